"""Send a few coordinates of each tensor, the largest or random ones, and remember the rest."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation, recall
from mlbench_core.aggregation.pytorch.transport.messages import (
    BLOCK_ELEMENTS,
    KeptMemory,
    all_finite,
    as_bytes,
    compare,
    divide,
    from_bytes,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    by_plain_name,
    check_keys,
    check_names,
    plain_name,
)

__all__ = ["SparsifiedAggregation", "coordinates_sent", "draw_coordinates", "largest_entries"]

# On a CPU, reading and writing a value by its index takes about as long as a pass over 16 values.
_FEW = 16

# A prime: a divisor of the width of a matrix would sample a few of its columns, whose values may be
# larger than others.
_STRIDE = 127


class SparsifiedAggregation(CompressedAggregation):
    r"""Send a few coordinates of each tensor and remember the rest.

    Worker :math:`i` adds its gradient :math:`g_i` to its error memory :math:`m_i`. (Instead of the
    gradient it may be a step; the memory is then in units of steps.) The worker sends the :math:`k`
    coordinates that :math:`\operatorname{comp}_k` selects, and remembers the others:

    .. math::

        m_i &\leftarrow m_i + g_i \\
        c_i &= \operatorname{comp}_k(m_i) \\
        m_i &\leftarrow m_i - c_i

    Every worker's tensor becomes :math:`\frac{1}{n} \sum_i c_i` over the :math:`n` workers (or the
    sum over ``denom``). :math:`\operatorname{comp}_k` keeps the :math:`k` coordinates that are
    largest in absolute value on that worker (top-k). With ``random=True``, it keeps :math:`k`
    uniformly drawn ones, the same on all workers (random-k). The kept values are not scaled. A
    tensor with fewer than :math:`k` coordinates is sent whole.

    If a value is infinite or nan on one worker, all workers see it in the same step: it is among
    the largest, and with ``random=True``, all values that are sent become nan. Values that are not
    finite are not remembered, so that a step that overflowed can be skipped.

    Let :math:`K` be the sum of :math:`k` over the tensors of one dtype of :math:`b` bytes. In each
    step, a worker sends :math:`(b + 4) K` bytes for top-k: the values and their int32 positions, in
    one all-gather. For random-k it sends :math:`b K` bytes, only the values, in one all-reduce.

    Args:
        model: The model, to check that a loaded state belongs to it; None for no check.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        size: Number of coordinates sent per tensor (an integer), or their share of it (a float, at
            most 1.0; at least one coordinate is sent).
        random: True to send random coordinates instead of the largest.
        error_feedback: True to remember the values that were not sent; with False they are lost.
        seed: Seed of the generator that draws random coordinates; the same on all workers.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``size`` is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: ``size`` is not a number.

    Example:
        >>> aggregation = SparsifiedAggregation(None, size=1)
        >>> gradient = torch.tensor([1.0, -3.0, 2.0])
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([ 0., -3.,  0.]), tensor([1., 0., 2.]))

    References:
        Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. arXiv:1809.07599
    """

    def __init__(
        self,
        model: nn.Module | None,
        use_cuda: bool = False,
        *,
        size: int | float = 10,
        random: bool = False,
        error_feedback: bool = True,
        seed: int = 0,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self.size = check_size(size, "size")
        self.random = random
        self.error_feedback = error_feedback
        self._generator = torch.Generator().manual_seed(operator.index(seed))
        self._shapes: dict[str, torch.Size] = {}
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                self._shapes[plain_name(name)] = parameter.shape
        self._changed: dict[str, Tensor] = {}
        self._kept = KeptMemory()

    def changed(self, name: str) -> Tensor | None:
        """Return the coordinates of a tensor that its last aggregation set; all others are zero.

        An update of these coordinates alone is faster than one of the whole tensor.

        Args:
            name: The tensor's name.

        Returns:
            Shape (n,), int64, positions in the flat tensor. One that several workers sent occurs
            several times. None before the first aggregation, or if an update of the whole tensor is
            faster.
        """
        return self._changed.get(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory by parameter name and, if random, the state of the generator."""
        state = super().state_dict()
        if self.random:
            state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        An empty state clears the memory and keeps the generator.

        Raises:
            ValueError: The state is that of another aggregation or another model.
        """
        keys = ["memory"]
        if self.random:
            keys.append("generator")
        check_keys(self, state_dict, (), keys)
        memory = by_plain_name(state_dict.get("memory", {}))
        if self._shapes:
            check_names(memory, self._shapes)
        for name, error in memory.items():
            if error.shape != self._shapes.get(name, error.shape):
                raise ValueError(
                    f"the saved memory of {name!r} must have the shape {tuple(self._shapes[name])} "
                    f"of the parameter, not {tuple(error.shape)}: load a checkpoint of this model"
                )
        super().load_state_dict({"memory": memory})
        if "generator" in state_dict:
            self._generator.set_state(state_dict["generator"].cpu())

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        m = []
        for name, tensor in tensors.items():
            if tensor.numel() > torch.iinfo(torch.int32).max:
                raise ValueError(
                    f"{name!r} must have fewer than 2**31 "
                    f"coordinates, not {tensor.numel()}: split it"
                )
            if self.error_feedback:
                # m is the memory itself. _take() subtracts the values to
                # send, and the rest stays in it.
                m_n = recall(self._memory, name, tensor).add_(tensor).view(-1)
            else:
                m_n = tensor.reshape(-1).clone()
            m.append(m_n)
        counts = [coordinates_sent(self.size, len(m_n)) for m_n in m]
        picked = list(map(self._pick, m, counts))
        dtype = next(iter(tensors.values())).dtype
        values = []
        for m_n, coordinates in zip(m, picked, strict=True):
            values.append(self._take(m_n, coordinates, dtype))
        sent = torch.cat(values)
        if self.random:
            # All workers have drawn the same coordinates, so an all-reduce can add their values.
            self._average_uncompressed([sent, *extra], 1)
            for tensor in extra:
                divide(tensor, divisor)
            received = [(sent, torch.cat(picked))]
        else:
            # Coordinates are positions within a tensor, so that they fit into an int32.
            messages = self._gather(as_bytes(sent, *picked), divisor, extra)
            received = []
            for message in messages:
                positions = from_bytes(message, sent.nbytes, len(sent), torch.int32)
                # index_copy_ takes only int64.
                received.append((from_bytes(message, 0, len(sent), dtype), positions.long()))
        # For each worker, pairs of values and coordinates of each tensor.
        parts = []
        for their_values, theirs in received:
            parts.append(zip(their_values.split(counts), theirs.split(counts), strict=True))
        # Added in the order of ranks, because sums in different orders differ in their last bits.
        for (name, tensor), *of_workers in zip(tensors.items(), *parts, strict=True):
            self._add_up(name, tensor, of_workers, divisor)

    def _pick(self, m: Tensor, count: int) -> Tensor:
        """Return the coordinates of a flat tensor to send."""
        if self.random:
            return draw_coordinates(len(m), count, self._generator).to(m.device)
        return largest_entries(m.__getitem__, len(m), count, self._kept)[0]

    def _add_up(
        self,
        name: str,
        tensor: Tensor,
        of_workers: Sequence[tuple[Tensor, Tensor]],
        divisor: Denominator,
    ) -> None:
        """Replace a tensor by the divided sum of all workers' values at their coordinates."""
        tensor.zero_()
        total = tensor.reshape(-1)
        for values, theirs in of_workers:
            total.index_add_(0, theirs, values)
        coordinates = torch.cat([theirs for _, theirs in of_workers])
        if _FEW * len(coordinates) <= len(total):
            self._changed[name] = coordinates
            # A coordinate of several workers is written several times,
            # each time with the same result.
            averages = divide(total.index_select(0, coordinates), divisor)
            total.index_copy_(0, coordinates, averages)
        else:
            self._changed.pop(name, None)
            divide(total, divisor)
        # The flat tensor is a copy only if the numbers are not in their logical order in memory.
        if not tensor.is_contiguous():
            tensor.copy_(total.view(tensor.shape))

    def _take(self, m: Tensor, coordinates: Tensor, dtype: torch.dtype) -> Tensor:
        """Subtract the values to send from ``m`` and return them in ``dtype``.

        The rounding error stays in ``m``.
        """
        # On a CPU, index_select is many times faster than an index in brackets.
        values = m.index_select(0, coordinates).to(dtype)
        m.index_add_(0, coordinates, values.to(m.dtype), alpha=-1)
        if self.random:
            # Random coordinates would hide a value of the others that is not finite.
            is_finite = all_finite(m)
        else:
            # The largest values are finite only if all others are.
            is_finite = values.isfinite().all()
        # On a GPU, reading the flag would make the host wait.
        if m.is_cuda or not is_finite:
            if self.random:
                values.masked_fill_(~is_finite, torch.nan)
            # Without this, an overflow would stay in the memory and in every later message.
            m.nan_to_num_(nan=0, posinf=0, neginf=0)
        return values


