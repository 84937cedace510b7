"""AdamW on every worker, and an average of a few random weights after each step (SPARTA)."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.local_steps.sparta import SPARTAAggregation
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.local_steps.periodic import make_inner_optimizer

__all__ = ["SPARTA"]


class SPARTA(GenericCentralizedOptimizer):
    r"""AdamW on every worker; after each step, the workers average a random share of the weights.

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`,

    .. math::

        x_i &\leftarrow \operatorname{AdamW}(x_i, g_i) \\
        x_{i,j} &\leftarrow \frac{1}{k} \sum_{l=1}^{k} x_{l,j} \quad \text{for a share } p
            \text{ of the positions } j,

    which are drawn again in each step, the same on all workers; see
    :class:`~mlbench_core.aggregation.pytorch.local_steps.sparta.SPARTAAggregation`. The moments of
    AdamW are local to a worker. The workers' weights are never all equal: average them before you
    evaluate, with :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Args:
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        share: :math:`p`, above 0 and at most 1; None for 0.005.
        aggregation: The average with all its settings, instead of ``share``. For another inner
            optimizer, give it to
            :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer` with
            ``agg_grad=False``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        TypeError: A number has the wrong type, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.local_steps.sparta.SPARTAAggregation`.
        ValueError: ``model`` or ``lr`` is missing, a number is out of range, ``world_size`` is not
            that of the process group, or an argument contradicts the aggregation.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SPARTA(model=model, lr=0.001)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        SPARTA in ExoGym: github.com/exo-explore/gym, exogym/strategy/sparta.py
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        by_layer: bool = False,
        *,
        share: float | None = None,
        aggregation: SPARTAAggregation | None = None,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        inner = make_inner_optimizer("SPARTA", None, model, lr, **options)
        if aggregation is None:
            sent_share = 0.005
            if share is not None:
                sent_share = share
            aggregation = SPARTAAggregation(world_size, share=sent_share)
        check_aggregation(aggregation, SPARTAAggregation, world_size=world_size, share=share)
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=inner,
            aggregation=aggregation,
        )
