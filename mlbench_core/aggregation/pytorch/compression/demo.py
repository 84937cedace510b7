"""Keep momentum on each worker, and send only its largest cosine coefficients (DeMo)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import (
    CompressedAggregation,
    flush_tiny_,
    recall,
)
from mlbench_core.aggregation.pytorch.transport.messages import (
    as_bytes,
    divide,
    from_bytes,
    pack,
)
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["DeMoAggregation", "dct_matrix"]


class DeMoAggregation(CompressedAggregation):
    r"""Add gradients to a momentum of each worker, and share its fast-moving components.

    A tensor is viewed as a matrix with its first dimension as rows (a vector as one row), and the
    matrix is cut into blocks. The sides of a block are the largest divisors of the sides of the
    matrix up to ``block_size``. For each block of its momentum :math:`m_i`, worker :math:`i` of
    :math:`k` selects the largest coefficients of the orthonormal cosine transform (DCT-II) along
    both sides, and takes them out:

    .. math::

        m_i &\leftarrow \beta m_i + g_i \\
        q_i &= \operatorname{top-k}(\operatorname{DCT}(m_i)) \\
        m_i &\leftarrow m_i - \operatorname{DCT}^{-1}(q_i)

    Every worker's tensor becomes :math:`\operatorname{DCT}^{-1}(\frac{1}{k} \sum_i q_i)` (or with
    the sum over ``denom``), summed in the order of ranks, so that all workers get the same bits. If
    a value is infinite or nan on one worker, its block is not finite on all workers. Such values
    are not remembered.

    Implementations differ. The authors' code divides each coefficient by the number of workers that
    sent it, not by :math:`k`; ``mean_of_senders`` does the same.

    In each step, a worker sends for each coefficient 2 bytes of its position and 4 bytes of its
    value (8 for float64), in one all-gather for the tensors of one dtype.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        decay: :math:`\beta`, below 1.
        top_k: Coefficients sent per block; a block with fewer is sent whole.
        block_size: Largest side of a block, at most 181, so that a position fits into 2 bytes.
        mean_of_senders: Divide each coefficient by the number of workers that sent it, whatever the
            divisor of the operation is.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: ``top_k`` or ``block_size`` is not an integer, or ``decay`` is not a number.

    Example:
        >>> aggregation, gradient = DeMoAggregation(top_k=1), torch.tensor([1.0, 2.0, 3.0])
        >>> # It sends the first coefficient, the mean.
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient.round(decimals=4), aggregation.memory("weight").round(decimals=4)
        (tensor([2., 2., 2.]), tensor([-1.,  0.,  1.]))

    References:
        B. Peng, J. Quesnelle, D. Kingma: DeMo: Decoupled Momentum Optimization. arXiv:2411.19870
    """

    averages_gradients = False

    _named_state = ("momentum",)
    _own_state = ("momentum",)

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        decay: float = 0.999,
        top_k: int = 32,
        block_size: int = 64,
        mean_of_senders: bool = False,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        check_finite_at_least_0("decay", decay)
        if decay >= 1:
            raise ValueError(
                f"decay must be below 1, not {decay}: the momentum would grow without end"
            )
        self.decay = decay
        self.mean_of_senders = mean_of_senders
        self.top_k = check_int("top_k", top_k)
        self.block_size = check_int("block_size", block_size)
        if self.block_size > 181:
            raise ValueError(
                "block_size must be at most 181, so that a "
                f"position fits into 2 bytes, not {block_size}"
            )

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        values, positions, totals = [], [], []
        for name, tensor in tensors.items():
            # m_i = beta m_i + g_i
            m = recall(self._memory, name, tensor).mul_(self.decay).add_(tensor)
            coefficients = self._transform(m)
            count = min(self.top_k, coefficients.shape[1])
            picked = coefficients.abs().topk(count, dim=1, sorted=False).indices
            # A product with a denormal number may be rounded up to twice its value, so the message
            # could hold more than the momentum. See flush_tiny_().
            values.append(flush_tiny_(coefficients.gather(1, picked)))
            positions.append(picked)
            totals.append(torch.zeros_like(coefficients))
            # m_i = m_i - DCT^-1(q_i)
            m -= self._invert(totals[-1].scatter(1, picked, values[-1]), m.shape)
            # Without this, an overflow would stay in the momentum and in every later message.
            m.nan_to_num_(nan=0, posinf=0, neginf=0)
        # For each coefficient, the number of workers that sent it, if the mean is over these.
        senders: list[Tensor] = []
        if self.mean_of_senders:
            senders = list(map(torch.zeros_like, totals))
        # A block has at most 181 * 181 coefficients, so a position fits into an int16.
        own, own_positions = pack(values), pack(positions).to(torch.int16)
        sizes = list(map(torch.numel, values))
        # Added in the order of ranks, because sums in different orders differ in their last bits.
        for message in self._gather(as_bytes(own, own_positions), divisor, extra):
            theirs = from_bytes(message, 0, len(own), own.dtype).split(sizes)
            their_positions = from_bytes(message, own.nbytes, len(own), torch.int16).long()
            parts = zip(values, theirs, their_positions.split(sizes), strict=True)
            for i, (like, part, picked) in enumerate(parts):
                picked = picked.view_as(like)
                totals[i].scatter_add_(1, picked, part.view_as(like))
                if senders:
                    senders[i].scatter_add_(1, picked, torch.ones_like(like))
        for i, tensor in enumerate(tensors.values()):
            if senders:
                mean = totals[i].div_(senders[i].clamp_(min=1))
            else:
                mean = divide(totals[i], divisor)
            tensor.copy_(self._invert(mean, tensor.shape))

    def _sides(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Return the number of blocks and the side of one, along a matrix's rows and columns."""
        rows = 1
        if len(shape) > 1:
            rows = shape[0]
        columns = math.prod(shape) // rows
        a, b = self._side(rows), self._side(columns)
        return rows // a, a, columns // b, b

    def _side(self, n: int) -> int:
        """Return the largest divisor of a number of rows or columns up to the block size."""
        return max(side for side in range(1, self.block_size + 1) if n % side == 0)

    def _transform(self, tensor: Tensor) -> Tensor:
        """Return the coefficients of a tensor, one block per row."""
        rows, a, columns, b = self._sides(tensor.shape)
        blocks = tensor.reshape(rows, a, columns, b).transpose(1, 2)
        dct_a = dct_matrix(a, tensor.dtype, tensor.device)
        dct_b = dct_matrix(b, tensor.dtype, tensor.device)
        return (dct_a @ blocks @ dct_b.t()).reshape(-1, a * b)

    def _invert(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor that has coefficients."""
        rows, a, columns, b = self._sides(shape)
        dct_a = dct_matrix(a, coefficients.dtype, coefficients.device)
        dct_b = dct_matrix(b, coefficients.dtype, coefficients.device)
        blocks = dct_a.t() @ coefficients.view(rows, columns, a, b) @ dct_b
        return blocks.transpose(1, 2).reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum by parameter name under ``"momentum"``; empty without one."""
        if not self._memory:
            return {}
        return {"momentum": dict(self._memory)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state clears the momentum.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("momentum",))
        self._memory = copies_by_plain_name(state_dict.get("momentum", {}))


@functools.lru_cache(maxsize=64)
def dct_matrix(
    size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    r"""Return the orthonormal DCT-II as a matrix, which is not to be changed.

    .. math:: D_{pn} = \sqrt{\frac{2 - [p = 0]}{N}} \cos \frac{\pi p (n + 1/2)}{N}

    Args:
        size: :math:`N`.
        dtype: Type of the result. It is computed in float64.
        device: Device of the result.

    Returns:
        Shape (N, N).

    Example:
        >>> dct = dct_matrix(5)
        >>> torch.allclose(dct @ dct.t(), torch.eye(5), atol=1e-6)
        True
    """
    n = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * n[:, None] * (n + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)
