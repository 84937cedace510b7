"""DiLoCo whose outer steps take one fragment after another during training (Streaming DiLoCo)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.local_steps.streaming import StreamingDiLoCoAggregation
from mlbench_core.optim.pytorch.distributed import (
    GenericCentralizedOptimizer,
    OptimizerFactory,
    check_aggregation,
)
from mlbench_core.optim.pytorch.local_steps.periodic import make_inner_optimizer

__all__ = ["StreamingDiLoCo"]


class StreamingDiLoCo(GenericCentralizedOptimizer):
    r"""DiLoCo whose messages are fragments of the model, sent while the workers take more steps.

    Every worker takes inner steps without communication. Each fragment of the shared weights
    :math:`\theta` is synchronized every H steps, at its own offset. At a step :math:`t`, the
    workers start to average the outer gradient of a fragment, and merge the result after
    :math:`\tau` more inner steps:

    .. math::

        \Delta &= \frac{1}{k} \sum_{i=1}^{k} (\theta - \theta_i) \qquad \text{at step } t \\
        \theta &\leftarrow \operatorname{OuterOptimizer}(\theta, \Delta), \qquad
        \theta_i \leftarrow \alpha \theta_i + (1 - \alpha) \theta \qquad \text{at step } t + \tau.

    H, :math:`\tau`, :math:`\alpha`, the number of fragments, the outer optimizer and the
    quantization are settings of
    :class:`~mlbench_core.aggregation.pytorch.local_steps.streaming.StreamingDiLoCoAggregation`. The
    workers' weights are never all equal: average them before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Attributes:
        outer_optimizer: The outer optimizer; its learning rate may be changed.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model, with the same weights on every worker when the first step is taken.
        lr: Inner learning rate.
        betas: Decay of the inner running averages of the gradient and of its square.
        eps: Added to the inner denominator.
        weight_decay: Inner, decoupled weight decay.
        inner_optimizer: A function that makes another inner optimizer of an iterable of parameters.
            Its learning rate is its own: leave out ``lr``; the other inner arguments are not used.
        aggregation: The exchange with all its settings; None for ``StreamingDiLoCoAggregation()``.

    Raises:
        TypeError: ``lr`` is not a number, or the aggregation is not a
            :class:`.StreamingDiLoCoAggregation`.
        ValueError: ``model`` or ``lr`` is missing, ``lr`` is negative or not finite, or
            ``world_size`` is not that of the process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> exchange = StreamingDiLoCoAggregation(period=50, fragments=2, delay=5, quantize=True)
        >>> optimizer = StreamingDiLoCo(model=model, lr=0.001, aggregation=exchange)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.outer_optimizer.param_groups[0]["lr"]
        0.7

    References:
        A. Douillard et al.: Streaming DiLoCo with overlapping communication. arXiv:2501.18512
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
        inner_optimizer: OptimizerFactory | None = None,
        aggregation: StreamingDiLoCoAggregation | None = None,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        inner_optimizer = make_inner_optimizer(
            "StreamingDiLoCo", inner_optimizer, model, lr, **options
        )
        if aggregation is None:
            aggregation = StreamingDiLoCoAggregation(world_size=world_size)
        self._outer = check_aggregation(
            aggregation, StreamingDiLoCoAggregation, world_size=world_size
        )
        super().__init__(
            None, model, agg_grad=False, optimizer=inner_optimizer, aggregation=self._outer
        )

    @property
    def outer_optimizer(self) -> Optimizer:
        """Return the optimizer of the weights that all workers share."""
        return self._outer.outer_optimizer

    def _before_step(self) -> None:
        """Share the weights before the first step with the aggregation."""
        # Not in the constructor: a script may load a checkpoint into the model after it made the
        # optimizer.
        self._outer.start(self.model)