def check_size(size: int | float, name: str) -> int | float:
    """Check a number of coordinates, or their share, and return it as an ``int`` or a ``float``.

    Args:
        size: A number of coordinates (an integer of at least 1), or a share (a float above 0 and at
            most 1.0).
        name: Name of the argument, for the message.

    Raises:
        TypeError: ``size`` is not a number.
        ValueError: ``size`` is out of range.
    """
    if isinstance(size, bool) or not isinstance(size, numbers.Real):
        raise TypeError(
            f"{name} must be an integer (coordinates per "
            f"tensor) or a float (their share), not {size!r}"
        )
    # The type of the result says if it is a number of coordinates (int) or a share (float).
    if isinstance(size, numbers.Integral):
        size = int(size)
    else:
        size = float(size)
    if size <= 0 or (isinstance(size, float) and not size <= 1):
        raise ValueError(
            f"{name} must be an integer from 1 (coordinates per tensor) or "
            f"a float in (0, 1] (a share), not {size}"
        )
    return size


def coordinates_sent(size: int | float, numel: int) -> int:
    """Return how many coordinates of a tensor are sent.

    Args:
        size: Number of coordinates (an integer), or their share (a float).
        numel: Number of coordinates the tensor has, at least 1.

    Example:
        >>> coordinates_sent(10, 7), coordinates_sent(0.01, 1000), coordinates_sent(0.01, 3)
        (7, 10, 1)
    """
    if isinstance(size, int):
        return min(numel, size)
    return max(1, round(size * numel))


