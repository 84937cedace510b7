"""Batches of sentence pairs of similar length, distributed to workers.

:class:`BucketBatchSampler`, :func:`build_collate_fn` and :class:`TeacherForcedBatches` make
time-first batches of a fixed number of pairs, for GNMT. :func:`get_batches`, :func:`shard_batches`
and :func:`collate_batch` make batch-first batches of about the same number of tokens, for the
Transformer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mlbench_core.arguments import check_at_least, check_int, check_rank
from mlbench_core.dataset.pytorch.resumable import ResumablePasses

__all__ = [
    "BucketBatchSampler",
    "PaddedBatch",
    "SizedPairs",
    "TeacherForcedBatches",
    "build_collate_fn",
    "collate_batch",
    "get_batches",
    "shard_batches",
]

PaddedBatch = tuple[Tensor, Tensor]
"""Ids of sentences, padded at the end, and the sentences' lengths."""

_Order = npt.NDArray[np.int64]


def build_collate_fn(
    batch_first: bool = False, sort: bool = False, *, pad: int = 0, multiple: int = 1
) -> Callable[[Sequence[tuple[Tensor, Tensor]]], tuple[PaddedBatch, PaddedBatch]]:
    """Return a ``collate_fn`` for a ``DataLoader`` that pads the sentences of a batch.

    Args:
        batch_first: If True, the first dimension is the sentence instead of the time.
        sort: If True, sort the pairs of a batch by the length of the source, the longest first.
        pad: Id of padding.
        multiple: Pad the sentences of a batch to a multiple of this length.

    Returns:
        A function of a list of pairs (source, target), each int64 of shape (tokens,). It returns
        ``((source, source_lengths), (target, target_lengths))``: ids of shape (time, batch), padded
        at the end, or (batch, time) with ``batch_first``; lengths without padding, of shape
        (batch,). All are int64.

    Raises:
        ValueError: ``multiple`` is not positive.

    Example:
        >>> long, short = torch.tensor([2, 7, 3]), torch.tensor([2, 3])
        >>> (source, lengths), _ = build_collate_fn()([(long, short), (short, long)])
        >>> source.tolist(), lengths.tolist()
        ([[2, 2], [7, 3], [3, 0]], [3, 2])
    """
    check_at_least("multiple", multiple, 1)
    # Return a partial of a module's function, because a closure could not be pickled for a
    # DataLoader's processes.
    return functools.partial(
        _collate, batch_first=batch_first, sort=sort, pad=pad, multiple=multiple
    )


def _collate(
    pairs: Sequence[tuple[Tensor, Tensor]], batch_first: bool, sort: bool, pad: int, multiple: int
) -> tuple[PaddedBatch, PaddedBatch]:
    if sort:
        pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
    sides = []
    for side in (0, 1):
        sentences = [pair[side] for pair in pairs]
        batch = _pad(sentences, pad, multiple)
        if not batch_first:
            batch = batch.T.contiguous()
        sides.append((batch, _lengths(sentences)))
    return sides[0], sides[1]


def _lengths(sentences: Sequence[Tensor]) -> Tensor:
    return torch.tensor(list(map(len, sentences)), dtype=torch.int64)


