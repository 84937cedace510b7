"""Partitions: nothing lost, nothing doubled, the same on every worker."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mlbench_core.dataset.pytorch import (
    DataPartitioner,
    Partition,
    parse_partition,
    partition_dataset_by_rank,
    stratified_split,
)
from mlbench_core.errors import ConfigurationError

DISTRIBUTIONS = ["uniform", "dirichlet", "label_skew"]


class Labelled:
    """A data set of numbers with a label each."""

    classes = ("even", "odd")

    def __init__(self, count: int, classes: int = 10) -> None:
        self.targets = [(7 * index) % classes for index in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.targets[index]


class Fetching(Labelled):
    """One that can fetch several samples at once, and counts how often it did."""

    fetched = 0

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        self.fetched += 1
        return [self[index] for index in indices]


def parts(world_size: int, dataset: object, **kwargs: object) -> list[list[int]]:
    return [
        partition_dataset_by_rank(dataset, rank, world_size, **kwargs).indices
        for rank in range(world_size)
    ]


def assert_exact_cover(found: list[list[int]], count: int) -> None:
    assert sorted(index for part in found for index in part) == list(range(count))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_uniform_covers_all_for_every_world_size(shuffle: bool) -> None:
    for world_size in range(1, 200):
        assert_exact_cover(parts(world_size, range(1000), shuffle=shuffle), 1000)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[1:])
@pytest.mark.parametrize("shuffle", [True, False])
def test_distributions_by_class_cover_all(distribution: str, shuffle: bool) -> None:
    dataset = Labelled(1000)
    for world_size in (1, 2, 3, 7, 16, 31):
        found = [
            partition_dataset_by_rank(
                dataset, rank, world_size, distribution, shuffle, alpha=0.1
            ).indices
            for rank in range(world_size)
        ]
        assert_exact_cover(found, 1000)


@pytest.mark.parametrize("alpha", [1e-4, 1e-2, 0.5, 100.0])
@pytest.mark.parametrize("count", [0, 1, 5, 103])
def test_dirichlet_covers_all_at_the_edges(alpha: float, count: int) -> None:
    assert_exact_cover(parts(4, Labelled(count), distribution="dirichlet", alpha=alpha), count)
    assert_exact_cover(
        parts(4, Labelled(count), distribution="label_skew", classes_per_worker=3), count
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_seed_alone_decides(distribution: str) -> None:
    dataset = Labelled(100)
    first = parts(4, dataset, distribution=distribution, seed=5)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    states = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002
    assert parts(4, dataset, distribution=distribution, seed=5) == first
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert parts(4, dataset, distribution=distribution, seed=6) != first


def test_without_shuffle_uniform_parts_are_contiguous() -> None:
    assert parts(3, range(8), shuffle=False) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def class_shares(indices: list[int], dataset: Labelled) -> np.ndarray:
    return np.bincount([dataset.targets[index] for index in indices], minlength=10) / len(indices)


def test_alpha_sets_how_different_the_workers_are() -> None:
    dataset = Labelled(5000)

    def distance(alpha: float) -> float:
        found = parts(5, dataset, distribution="dirichlet", alpha=alpha)
        return float(
            np.mean([np.abs(class_shares(part, dataset) - 0.1).sum() / 2 for part in found])
        )

    uniform, mild, strong = distance(1e4), distance(5.0), distance(0.05)
    assert uniform < 0.05
    assert uniform < mild < strong
    assert strong > 0.5


def test_label_skew_gives_each_worker_few_classes() -> None:
    dataset = Labelled(1000)
    for part in parts(5, dataset, distribution="label_skew", classes_per_worker=2):
        assert len({dataset.targets[index] for index in part}) <= 2
    for part in parts(10, dataset, distribution="label_skew", classes_per_worker=1):
        assert len({dataset.targets[index] for index in part}) == 1


def test_label_skew_deals_its_shards_at_random() -> None:
    """Dealt in order, every worker would have the class of its rank, whatever the seed."""
    dataset = Labelled(100)
    skew = {"distribution": "label_skew", "classes_per_worker": 1}
    of_rank_0 = set()
    for seed in range(12):
        classes = [
            {dataset.targets[index] for index in part}
            for part in parts(10, dataset, seed=seed, **skew)
        ]
        assert sorted(map(tuple, classes)) == [(label,) for label in range(10)]
        of_rank_0 |= classes[0]
    assert len(of_rank_0) >= 4


def test_dirichlet_fills_the_workers_in_a_random_order() -> None:
    """With a tiny alpha who is filled first has one class. Filled by rank, that would be worker 0
    with every seed."""
    labels = [0] * 30 + [1] * 30
    pure = [0, 0, 0]
    for seed in range(30):
        found = parts(3, range(60), distribution="dirichlet", alpha=1e-9, labels=labels, seed=seed)
        for rank, part in enumerate(found):
            pure[rank] += len({labels[index] for index in part}) == 1
    assert all(10 <= count < 30 for count in pure)


def test_shares_that_miss_1_by_rounding_lose_no_sample() -> None:
    count = 4_000_000
    cut = DataPartitioner(range(count), 0, False, [0.25, 0.25, 0.25, 0.25 - 5e-7])
    assert sum(len(part) for part in cut.partitions) == count


def test_classes_may_be_given() -> None:
    labels = [0] * 50 + [1] * 50
    found = parts(2, range(100), distribution="label_skew", classes_per_worker=1, labels=labels)
    assert sorted(map(sorted, found)) == [list(range(50)), list(range(50, 100))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 4}, "rank must be from 0 to 3, not 4"),
        ({"rank": -1}, "rank must be from 0 to 3, not -1"),
        ({"world_size": 0}, "world_size must be at least 1, not 0"),
        (
            {"distribution": "normal"},
            "distribution must be 'uniform', 'dirichlet' or 'label_skew', not 'normal'",
        ),
        ({"distribution": "dirichlet"}, "range has no `targets`: pass labels=..."),
        (
            {"distribution": "dirichlet", "labels": [1, 2]},
            r"labels must have shape \(9,\), one per sample, not \(2,\)",
        ),
        ({"alpha": 0.0}, "alpha must be finite and positive, not 0.0"),
        ({"classes_per_worker": 0}, "classes_per_worker must be at least 1, not 0"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_dataset_by_rank(**{"dataset": range(9), "rank": 0, "world_size": 4, **arguments})


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("uniform", {}),
        ("dirichlet:0.3", {"distribution": "dirichlet", "alpha": 0.3}),
        ("label_skew:3", {"distribution": "label_skew", "classes_per_worker": 3}),
    ],
)
def test_a_text_gives_the_partition_of_its_arguments(text: str, arguments: dict) -> None:
    assert parts(4, Labelled(100), **parse_partition(text)) == parts(4, Labelled(100), **arguments)


@pytest.mark.parametrize(
    "text",
    ["", "uniform:", "normal", "dirichlet", "dirichlet:0", "dirichlet:inf", "dirichlet:nan",
     "label_skew:0",
     "label_skew:1.5", "label_skew:"],
)  # fmt: skip
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"partition must be uniform, dirichlet:ALPHA .* not '{text}': write",
    ):
        parse_partition(text)


def test_a_rank_is_a_whole_number() -> None:
    with pytest.raises(TypeError):
        partition_dataset_by_rank(range(9), 0.5, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "copied", [lambda p: pickle.loads(pickle.dumps(p)), copy.copy, copy.deepcopy]
)
def test_partition_can_be_pickled_and_copied(copied) -> None:  # type: ignore[no-untyped-def]
    part = Partition(Labelled(10), [3, 1])
    again = copied(part)
    assert [again[0], again[1]] == [part[0], part[1]] == [(3, 1), (1, 7)]
    assert again.classes == ("even", "odd")


def test_partition_works_in_loader_processes() -> None:
    part = partition_dataset_by_rank(TensorDataset(torch.arange(12)), 1, 2, shuffle=False)
    loader = DataLoader(part, batch_size=3, num_workers=1, multiprocessing_context="spawn")
    assert [batch[0].tolist() for batch in loader] == [[6, 7, 8], [9, 10, 11]]


def test_partition_has_the_attributes_of_the_data_set_and_its_own_targets() -> None:
    part = Partition(Labelled(10), [3, 1])
    assert part.classes == ("even", "odd")
    assert part.targets == [1, 7]
    part.data.targets = torch.tensor(part.data.targets)
    assert part.targets.tolist() == [1, 7]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = part.nonsense
    with pytest.raises(AttributeError, match="targets"):
        _ = Partition([1, 2], [0]).targets
    with pytest.raises(AttributeError, match="'data'"):
        _ = Partition.__new__(Partition).anything
    assert "2 of the 10 samples of Labelled" in repr(part)


def test_a_part_can_be_cut_again_by_class() -> None:
    part = partition_dataset_by_rank(Labelled(100), 0, 2)
    again = parts(5, part, distribution="label_skew")
    assert_exact_cover(again, 50)


def test_batches_are_fetched_at_once_where_the_data_set_can() -> None:
    part = Partition(Fetching(10), list(range(8)))
    assert [batch[0].tolist() for batch in DataLoader(part, batch_size=4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert part.data.fetched == 2
    assert Partition(Labelled(10), [5, 6]).__getitems__([1, 0]) == [(6, 2), (5, 5)]


def test_every_part_knows_the_smallest() -> None:
    assert [partition_dataset_by_rank(range(10), rank, 4).smallest_part for rank in range(4)] == [
        2,
        2,
        2,
        2,
    ]
    assert Partition(range(10), [1, 2, 3]).smallest_part == 3


def test_partitioner_shares() -> None:
    cut = DataPartitioner(range(1000), 0, True)
    assert [len(cut.use(index)) for index in range(3)] == [700, 200, 100]
    assert sorted(index for part in range(3) for index in cut.use(part).indices) == list(
        range(1000)
    )
    assert DataPartitioner(range(1000), 3, True).use(1).indices == cut.use(1).indices
    assert DataPartitioner(range(1000), 0, True, seed=1).use(1).indices != cut.use(1).indices


def test_partitioner_with_equal_shares_loses_nothing() -> None:
    for world_size in range(1, 200):
        cut = DataPartitioner(range(1000), 0, False, sizes=[1 / world_size] * world_size)
        assert_exact_cover([cut.use(rank).indices for rank in range(world_size)], 1000)


def test_partitioner_leaves_the_rest_to_nobody() -> None:
    cut = DataPartitioner(range(10), 0, False, sizes=[0.3, 0.3])
    assert [cut.use(0).indices, cut.use(1).indices] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("sizes", [[], [0.7, 0.7], [-0.1, 0.5], [0.0], [float("nan")]])
def test_partitioner_bad_shares(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match="fractions of at least 0 that add up to at most 1"):
        DataPartitioner(range(10), 0, False, sizes=sizes)


def test_partitioner_bad_part() -> None:
    with pytest.raises(ValueError, match="partition_ind must be from 0 to 2, not 3"):
        DataPartitioner(range(10), 0, False).use(3)


def test_a_split_holds_out_the_same_share_of_each_class() -> None:
    labels = np.repeat([-1.0, 1.0, 2.0], [50, 30, 3])
    training, validation = stratified_split(labels)
    assert sorted([*training, *validation]) == list(range(83))
    assert [int((labels[validation] == label).sum()) for label in (-1, 1, 2)] == [10, 6, 1]
    assert np.array_equal(stratified_split(labels)[1], validation)
    assert not np.array_equal(stratified_split(labels, seed=1)[1], validation)
    assert len(stratified_split(labels, 0.5)[1]) == 25 + 15 + 2
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            stratified_split(labels, share)
