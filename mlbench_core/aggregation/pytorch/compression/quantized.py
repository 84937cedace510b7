"""Sum gradients in 8 or 4 bits: quantized parts go to their owners, and sums back to all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation, recall
from mlbench_core.aggregation.pytorch.compression.qsgd import uniform_source
from mlbench_core.aggregation.pytorch.transport.messages import (
    BLOCK_ELEMENTS,
    Flattened,
    divide,
    nbytes_of,
)
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.aggregation.pytorch.transport.packing import pack_codes, unpack_codes
from mlbench_core.arguments import check_finite_at_least_0, check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["QuantizedAllReduceAggregation"]

STRIPE = 1 << 19
"""Numbers of a part that travel in one message over Gloo."""


class QuantizedAllReduceAggregation(CompressedAggregation):
    r"""Average gradients by an all-reduce whose two messages have 8 or 4 bits for each number.

    The tensors of one dtype are put one after another and cut into :math:`k` equal parts, one for
    each worker; zeros fill the last. Numbers are quantized in blocks of consecutive numbers of a
    part; its last block may be shorter. With :math:`L = 127` for 8 bits and 7 for 4 bits, a block
    :math:`v` becomes

    .. math:: Q(v) = s \operatorname{round}(v / s), \qquad s = \max_j |v_j| / L,

    and a block whose :math:`s` would be zero or denormal becomes zeros. ``rounding="stochastic"``
    rounds to :math:`\lfloor v / s + u \rfloor` with :math:`u` uniform in :math:`[0, 1)`, which is
    :math:`v / s` on average. Each worker :math:`i` sends each part of :math:`Q(g_i)` to its owner.
    The owner computes the average :math:`a` of the :math:`k` parts, at least in float32, and sends
    :math:`Q(a)` to all. All workers, the owner too, use :math:`Q(a)`, so they have the same bits. A
    single worker quantizes as well, and sends nothing.

    With ``error_decay`` :math:`\beta`, both quantizations have the error feedback of LoCo, with an
    error memory :math:`e_i` of each worker and :math:`\epsilon` of the owner:

    .. math::

        h_i &= g_i + e_i, & e_i &\leftarrow \beta e_i + (1 - \beta) (h_i - Q(h_i)) \\
        a &= \frac{1}{k} \sum_i Q(h_i) + \epsilon, &
        \epsilon &\leftarrow \beta \epsilon + (1 - \beta) (a - Q(a))

    :math:`\beta = 0` is classical error feedback. Each memory has the shape of its tensor, and
    :math:`\epsilon` is zero outside of the own part. If a value is infinite or nan on one worker,
    its block becomes nan on all. Such values are not remembered.

    In each step, a worker sends two messages for the :math:`d` numbers of one dtype. With
    :math:`p = \lceil d / k \rceil` (one more for 4 bits if that is odd), a part has :math:`p b / 8`
    bytes for its numbers in :math:`b` bits, and 4 bytes for the scale of each block (8 for
    float64). The first message, an all-to-all, has :math:`k` parts, and the second, an all-gather,
    has one. Over Gloo, a message with many numbers travels as several ones at once, which count as
    one.

    Implementations differ. LoCo keeps :math:`e` in 8 bits and sets it to zero every 1,024 steps.
    Here it has at least float32, and is never reset. ZeRO++ has the scale :math:`\max_j |v_j| / 8`
    for 4 bits, so the largest value shrinks to 7/8. Here it stays, up to floating-point rounding.

    Attributes:
        bits: As given.
        block: As given.
        rounding: As given.
        error_decay: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        bits: Bits of a number, 8 or 4.
        block: Numbers that share a scale.
        rounding: ``"nearest"`` or ``"stochastic"``.
        error_decay: :math:`\beta`, from 0 to less than 1; LoCo has 0.8. None for no error feedback.
        seed: Seed of the stochastic rounding; the same on all workers, each of which derives
            numbers of its own from it.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: An argument is out of range, or ``world_size`` is not the number of workers in
            the process group.
        TypeError: ``bits``, ``block`` or ``seed`` is not an integer, or ``error_decay`` is not a
            number.

    Example:
        >>> aggregation = QuantizedAllReduceAggregation(bits=4, error_decay=0)
        >>> gradient = torch.tensor([7.0, 2.25, -0.25])
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([7., 2., 0.]), tensor([ 0.0000,  0.2500, -0.2500]))

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training.
        arXiv:2306.10209. Xie, Lin, Toh, Zhou: LoCo: Low-Bit Communication Adaptor for Large-scale
        Model Training. arXiv:2407.04480
    """

    _named_state = ("memory", "owner_memory")
    # All workers have made the same number of draws.
    _own_state = ("memory", "owner_memory")

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        bits: int = 8,
        block: int = 256,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        error_decay: float | None = None,
        seed: int = 0,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self.bits = check_int("bits", bits)
        if self.bits not in (8, 4):
            raise ValueError(f"bits must be 8 or 4, not {bits}: use QSGDAggregation for others")
        self.block = check_int("block", block)
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"rounding must be 'nearest' or 'stochastic', not {rounding!r}: "
                "leave it out for 'nearest'"
            )
        self.rounding = rounding
        if error_decay is not None:
            check_finite_at_least_0("error_decay", error_decay)
            if error_decay >= 1:
                raise ValueError(
                    f"error_decay must be below 1, not {error_decay}: errors would not count"
                )
        self.error_decay = error_decay
        self._levels = 2 ** (self.bits - 1) - 1
        self._seed = check_int("seed", seed, least=0)
        self._draws = 0
        self._owner_memory: dict[str, Tensor] = {}

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        first = next(iter(tensors.values()))
        # Numbers are computed in this dtype on this device.
        like = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))
        flat = Flattened(tensors.values())
        # A part in 4 bits has whole bytes.
        in_byte = 8 // self.bits
        length = -(-flat.numel // (self.world_size * in_byte)) * in_byte
        begins = [rank * length for rank in range(self.world_size)]
        own = process_groups.rank(self.group) * length
        draw = self._source(first.device)
        errors = self._remembered(self._memory, tensors)
        owner_errors = self._remembered(self._owner_memory, tensors)
        stripes = self._stripes(length)
        is_striped = len(stripes) > 1

        def read(at: int, into: Tensor) -> Tensor:
            view = flat.view(at, into)
            return flat.read(at, into) if view is None else view

        # One stripe travels while the next one is quantized.
        parts, sent_bytes = [], 0
        for start, end in stripes:
            message = self._compress(
                read, [begin + start for begin in begins], end - start, errors, draw, like
            )
            parts.append(self._start_to_owners(message, is_striped))
            sent_bytes += message.nbytes
        gathers, gathered_bytes = [], 0
        for (start, end), receive in zip(stripes, parts, strict=True):
            average = self._average_of(receive(), own + start, end - start, divisor)
            own_place = [own + start]
            (message,) = self._compress(average, own_place, end - start, owner_errors, draw, like)
            riders: Sequence[Tensor] = ()
            if end == length:
                riders = extra
            gathers.append(self._start_gather(message, divisor, riders, is_striped))
            gathered_bytes += nbytes_of([message, *riders])
        if self.world_size > 1:
            # All stripes count as one message, whose time they need. An all-to-all moves the bytes
            # of a reduce-scatter, whose cost the prediction knows.
            self._count("reduce_scatter", self.world_size, sent_bytes)
            self._count("all_gather", self.world_size, gathered_bytes)
        for (start, end), receive in zip(stripes, gathers, strict=True):
            for begin, row in zip(begins, receive(), strict=True):
                for at, piece in self._pieces(end - start, like):
                    place = begin + start + at
                    view = flat.view(place, piece)
                    if view is None:
                        flat.write(place, self._dequantize(row, end - start, at, piece))
                    else:
                        self._dequantize(row, end - start, at, view)
        for written in (flat, errors, owner_errors):
            if written is not None:
                written.finish()

    def _stripes(self, length: int) -> list[tuple[int, int]]:
        """Return begin and end of the stripes in which the parts travel."""
        # Over Gloo, several messages on their way at once keep a slow link busy. After a pause, TCP
        # needs some time to reach the speed of the link again.
        if self.world_size > 1 and process_groups.backend(self.group) == "gloo":
            return self._cut(length, STRIPE)
        return [(0, length)]

    def _cut(self, length: int, most: int) -> list[tuple[int, int]]:
        """Cut a part into pieces of about ``most`` numbers, with whole blocks and whole bytes."""
        step = max(1, most // (2 * self.block)) * 2 * self.block
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]

    def _remembered(
        self, memory: dict[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> Flattened | None:
        """Return an error memory; None without error feedback."""
        if self.error_decay is None:
            return None
        return Flattened(recall(memory, name, tensor) for name, tensor in tensors.items())

    def _average_of(
        self, rows: Tensor, begin: int, length: int, divisor: Denominator
    ) -> Callable[[int, Tensor], Tensor]:
        """Return a function that reads the average of some rows of bytes, from ``begin`` on."""

        def read(at: int, into: Tensor) -> Tensor:
            self._dequantize(rows[0], length, at - begin, into)
            for row in rows[1:]:
                into += self._dequantize(row, length, at - begin, torch.empty_like(into))
            return divide(into, divisor)

        return read

    def _compress(
        self,
        read: Callable[[int, Tensor], Tensor],
        begins: Sequence[int],
        length: int,
        memory: Flattened | None,
        draw: Callable[[Tensor], Tensor] | None,
        like: Tensor,
    ) -> Tensor:
        """Return numbers as rows of bytes, with error feedback if it is on.

        A row has the scales of its blocks, and then the codes of its numbers.

        Args:
            read: Returns the numbers from a position on. It may write them into a tensor that it
                gets, which has as many.
            begins: The first position of each row.
            length: Numbers of a row.
            memory: The error memory, which is renewed; None without error feedback.
            draw: See :meth:`_source`.
            like: A tensor of the dtype and device of the numbers.
        """
        size_bytes = self._scale_bytes(length, like.dtype) + length * self.bits // 8
        message = torch.empty(len(begins), size_bytes, dtype=torch.uint8, device=like.device)
        for begin, row in zip(begins, message, strict=True):
            for at, piece in self._pieces(length, like):
                v = read(begin + at, piece)
                if memory is None or self.error_decay is None:
                    self._quantize(v, draw, row, length, at, piece)
                    continue
                errors = memory.read(begin + at, torch.empty_like(v))
                v = v + errors
                self._quantize(v, draw, row, length, at, piece)
                sent = self._dequantize(row, length, at, torch.empty_like(v))
                # e = beta e + (1 - beta) (h - Q(h))
                errors.lerp_(v - sent, 1 - self.error_decay).nan_to_num_(nan=0, posinf=0, neginf=0)
                memory.write(begin + at, errors)
        return message

    def _start_to_owners(self, parts: Tensor, is_async: bool) -> Callable[[], Tensor]:
        """Begin to send row j to worker j; the result waits for the rows of all workers."""
        if self.world_size == 1:
            return lambda: parts
        sent = self._sendable(parts)
        received = torch.empty_like(sent)
        work = process_groups.dist.all_to_all_single(
            received, sent, group=self.group, async_op=is_async
        )

        def receive() -> Tensor:
            if work is not None:
                work.wait()
            return received.to(parts.device)

        return receive

    def _quantize(
        self,
        piece: Tensor,
        draw: Callable[[Tensor], Tensor] | None,
        row: Tensor,
        length: int,
        at: int,
        scratch: Tensor,
    ) -> None:
        """Write a piece of the numbers, from position ``at`` on, into their row of bytes.

        Args:
            piece: The numbers.
            draw: See :meth:`_source`.
            row: The bytes.
            length: Numbers of the row.
            at: The position.
            scratch: Memory like the piece, and maybe the piece itself. It is overwritten.
        """
        v, level = piece, scratch
        if len(v) % self.block:
            v = level = pad(v, (0, -len(v) % self.block))
        v, level = v.view(-1, self.block), level.view(-1, self.block)
        # This needs no memory for absolute values.
        s = torch.maximum(v.amax(dim=1), v.amin(dim=1).neg_()).div_(float(self._levels))
        # Zeros, and numbers whose scale would be denormal and so inexact, become zeros.
        is_tiny = s < torch.finfo(s.dtype).tiny
        # After an overflow, the scale makes the whole block nan.
        s.masked_fill_(s.isinf(), math.nan)
        scales, codes = self._places(row, length, at, len(piece), s.dtype)
        scales.copy_(s.masked_fill(is_tiny, 1).view(torch.uint8))
        torch.div(v, s.masked_fill_(is_tiny, math.inf)[:, None], out=level)
        if draw is None:
            level.round_()
        else:
            level.add_(draw(level)).floor_().clamp_(-self._levels, self._levels)
        own = level.view(-1)[: len(piece)]
        if self.bits == 8:
            codes.view(torch.int8).copy_(own)
        else:
            codes.copy_(pack_codes(own.add_(self._levels).to(torch.uint8), self.bits))

    def _dequantize(self, row: Tensor, length: int, at: int, into: Tensor) -> Tensor:
        """Read numbers, from position ``at`` on, from their row of bytes."""
        scales, codes = self._places(row, length, at, len(into), into.dtype)
        level = codes.view(torch.int8)
        if self.bits < 8:
            level = unpack_codes(codes, len(into), self.bits)
            level -= self._levels
        # A copy, because torch views bytes as a wider dtype only at an aligned offset.
        s = scales.clone().view(into.dtype)
        into.copy_(level)
        whole = len(into) - len(into) % self.block
        into[:whole].view(-1, self.block).mul_(s[: whole // self.block, None])
        if whole < len(into):
            into[whole:].mul_(s[-1])
        return into

    def _places(
        self, row: Tensor, length: int, at: int, count: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the bytes of a row that have the scales and codes of a piece.

        Args:
            row: The bytes.
            length: Numbers of the row.
            at: Position of the first number of the piece, at the begin of a block.
            count: Numbers of the piece.
            dtype: That of the scales.
        """
        begin = self._scale_bytes(at, dtype)
        codes = row[self._scale_bytes(length, dtype) + at * self.bits // 8 :]
        return row[begin : begin + self._scale_bytes(count, dtype)], codes[: count * self.bits // 8]

    def _scale_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of the scales of a part."""
        return -(-length // self.block) * dtype.itemsize

    def _pieces(self, length: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the begin of each piece of a row, and memory for its numbers.

        The pieces are computed one after another in the same memory, which a CPU keeps in its
        cache.
        """
        cuts = [(0, length)]
        if like.device.type == "cpu":
            cuts = self._cut(length, BLOCK_ELEMENTS)
        memory = like.new_empty(max((end - begin for begin, end in cuts), default=0))
        for begin, end in cuts:
            yield begin, memory[: end - begin]

    def _source(self, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """Return a function that draws uniform numbers; None if numbers go to the nearest level."""
        if self.rounding == "nearest":
            return None
        self._draws += 1
        return uniform_source(
            device, (self._seed, process_groups.rank(self.group), self._draws - 1)
        )

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return the error memories of the worker and of the owner."""
        return [self._memory, self._owner_memory]

    def state_dict(self) -> dict[str, Any]:
        """Return the state: error memories by parameter name, and the number of draws.

        The keys are ``"memory"`` and ``"owner_memory"`` with error feedback, and ``"draws"`` with
        stochastic rounding. It is empty before the first step.
        """
        state: dict[str, Any] = {}
        if self._memory:
            state = {"memory": dict(self._memory), "owner_memory": dict(self._owner_memory)}
        if self._draws:
            state["draws"] = self._draws
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), (*self._named_state, "draws"))
        self._memory = copies_by_plain_name(state_dict.get("memory", {}))
        self._owner_memory = copies_by_plain_name(state_dict.get("owner_memory", {}))
        self._draws = int(state_dict.get("draws", 0))
