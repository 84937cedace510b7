"""Orthonormal updates of low rank for matrices, and AdamW for all other parameters (Dion)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.dion import DionAggregation, is_matrix
from mlbench_core.optim.pytorch.compression.compressed import (
    CompressedOptimizer,
    Params,
    adam_defaults,
)
from mlbench_core.optim.pytorch.distributed import check_aggregation

__all__ = ["Dion"]


class Dion(CompressedOptimizer):
    r"""Distributed orthonormal updates of low rank (Dion).

    :class:`~mlbench_core.aggregation.pytorch.compression.dion.DionAggregation` makes
    :math:`P Q^\top` of the gradients of a parameter with :math:`n` rows and :math:`m` columns, from
    a momentum of each worker. With the learning rate :math:`\eta` and the decoupled weight decay
    :math:`\lambda`,

    .. math:: x \leftarrow (1 - \eta \lambda) x - \eta \sqrt{n / m} \, P Q^\top.

    Parameters with fewer than two dimensions take the step of :class:`torch.optim.AdamW` with the
    average gradient.

    Implementations differ. Some scale by :math:`\sqrt{\max(1, n / m)}`. Some use AdamW for
    embeddings and for the last layer too: give those to another optimizer. Tensors with more than
    two dimensions, such as kernels, are matrices here. The authors' code has 0.95 as the second of
    ``betas``, and as rank a fraction of the smaller side of each matrix, 1 if none is given.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        betas: Decay of the running averages of AdamW.
        eps: Added to the denominator of AdamW.
        weight_decay: :math:`\lambda`, for all parameters.
        rank: Largest rank of an update. It is not the worker's number.
        world_size: Number of workers; None takes that of the process group, when the optimizer is
            made.
        aggregation: The exchange with all its settings, instead of ``rank``, for example
            ``DionAggregation(rank=16, momentum=0.9)``.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, ``world_size`` is not that of the
            process group, or ``rank`` contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Dion([x], lr=0.5)
        >>> x.grad = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
        >>> optimizer.step()
        >>> torch.allclose(x @ x.t(), 0.25 * torch.eye(2), atol=1e-6)  # orthonormal, times the rate
        True

    References:
        K. Ahn, B. Xu, N. Abreu, J. Langford: Dion: Distributed Orthonormalized Updates.
        arXiv:2504.05295
    """

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        aggregation: DionAggregation | None = None,
    ) -> None:
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        if aggregation is None:
            largest_rank = 8
            if rank is not None:
                largest_rank = rank
            aggregation = DionAggregation(rank=largest_rank, world_size=world_size)
        check_aggregation(aggregation, DionAggregation, world_size=world_size, rank=rank)
        super().__init__(params, defaults, aggregation)

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        # A copy, because the aggregation overwrites the tensors that it is given.
        return parameter.grad.clone()

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        if is_matrix(parameter):
            # A kernel is a matrix with one row per output channel.
            rows = len(parameter)
            parameter.add_(agreed, alpha=-lr * math.sqrt(rows / (parameter.numel() // rows)))
            return
        state = self.state[parameter]
        t = state["step"] = state.get("step", 0) + 1
        m = state.setdefault("exp_avg", torch.zeros_like(parameter))
        v = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        m.lerp_(agreed, 1 - beta1)
        v.mul_(beta2).addcmul_(agreed, agreed, value=1 - beta2)
        size = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"])
        parameter.addcdiv_(m, size, value=-lr / (1 - beta1**t))
