"""Rows per second of a linear model's training data, in epsilon's shape: 2,000 float32 features, 40,000 rows.

Every way draws the same number of shuffled rows, in batches of 128 tensors, out of the page cache, in one process:

* version 3.0's way: one LMDB value for each row, a pickle, row by row through ``Dataset.__getitem__`` and torch's
  collate. It is written anew in this file. The pickles are loaded only from a file that this script has just made.
* ``numpy.memmap`` of the same bytes: whole blocks of rows in random order, the fastest that plain reading can be.
* ours: ``LinearBatches``, and ``LMDBDataset`` behind a ``DataLoader``.

Blocks of the ways alternate, so a change of the machine's load meets all of them; the median counts.

    python benchmarks/micro/linear_loading.py [--rows 4000] [--append-results]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

import lmdb
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mlbench_core.dataset.linearmodels.pytorch import BlockBatchSampler, LinearBatches, LMDBDataset, collate_rows
from mlbench_core.dataset.linearmodels.pytorch.synthetic_dense import write_synthetic_dense

Batch = tuple[Tensor, Tensor]
PICKLED, MEMMAP = "version 3.0: pickled rows, one at a time", "numpy.memmap, whole shuffled blocks"
OURS, SAMPLER = "LinearBatches", "LMDBDataset, DataLoader, BlockBatchSampler, collate_rows"
PLAIN, CACHED = "LMDBDataset, DataLoader(shuffle=True), torch's collate", "LinearBatches, cache=True"
HEADING = "## `linear_loading.py`: training rows of a linear model"


class PickledRows(Dataset[Batch]):
    """What version 3.0 did: each row of its own, pickled with its label."""

    def __init__(self, path: Path) -> None:
        self.environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        self.length = self.environment.stat()["entries"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        with self.environment.begin() as transaction:
            features, label = pickle.loads(transaction.get(b"%d" % index))  # written by write_pickled, in this run
        return torch.from_numpy(features), torch.tensor(label)


def write_pickled(dataset: LMDBDataset, path: Path) -> None:
    """Write rows as version 3.0 stored them."""
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 40) as environment:
        for start in range(0, len(dataset), 1024):
            features, labels = dataset.batch(range(start, min(start + 1024, len(dataset))))
            with environment.begin(write=True) as transaction:
                for offset, (row, label) in enumerate(zip(features.numpy(), labels.flatten().tolist(), strict=True)):
                    transaction.put(b"%d" % (start + offset), pickle.dumps((row, label)))


def write_raw(dataset: LMDBDataset, path: Path) -> None:
    """Write the bytes of all rows, nothing else."""
    with path.open("wb") as file:
        for start in range(0, len(dataset), 1024):
            file.write(dataset.batch(range(start, min(start + 1024, len(dataset))))[0].numpy().tobytes())


class MemmapBlocks:
    """The plain way to read shuffled blocks: each block is copied out of the mapped file, and cut into batches."""

    def __init__(self, path: Path, dataset: LMDBDataset, batch_size: int) -> None:
        self.rows = np.memmap(path, np.float32, "r", shape=(len(dataset), dataset.n_features))
        self.labels, self.bounds, self.batch_size = dataset.targets, dataset.row_blocks, batch_size

    def __iter__(self) -> Iterator[Batch]:
        for block in torch.randperm(len(self.bounds) - 1).tolist():
            start, stop = self.bounds[block : block + 2].tolist()
            features = torch.from_numpy(np.array(self.rows[start:stop]))
            yield from zip(features.split(self.batch_size), self.labels[start:stop].split(self.batch_size), strict=True)


def rows_per_second(batches: Iterable[Batch], limit: int) -> float:
    """Draw batches until ``limit`` rows have come, epoch after epoch."""
    done = 0
    start = time.perf_counter()
    for features, _ in itertools.chain.from_iterable(itertools.repeat(batches)):
        done += len(features)
        if done >= limit:
            return done / (time.perf_counter() - start)
    raise AssertionError("there are no batches")


def ways(folder: Path, dataset: LMDBDataset, batch_size: int) -> dict[str, Iterable[Batch]]:
    """The ways, by name."""
    write_pickled(dataset, folder / "pickled.lmdb")
    write_raw(dataset, folder / "rows.raw")
    cached = LMDBDataset(dataset.name, dataset.data_type, dataset.root, cache=True)
    sampler = BlockBatchSampler(dataset, batch_size)
    return {
        PICKLED: DataLoader(PickledRows(folder / "pickled.lmdb"), batch_size, shuffle=True),
        MEMMAP: MemmapBlocks(folder / "rows.raw", dataset, batch_size),
        OURS: LinearBatches(dataset, batch_size),
        CACHED: LinearBatches(cached, batch_size),
        SAMPLER: DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_rows),
        PLAIN: DataLoader(dataset, batch_size, shuffle=True),
    }


def measure(candidates: dict[str, Iterable[Batch]], blocks: int, rows: int, slow_rows: int) -> dict[str, list[float]]:
    """Rows per second of each way in each block, after one block that warms up (and fills the page cache)."""
    speeds: dict[str, list[float]] = {name: [] for name in candidates}
    for block in range(blocks + 1):
        for name, batches in candidates.items():
            speed = rows_per_second(batches, slow_rows if name == PICKLED and block else rows)
            if block:
                speeds[name].append(speed)
    return speeds


def report(speeds: dict[str, list[float]], arguments: argparse.Namespace) -> str:
    """A section of RESULTS.md."""
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    lines = [
        HEADING,
        "",
        f"{arguments.rows:,} rows of {arguments.features:,} float32 features, batches of {arguments.batch_size}, page",
        f"cache warm, one process, {torch.get_num_threads()} thread; median of {arguments.blocks} alternating blocks.",
        "Limits: `LinearBatches` at least 10 times version 3.0's way and half of `numpy.memmap`.",
        f"torch {torch.__version__}, numpy {np.__version__}; {platform.machine()}, {os.cpu_count()} cores; "
        f"{date.today()}.",
        "",
        "| way | rows/s | range | GB/s | times version 3.0 | times memmap |",
        "|---|---|---|---|---|---|",
    ]
    for name, median in medians.items():
        gigabytes = median * arguments.features * 4 / 1e9
        spread = f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}"
        lines.append(
            f"| {name} | {median:,.0f} | {spread} | {gigabytes:.2f} | {median / medians[PICKLED]:.1f} "
            f"| {median / medians[MEMMAP]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def append_results(section: str) -> None:
    """Write the section into RESULTS.md, in place of the one there or at the end."""
    path = Path(__file__).with_name("RESULTS.md")
    text = path.read_text()
    pattern = re.compile(re.escape(HEADING) + r"\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    replace: Callable[[re.Match[str]], str] = lambda _: section + "\n"  # noqa: E731
    text = pattern.sub(replace, text) if pattern.search(text) else f"{text.rstrip()}\n\n{section}"
    path.write_text(text.rstrip() + "\n")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each way; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--folder", type=Path, help="where to put 1 GB of files for the time of the run")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--append-results", action="store_true", help="write the table into RESULTS.md")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_synthetic_dense(folder / "synthetic_dense_train.lmdb", arguments.features, arguments.rows)
        dataset = LMDBDataset("synthetic_dense", "train", folder)
        candidates = ways(folder, dataset, arguments.batch_size)
        speeds = measure(candidates, arguments.blocks, arguments.rows, max(1, arguments.rows // 4))
    section = report(speeds, arguments)
    print(section)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows_per_second": speeds}, indent=2))
    if arguments.append_results:
        append_results(section)


if __name__ == "__main__":
    main()
