"""Muon for matrices and AdamW for all other parameters, in one optimizer that can be wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from mlbench_core.arguments import check_at_least
from mlbench_core.optim.pytorch.distributed import check_lr, evaluate

__all__ = ["MuonAdamW"]


class MuonAdamW(Optimizer):
    r"""The step of :class:`torch.optim.Muon` for matrices, and AdamW's for all other parameters.

    With :math:`g` the gradient of an :math:`n \times m` matrix, Muon's step is

    .. math::

        b &\leftarrow \mu b + (1 - \mu) g \\
        x &\leftarrow (1 - \eta \lambda) x - 0.2 \sqrt{\max(n, m)} \; \eta
        \operatorname{NewtonSchulz}((1 - \mu) g + \mu b),

    where five Newton-Schulz iterations bring all singular values near 1. The factor gives the step
    the size of AdamW's, so that both share the learning rate and the weight decay.
    :class:`torch.optim.Muon` refuses parameters that are not matrices, and a wrapper of this
    library wraps one optimizer. This class makes one of the two.

    With ``kernels``, a tensor with more than two dimensions, such as the kernel of a convolution,
    is a matrix with one row per output channel. Without, it takes AdamW's step.

    For distributed training give it to
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`, or as
    ``inner_optimizer`` to :class:`~mlbench_core.optim.pytorch.local_steps.periodic.DiLoCo`; the
    latter is known as MuLoCo.

    Args:
        params: Parameters, or groups of parameters. A group may have its own options. With
            ``"use_muon": False``, its matrices take AdamW's step, as is usual for embeddings and
            the last layer.
        lr: Learning rate :math:`\eta`.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: Muon's momentum :math:`\mu`, with Nesterov's step.
        betas: Decay of AdamW's running averages of the gradient and of its square.
        eps: Added to AdamW's denominator.
        use_muon: False for AdamW's step everywhere.
        kernels: True for Muon's step on tensors with more than two dimensions.

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
        K. Jordan et al.: Muon: An optimizer for hidden layers in neural networks,
        kellerjordan.github.io/posts/muon

        J. Liu et al.: Muon is Scalable for LLM Training. arXiv:2502.16982 (the factor)

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
        kernels: bool = False,
    ) -> None:
        # The optimizers that step() makes check the other options, but only at the first step.
        check_at_least("weight_decay", weight_decay, 0)
        check_at_least("momentum", momentum, 0)
        defaults = {"weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(
            params,
            {"lr": check_lr(lr, "MuonAdamW"), **defaults, "use_muon": use_muon, "kernels": kernels},
        )

    def _add_options(self, **options: Any) -> None:
        """Add options of a subclass to all groups that do not have them."""
        self.defaults.update(options)
        for group in self.param_groups:
            for name, value in options.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the
                loss.

        Returns:
            The closure's result; None without a closure.

        Raises:
            ValueError: The gradient of a matrix is sparse.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            matrices: list[Tensor] = []
            others: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # A checkpoint from before this option has no "kernels".
                is_kernel = parameter.ndim > 2 and group.get("kernels", False)
                if group["use_muon"] and (parameter.ndim == 2 or is_kernel):
                    matrices.append(parameter)
                else:
                    others.append(parameter)
            if matrices:
                self._take_matrix_step(matrices, group)
            if others:
                options = {name: group[name] for name in ("lr", "weight_decay", "betas", "eps")}
                optimizer = AdamW(others, **options)
                # A new optimizer at each step takes microseconds, and always has the current groups
                # and options.
                optimizer.state = self.state
                optimizer.step()
        return loss

    def _take_matrix_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take a step on parameters with at least two dimensions, as matrices."""
        for parameter in parameters:
            if parameter.grad.is_sparse:  # type: ignore[union-attr]
                raise ValueError(
                    "gradients must be dense, not sparse: make nn.Embedding with sparse=False"
                )
        # Copies of kernels in channels-last order, because their memory has no view as such a
        # matrix.
        matrices = [parameter.detach().flatten(1) for parameter in parameters]
        for matrix, parameter in zip(matrices, parameters, strict=True):
            matrix.grad = parameter.grad.flatten(1)  # type: ignore[union-attr]
        # The same dictionaries, so that this optimizer keeps the values that the step writes.
        self._update_matrices(matrices, [self.state[parameter] for parameter in parameters], group)
        for matrix, parameter in zip(matrices, parameters, strict=True):
            if matrix.data_ptr() != parameter.data_ptr():
                parameter.copy_(matrix.view_as(parameter))

    def _update_matrices(
        self, matrices: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        """Take Muon's step on matrices with gradients; subclasses take theirs."""
        options = {name: group[name] for name in ("lr", "weight_decay", "momentum")}
        optimizer = Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
        for matrix, state in zip(matrices, states, strict=True):
            optimizer.state[matrix] = state
        optimizer.step()
