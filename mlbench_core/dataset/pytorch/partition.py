"""Parts of a data set, one for each worker.

Every worker computes the whole assignment from the seed alone and keeps its own part. Therefore all
workers agree without communication, and no global generator is read. The parts are disjoint. Those
of :func:`partition_dataset_by_rank` cover every sample, and their sizes differ by at most 1.
"""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from mlbench_core.arguments import check_int, check_positive, check_rank
from mlbench_core.dataset.parts import part_sizes, sample_order, stratified_split, uniform_part
from mlbench_core.errors import ConfigurationError

__all__ = [
    "DataPartitioner",
    "Partition",
    "Partitioner",
    "parse_partition",
    "partition_dataset_by_rank",
    "stratified_split",
]


class Partition(Dataset):
    """A part of a data set, with the interface of the whole data set.

    Attributes that a partition does not have, such as ``classes``, are read from the data set.

    Args:
        data: The whole data set.
        indices: Positions in ``data`` of the samples of this part.
        smallest_part: Number of samples of the smallest of all parts; if None, of this part. A
            loader that stops at this number has the same number of batches on every worker, so no
            collective waits indefinitely.

    Attributes:
        data: The whole data set.
        indices: Positions in ``data`` of the samples of this part, a list of int.
        smallest_part: As given, or the number of samples of this part.

    Example:
        >>> part = Partition("abcdef", [4, 0])
        >>> len(part), part[0], part[1]
        (2, 'e', 'a')
    """

    def __init__(self, data: Any, indices: Sequence[int], smallest_part: int | None = None) -> None:
        self.data = data
        self.indices = list(map(int, indices))
        if smallest_part is None:
            smallest_part = len(self.indices)
        self.smallest_part = smallest_part

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples at once; torch's DataLoader calls this if a data set offers it."""
        positions = [self.indices[index] for index in indices]
        fetch_many = getattr(self.data, "__getitems__", None)
        if callable(fetch_many):
            return fetch_many(positions)
        return [self.data[position] for position in positions]

    @property
    def targets(self) -> Any:
        """Return the labels of this part, if the data set has ``targets``."""
        targets = self.data.targets
        if isinstance(targets, list | tuple):
            return [targets[index] for index in self.indices]
        return targets[self.indices]

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are missing here. Special names must stay missing,
        # and so must `data` of an object that pickle or copy has not filled yet: looking it up in
        # `self.data` would recurse indefinitely.
        if name == "data" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.data, name)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} of the {len(self.data)} samples of "
            f"{type(self.data).__name__})"
        )


class Partitioner(ABC):
    """The base class of objects that divide a data set into parts."""

    @abstractmethod
    def use(self, partition_ind: int) -> Partition:
        """Return one of the parts.

        Args:
            partition_ind: Position of the part, from 0.

        Raises:
            ValueError: The part does not exist.
        """


class DataPartitioner(Partitioner):
    """Divide a data set into parts of given fractions.

    The bounds of the parts are the cumulative fractions, rounded to whole samples. Therefore equal
    fractions give sizes that differ by at most 1, and fractions that add up to 1 cover every
    sample.

    Args:
        data: The data set.
        rank: Rank of this worker. It has no effect: every rank computes the same parts.
        shuffle: If True, draw the samples of each part at random; otherwise parts are contiguous.
        sizes: Fraction of each part, at least 0; the sum is at most 1. If it is below 1, the
            remaining samples belong to no part.
        seed: Seed of the shuffle, at least 0.

    Raises:
        ValueError: ``sizes`` is empty, has a negative fraction, or adds up to 0 or to more than 1.

    Example:
        >>> cut = DataPartitioner(range(10), rank=0, shuffle=False, sizes=[0.7, 0.2, 0.1])
        >>> [list(cut.use(part)) for part in range(3)]
        [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]
    """

    def __init__(
        self,
        data: Any,
        rank: int,
        shuffle: bool,
        sizes: Sequence[float] = [0.7, 0.2, 0.1],
        *,
        seed: int = 0,
    ) -> None:
        total = float(sum(sizes))
        if len(sizes) == 0 or min(sizes) < 0 or not 0 < total <= 1 + 1e-6:
            raise ValueError(
                f"sizes must be fractions of at least 0 that add up to at most 1, not {list(sizes)}"
            )
        self.data = data
        self.rank = rank
        count = len(data)
        ends: np.ndarray = np.cumsum(np.asarray(sizes, dtype=np.float64))
        # Fractions such as 0.7, 0.2 and 0.1 do not add up to exactly 1 in floating point, but must
        # cover every sample.
        if abs(total - 1) <= 1e-6:
            ends = ends / total
        order = sample_order(count, shuffle, seed)
        self.partitions: list[np.ndarray] = []
        start = 0
        for end in ends.tolist():
            stop = round(end * count)
            self.partitions.append(order[start:stop])
            start = stop

    def use(self, partition_ind: int) -> Partition:
        """Return one of the parts.

        Args:
            partition_ind: Position of its fraction in ``sizes``.

        Returns:
            The part.

        Raises:
            ValueError: The part does not exist.
        """
        # Refuse negative positions: a wrong rank would silently get the part of another one.
        index = operator.index(partition_ind)
        if not 0 <= index < len(self.partitions):
            raise ValueError(
                f"partition_ind must be from 0 to {len(self.partitions) - 1}, not {partition_ind}"
            )
        return Partition(self.data, self.partitions[index].tolist())