def largest_entries(
    m: Callable[[slice], Tensor], numel: int, k: int, kept: KeptMemory
) -> tuple[Tensor, Tensor]:
    """Find the entries of a flat tensor with the largest absolute values; nan counts as largest.

    On the CPU, :func:`torch.topk` on all values takes most of the time of a step. If ``k`` is
    small, a sample of every 127th value gives two thresholds: a few more than ``k`` values reach
    the low one, and a few less than ``k`` exceed the high one. The latter belong to the result. The
    others of the result are searched for between the thresholds. If the sample misleads, all values
    that reach the low one are searched, or all values. So the result is always exact.

    Args:
        m: Returns a part of the tensor, for example ``tensor.__getitem__``. Parts are read in the
            CPU's cache, so a sum or a difference need not be written to memory. The next call may
            overwrite a part.
        numel: Size of the tensor.
        k: Number of entries, from 1 to ``numel``.
        kept: Memory for intermediate results.

    Returns:
        The coordinates, shape (k,), int32, ascending, and the values at them, shape (k,).

    Example:
        >>> m = torch.tensor([1.0, -3.0, 2.0])
        >>> largest_entries(m.__getitem__, numel=3, k=2, kept=KeptMemory())
        (tensor([1, 2], dtype=torch.int32), tensor([-3.,  2.]))
    """
    if (
        numel < max(2**15, 8 * k)
        or (first := m(slice(1))).device.type != "cpu"
        or first.is_complex()
    ):
        return _topk(m(slice(numel)), k)
    sample = m(slice(0, numel, _STRIDE)).abs()
    # About one in _STRIDE of the k largest values is in the sample, with a
    # deviation of the square root of it.
    rank = k / _STRIDE
    margin = 4 * math.sqrt(rank) + 8
    more, fewer = int(rank + margin), max(1, int(rank - margin))
    room = 2 * more * _STRIDE
    room_for_coordinates = kept.flat("coordinates", room, torch.int32, first.device)
    room_for_values = kept.flat("values", room, first.dtype, first.device)
    limit = _largest(sample, more)
    candidates = _not_below(m, numel, limit, room_for_coordinates, room_for_values, kept)
    if candidates is None or len(candidates[0]) < k:
        return _topk(m(slice(numel)), k)
    coordinates, values = candidates
    size = values.abs()
    # From here on, the k largest are found by removing the smallest candidates.
    surplus = len(size) - k
    # A value that equals the high threshold may or may not belong to the result.
    # nan is above every threshold.
    between = _positions(compare(size, "less_equal", _largest(sample, fewer)))
    if len(between) <= surplus:
        # At least k values are above the high threshold, as for a very small k.
        between = torch.arange(len(size))
    # NumPy finds the smallest five times faster than torch's topk, but does not know bfloat16.
    searched = size.index_select(0, between).to(torch.promote_types(size.dtype, torch.float32))
    smallest = np.argpartition(searched.numpy(), surplus)[:surplus]
    stays = np.ones(len(size), dtype=bool)
    stays[between.numpy()[smallest]] = False
    chosen = _positions(torch.from_numpy(stays))
    return coordinates.index_select(0, chosen), values.index_select(0, chosen)