def _pad(sentences: Sequence[Tensor], pad: int, multiple: int, left: bool = False) -> Tensor:
    """Return sentences of ids as one tensor of shape (sentences, time).

    The time is a multiple of ``multiple``.
    """
    # In validation, a worker without pairs gets an empty batch.
    width = -(-max(map(len, sentences), default=0) // multiple) * multiple
    batch = torch.full((len(sentences), width), pad, dtype=torch.int64)
    for row, sentence in zip(batch, sentences, strict=True):
        start = 0
        if left:
            start = width - len(sentence)
        row[start : start + len(sentence)].copy_(sentence)
    return batch


class BucketBatchSampler(ResumablePasses, Sampler[list[int]]):
    """Batches of pairs of similar length, the same number on every worker.

    Training (``shuffle=True``): pairs are sorted into buckets by length and shuffled within each
    bucket. Each bucket is cut into batches of all workers together. The remaining pairs of all
    buckets, in order of length, make further batches; a rest smaller than a batch is left out of
    that epoch. The order of the batches is shuffled. Step by step, k workers with batches of b
    pairs get the same pairs as one worker with batches of kb. Everything depends only on (seed,
    epoch), so workers do not communicate.

    Validation (``shuffle=False``): every pair comes once, in order of its length. The batches of
    all workers differ by at most one pair. If there are fewer pairs than batches of all workers,
    some batches are empty.

    Pass it to ``DataLoader(dataset, batch_sampler=..., collate_fn=build_collate_fn())``. Each pass
    is its own epoch unless :meth:`set_epoch` sets another one.

    Args:
        lengths: Length of each pair, shape (pairs,), for example that of its longer side.
        batch_size: Pairs in a worker's batch.
        shuffle: If True, make batches for training, otherwise for validation.
        seed: Seed of the order, at least 0.
        rank: Rank of this worker.
        world_size: Number of workers.
        buckets: Number of ranges of length, each with the same number of pairs.

    Raises:
        ValueError: An argument is outside the values listed above, or the pairs are too few for one
            training step.

    Example:
        >>> one = BucketBatchSampler([3, 9, 4, 8], 1, rank=0, world_size=2, buckets=2)
        >>> other = BucketBatchSampler([3, 9, 4, 8], 1, rank=1, world_size=2, buckets=2)
        >>> sorted(sorted(batch + other_batch) for batch, other_batch in zip(one, other))
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
        buckets: int = 5,
    ) -> None:
        check_int("batch_size", batch_size)
        check_int("buckets", buckets)
        check_int("seed", seed, 0)
        check_rank(rank, world_size)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.rank, self.world_size, self.buckets = rank, world_size, buckets
        # With fewer pairs than one batch of all workers, an epoch would have no step.
        if shuffle and len(self.lengths) < batch_size * world_size:
            raise ValueError(
                f"lengths must have at least {batch_size * world_size} pairs, a batch of "
                f"{batch_size} for each of {world_size} workers, not {len(self.lengths)}: "
                "use smaller batches"
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch, on every worker."""
        # The number depends on the number of pairs alone, so workers agree on it without
        # communication.
        together = self.batch_size * self.world_size
        if self.shuffle:
            return len(self.lengths) // together
        return -(-len(self.lengths) // together)

    def __iter__(self) -> Iterator[list[int]]:
        return self._generate(self._begin())

    def _generate(self, first: int) -> Iterator[list[int]]:
        if self.shuffle:
            batches = self._training_batches()
        else:
            batches = self._validation_batches()
        for number in range(first, len(batches)):
            self._mark_yielded(number)
            yield batches[number].tolist()

    def _validation_batches(self) -> list[_Order]:
        order = np.argsort(self.lengths, kind="stable")
        if not len(order):
            return []
        # Cut the shares of all workers and batches at once, so that they differ by at most one
        # pair.
        shares = np.array_split(order, len(self) * self.world_size)
        return shares[self.rank :: self.world_size]

    def _training_batches(self) -> list[_Order]:
        """Return this worker's share of the batches of all workers."""
        generator = np.random.default_rng((self.seed, self._epoch))
        together = self.batch_size * self.world_size
        full: list[_Order] = []
        rest: list[_Order] = []
        for bucket in np.array_split(np.argsort(self.lengths, kind="stable"), self.buckets):
            order = generator.permutation(bucket)
            # Cut only whole batches here. The rest of each bucket is cut below.
            whole = len(order) // together * together
            if whole:
                full += np.split(order[:whole], whole // together)
            rest.append(order[whole:])
        left = np.concatenate(rest)
        # Drop pairs at random: dropping the last ones would always drop long pairs.
        drop = generator.permutation(len(left))[: len(left) % together]
        left = np.delete(left, drop)
        if len(left):
            full += np.split(left, len(left) // together)
        # Each batch in `full` is that of all workers, so that k workers see the batches of one
        # worker with k times the batch size.
        mine = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        return [full[number][mine] for number in generator.permutation(len(full))]

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "buckets": self.buckets,
            "pairs": len(self.lengths),
        }


class TeacherForcedBatches:
    """Batches for training: the inputs of the model, and the words that it should predict next.

    Args:
        pairs: Pairs (source, target), each int64 of shape (tokens,), from the id of the beginning
            to that of the end.
        order: Indices of each batch: a sampler such as :class:`BucketBatchSampler`, or a list of
            lists.
        device: Device of the ids.

    Example:
        >>> pairs = [([2, 7, 3], [2, 8, 9, 3]), ([2, 3], [2, 3])]
        >>> pairs = [(torch.tensor(source), torch.tensor(target)) for source, target in pairs]
        >>> [((source, lengths, inputs), next_words)] = TeacherForcedBatches(pairs, [[0, 1]])
        >>> lengths.tolist(), inputs.T.tolist(), next_words.T.tolist()
        ([3, 2], [[2, 8, 9], [2, 3, 0]], [[8, 9, 3], [3, 0, 0]])
    """

    def __init__(
        self,
        pairs: Dataset[tuple[Tensor, Tensor]] | Sequence[tuple[Tensor, Tensor]],
        order: Iterable[list[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        # Any sequence of pairs has the methods that a DataLoader needs.
        dataset: Any = pairs
        self.loader = DataLoader(dataset, batch_sampler=order, collate_fn=build_collate_fn())
        self.device = torch.device(device)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]:
        """Yield ``((source, lengths, inputs), next_words)``, time first.

        ``inputs`` is the target without its last row, ``next_words`` without its first row. Ids
        have the shapes (source, batch), (target - 1, batch) and (target - 1, batch); the sources'
        lengths, of shape (batch,), stay on the CPU, because packing sentences needs them there.
        """
        for (source, lengths), (target, _) in self.loader:
            target = target.to(self.device, non_blocking=True)
            yield (source.to(self.device, non_blocking=True), lengths, target[:-1]), target[1:]


class SizedPairs(Protocol):
    """A data set that can be cut into batches by size."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each pair's longer side in a batch, shape (pairs,)."""

    @property
    def shuffle(self) -> bool:
        """Return True if pairs of the same size go into batches in random order."""


def get_batches(
    dataset: SizedPairs,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    bsz_mult: int = 8,
    shuffle: bool = True,
    seed: int = 0,
) -> list[list[int]]:
    """Cut a data set into batches of pairs of similar length.

    A batch of n pairs whose longest side has l tokens has n x l tokens, padding included. Pairs are
    added to a batch in order of their size, as long as the batch has at most ``max_tokens`` tokens
    and ``max_sentences`` pairs. Then n is rounded down to a multiple of ``bsz_mult``, unless it is
    smaller than ``bsz_mult``. The result depends only on the arguments, so it is the same on every
    worker. :func:`shard_batches` selects each worker's batches.

    Args:
        dataset: A :class:`~mlbench_core.dataset.nlp.pytorch.wmt17_dataset.WMT17Dataset`, or another
            object with its ``sizes`` and ``shuffle``.
        max_tokens: Largest number of tokens in a batch; None for no limit.
        max_sentences: Largest number of pairs in a batch; None for no limit.
        bsz_mult: Make the number of pairs in a batch a multiple of this number if possible.
        shuffle: If True, shuffle the order of batches and, if the data set's ``shuffle`` is True,
            of pairs of one size.
        seed: Seed of both orders; use another one in each epoch, for example ``seed + epoch``.

    Returns:
        The batches: lists of indices; each pair is in one of them.

    Raises:
        ValueError: A limit is not positive, or a pair is longer than ``max_tokens``.

    Example:
        >>> from types import SimpleNamespace
        >>> dataset = SimpleNamespace(sizes=np.array([4, 2, 3, 2, 4]), shuffle=False)
        >>> get_batches(dataset, max_tokens=8, bsz_mult=2, shuffle=False)
        [[1, 3], [2, 0], [4]]
    """
    for name, limit in (
        ("max_tokens", max_tokens),
        ("max_sentences", max_sentences),
        ("bsz_mult", bsz_mult),
    ):
        if limit is not None:
            check_at_least(name, limit, 1)
    sizes = dataset.sizes
    if max_tokens is not None and len(sizes) and sizes.max() > max_tokens:
        longest = int(sizes.argmax())
        raise ValueError(
            f"max_tokens must be at least {sizes[longest]}, the tokens of pair {longest}, not "
            f"{max_tokens}: raise it, or give the data set smaller max_positions"
        )
    # The generator depends on the seed alone, so every worker cuts the same batches without
    # communication.
    generator = np.random.default_rng(seed)
    order: _Order = np.arange(len(sizes))
    if shuffle and dataset.shuffle:
        order = generator.permutation(len(sizes))
    # A stable sort keeps the random order of pairs of the same size.
    order = order[np.argsort(sizes[order], kind="stable")]
    batches = _cut(order, sizes[order], max_tokens, max_sentences, bsz_mult)
    if not shuffle:
        return batches
    return [batches[number] for number in generator.permutation(len(batches))]


def _cut(
    order: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    max_tokens: int | None,
    max_sentences: int | None,
    bsz_mult: int,
) -> list[list[int]]:
    """Cut pairs, given as indices and their sizes in increasing order, into batches."""
    most = max_sentences
    if most is None:
        most = len(order)
    batches, start = [], 0
    while start < len(order):
        stop, limit = start, min(len(order), start + most)
        # Sizes increase, so the next pair is the longest one of the batch.
        while stop < limit and (
            max_tokens is None or (stop + 1 - start) * sizes[stop] <= max_tokens
        ):
            stop += 1
        # The last batch takes all remaining pairs, so it is not rounded down.
        if stop < len(order) and stop - start > bsz_mult:
            stop -= (stop - start) % bsz_mult
        batches.append(order[start:stop].tolist())
        start = stop
    return batches


def shard_batches(
    batches: Sequence[list[int]], rank: int, world_size: int, *, drop_last: bool = True
) -> list[list[int]]:
    """Return every k-th batch of a list that is the same on every worker.

    All workers get the same number of batches; otherwise some would wait indefinitely in a
    collective.

    Args:
        batches: Batches of all workers.
        rank: Rank of this worker.
        world_size: Number k of workers.
        drop_last: If True, as for training, leave out the remainder if k does not divide the number
            of batches. Other batches are left out in each epoch, because batches are shuffled. If
            False, as for validation, a worker without a last batch gets an empty one, and
            ``collater`` converts it to an empty dictionary.

    Returns:
        The batches of the worker.

    Raises:
        ValueError: The rank is not below ``world_size``, or the batches are too few for one
            training step.

    Example:
        >>> batches = [[0], [1], [2]]
        >>> [shard_batches(batches, rank, 2) for rank in range(2)]
        [[[0]], [[1]]]
        >>> [shard_batches(batches, rank, 2, drop_last=False) for rank in range(2)]
        [[[0], [2]], [[1], []]]
    """
    check_rank(rank, world_size)
    rounds = len(batches) // world_size
    if drop_last and rounds == 0:
        raise ValueError(
            f"batches must have one for each of {world_size} workers, not {len(batches)} in "
            "total: use smaller batches"
        )
    if not drop_last:
        rounds = -(-len(batches) // world_size)
    # Neighboring batches that are not shuffled have similar sizes, so every k-th batch gives
    # workers similar work.
    mine = list(batches[rank : rounds * world_size : world_size])
    if len(mine) < rounds:
        mine.append([])
    return mine


def collate_batch(
    samples: Sequence[Mapping[str, Any]],
    pad_idx: int,
    eos_idx: int,
    left_pad_source: bool = True,
    left_pad_target: bool = False,
    seq_len_multiple: int = 1,
) -> dict[str, Any]:
    """Make a batch of samples.

    Args:
        samples: Items of the data set: ``id``, an integer, and ``source`` and ``target``, int64 of
            shape (tokens,), each with the end symbol.
        pad_idx: Number of the padding.
        eos_idx: Number of the end symbol.
        left_pad_source: If True, sources are padded on the left.
        left_pad_target: If True, targets are padded on the left.
        seq_len_multiple: Pad sources and targets to multiples of this length.

    Returns:
        A dictionary, which is empty without samples. ``id``: int64 of shape (batch,); ``ntokens``:
        number of target tokens without padding; ``target``: int64 of shape (batch, tokens);
        ``net_input``: the arguments of the model. These are ``src_tokens``, int64 of shape (batch,
        tokens), ``src_lengths`` of shape (batch,), and ``prev_output_tokens``, the targets with the
        end symbol moved from the end to the beginning.

    Example:
        >>> sample = {"id": 7, "source": torch.tensor([5, 1]), "target": torch.tensor([8, 9, 1])}
        >>> inputs = collate_batch([sample], pad_idx=0, eos_idx=1, seq_len_multiple=4)["net_input"]
        >>> inputs["src_tokens"].tolist(), inputs["prev_output_tokens"].tolist()
        ([[0, 0, 5, 1]], [[1, 8, 9, 0]])
    """
    if not samples:
        return {}
    sources = [sample["source"] for sample in samples]
    targets = [sample["target"] for sample in samples]
    # The decoder reads the target shifted by one: from the end symbol, which starts a translation,
    # to the last word.
    end = torch.tensor([eos_idx])
    previous = [torch.cat((end, target[:-1])) for target in targets]
    return {
        "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.int64),
        "ntokens": sum(map(len, targets)),
        "net_input": {
            "src_tokens": _pad(sources, pad_idx, seq_len_multiple, left_pad_source),
            "src_lengths": _lengths(sources),
            "prev_output_tokens": _pad(previous, pad_idx, seq_len_multiple, left_pad_target),
        },
        "target": _pad(targets, pad_idx, seq_len_multiple, left_pad_target),
    }