def partition_dataset_by_rank(
    dataset: Any,
    rank: int,
    world_size: int,
    distribution: str = "uniform",
    shuffle: bool = True,
    *,
    seed: int = 0,
    alpha: float = 0.5,
    classes_per_worker: int = 2,
    labels: Sequence[int] | None = None,
) -> Partition:
    r"""Return the part of a data set that belongs to one worker.

    * ``"uniform"``: every sample is equally likely on every worker.
    * ``"dirichlet"``: for each worker, the proportions of the classes are drawn from :math:`q \sim
      \mathrm{Dir}(\alpha p)`, with p the proportions in the data set. The samples of its part are
      drawn from the classes with probabilities q. If a class has no samples left, q is renormalized
      without it (Hsu et al. 2019). Workers get their parts in an order drawn from the seed; the
      last ones get the samples that are left. With a small alpha, a worker has nearly one class; a
      large alpha approaches the uniform distribution.
    * ``"label_skew"``: the samples are sorted by class and cut into ``world_size *
      classes_per_worker`` shards; each worker gets ``classes_per_worker`` of them (McMahan et al.
      2017). A shard may contain the end of one class and the beginning of the next.

    In all three the parts are disjoint, cover every sample, and their sizes differ by at most 1:
    the first ``len(dataset) % world_size`` workers have one sample more. All random numbers depend
    on ``seed`` alone; global generators are neither read nor changed. Another seed, such as the
    number of the epoch, gives other parts.

    Args:
        dataset: A data set with a length.
        rank: Rank of this worker, from 0 to ``world_size - 1``.
        world_size: Number of workers, at least 1.
        distribution: ``"uniform"``, ``"dirichlet"`` or ``"label_skew"``.
        shuffle: If True, the samples of a part are drawn at random and in random order. Otherwise a
            uniform part is contiguous, and the samples of any part come in the data set's order.
        seed: Seed of every draw, at least 0; the same on all workers.
        alpha: Concentration of the Dirichlet distribution, above 0.
        classes_per_worker: Shards of each worker with ``"label_skew"``, at least 1.
        labels: Class of each sample, for a data set that has no ``targets``.

    Returns:
        The part of worker ``rank``.

    Raises:
        ValueError: An argument is outside the values listed above, or a distribution by class has
            no labels.

    Example:
        >>> partition_dataset_by_rank(range(5), rank=1, world_size=2, shuffle=False).indices
        [3, 4]

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        arXiv:1602.05629.

        Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution,
        arXiv:1909.06335.
    """
    check_rank(rank, world_size)
    if distribution not in ("uniform", "dirichlet", "label_skew"):
        raise ValueError(
            f"distribution must be 'uniform', 'dirichlet' or 'label_skew', not {distribution!r}"
        )
    check_positive("alpha", alpha)
    check_int("classes_per_worker", classes_per_worker)
    check_int("seed", seed, 0)
    count = len(dataset)
    # Sizes depend on the length alone, so every worker computes all of them without communication.
    sizes = part_sizes(count, world_size)
    if distribution == "uniform":
        mine = uniform_part(count, rank, world_size, shuffle=shuffle, seed=seed)
    else:
        classes = _classes(dataset, labels)
        generator = np.random.default_rng(seed)
        if distribution == "dirichlet":
            parts = _dirichlet(classes, sizes, alpha, shuffle, generator)
        else:
            parts = _label_skew(classes, sizes, classes_per_worker, shuffle, generator)
        mine = parts[rank]
        # The samples are grouped by class here. Permute them, so that batches mix the classes of
        # this worker.
        if shuffle:
            mine = generator.permutation(mine)
        else:
            mine = np.sort(mine)
    # The first workers get the remainder of the division, so the last part is the smallest.
    return Partition(dataset, mine.tolist(), smallest_part=sizes[-1])


