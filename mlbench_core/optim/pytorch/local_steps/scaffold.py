"""Local SGD whose workers correct their gradients for the differences of their data (SCAFFOLD)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import parameters_of
from mlbench_core.aggregation.pytorch.local_steps.periodic import PeriodicAggregation
from mlbench_core.aggregation.pytorch.local_steps.scaffold import ScaffoldAggregation
from mlbench_core.optim.pytorch.distributed import (
    GenericCentralizedOptimizer,
    check_aggregation,
    check_lr,
)

__all__ = ["SCAFFOLD"]


class SCAFFOLD(GenericCentralizedOptimizer):
    r"""Local SGD with control variates, for workers whose data differ.

    With the control variates :math:`c_i` of worker :math:`i` and their average :math:`c`, every
    worker takes H steps

    .. math:: y_i \leftarrow y_i - \eta (g_i(y_i) - c_i + c).

    Then all average their weights, and :math:`c_i` becomes the mean of the worker's own gradients
    of these steps; see
    :class:`~mlbench_core.aggregation.pytorch.local_steps.scaffold.ScaffoldAggregation`. So each
    worker steps along the common gradient, and workers with different data do not drift apart as
    those of :class:`~mlbench_core.optim.pytorch.local_steps.periodic.LocalSGD` do. There is no
    momentum, because the control variates are computed from the length of the way, which momentum
    changes. Workers must have the same learning rates. See
    :class:`~mlbench_core.optim.pytorch.local_steps.periodic.LocalSGD` for when to evaluate, and for
    frozen layers.

    Args:
        world_size: Number of workers; None takes that of the process group.
        lr: Learning rate :math:`\eta`.
        weight_decay: L2 penalty, part of :math:`g_i`.
        period: H, the number of steps from one average to the next.
        aggregation: The average with its settings, for example
            ``ScaffoldAggregation(process_group=group)``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`. The ``model`` must
    have the same weights on every worker when the first step is taken.

    Raises:
        TypeError: ``period`` is not an integer, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.local_steps.scaffold.ScaffoldAggregation`.
        ValueError: ``model`` or ``lr`` is missing, ``period`` is not positive, or ``world_size`` is
            not that of the process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SCAFFOLD(model=model, lr=0.1, period=4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging
        for Federated Learning. arXiv:1910.06378
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        period: int = 8,
        aggregation: ScaffoldAggregation | None = None,
    ) -> None:
        if aggregation is None:
            aggregation = ScaffoldAggregation(world_size, use_cuda)
        self._scaffold = check_aggregation(
            aggregation, ScaffoldAggregation, world_size=world_size, use_cuda=use_cuda or None
        )
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=partial(SGD, lr=check_lr(lr, "SCAFFOLD"), weight_decay=weight_decay),
            aggregation=PeriodicAggregation(aggregation, period),
        )

    def _before_step(self) -> None:
        """Share the weights before the first step with the aggregation."""
        # Not in the constructor: a script may load a checkpoint into the model after it made the
        # optimizer.
        self._scaffold.start(self.model)

    def _take_step(self) -> None:
        """Take a local step with corrected gradients."""
        rates: dict[int, float] = {}
        for group in self.param_groups:
            rates.update(dict.fromkeys(map(id, group["params"]), float(group["lr"])))
        named = {
            **parameters_of(self.model),
            **self.extra_parameters(self.model.parameters()),
        }
        gradients: list[tuple[Tensor, Tensor]] = []
        for name, parameter in named.items():
            # A parameter that the optimizer does not update has the rate 0.
            self._scaffold.count(name, rates.get(id(parameter), 0.0))
            correction = self._scaffold.correction(name)
            if parameter.grad is not None and correction is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = parameter.grad + correction.to(parameter.grad)
        try:
            super()._take_step()
        # The gradients belong to the script, which may accumulate more into them.
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
