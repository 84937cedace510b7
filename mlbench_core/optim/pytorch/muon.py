"""Muon for matrices and AdamW for all other parameters, in one optimizer that can be wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from mlbench_core.arguments import check_at_least
from mlbench_core.optim.pytorch.distributed import check_lr, evaluate

__all__ = ["MuonAdamW"]


class MuonAdamW(Optimizer):
    r"""The step of :class:`torch.optim.Muon` for matrices, and of :class:`torch.optim.AdamW` for other parameters.

    With :math:`g` the gradient of an :math:`n \times m` matrix, Muon's step is

    .. math::

        b &\leftarrow \mu b + (1 - \mu) g \\
        x &\leftarrow (1 - \eta \lambda) x - 0.2 \sqrt{\max(n, m)} \; \eta
        \operatorname{NewtonSchulz}((1 - \mu) g + \mu b),

    where five Newton-Schulz iterations bring all singular values near 1. The factor gives the step the size of AdamW's,
    so that both share the learning rate and the weight decay. :class:`torch.optim.Muon` refuses parameters that are not
    matrices, and a wrapper of this library wraps one optimizer. This class makes one of the two.

    For distributed training give it to
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`, or as ``inner_optimizer`` to
    :class:`~mlbench_core.optim.pytorch.presets.DiLoCo`; the latter is known as MuLoCo.

    Args:
        params: Parameters, or groups of parameters. A group may have options of its own. With ``"use_muon": False``,
            its matrices take AdamW's step, as is usual for embeddings and the last layer.
        lr: Learning rate :math:`\eta`.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: Muon's momentum :math:`\mu`, with Nesterov's step.
        betas: Decay of AdamW's running averages of the gradient and of its square.
        eps: Added to AdamW's denominator.
        use_muon: False for AdamW's step everywhere.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: A number is out of range.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = MuonAdamW(model.parameters(), lr=0.02)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight]), sorted(optimizer.state[model.bias])
        (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])

    References:
        K. Jordan et al.: Muon: An optimizer for hidden layers in neural networks, kellerjordan.github.io/posts/muon.
        J. Liu et al.: Muon is Scalable for LLM Training. arXiv:2502.16982 (the factor).
        B. Thérien et al.: MuLoCo: Muon is a practical inner optimizer for DiLoCo. arXiv:2505.23725
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_muon: bool = True,
    ) -> None:
        # The optimizers that step() makes check the other options, but only at the first step.
        check_at_least("weight_decay", weight_decay, 0)
        check_at_least("momentum", momentum, 0)
        defaults = {"weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {"lr": check_lr(lr, "MuonAdamW"), **defaults, "use_muon": use_muon})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the loss.

        Returns:
            The closure's result; None without a closure.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            common = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            matrices = [parameter for parameter in present if group["use_muon"] and parameter.ndim == 2]
            others = [parameter for parameter in present if not group["use_muon"] or parameter.ndim != 2]
            if matrices:
                momentum = group["momentum"]
                self._let_step(Muon(matrices, **common, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
            if others:
                self._let_step(AdamW(others, **common, betas=group["betas"], eps=group["eps"]))
        return loss

    def _let_step(self, optimizer: Optimizer) -> None:
        """Let an optimizer of a part of the parameters take a step with their state, which this one keeps."""
        # New at each step, which takes microseconds: it always has the current groups, options and state.
        optimizer.state = self.state
        optimizer.step()
