"""Rows of linear models: whole batches, their order, and worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mlbench_core.dataset.linearmodels.pytorch import (
    BlockBatchSampler,
    LinearBatches,
    LMDBDataset,
    collate_rows,
    libsvm,
)
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter
from mlbench_core.dataset.linearmodels.pytorch.subset import RowSubset
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.models.pytorch.linear_models import LogisticRegression
from tests.helpers.data import test_data

pytest.importorskip("lmdb", reason="the package lmdb is not installed")


def numbered(
    folder: Path, rows: int, per_block: int = 10, layout: str = "dense", stores: int = 1
) -> LMDBDataset:
    """A data set whose row i holds i and i + 0.5 and has the label i % 2, in one or several
    stores."""
    bounds = np.linspace(0, rows, stores + 1).astype(int)
    for number in range(stores):
        name = "n_train.lmdb" if stores == 1 else f"n_train-{number}.lmdb"
        ids = np.arange(bounds[number], bounds[number + 1])
        with StoreWriter(folder / name, 2, layout=layout, rows_per_block=per_block) as writer:
            writer.append(np.stack([ids, ids + 0.5], axis=1), ids % 2)
            writer.finish()
    return LMDBDataset("n", "train", folder)


def ids(batches: Any) -> list[list[int]]:
    """Which rows were in each batch; the content of a batch is checked on the way."""
    found = []
    for features, labels in batches:
        assert torch.equal(features[:, 1], features[:, 0] + 0.5)
        assert torch.equal(labels, features[:, :1] % 2)
        found.append(features[:, 0].int().tolist())
    return found


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("stores", [1, 3])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_rows_are_where_they_belong(layout: str, stores: int, tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 95, layout=layout, stores=stores)
    assert len(dataset) == 95
    assert [dataset[i][0][0].item() for i in (0, 9, 10, 94, -1, -95)] == [0, 9, 10, 94, 94, 0]
    features, label = dataset[7]
    assert (features.shape, label.shape, features.dtype, label.dtype) == (
        (2,),
        (1,),
        torch.float32,
        torch.float32,
    )
    for wrong in (95, -96):
        with pytest.raises(
            IndexError, match=rf"rows of n train must be from -95 to 94, not {wrong}"
        ):
            dataset[wrong]
    wanted = np.random.default_rng(0).permutation(95)
    assert dataset.batch(wanted)[0][:, 0].tolist() == wanted.tolist()
    assert dataset.batch([])[0].shape == (0, 2)
    sparse = LMDBDataset("n", "train", tmp_path, layout="sparse_csr").batch(wanted)[0]
    assert sparse.layout == torch.sparse_csr
    assert torch.equal(sparse.to_dense(), dataset.batch(wanted)[0])
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 1)
    # Sums of terms up to 95, in another order.
    torch.testing.assert_close(linear(sparse), linear(sparse.to_dense()), rtol=0, atol=1e-4)
    assert dataset.row_blocks[-1] == 95
    features.zero_()  # a copy: the data does not change
    assert dataset[7][0].tolist() == [7, 7.5]


def test_labels_have_the_shape_of_a_linear_models_output(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 8)
    model = LogisticRegression(2)
    loaders: list[Any] = [
        DataLoader(dataset, batch_size=4),
        DataLoader(dataset, batch_size=4, collate_fn=collate_rows),
        LinearBatches(dataset, 4),
    ]
    for loader in loaders:
        features, labels = next(iter(loader))
        assert (labels.shape, labels.dtype) == ((4, 1), torch.float32)
        assert torch.nn.functional.binary_cross_entropy(model(features), labels).isfinite()


def test_target_transform_and_cache(tmp_path: Path) -> None:
    numbered(tmp_path, 30)
    dataset = LMDBDataset("n", "train", tmp_path, lambda label: 2 * label - 1, cache=True)
    assert [dataset[i][1].item() for i in range(3)] == [-1, 1, -1]
    assert dataset.batch([5, 4])[1].tolist() == [[1], [-1]]
    assert dataset.targets.tolist()[:3] == [0, 1, 0]
    expected = dataset.batch(range(30))[0]
    dataset.close()
    assert torch.equal(dataset.batch(range(30))[0], expected)
    sparse = tmp_path / "sparse"
    numbered(sparse, 30, layout="csr")
    again = LMDBDataset("n", "train", sparse, cache=True)
    assert torch.equal(again.batch(range(30))[0], expected) and torch.equal(
        again.batch(range(30))[0], expected
    )


def test_the_usual_loop_over_a_data_loader(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 50)
    plain = ids(DataLoader(dataset, batch_size=8))
    assert flat(plain) == list(range(50))
    assert ids(DataLoader(dataset, batch_size=8, collate_fn=collate_rows)) == plain
    assert sorted(flat(ids(DataLoader(dataset, batch_size=8, shuffle=True)))) == list(range(50))
    part = partition_dataset_by_rank(dataset, 1, 2, shuffle=False)
    assert flat(ids(DataLoader(part, batch_size=8))) == list(range(25, 50))
    assert ids(DataLoader(part, batch_size=25, collate_fn=collate_rows)) == [list(range(25, 50))]
    alone = DataLoader([dataset[0], dataset[1]], batch_size=2, collate_fn=collate_rows)
    assert ids(alone) == [[0, 1]]


@pytest.mark.parametrize(("start_method", "processes"), [("fork", 2), ("spawn", 1)])
def test_worker_processes_read_what_this_one_reads(
    start_method: str, processes: int, tmp_path: Path
) -> None:
    dataset = numbered(tmp_path, 60)
    assert dataset[3][0][0].item() == 3  # open here already, when the workers are forked
    sampler = BlockBatchSampler(dataset, 7, seed=1, window_blocks=2)
    context = multiprocessing.get_context(start_method)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_rows,
        num_workers=processes,
        multiprocessing_context=context,
    )
    alone = LinearBatches(dataset, 7, seed=1, window_blocks=2)
    for _ in range(2 if start_method == "fork" else 1):
        found = ids(loader)
        assert found == ids(alone)
        assert sorted(flat(found)) == list(range(60))
    assert dataset[4][0][0].item() == 4


def open_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this loop, which is closed by then
            found.append(os.readlink(descriptor))
    return [file for file in found if file.startswith(str(folder))]


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("/proc/self/fd is not here")
    numbered(tmp_path, 20)
    for _ in range(5):
        one, two = LMDBDataset("n", "train", tmp_path), LMDBDataset("n", "train", tmp_path)
        assert one[1][1] == two[1][1]
        pickle.loads(pickle.dumps(one))[0]
        one.close()
        assert one[2][0][0].item() == 2
    assert open_below(tmp_path)
    del one, two
    # Not a number of all: files of an earlier test may be closed by the garbage collector only now.
    assert open_below(tmp_path) == []


def test_a_folder_without_write_permission_is_enough(tmp_path: Path) -> None:
    numbered(tmp_path, 20)
    store = tmp_path / "n_train.lmdb"
    store.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(ids(LinearBatches(LMDBDataset("n", "train", tmp_path), 5))) == 4
        assert sorted(os.listdir(tmp_path)) == [".n_train.lmdb.lock", "n_train.lmdb"]  # nothing new
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("repartition", [True, False])
@pytest.mark.parametrize(
    ("rows", "world_size", "batch_size"),
    [(100, 1, 8), (97, 2, 8), (95, 3, 16), (81, 4, 20), (82, 4, 20), (7, 7, 3)],
)
def test_every_row_comes_once_an_epoch_and_every_worker_has_as_many_batches(
    rows: int, world_size: int, batch_size: int, repartition: bool, shuffle: bool, tmp_path: Path
) -> None:
    dataset = numbered(tmp_path, rows, stores=2)
    options: Any = {
        "shuffle": shuffle,
        "repartition": repartition,
        "world_size": world_size,
        "window_blocks": 3,
    }
    workers = [
        LinearBatches(dataset, batch_size, rank=rank, **options) for rank in range(world_size)
    ]
    assert len({len(worker) for worker in workers}) == 1
    parts = []
    for _ in range(2):
        found = [ids(worker) for worker in workers]
        assert [len(batches) for batches in found] == [len(workers[0])] * world_size
        assert sorted(flat(flat(found))) == list(range(rows))
        assert all(
            batch_size <= len(batch) <= batch_size + 1
            for batches in found
            for batch in batches[:-1]
        )
        assert max(len(batch) for batches in found for batch in batches) <= batch_size + 1
        parts.append([sorted(flat(batches)) for batches in found])
    if not repartition or not shuffle:
        assert parts[0] == parts[1]
    dropping = [
        LinearBatches(dataset, batch_size, rank=rank, drop_last=True, **options)
        for rank in range(world_size)
    ]
    assert all(len(batch) == batch_size for worker in dropping for batch in ids(worker))
    assert {len(worker) for worker in dropping} == {rows // world_size // batch_size}


def test_order_follows_from_the_seed_and_is_one_of_windows_of_blocks(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 1000)
    batches = LinearBatches(dataset, 20, seed=3, window_blocks=4, min_pieces=1)
    epochs = [ids(batches) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = LinearBatches(dataset, 20, seed=3, window_blocks=4, min_pieces=1)
    again.set_epoch(2)
    assert ids(again) == epochs[2]
    assert ids(LinearBatches(dataset, 20, seed=4, window_blocks=4)) != epochs[0]
    windows = [
        flat(epochs[0][start : start + 2]) for start in range(0, 50, 2)
    ]  # 40 rows: 4 blocks of 10
    for window in windows:
        blocks = {row // 10 for row in window}
        assert sorted(window) == sorted(10 * block + row for block in blocks for row in range(10))
    assert [min(window) for window in windows] != sorted(min(window) for window in windows)
    firsts = [len({row // 10 for row in batch}) for batch in epochs[0]]
    assert min(firsts) >= 3  # a batch of 20 is a mixture of its window's 4 blocks
    # With one window it is a plain shuffle: positions of rows in the epoch are uncorrelated with
    # the rows.
    order = BlockBatchSampler(dataset, 20, window_blocks=1000).rows(0)
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def test_repartition_gives_workers_other_rows_in_each_epoch_and_without_it_they_keep_theirs(
    tmp_path: Path,
) -> None:
    dataset = numbered(tmp_path, 200)

    def parts(repartition: bool) -> list[set[int]]:
        sampler = BlockBatchSampler(
            dataset, 10, world_size=2, min_pieces=1, repartition=repartition
        )
        return [set(sampler.rows(epoch).tolist()) for epoch in range(4)]

    kept, dealt = parts(False), parts(True)
    assert kept[0] == kept[1] == kept[2] == kept[3]
    assert len({frozenset(part) for part in dealt}) == 4
    assert all(
        20 < len(first & second) < 80 for first, second in pairwise(dealt)
    )  # of 100; 50 by chance


def test_workers_mix_their_rows_by_random_numbers_of_their_own(tmp_path: Path) -> None:
    """Every worker has 10 blocks of 10 rows; permuted by one stream, their orders of blocks and
    rows would be equal."""
    dataset = numbered(tmp_path, 200)
    samplers = [
        BlockBatchSampler(dataset, 10, rank=rank, world_size=2, min_pieces=1, window_blocks=1)
        for rank in range(2)
    ]
    for epoch in range(2):
        within_blocks = [(sampler.rows(epoch) % 10).tolist() for sampler in samplers]
        assert [sorted(rows) for rows in within_blocks] == [sorted(10 * list(range(10)))] * 2
        assert within_blocks[0] != within_blocks[1]


def test_workers_get_like_parts_of_a_small_sorted_file(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 1000, per_block=400)
    for rank in range(2):
        order = BlockBatchSampler(dataset, 10, rank=rank, world_size=2).rows(0)
        assert 400 < order.mean() < 600  # halves of the file would have 250 and 750


def test_mean_of_a_batch_has_the_documented_variance(tmp_path: Path) -> None:
    rows, per_block, window, size = 2000, 10, 8, 20
    dataset = numbered(tmp_path, rows, per_block)
    values = np.arange(rows) / rows  # sorted: the worst case
    sampler = BlockBatchSampler(dataset, size, window_blocks=window, min_pieces=1)
    means = np.array(
        [
            values[batch].mean()
            for epoch in range(20)
            for batch in _batches(sampler.rows(epoch), size)
        ]
    )
    block_means = values.reshape(-1, per_block).mean(1)
    bound = values.var() / size + block_means.var() / window
    assert means.mean() == pytest.approx(values.mean(), abs=1e-9)
    assert 0.5 * bound < means.var() < 1.1 * bound


def _batches(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_run_goes_on_with_the_very_batches_it_would_have_had(stop: int, tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 70)
    whole = LinearBatches(dataset, 5, rank=1, world_size=2, window_blocks=2)
    expected = [*ids(whole), *ids(whole)]
    first = LinearBatches(dataset, 5, rank=1, world_size=2, window_blocks=2)
    begun = ids(islice(iter(first), stop)) if stop else []
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = LinearBatches(dataset, 5, rank=1, world_size=2, window_blocks=2)
    second.load_state_dict(state)
    second.set_epoch(state["epoch"])
    rest = [*ids(second), *(ids(second) if stop < 7 else [])]
    assert begun + rest == expected
    for other in (
        LinearBatches(dataset, 5, rank=0, world_size=2),
        LinearBatches(dataset, 6, rank=1, world_size=2),
    ):
        with pytest.raises(ValueError, match="the state was saved with"):
            other.load_state_dict(state)


def test_a_worker_with_rows_of_its_own_reads_them_all_in_its_own_order(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 60)
    rows = range(0, 60, 2)
    parts = [RowSubset(RowSubset(dataset, rows), range(start, start + 15)) for start in (0, 15)]
    orders = [flat(ids(LinearBatches(part, 15, rank=rank))) for rank, part in enumerate(parts)]
    assert [sorted(order) for order in orders] == [list(rows[:15]), list(rows[15:])]
    # A batch of all rows is sorted, so the orders are compared before that.
    first, second = (
        LinearBatches(part, 15, rank=rank).rows(0).tolist() for rank, part in enumerate(parts)
    )
    assert first != second


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 20)
    for change, says in [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"window_blocks": 0}, "window_blocks must be at least 1, not 0"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, not 2"),
        ({"rank": -1}, "rank must be at least 0, not -1"),
        ({"world_size": 21}, "world_size must be at most 20, the rows of the data set, not 21"),
    ]:
        with pytest.raises(ValueError, match=says):
            LinearBatches(dataset, **{"batch_size": 4, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
        LinearBatches(dataset, 4).set_epoch(-1)
    with pytest.raises(ValueError, match="layout must be 'dense' or 'sparse_csr', not 'coo'"):
        LMDBDataset("n", "train", tmp_path, layout="coo")


def test_real_rows_reach_logistic_regression(tmp_path: Path) -> None:
    source = test_data("libsvm", "agaricus.txt.train")
    libsvm.convert([source], tmp_path / "agaricus_train.lmdb", n_features=126, layout="csr")
    dataset = LMDBDataset("agaricus", "train", tmp_path)
    batches = LinearBatches(dataset, 512, world_size=2, rank=1)
    weights = torch.zeros(126, 1, requires_grad=True)
    for _ in range(30):
        for features, labels in batches:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(features @ weights, labels)
            (gradient,) = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                weights -= 0.3 * gradient
    features, labels = dataset.batch(range(len(dataset)))
    accuracy: Tensor = ((features @ weights > 0) == (labels > 0)).float().mean()
    assert accuracy > 0.97
