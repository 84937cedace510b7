"""Send each number with a few bits, rounded at random so that the result is right on average (QSGD)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compressed import CompressedAggregation
from mlbench_core.aggregation.pytorch.messages import as_bytes, divide, from_bytes, pack, unpack
from mlbench_core.aggregation.pytorch.names import check_keys
from mlbench_core.aggregation.pytorch.packing import bits_for, pack_codes, unpack_codes
from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["QSGDAggregation"]


class QSGDAggregation(CompressedAggregation):
    r"""Average gradients that each worker rounded at random to a few levels.

    Each tensor is cut into buckets of consecutive coordinates, in its logical order; the last bucket of a tensor may be
    shorter. For a bucket :math:`v` and :math:`s` levels, a worker sends

    .. math::

        Q(v)_j = \lVert v \rVert \operatorname{sign}(v_j) \, \xi_j, \qquad
        \xi_j = \frac{1}{s} \Bigl\lfloor \frac{s |v_j|}{\lVert v \rVert} + u_j \Bigr\rfloor,

    with :math:`u_j` uniform in :math:`[0, 1)`, drawn by each worker for itself. So :math:`Q(v)` is :math:`v` on
    average. With the Euclidean norm, its variance is at most
    :math:`\min(d / s^2, \sqrt{d} / s) \lVert v \rVert^2` for a bucket of :math:`d` coordinates. Every worker's tensor
    becomes :math:`\frac{1}{k} \sum_i Q(v_i)` (or the sum over ``denom``), summed in the order of ranks, so that all
    workers get the same bits. The error is zero on average, so QSGD needs no error feedback. A worker that trains
    alone rounds too, and sends nothing. If a value is infinite or nan on one worker, its bucket becomes nan on all.

    In each step, a worker sends, in one all-gather for the tensors of one dtype, 4 bytes for each bucket (8 for
    float64) and :math:`\lceil \log_2(2 s + 1) \rceil` bits for each coordinate.

    Implementations differ. The analysis of the paper has the Euclidean norm, and its experiments the largest absolute
    value (``norm=math.inf``), which has less variance for equal ``levels``. The paper also has a variable-length code
    (Elias) for few levels, where most values are zero. Here every value has the same number of bits.

    Attributes:
        levels: As given.
        bucket_size: As given.
        norm: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        levels: :math:`s`, the number of levels above zero, from 1 to 127. The values 1, 3, 7, 15, ..., 127 use all
            codes of 2, 3, 4, 5, ..., 8 bits but one.
        bucket_size: Coordinates that share a norm.
        norm: 2 for the Euclidean norm, ``math.inf`` for the largest absolute value.
        seed: Seed of the random numbers; the same on all workers, each of which derives numbers of its own from it.
        world_size: Number of workers; None takes that of the process group.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the process group.
        TypeError: ``levels``, ``bucket_size`` or ``seed`` is not an integer.

    Example:
        >>> gradient = torch.tensor([0.0, 2.0, 4.0, -4.0])
        >>> QSGDAggregation(levels=2, norm=math.inf).aggregate({"weight": gradient}, "avg_world")
        >>> gradient  # these values are levels, so they are exact
        tensor([ 0.,  2.,  4., -4.])

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding. arXiv:1610.02132
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
            raise ValueError(f"levels must be at most 127, so that a value fits into 8 bits, not {levels}")
        self.bucket_size = check_int("bucket_size", bucket_size)
        if norm not in (2, math.inf):
            raise ValueError(f"norm must be 2 (Euclidean) or math.inf (the largest absolute value), not {norm!r}")
        self.norm = float(norm)
        self._seed = check_int("seed", seed, least=0)
        self._draws = 0

    def _aggregate_kind(self, tensors: Mapping[str, Tensor], divisor: Denominator) -> None:
        shapes = [(tensor.numel(), -(-tensor.numel() // self.bucket_size)) for tensor in tensors.values()]
        numel, buckets = (sum(sizes) for sizes in zip(*shapes, strict=True))
        generator = self._generator(next(iter(tensors.values())).device)
        norms, codes = zip(*(self._quantize(tensor, generator) for tensor in tensors.values()), strict=True)
        own_norms, bits = pack(norms), bits_for(2 * self.levels + 1)
        messages = self._gather(as_bytes(own_norms, pack_codes(pack(codes), bits)))
        total = torch.zeros(numel, dtype=own_norms.dtype, device=own_norms.device)
        # Added in the order of ranks, because sums in different orders differ in their last bits.
        for message in messages:
            their_norms = from_bytes(message, 0, buckets, own_norms.dtype)
            theirs = unpack_codes(message[own_norms.nbytes :], numel, bits).to(own_norms.dtype).sub_(self.levels)
            start = first = 0
            for length, count in shapes:
                scale = their_norms[first : first + count].repeat_interleave(self.bucket_size)[:length]
                total[start : start + length].addcmul_(theirs[start : start + length], scale, value=1 / self.levels)
                start, first = start + length, first + count
        unpack(divide(total, divisor), tensors.values())

    def _quantize(self, tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the norm of each bucket, and for each coordinate a code from 0 to twice the number of levels."""
        wide = tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
        # Zeros at the end change no norm. The draws for them are not used.
        v = torch.nn.functional.pad(wide, (0, -len(wide) % self.bucket_size)).view(-1, self.bucket_size)
        norms = torch.linalg.vector_norm(v, ord=self.norm, dim=1)
        drawn = torch.rand(v.shape, generator=generator, dtype=v.dtype, device=v.device)
        # A bucket of zeros has the norm 0, and 0 / 0 is nan. After an overflow the norm itself makes the result nan.
        ratio = (v.abs() * self.levels / norms[:, None]).nan_to_num_(nan=0, posinf=0)
        # The sum may round up to the next integer, beyond the highest level.
        level = ratio.add_(drawn).floor_().clamp_(max=self.levels)
        codes = level.mul_(v.sign().nan_to_num_(nan=0)).add_(self.levels)
        return norms, codes.view(-1)[: len(wide)].to(torch.int32)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return a generator for the next draw, which depends on the seed, the rank and the number of draws only."""
        # A count is enough to resume, on any device, and it is the same on all workers.
        entropy = (self._seed, process_groups.rank(self.group), self._draws)
        self._draws += 1
        return torch.Generator(device).manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws under ``"draws"``; an empty dictionary before the first."""
        return {"draws": self._draws} if self._draws else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("draws",))
        self._draws = int(state_dict.get("draws", 0))
