"""Local momentum, of which the workers share only the largest cosine coefficients (DeMo)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.demo import DeMoAggregation
from mlbench_core.aggregation.pytorch.compression.sign import signs_or_nan
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.optim.pytorch.compression.compressed import CompressedOptimizer, Params
from mlbench_core.optim.pytorch.distributed import check_aggregation

__all__ = ["DeMo"]


class DeMo(CompressedOptimizer):
    r"""Decoupled momentum: each worker shares only the largest cosine coefficients of its momentum.

    With gradient :math:`g_i` of worker :math:`i` of :math:`k` and the learning rate :math:`\eta`,

    .. math::

        m_i &\leftarrow \beta m_i + \eta g_i \\
        q_i &= \operatorname{top-k}(\operatorname{DCT}(m_i)) \\
        m_i &\leftarrow m_i - \operatorname{DCT}^{-1}(q_i) \\
        x &\leftarrow x - \eta \operatorname{sign}\Bigl(
            \operatorname{DCT}^{-1}\Bigl(\frac{1}{k} \sum_i q_i\Bigr)\Bigr).

    The momenta of the workers differ and are never averaged. For the blocks and the bytes see
    :class:`~mlbench_core.aggregation.pytorch.compression.demo.DeMoAggregation`.

    :math:`\beta` is the option ``momentum`` of the first parameter group, which schedulers such as
    :class:`torch.optim.lr_scheduler.OneCycleLR` may change; at first it is the ``decay`` of the
    aggregation.

    Implementations differ. The sign is that of the authors' code; every weight then moves by
    :math:`\eta`, so good rates are those of Adam. This includes weights whose gradient is 0, if
    their block has others, because a cosine covers the whole block. With ``sign=False``, :math:`x`
    moves by the transformed average itself, which contains the rate already. The authors' code
    divides each coefficient by the number of workers that sent it, as
    ``DeMoAggregation(mean_of_senders=True)`` does.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        weight_decay: Decoupled weight decay :math:`\lambda`: :math:`x \leftarrow (1 - \eta \lambda)
            x` before the step.
        sign: True to step along the sign.
        world_size: Number of workers; None takes that of the process group, when the optimizer is
            made.
        aggregation: The exchange with all its settings, for example ``DeMoAggregation(decay=0.99,
            top_k=8)``.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of
            the process group.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> optimizer = DeMo([x], lr=0.25)
        >>> x.grad = torch.tensor([0.1, -30.0])
        >>> optimizer.step()
        >>> x.tolist()
        [0.75, -0.75]

    References:
        B. Peng, J. Quesnelle, D. Kingma: DeMo: Decoupled Momentum Optimization. arXiv:2411.19870
    """

    aggregation: DeMoAggregation

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        *,
        sign: bool = True,
        world_size: int | None = None,
        aggregation: DeMoAggregation | None = None,
    ) -> None:
        check_finite_at_least_0("weight_decay", weight_decay)
        if aggregation is None:
            aggregation = DeMoAggregation(world_size=world_size)
        check_aggregation(aggregation, DeMoAggregation, world_size=world_size)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "sign": sign,
            "momentum": aggregation.decay,
        }
        super().__init__(params, defaults, aggregation)

    def _before_step(self) -> None:
        """Give the aggregation the decay, which a scheduler may have changed."""
        self.aggregation.decay = self.param_groups[0]["momentum"]

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        # The rate goes into the momentum, so that a later rate does not rescale gradients of
        # earlier steps.
        return parameter.grad * group["lr"]

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if group["sign"]:
            parameter.add_(signs_or_nan(agreed), alpha=-float(group["lr"]))
        else:
            parameter.sub_(agreed)
