"""Sentence pairs per second: the memory-mapped store of the translation data sets against reading text.

Every way gives all pairs of a training text as batches of 128 in random order, padded arrays of sub-word numbers, in
one process, with the files in the page cache:

* text as it comes: read the lines, cut them into Moses' words and sub-words;
* text in words and sub-words already (what ``preprocessed`` data is): read the lines, split them at spaces, look every
  symbol up in a dictionary;
* our store, opened anew each time, mapped or read into memory.

The first two are what an epoch or a start costs without a store. Blocks of the ways alternate, so that a change of the
machine's load meets all of them; the median counts. The limit: the store at least 10 times both ways of reading text.

    python benchmarks/micro/text_store.py --data FOLDER_OF_MULTI30K [--append-results]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import _sections
import numpy as np
import numpy.typing as npt

from mlbench_core.dataset.local_files import read_lines
from mlbench_core.dataset.nlp.pytorch import Multi30k
from mlbench_core.dataset.nlp.pytorch.pair_store import PairStore
from mlbench_core.dataset.nlp.pytorch.subwords import Subwords
from mlbench_core.dataset.nlp.pytorch.words import split_words

Numbers = npt.NDArray[np.int32]
Way = Callable[[], int]

HEADING = "## `text_store.py`: pairs of sentences"
RAW, DIVIDED = "text: Moses' words, sub-words", "text in sub-words: split, look up"
MAPPED, LOADED = "store, mapped", "store, read into memory"
BATCH = 128


def from_raw_text(paths: tuple[Path, Path], languages: tuple[str, str], subwords: Subwords, limit: int) -> int:
    """Read text and cut it into sub-words; only so many pairs, for it is slow."""
    sides = []
    for path, lang in zip(paths, languages, strict=True):
        lines = itertools.islice(read_lines(path), limit)
        sides.append(subwords.encode([" ".join(split_words(line, lang)) for line in lines]))
    return take_batches(sides[0], sides[1])


def from_divided_text(paths: tuple[Path, Path], numbers: dict[str, int]) -> int:
    """Read text that is in sub-words: the plain way, with nothing that could be left out."""
    sides = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            sides.append([np.array([numbers[symbol] for symbol in line.split()], dtype=np.int32) for line in file])
    return take_batches(sides[0], sides[1])


def from_store(folder: Path, in_memory: bool) -> int:
    """Open a store and take all its pairs."""
    store = PairStore(folder, in_memory)
    total = 0
    for batch in random_batches(len(store)):
        sources, _ = store.source.padded(batch)
        targets, _ = store.target.padded(batch)
        total += min(len(sources), len(targets))
    return total


def take_batches(sources: list[Numbers], targets: list[Numbers]) -> int:
    """Make batches of arrays, row by row, and return how many pairs there are."""
    total = 0
    for batch in random_batches(len(sources)):
        total += min(len(pad([side[i] for i in batch])) for side in (sources, targets))
    return total


def random_batches(count: int) -> list[list[int]]:
    """Batches in random order."""
    order = np.random.default_rng(0).permutation(count).tolist()
    return [order[start : start + BATCH] for start in range(0, count, BATCH)]


def pad(sentences: list[Numbers]) -> npt.NDArray[np.int64]:
    """Sentences in one array."""
    batch = np.zeros((len(sentences), max(map(len, sentences))), dtype=np.int64)
    for row, sentence in zip(batch, sentences, strict=True):
        row[: len(sentence)] = sentence
    return batch


def write_divided(store: PairStore, symbols: list[str], folder: Path) -> tuple[Path, Path]:
    """Write a store's pairs as text in sub-words."""
    paths = (folder / "divided.source", folder / "divided.target")
    for path, side in zip(paths, (store.source, store.target), strict=True):
        lines = (" ".join(symbols[number - 1] for number in side[i].tolist()) for i in range(len(side)))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


def measure(ways: dict[str, Way], blocks: int) -> dict[str, list[float]]:
    """Pairs per second of each way in each block, after one block that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(blocks + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            pairs = way()
            elapsed = time.perf_counter() - start
            if block:
                speeds[name].append(pairs / elapsed)
    return speeds


def report(speeds: dict[str, list[float]], dataset: Multi30k, blocks: int) -> str:
    """The text of the section."""
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    lines = [
        f"All {len(dataset):,} training pairs of Multi30k as padded batches of {BATCH} in random order, one process,",
        f"page cache warm; median of {blocks} alternating blocks. The store is opened anew in each. Limit: the store",
        "at least 10 times both ways of reading text.",
        f"{_sections.machine()}; {date.today()}.",
        "",
        "| way | pairs/s | range | times text in sub-words | times text |",
        "|---|---|---|---|---|",
    ]
    for name, median in medians.items():
        spread = f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}"
        lines.append(
            f"| {name} | {median:,.0f} | {spread} | {median / medians[DIVIDED]:.1f} | {median / medians[RAW]:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.en and train.de of Multi30k")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each way; the median counts")
    parser.add_argument("--raw-pairs", type=int, default=2_000, help="pairs that the slowest way reads")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--append-results", action="store_true", help="write the table into RESULTS.md")
    arguments = parser.parse_args()
    if arguments.data is None:
        print("text_store.py: nothing measured, it needs the text of Multi30k: --data FOLDER")
        return

    with tempfile.TemporaryDirectory() as name:
        dataset = Multi30k(arguments.data, train=True, cache_dir=name)
        part = dataset.part
        raw = (part.files.sources[0], part.files.targets[0])
        divided = write_divided(part.store, part.subwords.symbols, Path(name))
        numbers = {symbol: number for number, symbol in enumerate(part.subwords.symbols, 1)}
        ways: dict[str, Way] = {
            RAW: lambda: from_raw_text(raw, dataset.lang, part.subwords, arguments.raw_pairs),
            DIVIDED: lambda: from_divided_text(divided, numbers),
            MAPPED: lambda: from_store(part.store.folder, in_memory=False),
            LOADED: lambda: from_store(part.store.folder, in_memory=True),
        }
        speeds = measure(ways, arguments.blocks)
        section = report(speeds, dataset, arguments.blocks)
    print(section)
    if arguments.json:
        arguments.json.write_text(json.dumps({"pairs_per_second": speeds}, indent=2))
    if arguments.append_results:
        _sections.update_section(_sections.RESULTS, HEADING, section)


if __name__ == "__main__":
    main()