def _largest(sample: Tensor, rank: int) -> float:
    """Return the value of a rank, 1 for the largest. NumPy finds it ten times faster than torch."""
    index = len(sample) - rank
    return float(np.partition(sample.float().numpy(), index)[index])


def _topk(m: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search all values for the entries that :func:`largest_entries` returns."""
    coordinates = m.abs().topk(k, sorted=False).indices.sort().values
    return coordinates.to(torch.int32), m.index_select(0, coordinates)


def _not_below(
    m: Callable[[slice], Tensor],
    numel: int,
    limit: float,
    coordinates: Tensor,
    values: Tensor,
    kept: KeptMemory,
) -> tuple[Tensor, Tensor] | None:
    """Write coordinates, ascending, and values of the entries not below a limit in size.

    Returns:
        The parts of ``coordinates`` and ``values`` that were written; None if there is not room for
        all entries.
    """
    count = 0
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = m(slice(start, start + BLOCK_ELEMENTS))
        size = torch.abs(block, out=kept.flat("size", len(block), block.dtype, block.device))
        positions = _positions(~compare(size, "less", limit))
        stop = count + len(positions)
        if stop > len(values):
            return None
        torch.index_select(block, 0, positions, out=values[count:stop])
        torch.add(positions, start, out=coordinates[count:stop])
        count = stop
    return coordinates[:count], values[:count]


def _positions(flags: Tensor) -> Tensor:
    """Return the ascending positions of True on the CPU. NumPy is many times faster than torch."""
    searched = flags.numpy()
    n, count = len(searched), np.count_nonzero(searched)
    # NumPy searches without branches if more than a tenth are True, and otherwise with branches.
    # The latter is faster below a fiftieth, and takes up to three times as long above it. So the
    # code appends True until more than a tenth of the flags are True.
    if n < 50 * count and 10 * count <= n:
        searched = np.append(searched, np.ones((n - 10 * count) // 9 + 1, dtype=bool))
    return torch.from_numpy(np.flatnonzero(searched)[:count])


def draw_coordinates(numel: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw coordinates without repetition, every set of them with the same probability.

    For a small ``count``, the time does not depend on ``numel``: coordinates are drawn with
    replacement, and repetitions are dropped.

    Args:
        numel: Number of coordinates to draw from: 0 to ``numel - 1``.
        count: Number of coordinates to draw, at most ``numel``.
        generator: Random generator on the CPU.

    Returns:
        Shape (count,), int64, on the CPU, in no order.

    Example:
        >>> sorted(draw_coordinates(3, 3, torch.Generator()).tolist())
        [0, 1, 2]
    """
    # If a large part of the tensor is drawn, draws with replacement would repeat too often.
    if 4 * count >= numel:
        return torch.randperm(numel, generator=generator)[:count]
    # Each coordinate keeps the place of its first draw. np.unique sorts, and a sorted list that is
    # cut to ``count`` would favor small coordinates.
    drawn = torch.empty(0, dtype=torch.int64)
    while len(drawn) < count:
        drawn = torch.cat([drawn, torch.randint(numel, (2 * count,), generator=generator)])
        first = np.unique(drawn.numpy(), return_index=True)[1]
        drawn = drawn[torch.from_numpy(np.sort(first))]
    return drawn[:count]
