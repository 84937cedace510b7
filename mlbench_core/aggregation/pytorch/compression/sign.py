"""Send one bit per weight: a majority vote of signs, and scaled signs with error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation, recall
from mlbench_core.aggregation.pytorch.transport.messages import (
    KeptMemory,
    all_finite,
    as_bytes,
    compare,
    divide,
    fill,
    from_bytes,
    in_blocks,
    unpack,
)
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, check_keys
from mlbench_core.aggregation.pytorch.transport.packing import pack_bits, unpack_bits
from mlbench_core.distributed.pytorch import process_groups

__all__ = [
    "EFSignAggregation",
    "SignAggregation",
    "pack_signs",
    "scaled_signs",
    "signs_or_nan",
    "sum_scaled_signs",
    "unpack_part",
]


class SignAggregation(CompressedAggregation):
    r"""Replace every coordinate by the sign that most workers have (majority vote).

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`, every worker's tensor becomes

    .. math:: \operatorname{sign}\Bigl(\sum_{i=1}^{k} \operatorname{sign}(g_i)\Bigr) \in \{-1, 0,
      1\},

    whatever the divisor of the operation is. A tie, which an even number of workers can have, gives
    0.

    One bit cannot represent a zero, so worker :math:`i` sends a zero in step :math:`t` as
    :math:`(-1)^{t + i}`. If all of an even number of workers have a zero, their votes cancel and
    give 0. Otherwise the votes for the zeros of one worker cancel from step to step. A missing
    gradient of this worker counts as zeros. A single worker sends nothing and keeps its zeros.

    A sign cannot represent an infinity or nan, so one more bit says if all numbers of the message
    are finite. If they are not on one worker, all tensors of the message become nan on all workers.

    In each step, a worker sends :math:`\lceil (d + 1) / 8 \rceil` bytes for the :math:`d`
    coordinates of one dtype, in one all-gather. With ``by_layer=True`` this holds for each
    parameter.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> gradient = torch.tensor([0.3, -7.0, 0.0])
        >>> SignAggregation().aggregate({"weight": gradient}, "avg_world")
        >>> gradient
        tensor([ 1., -1.,  0.])

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimisation for
        Non-Convex Problems. arXiv:1802.04434

        Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with Majority Vote is Communication
        Efficient and Fault Tolerant. arXiv:1810.05291
    """

    averages_gradients = False

    _named_state = ("votes_held",)
    # No state differs between workers: the votes for zeros cancel only if all
    # workers have the same counts.
    _own_state = ()

    def __init__(
        self, use_cuda: bool = False, *, world_size: int | None = None, process_group: Any = None
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self._votes_held: dict[str, int] = {}

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        if self.world_size == 1:
            for tensor in tensors.values():
                tensor.copy_(signs_or_nan(tensor))
            return
        # With by_layer=True or several dtypes, a step has several votes. Each has its own counter,
        # under the name of its first tensor.
        first_name = next(iter(tensors))
        step = self._votes_held.get(first_name, 0)
        self._votes_held[first_name] = step + 1
        # Zeros count as positive in one step and as negative in the next. Even ranks begin with
        # positive, odd ranks with negative.
        zero_is_positive = (step + process_groups.rank(self.group)) % 2 == 0
        flags: list[Tensor] = []

        def signed() -> Iterator[Tensor]:
            for tensor in tensors.values():
                for block in in_blocks(tensor.reshape(-1)):
                    flags.append(all_finite(block))
                    yield block
            yield scaled_signs(torch.stack(flags).all(), block.new_ones(())).view(1)

        ballots = self._gather(pack_signs(signed(), zero_is_positive), divisor, extra)
        end = sum(map(torch.numel, tensors.values()))
        is_finite = torch.cat([unpack_part(ballot, end, end + 1) for ballot in ballots]).all()

        def majority(first: int, start: int, stop: int) -> Tensor:
            # int16 takes a quarter of the memory of int64. The counts are doubled,
            # which fits for 16,383 workers.
            votes_for = torch.zeros(stop - start, dtype=torch.int16, device=ballots.device)
            for ballot in ballots:
                votes_for += unpack_part(ballot, first + start, first + stop)
            return votes_for.mul_(2).sub_(self.world_size).sign_()  # votes for minus those against

        if ballots.is_cuda:
            # A GPU counts the votes for all tensors at once, because
            # counting takes several kernels.
            result = majority(0, 0, end).float().masked_fill_(~is_finite, torch.nan)
            unpack(result, tensors.values())
            return
        first = 0
        for tensor in tensors.values():
            if is_finite:
                fill(tensor, partial(majority, first))
            else:
                tensor.fill_(torch.nan)
            first += tensor.numel()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of votes under ``"votes_held"``, by each message's first tensor."""
        if not self._votes_held:
            return {}
        return {"votes_held": dict(self._votes_held)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("votes_held",))
        self._votes_held = by_plain_name(state_dict.get("votes_held", {}))


class EFSignAggregation(CompressedAggregation):
    r"""Scaled signs with error feedback.

    Worker :math:`i` adds its error memory :math:`e_i` to its gradient :math:`g_i`. (Instead of the
    gradient it may be a step; the memory is then in units of steps.) For each tensor with :math:`d`
    coordinates it sends the signs and the mean absolute value, and remembers the rest:

    .. math::

        p_i &= g_i + e_i \\
        \Delta_i &= \frac{\lVert p_i \rVert_1}{d} \operatorname{sign}(p_i) \\
        e_i &\leftarrow p_i - \Delta_i

    Every worker's tensor becomes :math:`\frac{1}{k} \sum_i \Delta_i` (or the sum over ``denom``),
    summed in the order of ranks, so that all workers get the same bits. The sign of zero is 1. If a
    value is infinite or nan on one worker, its scale is too, and the whole tensor on all workers.
    Values that are not finite are not remembered, so that a step that overflowed can be skipped.

    In each step, a worker sends :math:`\lceil d / 8 \rceil` bytes for the :math:`d` coordinates of
    one dtype, and 4 bytes for each tensor (8 for float64), in one all-gather.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> aggregation, gradient = EFSignAggregation(), torch.tensor([3.0, -1.0])
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([ 2., -2.]), tensor([1., 1.]))

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes. arXiv:1901.09847
    """

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        # The error memory is changed in place: it holds p first, and then the new e.
        p = [recall(self._memory, name, tensor) for name, tensor in tensors.items()]
        scales_of_p, kept = [], KeptMemory()

        def blocks_of_p() -> Iterator[Tensor]:
            # p, its absolute sum and its signs are computed while a block is in the CPU's cache.
            for p_n, tensor in zip(p, tensors.values(), strict=True):
                sums = []
                pairs = zip(in_blocks(p_n.view(-1)), in_blocks(tensor.reshape(-1)), strict=True)
                for block, part in pairs:
                    block += part
                    size = kept.flat("size", len(block), block.dtype, block.device)
                    sums.append(torch.abs(block, out=size).sum())
                    yield block
                scales_of_p.append(torch.stack(sums).sum() / p_n.numel())

        # A zero counts as positive. A tensor of zeros still gives zeros, because its scale is 0.
        signs = pack_signs(blocks_of_p())
        scales = torch.stack(list(map(mean_in_range, scales_of_p, p)))
        message = as_bytes(scales, signs)
        for p_n, scale in zip(p, scales, strict=True):
            for part in in_blocks(p_n.view(-1)):
                delta = kept.flat("size", len(part), part.dtype, part.device)
                # Zeros are positive here as well: a sum that started from +0 is never -0. The
                # memory now holds e.
                part -= torch.copysign(scale, part, out=delta)
        # On a GPU, reading the flag would make the host wait, so there
        # the values are always replaced.
        if scales.is_cuda or not scales.isfinite().all():
            torch_private.foreach_copy_(p, [p_n.nan_to_num(nan=0, posinf=0, neginf=0) for p_n in p])
        messages = self._gather(message, divisor, extra)
        # One row per tensor, and one column per worker.
        columns = [from_bytes(message, 0, len(p), scales.dtype) for message in messages]
        their_scales = torch.stack(columns, dim=1)
        if scales.device.type != "cpu":
            sizes = list(map(torch.numel, tensors.values()))
            total = sum_scaled_signs(messages[:, scales.nbytes :], their_scales, sizes)
            unpack(divide(total, divisor), tensors.values())
            return
        every_byte = torch.arange(256, dtype=torch.uint8, device=scales.device)
        bits = unpack_bits(every_byte, 8 * 256)
        signs_of_bytes = scaled_signs(bits, scales.new_ones(())).view(256, 8)

        def average(first: int, tables: Tensor, start: int, stop: int) -> Tensor:
            first_byte, end = (first + start) // 8, (first + stop + 7) // 8
            size = 8 * (end - first_byte)
            total = kept.flat("total", size, scales.dtype, scales.device)
            other = kept.flat("other", size, scales.dtype, scales.device)
            # All workers add in the same order, because sums in different
            # orders differ in their last bits.
            for i, (table, message) in enumerate(zip(tables, messages, strict=True)):
                packed = message[scales.nbytes + first_byte : scales.nbytes + end]
                # The first worker's values need no addition.
                rows = (other if i else total).view(-1, 8)
                # NumPy finds rows in a table twice as fast as torch. "clip" lets it write them
                # without a buffer.
                np.take(table.numpy(), packed.numpy(), axis=0, out=rows.numpy(), mode="clip")
                if i:
                    total += other
            return divide(total[first + start - 8 * first_byte :][: stop - start], divisor)

        first = 0
        for tensor, scales_n in zip(tensors.values(), their_scales, strict=True):
            # For each worker, the eight scaled signs that each value of a byte represents. If a
            # scale underflows to 0, its negative signs give -0. Adding 0 makes them +0.
            fill(tensor, partial(average, first, scales_n[:, None, None] * signs_of_bytes + 0))
            first += tensor.numel()


def sum_scaled_signs(packed: Tensor, scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum the workers' scaled signs of all tensors; for GPUs.

    The signs of a worker are unpacked at once, and then each tensor takes one kernel. On an NVIDIA
    H200, finding a byte's eight values in a table, as CPUs do, took 1.1 ms for each million bytes.

    Args:
        packed: One row per worker: the packed signs of all tensors, shape (k, bytes), uint8.
        scales: One row per tensor, shape (tensors, k).
        sizes: Number of elements of each tensor, n in all.

    Returns:
        Shape (n,), in the dtype of the scales: for each worker in turn, its scales times its signs
        are added.
    """
    total = scales.new_zeros(sum(sizes))
    for row, column in zip(packed, scales.unbind(1), strict=True):
        signs = unpack_bits(row, len(total)).to(scales.dtype).mul_(2).sub_(1)
        parts = zip(total.split(sizes), signs.split(sizes), column, strict=True)
        for sum_n, signs_n, scale in parts:
            sum_n.addcmul_(signs_n, scale)
    return total


def scaled_signs(positive: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale`` for True and ``-scale`` for False; faster than ``torch.where`` on a CPU."""
    return positive.to(scale.dtype).mul_(2).sub_(1).mul_(scale)


def mean_in_range(mean: Tensor, values: Tensor) -> Tensor:
    """Return the mean absolute value as given; on a CPU compute it again if its sum overflowed.

    Args:
        mean: The mean of the absolute values, without dimensions.
        values: The values.
    """
    if values.device.type == "cpu" and not math.isfinite(mean.item()):
        return (values.double() / values.numel()).abs().sum().to(mean.dtype)
    return mean


def signs_or_nan(tensor: Tensor) -> Tensor:
    """Return the signs, with nan for infinity and nan; :func:`torch.sign` makes 1 and 0 of them.

    Example:
        >>> signs_or_nan(torch.tensor([-2.0, 0.0, torch.inf, torch.nan]))
        tensor([-1.,  0., nan, nan])
    """
    # 0 times a number that is not finite is nan.
    return tensor.sign().add_(tensor, alpha=0)


def pack_signs(tensors: Iterable[Tensor], zero_is_positive: bool = True) -> Tensor:
    """Return the result of :func:`pack_bits` for the signs of tensors, one after another.

    On a CPU, the booleans, one byte each, stay in the cache. A GPU packs all tensors at once,
    because packing takes several kernels.

    Args:
        tensors: At least one; each is read in its logical order.
        zero_is_positive: If True, a zero counts as positive, otherwise as negative. nan is
            negative.

    Returns:
        Shape (ceil(n / 8),) for n elements in all, uint8, on the same device.

    Example:
        >>> pack_signs([torch.tensor([1.0, -1.0]), torch.tensor([2.0])])
        tensor([160], dtype=torch.uint8)
    """
    op: Literal["greater_equal", "greater"] = "greater"
    if zero_is_positive:
        op = "greater_equal"
    iterator = iter(tensors)
    first = next(iterator)
    tensors = chain([first], iterator)
    if first.device.type != "cpu":
        return pack_bits(torch.cat([compare(tensor.reshape(-1), op, 0) for tensor in tensors]))
    packed: list[Tensor] = []
    rest: Tensor | None = None
    for tensor in tensors:
        for block in in_blocks(tensor.reshape(-1)):
            signs = compare(block, op, 0)
            # Signs that do not fill a byte wait for those of the next block.
            if rest is not None:
                signs = torch.cat([rest, signs])
            whole = len(signs) // 8 * 8
            packed.append(pack_bits(signs[:whole]))
            rest = None
            if whole < len(signs):
                rest = signs[whole:]
    if rest is not None:
        packed.append(pack_bits(rest))
    return torch.cat(packed)


def unpack_part(packed: Tensor, start: int, stop: int) -> Tensor:
    """Return the booleans from ``start`` to before ``stop`` of those that :func:`pack_bits` packed.

    Example:
        >>> unpack_part(torch.tensor([131, 128], dtype=torch.uint8), 7, 10)
        tensor([ True,  True, False])
    """
    first = start // 8
    return unpack_bits(packed[first : (stop + 7) // 8], stop - 8 * first)[start - 8 * first :]
