"""Time the reading of sentence pairs from the memory-mapped store and from text files.

Every variant yields all pairs of a training text as batches of 128 in random order, as padded
arrays of sub-word numbers, in one process, with the files in the page cache:

* raw text: read the lines, cut them into Moses' words and sub-words;
* text in sub-words (the form of ``preprocessed`` data): read the lines, split them at spaces, look
  up every symbol;
* our store, opened again each time, mapped or read into memory.

Reading text is the cost of an epoch, or of a start, without a store.

    python benchmarks/micro/text_store.py --data FOLDER_OF_MULTI30K [--save]
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _bench import Subject, Timed, finish, make_parser, measure, parse, positive

from mlbench_core.dataset.local_files import read_lines
from mlbench_core.dataset.nlp.pytorch import Multi30k
from mlbench_core.dataset.nlp.pytorch.pair_store import PairStore, Sentences
from mlbench_core.dataset.nlp.pytorch.subwords import Subwords
from mlbench_core.dataset.nlp.pytorch.words import split_words

Numbers = npt.NDArray[np.int32]
RAW, SPLIT = "text: Moses' words, sub-words", "text in sub-words: split, look up"
BATCH = 128
SUBJECT = Subject(
    "text_store",
    "Pairs of sentences (`text_store.py`)",
    "pairs/s",
    (SPLIT, RAW),
    ("The store is more than 11 times as fast as text in sub-words, "
     "and more than 230 times as fast as raw text.",
     "Limit: at least 10 times both."),
)  # fmt: skip


def from_raw_text(
    paths: tuple[Path, Path], languages: tuple[str, str], subwords: Subwords, limit: int, total: int
) -> Timed:
    """Read ``limit`` pairs and cut them into sub-words.

    This is slow, so the time is scaled up to all pairs.
    """
    start = time.perf_counter()
    sides = []
    for path, lang in zip(paths, languages, strict=True):
        lines = itertools.islice(read_lines(path), limit)
        texts = [" ".join(split_words(line, lang)) for line in lines]
        sides.append(subwords.encode(texts))
    pairs = take_batches(sides[0], sides[1])
    return Timed((time.perf_counter() - start) * total / pairs, result=total)


def from_split_text(paths: tuple[Path, Path], numbers: dict[str, int]) -> int:
    """Read text in sub-words, in the plain way, without any step that could be left out."""
    sides = []
    for path in paths:
        sentences = []
        with path.open(encoding="utf-8") as file:
            for line in file:
                of_line = [numbers[symbol] for symbol in line.split()]
                sentences.append(np.array(of_line, dtype=np.int32))
        sides.append(sentences)
    return take_batches(sides[0], sides[1])


def from_store(folder: Path, in_memory: bool) -> int:
    """Open a store and read all its pairs."""
    store = PairStore(folder, in_memory)
    total = 0
    for batch in random_batches(len(store)):
        sources = pad_at_once(store.source, batch)
        targets = pad_at_once(store.target, batch)
        total += min(len(sources), len(targets))
    return total


def pad_at_once(side: Sentences, batch: list[int]) -> npt.NDArray[np.int64]:
    """Put sentences of a store into one array without a Python loop, by its arrays."""
    chosen = np.asarray(batch)
    starts = side.offsets[chosen]
    lengths = side.offsets[chosen + 1] - starts
    columns = np.arange(lengths.max())
    # Short sentences continue with the next one here; the next line overwrites these numbers.
    padded = side.numbers.take(starts[:, None] + columns, mode="clip").astype(np.int64)
    padded[columns >= lengths[:, None]] = 0
    return padded


def take_batches(sources: list[Numbers], targets: list[Numbers]) -> int:
    """Make padded batches row by row, and return the number of pairs."""
    total = 0
    for batch in random_batches(len(sources)):
        padded_sources = pad([sources[i] for i in batch])
        padded_targets = pad([targets[i] for i in batch])
        total += min(len(padded_sources), len(padded_targets))
    return total


def random_batches(count: int) -> list[list[int]]:
    """Return batches of indices in random order."""
    order = np.random.default_rng(0).permutation(count).tolist()
    return [order[start : start + BATCH] for start in range(0, count, BATCH)]


def pad(sentences: list[Numbers]) -> npt.NDArray[np.int64]:
    """Put sentences into one array."""
    batch = np.zeros((len(sentences), max(map(len, sentences))), dtype=np.int64)
    for row, sentence in zip(batch, sentences, strict=True):
        row[: len(sentence)] = sentence
    return batch


def write_split(store: PairStore, symbols: list[str], folder: Path) -> tuple[Path, Path]:
    """Write a store's pairs as text in sub-words."""
    paths = (folder / "split.source", folder / "split.target")
    for path, side in zip(paths, (store.source, store.target), strict=True):
        with path.open("w", encoding="utf-8") as file:
            for i in range(len(side)):
                # Number 0 is padding, so symbols are counted from 1.
                words = [symbols[number - 1] for number in side[i].tolist()]
                file.write(" ".join(words) + "\n")
    return paths


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    default = os.environ.get("MLBENCH_TEST_DATA")
    parser = make_parser(__doc__, blocks=9)
    add = parser.add_argument
    add("--data", type=Path, default=Path(default) / "multi30k" if default else None)
    add("--raw-pairs", type=positive, default=2_000, help="pairs that the slowest variant reads")
    arguments = parse(parser, argv, raw_pairs=200)
    if arguments.data is None:
        raise SystemExit(
            "text_store.py needs the text of Multi30k: "
            "give --data FOLDER with train.en and train.de"
        )
    with tempfile.TemporaryDirectory() as name:
        dataset = Multi30k(arguments.data, train=True, cache_dir=name)
        part, total = dataset.part, len(dataset)
        raw = (part.files.sources[0], part.files.targets[0])
        split = write_split(part.store, part.subwords.symbols, Path(name))
        numbers = {symbol: number for number, symbol in enumerate(part.subwords.symbols, 1)}
        variants = {
            RAW: partial(
                from_raw_text, raw, dataset.lang, part.subwords, arguments.raw_pairs, total
            ),
            SPLIT: partial(from_split_text, split, numbers),
            "store, mapped": partial(from_store, part.store.folder, in_memory=False),
            "store, read into memory": partial(from_store, part.store.folder, in_memory=True),
        }
        case = f"{total:,} pairs of Multi30k"
        rows = measure(SUBJECT, case, variants, arguments.blocks, amount=total)
    conditions = f"{arguments.blocks} blocks, batches of {BATCH}, page cache warm, one process."
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
