"""Time the loading of a linear model's training rows.

They have epsilon's shape: 2,000 float32 features, 40,000 rows. Every variant draws the same number
of shuffled rows, in batches of 128, from the page cache, in one process:

* one LMDB value per row, read row by row through ``Dataset.__getitem__`` and torch's collate, as
  version 3.0 did. This file has its own copy of that. Version 3.0 pickled the rows; here a row is
  its raw bytes, which are faster to read.
* ``numpy.memmap`` of the same bytes: whole blocks of rows in random order, the upper bound of plain
  reading.
* ours: ``LinearBatches``, and ``LMDBDataset`` behind a ``DataLoader``.

    python benchmarks/micro/linear_loading.py [--rows 4000] [--save]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import torch
from _bench import Subject, finish, make_parser, measure, parse, positive
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mlbench_core.dataset.linearmodels.pytorch import (
    BlockBatchSampler,
    LinearBatches,
    LMDBDataset,
    collate_rows,
)
from mlbench_core.dataset.linearmodels.pytorch.synthetic_dense import write_synthetic_dense

Batch = tuple[Tensor, Tensor]
PER_ROW, MEMMAP = "one value per row, DataLoader", "numpy.memmap, whole shuffled blocks"
SUBJECT = Subject(
    "linear_loading",
    "Training rows of a linear model (`linear_loading.py`)",
    "rows/s",
    (PER_ROW, "version 3.0: pickled rows, one at a time", MEMMAP),
    ("`LinearBatches` is more than 12 times as fast as version 3.0, "
     "and reaches more than half of `numpy.memmap`.",
     "Limits: at least 10 times version 3.0, and half of `numpy.memmap`."),
)  # fmt: skip


class RowPerValue(Dataset[Batch]):
    """Rows that are each one value of a store, with the label behind the features."""

    def __init__(self, path: Path) -> None:
        self.environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        self.length = self.environment.stat()["entries"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        with self.environment.begin() as transaction:
            # Copied, because a buffer of LMDB is read-only.
            row = np.frombuffer(transaction.get(b"%d" % index), np.float32).copy()
        return torch.from_numpy(row[:-1]), torch.tensor(row[-1])


def write_copies(dataset: LMDBDataset, per_row: Path, raw: Path) -> None:
    """Write the rows as one value each, and as one file of their bytes only."""
    with (
        raw.open("wb") as file,
        lmdb.open(str(per_row), subdir=False, lock=False, map_size=1 << 40) as environment,
    ):
        for start in range(0, len(dataset), 1024):
            features, labels = dataset.batch(range(start, min(start + 1024, len(dataset))))
            file.write(features.numpy().tobytes())
            rows = np.column_stack((features.numpy(), labels.flatten().numpy()))
            # One transaction for many rows: each commit waits for the disk.
            with environment.begin(write=True) as transaction:
                for index, row in enumerate(rows.astype(np.float32), start):
                    transaction.put(b"%d" % index, row.tobytes())


class MemmapBlocks:
    """Shuffled blocks in the plain way: each is copied out of the mapped file, and cut."""

    def __init__(self, path: Path, dataset: LMDBDataset, batch_size: int) -> None:
        self.rows = np.memmap(path, np.float32, "r", shape=(len(dataset), dataset.n_features))
        self.labels, self.bounds, self.batch_size = dataset.targets, dataset.row_blocks, batch_size

    def __iter__(self) -> Iterator[Batch]:
        for block in torch.randperm(len(self.bounds) - 1).tolist():
            start, stop = self.bounds[block : block + 2].tolist()
            # A copy, because the mapped pages are read only when they are touched.
            features = torch.from_numpy(np.array(self.rows[start:stop])).split(self.batch_size)
            labels = self.labels[start:stop].split(self.batch_size)
            yield from zip(features, labels, strict=True)


def draw(batches: Iterable[Batch]) -> tuple[int, float]:
    """Draw an epoch; return the number of rows and the sum of their labels for comparison."""
    rows, total = 0, 0.0
    for features, labels in batches:
        rows += len(features)
        total += labels.sum().item()
    return rows, total


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=9)
    add = parser.add_argument
    add("--features", type=positive, default=2_000)
    add("--rows", type=positive, default=40_000)
    add("--batch-size", type=positive, default=128)
    add("--folder", type=Path, help="where to put 1 GB of files during the run")
    arguments = parse(parser, argv, features=100, rows=2_000)
    torch.set_num_threads(1)
    size = arguments.batch_size
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_synthetic_dense(
            folder / "synthetic_dense_train.lmdb", arguments.features, arguments.rows
        )
        dataset = LMDBDataset("synthetic_dense", "train", folder)
        write_copies(dataset, folder / "rows.lmdb", folder / "rows.raw")
        cached = LMDBDataset("synthetic_dense", "train", folder, cache=True)
        sampler = BlockBatchSampler(dataset, size)
        variants: dict[str, Iterable[Batch]] = {
            PER_ROW: DataLoader(RowPerValue(folder / "rows.lmdb"), size, shuffle=True),
            MEMMAP: MemmapBlocks(folder / "rows.raw", dataset, size),
            "LinearBatches": LinearBatches(dataset, size),
            "LinearBatches, cache=True": LinearBatches(cached, size),
            "LMDBDataset, DataLoader, BlockBatchSampler, collate_rows": DataLoader(
                dataset, batch_sampler=sampler, collate_fn=collate_rows
            ),
            "LMDBDataset, DataLoader(shuffle=True), torch's collate": DataLoader(
                dataset, size, shuffle=True
            ),
        }
        rows = measure(
            SUBJECT,
            f"{arguments.rows:,} rows of {arguments.features:,} features",
            {name: partial(draw, batches) for name, batches in variants.items()},
            arguments.blocks,
            amount=arguments.rows,
        )
    for row in rows:
        row["extra"]["GB/s"] = row["value"] * arguments.features * 4 / 1e9
    conditions = f"{arguments.blocks} blocks, batches of {size}, page cache warm, one thread."
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
