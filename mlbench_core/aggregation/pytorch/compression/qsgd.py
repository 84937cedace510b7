"""Send each number with a few bits, rounded at random to the right result on average (QSGD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation
from mlbench_core.aggregation.pytorch.transport.messages import (
    BLOCK_ELEMENTS,
    all_finite,
    as_bytes,
    divide,
    from_bytes,
)
from mlbench_core.aggregation.pytorch.transport.names import check_keys
from mlbench_core.aggregation.pytorch.transport.packing import bits_for, pack_codes, unpack_codes
from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["QSGDAggregation", "uniform_source"]


class QSGDAggregation(CompressedAggregation):
    r"""Average gradients that each worker rounded at random to a few levels.

    Each tensor is cut into buckets of consecutive coordinates, in its logical order; the last
    bucket of a tensor may be shorter. For a bucket :math:`v` and :math:`s` levels, a worker sends

    .. math::

        Q(v)_j = \lVert v \rVert \operatorname{sign}(v_j) \, \xi_j, \qquad
        \xi_j = \frac{1}{s} \Bigl\lfloor \frac{s |v_j|}{\lVert v \rVert} + u_j \Bigr\rfloor,

    with :math:`u_j` uniform in :math:`[0, 1)`, drawn by each worker for itself. So :math:`Q(v)` is
    :math:`v` on average, on a CPU up to :math:`2^{-17}` of a level. With the Euclidean norm, its
    variance is at most :math:`\min(d / s^2, \sqrt{d} / s) \lVert v \rVert^2` for a bucket of
    :math:`d` coordinates. Every worker's tensor becomes :math:`\frac{1}{k} \sum_i Q(v_i)` (or the
    sum over ``denom``), summed in the order of ranks, so that all workers get the same bits. The
    error is zero on average, so QSGD needs no error feedback. A worker that trains alone rounds
    too, and sends nothing. If a value is infinite or nan on one worker, its bucket becomes nan on
    all.

    In each step, a worker sends, in one all-gather for the tensors of one dtype, 4 bytes for each
    bucket (8 for float64) and :math:`\lceil \log_2(2 s + 1) \rceil` bits for each coordinate.

    Implementations differ. The analysis of the paper has the Euclidean norm, and its experiments
    the largest absolute value (``norm=math.inf``), which has less variance for equal ``levels``.
    The paper also has a variable-length code (Elias) for few levels, where most values are zero.
    Here every value has the same number of bits.

    Attributes:
        levels: As given.
        bucket_size: As given.
        norm: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        levels: :math:`s`, the number of levels above zero, from 1 to 127. The values 1, 3, 7, 15,
            ..., 127 use all codes of 2, 3, 4, 5, ..., 8 bits but one.
        bucket_size: Coordinates that share a norm.
        norm: 2 for the Euclidean norm, ``math.inf`` for the largest absolute value.
        seed: Seed of the random numbers; the same on all workers, each of which derives numbers of
            its own from it.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: ``levels``, ``bucket_size`` or ``seed`` is not an integer.

    Example:
        >>> gradient = torch.tensor([0.0, 2.0, 4.0, -4.0])
        >>> QSGDAggregation(levels=2, norm=math.inf).aggregate({"weight": gradient}, "avg_world")
        >>> gradient  # these values are levels, so they are exact
        tensor([ 0.,  2.,  4., -4.])

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient
        Quantization and Encoding. arXiv:1610.02132
    """

    _named_state = ()
    # All workers have made the same number of draws. Their random numbers differ by the rank.
    _own_state = ()

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        levels: int = 7,
        bucket_size: int = 512,
        norm: float = 2,
        seed: int = 0,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        self.levels = check_int("levels", levels)
        if self.levels > 127:
            raise ValueError(
                f"levels must be at most 127, so that a value fits into 8 bits, not {levels}"
            )
        self.bucket_size = check_int("bucket_size", bucket_size)
        if norm not in (2, math.inf):
            raise ValueError(
                f"norm must be 2 (Euclidean) or math.inf (the largest absolute value), not {norm!r}"
            )
        self.norm = float(norm)
        self._seed = check_int("seed", seed, least=0)
        self._draws = 0

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        flats = [tensor.reshape(-1) for tensor in tensors.values()]
        dtype, device = torch.promote_types(flats[0].dtype, torch.float32), flats[0].device
        norms = torch.empty(sum(map(self._buckets, flats)), dtype=dtype, device=device)
        codes = torch.empty(sum(map(len, flats)), dtype=torch.uint8, device=device)
        draw = self._source(device)
        for block, start, first in self._in_blocks(flats):
            own_norms, own_codes = self._quantize(block.to(dtype), draw)
            norms[first : first + len(own_norms)] = own_norms
            codes[start : start + len(block)] = own_codes
        bits = bits_for(2 * self.levels + 1)
        messages = self._gather(as_bytes(norms, pack_codes(codes, bits)), divisor, extra)
        received = []
        for message in messages:
            their_norms = from_bytes(message, 0, len(norms), dtype)
            received.append((their_norms, message[norms.nbytes :]))
        for block, start, first in self._in_blocks(flats):
            total = torch.zeros(self._buckets(block), self.bucket_size, dtype=dtype, device=device)
            # Added in the order of ranks, because sums in different
            # orders differ in their last bits.
            for their_norms, packed in received:
                level = unpack_codes(packed, len(block), bits, start).to(dtype).sub_(self.levels)
                scale = their_norms[first : first + len(total), None]
                total.addcmul_(self._pad(level), scale, value=1 / self.levels)
            block.copy_(divide(total, divisor).view(-1)[: len(block)])
        for tensor, flat in zip(tensors.values(), flats, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _buckets(self, flat: Tensor) -> int:
        """Return the number of buckets of a flat tensor."""
        return -(-len(flat) // self.bucket_size)

    def _pad(self, flat: Tensor) -> Tensor:
        """Return a flat tensor as one row for each bucket, with zeros at the end of the last."""
        missing = -len(flat) % self.bucket_size
        if missing:
            flat = torch.nn.functional.pad(flat, (0, missing))
        return flat.view(-1, self.bucket_size)

    def _in_blocks(self, flats: Iterable[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
        """Split flat tensors into views of whole buckets that fit into a CPU's cache.

        On a GPU each tensor is one view.

        Yields:
            The view, the number of elements before it, and the number of buckets before it.
        """
        start = first = 0
        for flat in flats:
            buckets = self._buckets(flat)
            if flat.device.type == "cpu":
                buckets = max(1, BLOCK_ELEMENTS // self.bucket_size)
            for block in flat.split(buckets * self.bucket_size):
                yield block, start, first
                start, first = start + len(block), first + self._buckets(block)

    def _quantize(self, flat: Tensor, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return each bucket's norm, and a code for each coordinate, 0 to twice the levels."""
        # Zeros at the end change no norm. The draws for them are not used.
        v = self._pad(flat)
        norms = torch.linalg.vector_norm(v, ord=self.norm, dim=1)
        # Squares of large numbers overflow. On a GPU, reading the flag would make the host wait.
        if not v.is_cuda and not all_finite(norms):
            peak = v.abs().amax(1)
            scaled = torch.linalg.vector_norm(v / peak[:, None], ord=self.norm, dim=1)
            norms = torch.where(norms.isfinite(), norms, peak * scaled)
        # A bucket of zeros has the norm 0, and 0 / 0 is nan. After an overflow the norm itself
        # makes the result nan.
        level = (v * self.levels).div_(norms[:, None]).abs_().nan_to_num_(nan=0, posinf=self.levels)
        # The sum may round up to the next integer, beyond the highest level.
        level.add_(draw(v)).floor_().clamp_(max=self.levels)
        return norms, level.copysign_(v).add_(self.levels).view(-1)[: len(flat)]

    def _source(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that draws a uniform number for each element of a tensor.

        The numbers depend on the seed, the rank and the number of calls of this method. A count is
        enough to resume, and it is the same on all workers.
        """
        self._draws += 1
        rank = process_groups.rank(self.group)
        return uniform_source(device, (self._seed, rank, self._draws - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws under ``"draws"``; an empty dictionary before the first."""
        if not self._draws:
            return {}
        return {"draws": self._draws}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("draws",))
        self._draws = int(state_dict.get("draws", 0))


def uniform_source(
    device: torch.device, entropy: tuple[int, int, int]
) -> Callable[[Tensor], Tensor]:
    """Return a function that draws a uniform number from [0, 1) for each element of a tensor.

    CPUs and other devices have different numbers.

    Args:
        device: The device of the tensors.
        entropy: The numbers follow from the seed, the rank and the number of earlier sources.
    """
    sequence = np.random.SeedSequence(entropy)
    if device.type != "cpu":
        generator = torch.Generator(device).manual_seed(int(sequence.generate_state(1)[0]))
        return lambda like: torch.rand(
            like.shape, generator=generator, dtype=like.dtype, device=device
        )
    bits = np.random.Generator(np.random.SFC64(sequence))

    def draw(like: Tensor) -> Tensor:
        # Middles of 65,536 intervals: their means differ by at most 2**-17 of a level from those of
        # real numbers, and they take a tenth of the time of torch.rand.
        words = bits.integers(0, 2**64, -(-like.numel() // 4), dtype=np.uint64)
        drawn = torch.from_numpy(words.view(np.uint16))[: like.numel()].to(like.dtype)
        return drawn.add_(0.5).mul_(2**-16).view(like.shape)

    return draw
