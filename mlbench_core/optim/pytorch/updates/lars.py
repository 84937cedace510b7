"""LARS: SGD with momentum whose rate follows the norms of each layer, for very large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.arguments import check_finite_at_least_0, check_positive
from mlbench_core.optim.pytorch.distributed import check_lr, evaluate

__all__ = ["LARS"]


class LARS(Optimizer):
    r"""SGD with momentum and a separate learning rate for each layer.

    With :math:`w` a parameter and :math:`g` its gradient, a step is

    .. math::

        \rho &= \tau \frac{\lVert w \rVert}{\lVert g \rVert + \lambda \lVert w \rVert} \\
        v &\leftarrow \mu v + \eta \rho (g + \lambda w) \\
        w &\leftarrow w - v.

    So the first step of a layer is about :math:`\eta \tau` times as long as its weights, for any
    scale of the gradient. If the norm of the weights or of the gradient is zero, :math:`\rho` is 1,
    as in other implementations. Otherwise a layer that starts at zero would never move.

    For distributed training give it to
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`, or as
    ``inner_optimizer`` to :class:`~mlbench_core.optim.pytorch.local_steps.periodic.DiLoCo`.

    Args:
        params: Parameters, or groups of parameters. A group may have its own options. With
            ``"use_lars": False``, :math:`\rho` is 1 in it. Use this with ``"weight_decay": 0`` for
            biases and the parameters of normalization layers, as MLPerf does.
        lr: Learning rate :math:`\eta`. It is larger than that of SGD, because :math:`\tau` is
            small.
        momentum: Momentum :math:`\mu`. The rate is part of :math:`v`, unlike in
            :class:`torch.optim.SGD`, so a change of the rate affects only later gradients.
        weight_decay: Weight decay :math:`\lambda`, added to the gradient.
        trust_coefficient: :math:`\tau`.
        use_lars: False for :math:`\rho = 1` everywhere.

    Raises:
        TypeError: A number is not a number.
        ValueError: A number is out of range.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> groups = [
        ...     {"params": [model.weight]},
        ...     {"params": [model.bias], "use_lars": False, "weight_decay": 0},
        ... ]
        >>> optimizer = LARS(groups, lr=2.0)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['momentum_buffer']

    References:
        Y. You, I. Gitman, B. Ginsburg: Large Batch Training of Convolutional Networks.
        arXiv:1708.03888
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        use_lars: bool = True,
    ) -> None:
        check_finite_at_least_0("momentum", momentum)
        check_finite_at_least_0("weight_decay", weight_decay)
        check_positive("trust_coefficient", trust_coefficient)
        defaults = {
            "lr": check_lr(lr, "LARS"),
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "use_lars": use_lars,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the
                loss.

        Returns:
            The closure's result; None without a closure.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ValueError(
                        "gradients must be dense, not sparse: make nn.Embedding with sparse=False"
                    )
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                update = parameter.grad.add(parameter, alpha=group["weight_decay"])
                rate = group["lr"]
                if group["use_lars"]:
                    rate = rate * _ratio(
                        parameter, parameter.grad, group["weight_decay"], group["trust_coefficient"]
                    )
                # The buffer contains the rate: a change of the rate affects only later gradients.
                buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(update.mul_(rate))
                parameter.sub_(buffer)
        return loss


def _ratio(
    weights: Tensor, gradient: Tensor, weight_decay: float, trust_coefficient: float
) -> Tensor:
    """Return the factor of a layer's rate, without dimensions; do not wait for the device."""
    # Squares overflow in float16.
    dtype = torch.promote_types(weights.dtype, torch.float32)
    weight_norm = torch.linalg.vector_norm(weights, dtype=dtype)
    gradient_norm = torch.linalg.vector_norm(gradient, dtype=dtype)
    ratio = trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)
    return torch.where((weight_norm > 0) & (gradient_norm > 0), ratio, 1.0)
