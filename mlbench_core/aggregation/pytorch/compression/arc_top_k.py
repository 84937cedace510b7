"""Send the same rows of the gradient's change on all workers, the largest ones (ARC-Top-K)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import recall
from mlbench_core.aggregation.pytorch.compression.ef21 import EF21Aggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import coordinates_sent
from mlbench_core.aggregation.pytorch.transport.messages import divide
from mlbench_core.aggregation.pytorch.transport.names import check_keys
from mlbench_core.arguments import check_int

__all__ = ["ARCTopKAggregation"]


class ARCTopKAggregation(EF21Aggregation):
    r"""Estimate the average gradient from rows that all workers choose alike (ARC-Top-K).

    This is EF21-SGDM with another compression, which an all-reduce can add up. The change
    :math:`\Delta_i = M_i - G_i` of worker :math:`i` of :math:`k` is viewed as a matrix with
    :math:`n` rows (its first dimension) and :math:`m` columns (all others). With a matrix :math:`V
    \in \mathbb{R}^{m \times r}` of normally distributed numbers, drawn again in each step and the
    same on all workers,

    .. math::

        S &= \frac{1}{k} \sum_i \Delta_i V / \sqrt{r} \\
        J &= \text{the } K \text{ rows } j \text{ with the largest } \lVert S_j \rVert \\
        R_i &= \Delta_i \text{ in the rows } J, \text{ and 0 in the others}.

    The square of :math:`\lVert S_j \rVert` is on average that of row :math:`j` of the average
    change. So all workers choose the same rows, those that are large in the average, and need not
    send their positions. See :class:`EF21Aggregation` for :math:`M_i`, :math:`G_i`, :math:`G`, the
    first step, and values that are not finite.

    A tensor is sent whole if that takes no more bytes, :math:`n m \le n r + K m`. This holds for
    vectors, numbers, small matrices, and each tensor with :math:`K = n`. The estimate of such a
    tensor is exact.

    In each step after the first one, a worker sends :math:`b (n r + K m)` bytes per matrix and
    :math:`b n m` per tensor that is sent whole, in two all-reduces: all :math:`S` with these
    tensors, then all rows. The state, and :math:`b`, the bytes of one of its numbers, are those of
    :class:`EF21Aggregation`. All workers also keep the state of the generator.

    The code that calls itself the paper's implementation, github.com/Aris-ma/AllreduceTopK, also
    compresses vectors, and forms the rows of tensors with three or more dimensions differently. It
    rounds :math:`K` down, and this class to the nearest integer.

    Attributes:
        rank: :math:`r`.

    Args:
        model: See :class:`EF21Aggregation`.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        size: Share of the rows of each matrix that is sent (a float, at most 1.0; at least one row
            is sent), or their number (an integer).
        rank: :math:`r`, the number of columns of the sketch.
        momentum: :math:`\mu`, from 0 to less than 1.
        seed: Seed of the generator that draws :math:`V`; the same on all workers.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: A number has the wrong type.

    Example:
        >>> aggregation = ARCTopKAggregation(None, size=1, rank=1, momentum=0)
        >>> change = torch.zeros(4, 3)
        >>> change[2] = torch.tensor([1.0, -3.0, 2.0])
        >>> for gradient in (torch.ones(4, 3), 1 + change):
        ...     aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> torch.equal(gradient, 1 + change)
        True

    References:
        Chen, Ma, Li, He, Dong, Yuan: An All-Reduce Compatible Top-K Compressor for
        Communication-Efficient Distributed Learning. arXiv:2510.26709
    """

    def __init__(
        self,
        model: nn.Module | None,
        use_cuda: bool = False,
        *,
        size: int | float = 0.2,
        rank: int = 4,
        momentum: float = 0.9,
        seed: int = 0,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            model,
            use_cuda,
            size=size,
            momentum=momentum,
            world_size=world_size,
            process_group=process_group,
        )
        self.rank = check_int("rank", rank)
        self._generator.manual_seed(check_int("seed", seed, least=0))

    def _compress(
        self, changes: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        """Add changes to e_i, and replace them by the average of the rows that the workers send."""
        deltas, rows, sketches, sent = {}, {}, {}, {}
        for name, change in changes.items():
            e = recall(self._memory, name, change).add_(change)
            n = 1
            if e.dim() > 0:
                n = len(e)
            deltas[name] = delta = e.view(n, -1)
            m = delta.shape[1]
            # Sketch and rows together would be at least as large as the tensor.
            if n * m <= n * self.rank + coordinates_sent(self.size, n) * m:
                rows[name] = torch.arange(n, device=delta.device)
                sent[name] = delta.clone()
            else:
                V = torch.randn(m, self.rank, generator=self._generator, dtype=delta.dtype)
                # Divisions by k and by the root of r would not change the order of the rows.
                sketches[name] = delta @ V.to(delta.device)
        self._average_uncompressed([*sketches.values(), *sent.values(), *extra], 1)
        for tensor in extra:
            divide(tensor, divisor)
        for name, S in sketches.items():
            # Stable, so that all workers break exact ties alike. nan comes first.
            order = S.norm(dim=1).argsort(descending=True, stable=True)
            rows[name] = order[: coordinates_sent(self.size, len(S))]
            sent[name] = deltas[name].index_select(0, rows[name])
        self._average_uncompressed([sent[name] for name in sketches], 1)
        for name, change in changes.items():
            delta, average = deltas[name], divide(sent[name], self.world_size)
            own = delta.index_select(0, rows[name])
            # No worker can count an average that is not finite, so its own part stays in e_i.
            delta.index_copy_(0, rows[name], own.masked_fill_(average.isfinite(), 0))
            delta.nan_to_num_(nan=0, posinf=0, neginf=0)
            result = torch.zeros_like(delta).index_copy_(0, rows[name], average)
            change.copy_(result.view(change.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`EF21Aggregation`, and that of the generator."""
        state = super().state_dict()
        if state:
            state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        An empty state starts with an all-reduce and keeps the generator.

        Raises:
            ValueError: The state is that of another aggregation or another model.
        """
        if state_dict:
            check_keys(self, state_dict, (*self._named_state, "generator"))
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "generator"})
        if "generator" in state_dict:
            self._generator.set_state(state_dict["generator"].cpu())
