"""Adam whose momentum is averaged with one bit per weight after a warm-up (1-bit Adam)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.one_bit import OneBitAggregation
from mlbench_core.aggregation.pytorch.transport.messages import all_finite
from mlbench_core.arguments import check_int
from mlbench_core.optim.pytorch.compression.compressed import (
    CompressedOptimizer,
    Params,
    adam_defaults,
)
from mlbench_core.optim.pytorch.distributed import check_aggregation

__all__ = ["OneBitAdam"]


class OneBitAdam(CompressedOptimizer):
    r"""Adam that sends one bit per weight after a warm-up with full messages.

    In the warm-up it is :class:`torch.optim.Adam` on the average gradient. Then the second moment
    :math:`v` is frozen, and the momentum :math:`m` is averaged with one bit per weight and error
    feedback on the workers and on the average; see
    :class:`~mlbench_core.aggregation.pytorch.compression.one_bit.OneBitAggregation`. In step
    :math:`t`, with :math:`T` steps of warm-up and the learning rate :math:`\eta`,

    .. math:: x \leftarrow x - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^{\min(t, T)})}
      + \epsilon}.

    Implementations differ. The paper leaves the corrections :math:`1 - \beta^t` out; here they are
    those of Adam, so that the warm-up is Adam. Some scale the signs by :math:`\lVert p \rVert_2 /
    \sqrt{d}`, with which the error of a sparse :math:`p` is larger than :math:`p`; here the scale
    is :math:`\lVert p \rVert_1 / d`. A weight whose :math:`v` is 0 at the end of the warm-up,
    because it never had a gradient, does not move afterward: one bit cannot represent the zeros of
    its momentum, and the division by :math:`\epsilon` would make steps of any size from them.
    :math:`\beta_1` is that of the first parameter group.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`, added to the denominator.
        weight_decay: L2 penalty, part of the gradient.
        warmup_steps: :math:`T`, the steps of each parameter that send whole gradients: enough for
            the second moment to settle. The paper takes 15 to 20 % of all steps.
        world_size: Number of workers; None takes that of the process group, when the optimizer is
            made.
        aggregation: The exchange with its settings, instead of ``warmup_steps``, for example
            ``OneBitAggregation(warmup_steps=50, process_group=group)``. Its ``beta`` is set to
            :math:`\beta_1`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, ``world_size`` is not that of the
            process group, or ``warmup_steps`` contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = OneBitAdam([x], lr=0.5)
        >>> x.grad = torch.tensor([3.0, -1.0])
        >>> optimizer.step()
        >>> x
        Parameter containing:
        tensor([-0.5000,  0.5000], requires_grad=True)

    References:
        Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
        Convergence Speed. arXiv:2102.02888
    """

    aggregation: OneBitAggregation

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        warmup_steps: int | None = None,
        world_size: int | None = None,
        aggregation: OneBitAggregation | None = None,
    ) -> None:
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        if aggregation is None:
            steps = 100
            if warmup_steps is not None:
                steps = warmup_steps
            aggregation = OneBitAggregation(warmup_steps=steps, world_size=world_size)
        check_aggregation(
            aggregation, OneBitAggregation, world_size=world_size, warmup_steps=warmup_steps
        )
        # Without a step of Adam there would be no second moment to divide by.
        check_int("warmup_steps", aggregation.warmup_steps)
        super().__init__(params, defaults, aggregation)

    def _before_step(self) -> None:
        """Give the aggregation the decay of the momentum, which a scheduler may have changed."""
        self.aggregation.beta = self.param_groups[0]["betas"][0]

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.add(parameter, alpha=group["weight_decay"])

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        t, warmup_steps = self.aggregation.steps(name), self.aggregation.warmup_steps
        v = self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))
        beta2 = group["betas"][1]
        if t <= warmup_steps:
            v.mul_(beta2).addcmul_(agreed, agreed, value=1 - beta2)
        # One bit cannot represent a momentum of zero, and with v = 0 the step would be divided by
        # epsilon alone.
        m = self.aggregation.momentum(name).to(v.dtype).masked_fill(v == 0, 0)
        # The momentum forgets values that are not finite, but this step must show them.
        is_finite = all_finite(agreed)
        if agreed.is_cuda or not is_finite:
            m.masked_fill_(~is_finite, torch.nan)
        # As torch computes it, so that the warm-up is Adam in its last bits too.
        step_size = float(group["lr"]) / (1 - self.aggregation.beta**t)
        size = (v.sqrt() / math.sqrt(1 - beta2 ** min(t, warmup_steps))).add_(group["eps"])
        parameter.addcdiv_(m, size, value=-step_size)
