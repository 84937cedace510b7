"""AdamW on every worker, and a compressed exchange of the changes every H steps (SparseLoCo)."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.local_steps.sparse_loco import (
    ChunkedTopKAggregation,
    SparseLoCoAggregation,
)
from mlbench_core.optim.pytorch.distributed import check_aggregation
from mlbench_core.optim.pytorch.local_steps.periodic import DiLoCo

__all__ = ["SparseLoCo"]


class SparseLoCo(DiLoCo):
    r"""AdamW on every worker, and every H steps an exchange of the largest parts of their changes.

    With :math:`\theta` the weights that all workers share, every worker takes H inner steps from
    them to :math:`\theta_i`; then

    .. math::

        e_i &\leftarrow \beta e_i + \theta - \theta_i \\
        s_i &= Q(\operatorname{top-k}(e_i)), \qquad e_i \leftarrow e_i - s_i \\
        \theta &\leftarrow \theta - \frac{\alpha}{k} \sum_{i=1}^{k} s_i, \qquad
        \theta_i \leftarrow \theta.

    :math:`Q` and top-k are those of
    :class:`~mlbench_core.aggregation.pytorch.local_steps.sparse_loco.ChunkedTopKAggregation`: 2 %
    of the coordinates of each chunk with 2 bits each, :math:`\beta = 0.95` and :math:`\alpha = 1`.
    The steps in between send nothing; see
    :class:`~mlbench_core.optim.pytorch.local_steps.periodic.LocalSGD` for when to evaluate, and for
    frozen layers.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model, with the same weights on every worker when the first step is taken.
        lr: Inner learning rate.
        betas: Decay of the inner running averages of the gradient and of its square.
        eps: Added to the inner denominator.
        weight_decay: Inner, decoupled weight decay.
        period: H, the number of inner steps from one exchange to the next.
        aggregation: The exchange with all its settings, for example
            ``SparseLoCoAggregation(ChunkedTopKAggregation(density=0.01))``. For another inner
            optimizer, give it to :class:`~mlbench_core.optim.pytorch.local_steps.periodic.DiLoCo`.

    Raises:
        TypeError: ``period`` is not an integer, ``lr`` is not a number, or the aggregation is not a
            :class:`.SparseLoCoAggregation`.
        ValueError: ``model`` or ``lr`` is missing, ``lr`` is negative or not finite, ``period`` is
            not positive, or ``world_size`` is not that of the process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SparseLoCo(model=model, lr=0.001, period=30)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: Communication Efficient LLM Pre-training with
        SparseLoCo. arXiv:2508.15706
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        period: int = 30,
        aggregation: SparseLoCoAggregation | None = None,
    ) -> None:
        if aggregation is None:
            aggregation = SparseLoCoAggregation(ChunkedTopKAggregation(world_size=world_size))
        check_aggregation(aggregation, SparseLoCoAggregation, world_size=world_size)
        super().__init__(
            world_size, model, lr, betas, eps, weight_decay, period=period, aggregation=aggregation
        )
