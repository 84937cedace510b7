"""Send the largest coordinates of each chunk with a few bits to shared weights (SparseLoCo)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation, recall
from mlbench_core.aggregation.pytorch.compression.sparsified import check_size, coordinates_sent
from mlbench_core.aggregation.pytorch.local_steps.periodic import DiLoCoAggregation
from mlbench_core.aggregation.pytorch.transport.messages import as_bytes, divide, from_bytes, unpack
from mlbench_core.aggregation.pytorch.transport.packing import (
    bits_for,
    pack_codes,
    packed_bytes,
    unpack_codes,
)
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["ChunkedTopKAggregation", "SparseLoCoAggregation"]


class ChunkedTopKAggregation(CompressedAggregation):
    r"""Send the largest coordinates of each chunk with a few bits each, and remember the rest.

    Worker :math:`i` adds its tensor :math:`\Delta_i` to its error memory :math:`e_i`, which decays
    by :math:`\beta`. From each chunk of consecutive coordinates it selects the largest in absolute
    value (top-k), and quantizes them (:math:`Q`):

    .. math::

        e_i &\leftarrow \beta e_i + \Delta_i \\
        s_i &= Q(\operatorname{top-k}(e_i)) \\
        e_i &\leftarrow e_i - s_i.

    Every worker's tensor becomes :math:`\frac{1}{k} \sum_i s_i` (or the sum over ``denom``), summed
    in the order of ranks, so that all workers get the same bits. A tensor's last chunk may be
    shorter. Values that are not finite are not remembered.

    With :math:`b` bits, :math:`Q` keeps the sign of a value and puts its size into one of
    :math:`2^{b - 1}` equal intervals between the smallest and the largest size that the chunk
    sends. There are at most :math:`k` intervals. The mean of the sizes in an interval replaces
    each of them, so :math:`\lVert e - Q(e) \rVert \le \lVert e \rVert` for every :math:`e`. Zeros
    are not sent: if a chunk has fewer than :math:`k` other values, all of its zeros stay zero.

    For :math:`n` chunks of :math:`c` coordinates of which :math:`k` are sent, a worker sends
    :math:`n k \lceil \log_2 c \rceil` bits of positions, :math:`n k b` bits of values, and for each
    chunk :math:`\min(2^{b - 1}, k)` means of 4 bytes (8 for float64). Without quantization it sends
    the positions, and the values in the dtype of the tensor, at least in float32. Positions and
    values of a tensor's equal chunks are each filled up to whole bytes. Tensors of one dtype share
    one all-gather.

    If a value is infinite or nan on one worker, the values of its interval are infinite or nan on
    all workers.

    Attributes:
        density: As given.
        bits: As given.
        decay: As given.
        chunk_size: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        density: Share of each chunk that is sent (a float, at most 1.0; at least one coordinate is
            sent), or the number of coordinates (an integer).
        bits: Bits of a value, from 1 to 8; None for no quantization.
        decay: :math:`\beta`, from 0 (no error feedback) to 1 (nothing is lost).
        chunk_size: Coordinates of a chunk, at most 2^24.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: A number has the wrong type.

    Example:
        >>> aggregation = ChunkedTopKAggregation(density=2, chunk_size=4)
        >>> change = torch.tensor([8.0, 1.0, -4.0, 2.0])
        >>> aggregation.aggregate({"weight": change}, "avg_world")
        >>> change, aggregation.memory("weight")
        (tensor([ 8.,  0., -4.,  0.]), tensor([0., 1., 0., 2.]))

    References:
        A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: Communication Efficient LLM Pre-training with
        SparseLoCo. arXiv:2508.15706
    """

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        density: int | float = 0.02,
        bits: int | None = 2,
        decay: float = 0.95,
        chunk_size: int = 4096,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self.density = check_size(density, "density")
        if bits is not None:
            bits = check_int("bits", bits)
            if bits > 8:
                raise ValueError(f"bits must be at most 8, or None for no quantization, not {bits}")
        self.bits = bits
        check_finite_at_least_0("decay", decay)
        if decay > 1:
            raise ValueError(
                f"decay must be at most 1, not {decay}: the error memory would grow without end"
            )
        self.decay = decay
        self.chunk_size = check_int("chunk_size", chunk_size)
        if self.chunk_size > 1 << 24:
            raise ValueError(f"chunk_size must be at most 2**24, not {chunk_size}")

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        # The error memory is changed in place: it holds the sum first, and then the rest.
        e = []
        for name, tensor in tensors.items():
            # e_i = beta e_i + Delta_i
            e_n = recall(self._memory, name, tensor).mul_(self.decay).add_(tensor)
            e.append(e_n.view(-1))
        parts: list[Tensor] = []
        for e_n in e:
            parts += map(self._encode, self._chunks(e_n))
        for e_n in e:
            # Without this, an overflow would stay in the memory and in every later message.
            e_n.nan_to_num_(nan=0, posinf=0, neginf=0)
        total = list(map(torch.zeros_like, e))
        # Added in the order of ranks, because sums in different orders differ in their last bits.
        for message in self._gather(torch.cat(parts), divisor, extra):
            start = 0
            for total_n in total:
                for chunks in self._chunks(total_n):
                    start += self._add_decoded(chunks, message[start:])
        unpack(divide(torch.cat(total), divisor), tensors.values())

    def _chunks(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield a flat tensor as matrices of a chunk per row: full chunks, then a shorter one."""
        full = len(flat) // self.chunk_size * self.chunk_size
        if full:
            yield flat[:full].view(-1, self.chunk_size)
        if full < len(flat):
            yield flat[full:][None]

    def _encode(self, chunks: Tensor) -> Tensor:
        """Return the message of chunks, and subtract the values in it from them, in place."""
        # Sorted: the first value of a chunk is its largest, or nan.
        picked = chunks.abs().topk(coordinates_sent(self.density, chunks.shape[1]), dim=1).indices
        values = chunks.gather(1, picked)
        if self.bits is None:
            chunks.scatter_add_(1, picked, -values)
            return as_bytes(values, _pack_positions(picked, chunks.shape[1]))
        sizes = values.abs()
        is_zero = sizes == 0
        # A repetition of the first position means a zero; see _dequantize().
        picked = torch.where(is_zero, picked[:, :1], picked)
        low = sizes.masked_fill(is_zero, torch.inf).amin(1, keepdim=True)
        intervals = self._intervals(sizes.shape[1])
        # Of equal sizes the intervals have no width: 0 / 0 is nan.
        share = (sizes - low) / (sizes.amax(1, keepdim=True) - low)
        share.nan_to_num_(nan=0, posinf=0, neginf=0)
        number = share.mul_(intervals).floor_().clamp_(0, intervals - 1).long()
        # In float64, so that a sum of large values stays in range.
        shape = 2, len(chunks), intervals
        sums, counts = torch.zeros(shape, dtype=torch.float64, device=chunks.device)
        sums.scatter_add_(1, number, sizes.double())
        counts.scatter_add_(1, number, is_zero.logical_not().double())
        means = (sums / counts.clamp(min=1)).to(chunks.dtype)
        codes = number.to(torch.int32).add_((values < 0).int(), alpha=intervals)
        chunks.scatter_add_(1, picked, -_dequantize(codes, means, picked))
        positions = _pack_positions(picked, chunks.shape[1])
        return as_bytes(means, positions, pack_codes(codes.view(-1), self.bits))

    def _intervals(self, count: int) -> int:
        """Return the number of intervals, whose means are sent, for ``count`` values."""
        assert self.bits is not None
        return min(1 << (self.bits - 1), count)

    def _add_decoded(self, chunks: Tensor, message: Tensor) -> int:
        """Add the values in a message to chunks, in place; return the number of bytes read."""
        # A message has no lengths: sender and receiver compute them from the same shape.
        rows, width = chunks.shape
        sent = coordinates_sent(self.density, width)
        count = rows * sent
        # The message has the values themselves, or with quantization the means of the intervals.
        numbers = count
        if self.bits is not None:
            numbers = rows * self._intervals(sent)
        head = numbers * chunks.element_size()
        tail = head + packed_bytes(count, bits_for(width))
        table = from_bytes(message, 0, numbers, chunks.dtype).view(rows, -1)
        picked = unpack_codes(message[head:tail], count, bits_for(width)).long().view(rows, -1)
        if self.bits is None:
            chunks.scatter_add_(1, picked, table)
            return tail
        end = tail + packed_bytes(count, self.bits)
        codes = unpack_codes(message[tail:end], count, self.bits).view(rows, -1)
        chunks.scatter_add_(1, picked, _dequantize(codes, table, picked))
        return end


