"""One bit per weight: majority vote of signs, and scaled signs with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compressed import CompressedAggregation, recall
from mlbench_core.aggregation.pytorch.messages import as_bytes, divide, from_bytes, in_blocks, unpack
from mlbench_core.aggregation.pytorch.names import by_plain_name, check_keys
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["EFSignAggregation", "SignAggregation", "pack_bits", "scaled_signs", "unpack_bits"]


class SignAggregation(CompressedAggregation):
    r"""Majority vote: every coordinate becomes the sign that most workers have.

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`, every worker's tensor becomes

    .. math:: \operatorname{sign}\Bigl(\sum_{i=1}^{k} \operatorname{sign}(g_i)\Bigr) \in \{-1, 0, 1\},

    for every divisor of the operation. A tie of an even number of workers gives 0. One bit has no room for a zero, so
    worker :math:`i` sends a zero in step :math:`t` as :math:`(-1)^{t + i}`. Zeros on all of an even number of workers
    then give 0. Otherwise the votes of a worker's zeros cancel from step to step. A gradient that this worker lacks
    counts as zeros, and nan as -1. One worker alone sends nothing and keeps its zeros.

    Bytes a worker sends per step: :math:`\lceil d / 8 \rceil` for the :math:`d` coordinates of one dtype (of each
    parameter with ``by_layer=True``), in one all-gather.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> gradient = torch.tensor([0.3, -7.0, 0.0])
        >>> SignAggregation().aggregate({"weight": gradient}, "avg_world")
        >>> gradient
        tensor([ 1., -1.,  0.])

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimisation for Non-Convex Problems.
        arXiv:1802.04434
        Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with Majority Vote is Communication Efficient and Fault
        Tolerant. arXiv:1810.05291
    """

    _named_state = ("votes_held",)
    _own_state = ()  # the votes for zeros cancel only if all workers have the same counts

    def __init__(self, use_cuda: bool = False, *, world_size: int | None = None, process_group: Any = None) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self._votes_held: dict[str, int] = {}

    def _aggregate_kind(self, tensors: Mapping[str, Tensor], divisor: Denominator) -> None:
        if self.world_size == 1:
            for tensor in tensors.values():
                tensor.sign_()
            return
        # With by_layer=True or several dtypes, a step has several votes. Each counts its own turns, by the name of its
        # first tensor.
        message = next(iter(tensors))
        turn = self._votes_held.get(message, 0)
        self._votes_held[message] = turn + 1
        # One bit has no room for a zero, so zeros vote for and against in turn. Even and odd ranks begin differently.
        is_positive = torch.ge if (turn + process_groups.rank(self.group)) % 2 == 0 else torch.gt
        signs = torch.cat([is_positive(tensor.reshape(-1), 0) for tensor in tensors.values()])
        ballots = self._gather(pack_bits(signs))
        # Votes are counted in int16: a quarter of int64's memory, with room for doubled votes of 16,383 workers.
        votes_for = torch.zeros(signs.numel(), dtype=torch.int16, device=signs.device)
        for ballot in ballots:
            for part, votes in zip(in_blocks(votes_for), in_blocks(unpack_bits(ballot, signs.numel())), strict=True):
                part += votes
        for part in in_blocks(votes_for):
            part.mul_(2).sub_(self.world_size).sign_()  # votes for minus those against
        unpack(votes_for, tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of votes held, by the name of the message's first tensor, under ``"votes_held"``."""
        return {"votes_held": dict(self._votes_held)} if self._votes_held else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("votes_held",))
        self._votes_held = by_plain_name(state_dict.get("votes_held", {}))


class EFSignAggregation(CompressedAggregation):
    r"""Scaled signs with error feedback.

    Worker :math:`i` adds its error memory :math:`e_i` to its gradient :math:`g_i` (or step; the memory is in the same
    unit). It sends the signs and the mean absolute value of each tensor with :math:`d` coordinates, and remembers the
    rest:

    .. math::

        p_i &= g_i + e_i \\
        \Delta_i &= \frac{\lVert p_i \rVert_1}{d} \operatorname{sign}(p_i) \\
        e_i &\leftarrow p_i - \Delta_i

    Every worker's tensor becomes :math:`\frac{1}{k} \sum_i \Delta_i` (or the sum over ``denom``), summed in the order
    of ranks, so that all workers get the same bits. The sign of zero is 1. Values that are not finite are not
    remembered, so that a step that overflowed can be skipped.

    Bytes a worker sends per step: :math:`\lceil d / 8 \rceil` for the :math:`d` coordinates of one dtype, and 4 for
    each tensor (8 for float64), in one all-gather.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> aggregation, gradient = EFSignAggregation(), torch.tensor([3.0, -1.0])
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([ 2., -2.]), tensor([1., 1.]))

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
        arXiv:1901.09847
    """

    def _aggregate_kind(self, tensors: Mapping[str, Tensor], divisor: Denominator) -> None:
        # The error memory itself becomes p, then e, without a copy.
        p = [recall(self._memory, name, tensor).add_(tensor) for name, tensor in tensors.items()]
        # Block by block, so that the absolute values stay in the CPU's cache.
        sums = [torch.stack([part.abs().sum() for part in in_blocks(p_n.view(-1))]).sum() for p_n in p]
        scales = torch.stack([size / p_n.numel() for size, p_n in zip(sums, p, strict=True)])
        # A zero counts as positive. A tensor of zeros still gives zeros, because its scale is 0.
        message = as_bytes(scales, pack_bits(torch.cat([p_n.reshape(-1) >= 0 for p_n in p])))
        for p_n, scale in zip(p, scales, strict=True):
            for part in in_blocks(p_n.view(-1)):
                part -= scaled_signs(part >= 0, scale)  # now e
        if scales.is_cuda or not scales.isfinite().all():  # a GPU is not waited for
            torch_private.foreach_copy_(p, [p_n.nan_to_num(nan=0, posinf=0, neginf=0) for p_n in p])
        total = self._sum_of(self._gather(message), [p_n.numel() for p_n in p], scales)
        unpack(divide(total, divisor), tensors.values())

    def _sum_of(self, messages: Tensor, sizes: list[int], like: Tensor) -> Tensor:
        """Add up the workers' messages in the order of ranks: flat scaled signs of tensors of the given sizes."""
        total = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        # One order on all workers: sums of floating-point numbers in another order have other bits.
        for message in messages:
            scales = from_bytes(message, 0, len(sizes), like.dtype)
            signs = unpack_bits(message[like.nbytes :], sum(sizes))
            for tensor, positive, scale in zip(total.split(sizes), signs.split(sizes), scales, strict=True):
                for part, is_positive in zip(in_blocks(tensor), in_blocks(positive), strict=True):
                    part += scaled_signs(is_positive, scale)
        return total


def scaled_signs(positive: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale`` for True and minus it for False; on a CPU many times faster than ``torch.where``."""
    return positive.to(scale.dtype).mul_(2).sub_(1).mul_(scale)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack truth values, eight to a byte, the first into the highest bit; the last byte is filled up with zeros.

    Args:
        bits: Shape (n,), bool.

    Returns:
        Shape (ceil(n / 8),), uint8, on the same device.

    Example:
        >>> pack_bits(torch.tensor([True, False, False, False, False, False, True, True, True]))
        tensor([131, 128], dtype=torch.uint8)
    """
    if bits.device.type == "cpu":
        # NumPy packs 37 times faster than pack_with_torch, and unpacks 12 times faster (a million bits, one core).
        return torch.from_numpy(np.packbits(bits.numpy()))
    return pack_with_torch(bits)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Undo :func:`pack_bits`.

    Args:
        packed: Shape (ceil(count / 8),), uint8.
        count: Number of bits.

    Returns:
        Shape (count,), bool, on the same device.

    Example:
        >>> unpack_bits(torch.tensor([131], dtype=torch.uint8), 3)
        tensor([ True, False, False])
    """
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).view(bool))
    return unpack_with_torch(packed, count)


def pack_with_torch(bits: Tensor) -> Tensor:
    """Do as :func:`pack_bits`, on any device."""
    # Every bit has its own place in the byte, so the sum never carries.
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << _places(bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_with_torch(packed: Tensor, count: int) -> Tensor:
    """Do as :func:`unpack_bits`, on any device."""
    return (packed[:, None] >> _places(packed.device) & 1).view(-1)[:count].bool()


def _places(device: torch.device) -> Tensor:
    """Return the shift of each of a byte's eight bits; created on the device, so without a copy from the host."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