def parse_partition(text: str) -> dict[str, Any]:
    """Return the arguments of :func:`partition_dataset_by_rank` for a text of a command line.

    Args:
        text: ``"uniform"``, ``"dirichlet:ALPHA"`` with a finite ALPHA above 0, or
            ``"label_skew:N"`` with N classes per worker.

    Returns:
        ``distribution``, and ``alpha`` or ``classes_per_worker`` if the distribution needs it.

    Raises:
        ConfigurationError: The text is none of these.

    Example:
        >>> parse_partition("dirichlet:0.1")
        {'distribution': 'dirichlet', 'alpha': 0.1}
        >>> parse_partition("label_skew:2")
        {'distribution': 'label_skew', 'classes_per_worker': 2}
    """
    distribution, _, number = text.partition(":")
    with contextlib.suppress(ValueError):
        if text == "uniform":
            return {"distribution": distribution}
        if distribution == "dirichlet":
            alpha = float(number)
            check_positive("alpha", alpha)
            return {"distribution": distribution, "alpha": alpha}
        if distribution == "label_skew":
            count = check_int("classes_per_worker", int(number))
            return {"distribution": distribution, "classes_per_worker": count}
    raise ConfigurationError(
        "partition must be uniform, dirichlet:ALPHA with a finite ALPHA above 0, or label_skew:N "
        f"with a whole number N of at least 1, not {text!r}: write for example dirichlet:0.1"
    )


def _classes(dataset: Any, labels: Sequence[int] | None) -> np.ndarray:
    """Return the class of each sample, numbered from 0 without gaps."""
    if labels is None:
        labels = getattr(dataset, "targets", None)
    if labels is None:
        raise ValueError(
            "labels must be the class of each sample, not None, because "
            f"{type(dataset).__name__} has no `targets`: pass labels=..."
        )
    array = np.asarray(labels)
    if array.shape != (len(dataset),):
        raise ValueError(
            f"labels must have shape ({len(dataset)},), one per sample, not {array.shape}"
        )
    # Labels may be numbers with gaps, or text: only their order matters.
    return np.unique(array, return_inverse=True)[1]


def _dirichlet(
    classes: np.ndarray,
    sizes: list[int],
    alpha: float,
    shuffle: bool,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Fill each worker's part from the classes with its own proportions."""
    members = _members(classes, shuffle, generator)
    left = np.array(list(map(len, members)))
    prior = left / max(1, left.sum())
    parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sizes)
    # Workers draw in random order, because the last ones receive the classes that the others left.
    for worker in generator.permutation(len(sizes)):
        mixture = _draw_mixture(alpha * prior, generator)
        taken = _draw_counts(sizes[worker], mixture, left, generator)
        chosen = []
        for member, have, take in zip(members, left, taken, strict=True):
            # Samples are taken from the front of a class, so the `have` samples that are left are
            # its last ones.
            start = len(member) - have
            chosen.append(member[start : start + take])
        left = left - taken
        if chosen:
            parts[worker] = np.concatenate(chosen)
    return parts


def _draw_mixture(concentration: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw from the Dirichlet distribution."""
    gammas = generator.standard_gamma(concentration)
    if gammas.sum() > 0:
        return gammas / gammas.sum()
    # Tiny concentrations underflow, so draw from the limit of the distribution: a single class.
    mixture = np.zeros_like(concentration)
    if len(mixture):
        mixture[generator.choice(len(mixture), p=concentration / concentration.sum())] = 1.0
    return mixture


def _draw_counts(
    need: int, mixture: np.ndarray, left: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw the number of samples to take from each class."""
    taken = np.zeros_like(left)
    while need > 0:
        weights = np.where(left > taken, mixture, 0.0)
        # If no class of the mixture has samples left, draw from all remaining samples.
        if weights.sum() <= 0:
            weights = (left - taken).astype(np.float64)
        # A multinomial draw may exceed the remaining samples of a class; the next round replaces
        # the excess.
        draw = np.minimum(generator.multinomial(need, weights / weights.sum()), left - taken)
        taken += draw
        need -= int(draw.sum())
    return taken


def _label_skew(
    classes: np.ndarray,
    sizes: list[int],
    per_worker: int,
    shuffle: bool,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Cut the samples, sorted by class, into shards, and assign the shards at random."""
    # The empty array keeps the concatenation valid for a data set without samples.
    in_order = np.concatenate([*_members(classes, shuffle, generator), np.empty(0, dtype=np.int64)])
    # The sizes of a worker's shards differ by at most one sample and add up to the size of its
    # part.
    shards: list[tuple[int, int]] = []
    for worker, size in enumerate(sizes):
        shards += [(worker, length) for length in part_sizes(size, per_worker)]
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    start = 0
    for position in generator.permutation(len(shards)):
        worker, length = shards[position]
        parts[worker].append(in_order[start : start + length])
        start += length
    return [np.concatenate(part) for part in parts]


def _members(
    classes: np.ndarray, shuffle: bool, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return the samples of each class."""
    members = []
    for label in range(int(classes.max(initial=-1)) + 1):
        samples: np.ndarray = np.flatnonzero(classes == label)
        if shuffle:
            samples = generator.permutation(samples)
        members.append(samples)
    return members
