"""Batches with about the same number of tokens, distributed to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least, check_rank

__all__ = ["SizedPairs", "collate_batch", "get_batches", "shard_batches"]


class SizedPairs(Protocol):
    """A data set that can be cut into batches by size."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the tokens that a pair takes in a batch, its longer side, of shape (pairs,)."""

    @property
    def shuffle(self) -> bool:
        """Return whether pairs of the same size go into batches in random order."""


def get_batches(
    dataset: SizedPairs,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    bsz_mult: int = 8,
    shuffle: bool = True,
    seed: int = 0,
) -> list[list[int]]:
    """Cut a data set into batches of pairs of similar length.

    A batch of n pairs whose longest side has l tokens takes n x l tokens, padding included. Pairs are taken in order of
    their size. They are added to a batch as long as it takes at most ``max_tokens`` tokens and n is at most
    ``max_sentences``. Then n is rounded down to a multiple of ``bsz_mult``, unless it is smaller than that. The result
    depends only on the arguments, so it is the same on every worker: :func:`shard_batches` selects the share of each.

    Args:
        dataset: A :class:`~mlbench_core.dataset.nlp.pytorch.wmt17_dataset.WMT17Dataset`, or another object with its
            ``sizes`` and ``shuffle``.
        max_tokens: The most tokens in a batch; None for no limit.
        max_sentences: The most pairs in a batch; None for no limit.
        bsz_mult: The number of pairs is a multiple of it if possible.
        shuffle: If True, shuffle the order of batches and, if the data set's ``shuffle`` is True, of pairs of one size.
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
    for name, limit in (("max_tokens", max_tokens), ("max_sentences", max_sentences), ("bsz_mult", bsz_mult)):
        if limit is not None:
            check_at_least(name, limit, 1)
    sizes = dataset.sizes
    if max_tokens is not None and len(sizes) and sizes.max() > max_tokens:
        longest = int(sizes.argmax())
        raise ValueError(
            f"pair {longest} takes {sizes[longest]} tokens and max_tokens is {max_tokens}; give a larger one, or the "
            f"data set smaller max_positions"
        )
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(sizes)) if shuffle and dataset.shuffle else np.arange(len(sizes))
    # A stable sort keeps the random order of pairs of the same size.
    order = order[np.argsort(sizes[order], kind="stable")]
    batches = _cut(order, sizes[order], max_tokens, max_sentences, bsz_mult)
    return [batches[i] for i in generator.permutation(len(batches))] if shuffle else batches


def _cut(
    order: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    max_tokens: int | None,
    max_sentences: int | None,
    bsz_mult: int,
) -> list[list[int]]:
    """Cut pairs, the shortest first, into batches.

    Args:
        order: Indices of pairs.
        sizes: Their sizes, in increasing order.
        max_tokens: The most tokens in a batch.
        max_sentences: The most pairs.
        bsz_mult: The number of pairs is a multiple of it.
    """
    most = len(order) if max_sentences is None else max_sentences
    batches, start = [], 0
    while start < len(order):
        stop = start
        while stop < min(len(order), start + most) and (
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
    """Return this worker's share of batches that are the same on every worker: every k-th.

    All workers get the same number of batches; otherwise some would wait indefinitely in a collective.

    Args:
        batches: Batches of all workers.
        rank: This worker.
        world_size: Number k of workers.
        drop_last: True, for training: if k does not divide the number of batches, the last ones, fewer than k, are left
            out. As batches are shuffled, these are others in each epoch. False, for validation: workers without a last
            batch get an empty one, and ``collater`` turns it into an empty dictionary.

    Returns:
        The batches of the worker.

    Raises:
        ValueError: The rank is not below ``world_size``, or there are too few batches for a step of training.

    Example:
        >>> batches = [[0], [1], [2]]
        >>> [shard_batches(batches, rank, 2) for rank in range(2)]
        [[[0]], [[1]]]
        >>> [shard_batches(batches, rank, 2, drop_last=False) for rank in range(2)]
        [[[0], [2]], [[1], []]]
    """
    check_rank(rank, world_size)
    rounds = len(batches) // world_size if drop_last else -(-len(batches) // world_size)
    if drop_last and rounds == 0:
        raise ValueError(
            f"there are {len(batches)} batches; {world_size} workers need as many for one step: take smaller batches"
        )
    # Without shuffling, neighboring batches have similar sizes, so every k-th batch gives workers similar work.
    mine = list(batches[rank : rounds * world_size : world_size])
    return mine + [[] for _ in range(rounds - len(mine))]


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
        samples: Items of the data set: ``id``, an integer, and ``source`` and ``target``, int64 of shape (tokens,),
            each with the end symbol.
        pad_idx: Number of the padding.
        eos_idx: Number of the end symbol.
        left_pad_source: If True, sources are padded on the left.
        left_pad_target: If True, targets are padded on the left.
        seq_len_multiple: The lengths of the batch are multiples of it.

    Returns:
        ``id``: int64 of shape (batch,); ``ntokens``: number of target tokens without padding; ``target``: int64 of
        shape (batch, tokens); ``net_input``: the arguments of the model: ``src_tokens``, int64 of shape (batch,
        tokens), ``src_lengths`` of shape (batch,), and ``prev_output_tokens``, the targets with the end symbol moved
        from the end to the beginning. An empty dictionary for no samples.

    Example:
        >>> sample = {"id": 7, "source": torch.tensor([5, 1]), "target": torch.tensor([8, 9, 1])}
        >>> batch = collate_batch([sample], pad_idx=0, eos_idx=1, seq_len_multiple=4)
        >>> batch["net_input"]["src_tokens"].tolist(), batch["net_input"]["prev_output_tokens"].tolist()
        ([[0, 0, 5, 1]], [[1, 8, 9, 0]])
    """
    if not samples:
        return {}
    sources = [sample["source"] for sample in samples]
    targets = [sample["target"] for sample in samples]
    end = torch.tensor([eos_idx])

    def pad(sentences: Sequence[Tensor], left: bool) -> Tensor:
        width = -(-max(map(len, sentences)) // seq_len_multiple) * seq_len_multiple
        batch = torch.full((len(sentences), width), pad_idx, dtype=torch.int64)
        for row, sentence in zip(batch, sentences, strict=True):
            (row[width - len(sentence) :] if left else row[: len(sentence)]).copy_(sentence)
        return batch

    return {
        "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.int64),
        "ntokens": sum(len(target) for target in targets),
        "net_input": {
            "src_tokens": pad(sources, left_pad_source),
            "src_lengths": torch.tensor([len(source) for source in sources], dtype=torch.int64),
            "prev_output_tokens": pad([torch.cat((end, target[:-1])) for target in targets], left_pad_target),
        },
        "target": pad(targets, left_pad_target),
    }