def _pack_positions(picked: Tensor, width: int) -> Tensor:
    """Return positions in chunks of a width as bytes."""
    return pack_codes(picked.view(-1).to(torch.int32), bits_for(width))


def _dequantize(codes: Tensor, means: Tensor, picked: Tensor) -> Tensor:
    """Return the values of codes; 0 for a position that repeats the first of its row.

    Args:
        codes: Shape (n, k): the number of the interval, plus the number of intervals for negative
            values.
        means: Shape (n, intervals): the mean size in each interval of a row.
        picked: Shape (n, k): the positions.
    """
    intervals = means.shape[1]
    sizes = means.gather(1, (codes % intervals).long())
    values = torch.where(codes < intervals, sizes, -sizes)
    values[:, 1:].masked_fill_(picked[:, 1:] == picked[:, :1], 0)
    return values


class SparseLoCoAggregation(DiLoCoAggregation):
    r"""Update weights that all workers share by the largest parts of the workers' changes.

    With :math:`\theta` the shared weights and :math:`\theta_i` the current weights of worker
    :math:`i` of :math:`k`, a call computes the change :math:`\Delta_i = \theta - \theta_i`,
    compresses it to :math:`s_i` with error feedback as :class:`ChunkedTopKAggregation` does, and
    updates

    .. math:: \theta \leftarrow \theta - \frac{\alpha}{k} \sum_i s_i, \qquad \theta_i \leftarrow
      \theta.

    The error memory takes the place of an outer momentum. If all coordinates are sent without
    quantization and decay, and :math:`\alpha = 1`, the result is the average of the
    :math:`\theta_i`.

    Implementations differ. Some cut matrices into blocks of 64 x 64; here a chunk is 4,096
    consecutive coordinates. Some cut the values of a whole tensor, with their signs, into intervals
    around their mean; here the intervals are those of the sizes in a chunk, and the sign is a
    separate bit. Either way, the values in an interval are replaced by their mean.

    Attributes:
        compressed: The compression; it holds the error memory.
        outer_optimizer: SGD with the learning rate :math:`\alpha`, which may be changed.

    Args:
        compressed: The compression with all its settings, and the workers that take part; None for
            ``ChunkedTopKAggregation()``, which sends 2 % of the coordinates with 2 bits each.
        outer_lr: :math:`\alpha`.

    Raises:
        TypeError: ``compressed`` is not a :class:`ChunkedTopKAggregation`, or ``outer_lr`` is not a
            number.
        ValueError: ``outer_lr`` is negative or not finite.

    Example:
        >>> weights = {"x": torch.zeros(4)}
        >>> aggregation = SparseLoCoAggregation(ChunkedTopKAggregation(density=1))
        >>> aggregation.start({"x": torch.nn.Parameter(weights["x"])})
        >>> weights["x"] += torch.tensor([3.0, 2.0, 1.0, 0.0])
        >>> aggregation.aggregate(weights, "avg_world")
        >>> weights["x"], aggregation.compressed.memory("x")
        (tensor([3., 0., 0., 0.]), tensor([ 0., -2., -1.,  0.]))

    References:
        A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: Communication Efficient LLM Pre-training with
        SparseLoCo. arXiv:2508.15706
    """

    compressed: ChunkedTopKAggregation

    def __init__(
        self, compressed: ChunkedTopKAggregation | None = None, *, outer_lr: float = 1.0
    ) -> None:
        if compressed is None:
            compressed = ChunkedTopKAggregation()
        if not isinstance(compressed, ChunkedTopKAggregation):
            raise TypeError(
                f"compressed must be a ChunkedTopKAggregation, not {type(compressed).__name__}"
            )
        check_finite_at_least_0("outer_lr", outer_lr)
        super().__init__(
            partial(SGD, lr=outer_lr),
            use_cuda=compressed.use_cuda,
            process_group=compressed.group,
            compressed=compressed,
        )
