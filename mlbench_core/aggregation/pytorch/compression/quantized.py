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
from mlbench_core.aggregation.pytorch.transport.messages import divide, pack, unpack
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.aggregation.pytorch.transport.packing import pack_codes, unpack_codes
from mlbench_core.arguments import check_finite_at_least_0, check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["QuantizedAllReduceAggregation"]

# Numbers that a CPU quantizes at once: several copies of them fit into the cache of a core.
_IN_CACHE = 1 << 16


class QuantizedAllReduceAggregation(CompressedAggregation):
    r"""Average gradients by an all-reduce whose two messages have 8 or 4 bits for each number.

    The tensors of one dtype are put one after another and cut into :math:`k` equal parts, one for
    each worker; zeros fill the last. Numbers are quantized in blocks of consecutive numbers of a
    part; its last block may be shorter. With :math:`L = 127` for 8 bits and 7 for 4 bits, a block
    :math:`v` becomes

    .. math:: Q(v) = s \operatorname{round}(v / s), \qquad s = \max_j |v_j| / L,

    and :math:`s = 1` for a block of zeros. ``rounding="stochastic"`` rounds to
    :math:`\lfloor v / s + u \rfloor` with :math:`u` uniform in :math:`[0, 1)`, which is
    :math:`v / s` on average. Each worker :math:`i` sends each part of :math:`Q(g_i)` to its owner.
    The owner computes the average :math:`a` of the :math:`k` parts, at least in float32, and sends
    :math:`Q(a)` to all. All workers, the owner too, use :math:`Q(a)`, so they have the same bits.
    A single worker quantizes as well, and sends nothing.

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
    has one.

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
        dtype = torch.promote_types(next(iter(tensors.values())).dtype, torch.float32)
        g = self._in_parts(pack(tensors.values()).to(dtype))
        length, rank = g.shape[1], process_groups.rank(self.group)
        draw = self._source(g.device)
        sent = self._compress(g, tensors, self._memory, slice(None), draw)
        received = self._to_owners(sent)
        a = torch.zeros(1, length, dtype=dtype, device=g.device)
        for row in received:
            self._dequantize_row(row, a[0], adds=True)
        divide(a, divisor)
        own = slice(rank, rank + 1)
        message = self._compress(a, tensors, self._owner_memory, own, draw)
        averages = self._dequantize(self._gather(message[0], divisor, extra), length, dtype)
        count = sum(map(torch.numel, tensors.values()))
        unpack(averages.view(-1)[:count], tensors.values())

    def _in_parts(self, flat: Tensor) -> Tensor:
        """Return a flat tensor as one row for each worker, with zeros at the end of the last."""
        # A part in 4 bits has whole bytes.
        in_byte = 8 // self.bits
        length = -(-len(flat) // (self.world_size * in_byte)) * in_byte
        missing = self.world_size * length - len(flat)
        # Without a number to add, pad() would copy as well.
        if missing:
            flat = pad(flat, (0, missing))
        return flat.view(-1, length)

    def _compress(
        self,
        rows: Tensor,
        tensors: Mapping[str, Tensor],
        memory: dict[str, Tensor],
        own: slice,
        draw: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Return rows as bytes, with error feedback if it is on.

        Args:
            rows: The parts with the ranks ``own``, one row each.
            tensors: The tensors by name.
            memory: The error memory; its parts ``own`` are added to the rows and renewed.
            own: Ranks.
            draw: See :meth:`_source`.
        """
        if self.error_decay is None:
            return self._quantize(rows, draw)
        kept = [recall(memory, name, tensor) for name, tensor in tensors.items()]
        flat = pack(kept)
        e = self._in_parts(flat)
        h = rows + e[own]
        message = self._quantize(h, draw)
        errors = h - self._dequantize(message, rows.shape[1], rows.dtype)
        # e = beta e + (1 - beta) (h - Q(h))
        e[own] = e[own].lerp(errors, 1 - self.error_decay).nan_to_num(nan=0, posinf=0, neginf=0)
        unpack(e.view(-1)[: len(flat)], kept)
        return message

    def _to_owners(self, parts: Tensor) -> Tensor:
        """Send row j to worker j, and return the rows that the workers have sent here."""
        if self.world_size == 1:
            return parts
        sent = self._sendable(parts)
        received = torch.empty_like(sent)
        process_groups.dist.all_to_all_single(received, sent, group=self.group)
        # It moves the bytes of a reduce-scatter, whose cost the prediction knows.
        self._count("reduce_scatter", self.world_size, sent.nbytes)
        return received.to(parts.device)

    def _quantize(self, rows: Tensor, draw: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return each row as bytes: the scales of its blocks, and the codes of its numbers."""
        length = rows.shape[1]
        scale_bytes = self._scale_bytes(length, rows.dtype)
        size_bytes = scale_bytes + length * self.bits // 8
        message = torch.empty(len(rows), size_bytes, dtype=torch.uint8, device=rows.device)
        for row, into in zip(rows, message, strict=True):
            scales, codes = [], into[scale_bytes:]
            for begin, end in self._pieces(row):
                v = self._in_blocks(row[begin:end])
                level = v.abs()
                s = level.amax(dim=1).div_(self._levels)
                # Zeros, and numbers so small that their scale underflows, become zeros.
                s.masked_fill_(s == 0, 1)
                # After an overflow, the scale makes the whole block nan.
                s.masked_fill_(s.isinf(), math.nan)
                scales.append(s)
                torch.div(v, s[:, None], out=level)
                if draw is None:
                    level.round_()
                else:
                    level.add_(draw(level)).floor_()
                level.clamp_(-self._levels, self._levels)
                own = level.view(-1)[: end - begin]
                place = codes[begin * self.bits // 8 : end * self.bits // 8]
                if self.bits == 8:
                    place.view(torch.int8).copy_(own)
                else:
                    place.copy_(pack_codes(own.add_(self._levels).to(torch.uint8), self.bits))
            if scales:
                into[:scale_bytes] = torch.cat(scales).view(torch.uint8)
        return message

    def _dequantize(self, rows: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers of rows of bytes, shape (rows, ``length``)."""
        values = torch.empty(len(rows), length, dtype=dtype, device=rows.device)
        for row, into in zip(rows, values, strict=True):
            self._dequantize_row(row, into)
        return values

    def _dequantize_row(self, row: Tensor, into: Tensor, adds: bool = False) -> None:
        """Write the numbers of a row of bytes, or add them."""
        scale_bytes = self._scale_bytes(len(into), into.dtype)
        # A copy, because torch views bytes as a wider dtype only at an aligned offset.
        scales, codes = row[:scale_bytes].clone().view(into.dtype), row[scale_bytes:]
        for begin, end in self._pieces(into):
            level = codes[begin * self.bits // 8 : end * self.bits // 8].view(torch.int8)
            if self.bits < 8:
                level = unpack_codes(level.view(torch.uint8), end - begin, self.bits)
                level -= self._levels
            s = scales[begin // self.block : -(-end // self.block), None]
            v = (self._in_blocks(level) * s).view(-1)[: end - begin]
            if adds:
                into[begin:end] += v
            else:
                into[begin:end] = v

    def _in_blocks(self, piece: Tensor) -> Tensor:
        """Return a piece as one row for each block, with zeros at the end of the last."""
        if len(piece) % self.block:
            piece = pad(piece, (0, -len(piece) % self.block))
        return piece.view(-1, self.block)

    def _scale_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of the scales of a part."""
        return -(-length // self.block) * dtype.itemsize

    def _pieces(self, row: Tensor) -> Iterator[tuple[int, int]]:
        """Return begin and end of pieces of a part, each with whole blocks and whole bytes."""
        step = max(1, len(row))
        if row.device.type == "cpu":
            step = max(1, _IN_CACHE // (2 * self.block)) * 2 * self.block
        for begin in range(0, len(row), step):
            yield begin, min(begin + step, len(row))

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
