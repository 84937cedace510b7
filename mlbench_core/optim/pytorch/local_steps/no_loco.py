"""AdamW on every worker, and an exchange with one other worker every H steps (NoLoCo)."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.local_steps.no_loco import NoLoCoAggregation
from mlbench_core.optim.pytorch.distributed import check_aggregation
from mlbench_core.optim.pytorch.local_steps.periodic import DiLoCo

__all__ = ["NoLoCo"]


class NoLoCo(DiLoCo):
    r"""AdamW on every worker, and every H steps an outer step along the average of a random pair.

    Every worker :math:`i` takes H inner steps from its slow weights :math:`\phi_i` to
    :math:`\theta_i`. Then the workers form random pairs. With :math:`\bar{v}` the average of a
    pair,

    .. math::

        m_i &\leftarrow \mu m_i + \alpha \overline{(\theta - \phi)} +
            \gamma (\bar\phi - \phi_i) \\
        \phi_i &\leftarrow \phi_i + m_i, \qquad \theta_i \leftarrow \phi_i.

    :math:`\alpha`, :math:`\mu`, :math:`\gamma` and the seed of the pairs are settings of
    :class:`~mlbench_core.aggregation.pytorch.local_steps.no_loco.NoLoCoAggregation`. No worker
    waits for more than one other, except in an elastic run, where all wait for the outcome of a
    round. The workers' weights are never all equal from three workers on: average them before you
    evaluate, with :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model.
        lr: Inner learning rate.
        betas: Decay of the inner running averages of the gradient and of its square.
        eps: Added to the inner denominator.
        weight_decay: Inner, decoupled weight decay.
        period: H, the number of inner steps from one exchange to the next.
        aggregation: The exchange with all its settings, for example
            ``NoLoCoAggregation(outer_lr=0.5)``. For another inner optimizer, give it to
            :class:`~mlbench_core.optim.pytorch.local_steps.periodic.DiLoCo`.

    Raises:
        TypeError: ``period`` is not an integer, ``lr`` is not a number, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.local_steps.no_loco.NoLoCoAggregation`.
        ValueError: ``model`` or ``lr`` is missing, ``lr`` is negative or not finite, ``period`` is
            not positive, or ``world_size`` is not that of the process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = NoLoCo(model=model, lr=0.001, period=50)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low
        Communication Training Method for Large Models. arXiv:2506.10911
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
        period: int = 50,
        aggregation: NoLoCoAggregation | None = None,
    ) -> None:
        if aggregation is None:
            aggregation = NoLoCoAggregation(world_size)
        check_aggregation(aggregation, NoLoCoAggregation, world_size=world_size)
        super().__init__(
            world_size, model, lr, betas, eps, weight_decay, period=period, aggregation=aggregation
        )
