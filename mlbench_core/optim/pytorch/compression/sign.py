"""Optimizers whose workers exchange one bit per weight (signSGD, EF-signSGD)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation
from mlbench_core.aggregation.pytorch.compression.sign import EFSignAggregation, SignAggregation
from mlbench_core.optim.pytorch.compression.compressed import (
    CompressedOptimizer,
    Params,
    sgd_defaults,
)
from mlbench_core.optim.pytorch.distributed import check_aggregation

__all__ = ["EFSignSGD", "SignSGD"]


class _OneBitSGD(CompressedOptimizer):
    """Base of the optimizers that send one bit per weight."""

    _kind: ClassVar[type[SignAggregation] | type[EFSignAggregation]]

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        *,
        world_size: int | None = None,
        aggregation: CompressedAggregation | None = None,
    ) -> None:
        defaults = sgd_defaults(lr, momentum, weight_decay, dampening, nesterov)
        if aggregation is None:
            aggregation = self._kind(world_size=world_size)
        check_aggregation(aggregation, self._kind, world_size=world_size)
        super().__init__(params, defaults, aggregation)


class SignSGD(_OneBitSGD, SGD):  # type: ignore[misc]  # their step takes a tracker too
    r"""SignSGD with majority vote, which sends one bit per weight.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` (gradient,
    weight decay, momentum) and votes with its signs; with :math:`k` workers and the learning rate
    :math:`\eta`,

    .. math:: x \leftarrow x - \eta \operatorname{sign}\Bigl(\sum_{i=1}^{k}
      \operatorname{sign}(d_i)\Bigr).

    With momentum this is Signum. A tie moves nothing. For zeros and bytes see
    :class:`~mlbench_core.aggregation.pytorch.compression.sign.SignAggregation`. Every step has the
    size :math:`\eta`, so the rate must decay for the parameters to settle. The class is a
    :class:`torch.optim.SGD`, since its options are those of SGD; only the step is another one.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`, the distance that each parameter moves per step.
        momentum: Momentum factor of the local direction.
        weight_decay: L2 penalty, part of the direction.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        world_size: Number of workers; None takes that of the process group, when the optimizer is
            made.
        aggregation: The exchange, for example ``SignAggregation(process_group=group)`` for a
            subgroup of workers.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of
            the process group.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> optimizer = SignSGD([x], lr=0.25)
        >>> x.grad = torch.tensor([0.001, -30.0])
        >>> optimizer.step()
        >>> x.tolist()
        [0.75, -0.75]

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimisation for
        Non-Convex Problems. arXiv:1802.04434
    """

    _kind = SignAggregation

    def __setstate__(self, state: dict[str, Any]) -> None:
        # SGD's own method would add options that this class does not have.
        Optimizer.__setstate__(self, state)

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group)

    def _rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])


class EFSignSGD(_OneBitSGD):
    r"""Scaled signs with error feedback, which send one bit per weight and converge like SGD.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` and, for each
    tensor of :math:`d` coordinates, with the learning rate :math:`\eta` and :math:`k` workers,

    .. math::

        p_i &= \eta d_i + e_i \\
        \Delta_i &= \frac{\lVert p_i \rVert_1}{d} \operatorname{sign}(p_i) \\
        e_i &\leftarrow p_i - \Delta_i \\
        x &\leftarrow x - \frac{1}{k} \sum_{i=1}^{k} \Delta_i

    The memory :math:`e_i` is in units of steps, as in the paper, and contains the learning rate. So
    :math:`x - \frac{1}{k} \sum_i e_i` moves as SGD does under any schedule. Steps that are sent
    later keep the rate of their own step.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        aggregation: The exchange, for example ``EFSignAggregation(process_group=group)`` for a
            subgroup of workers.

    Other arguments: see :class:`SignSGD`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of
            the process group.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = EFSignSGD([x], lr=1.0)
        >>> x.grad = torch.tensor([3.0, -1.0])
        >>> optimizer.step()
        >>> x.tolist(), optimizer.aggregation.memory("group0.0").tolist()
        ([-2.0, 2.0], [1.0, 1.0])

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes. arXiv:1901.09847
    """

    _kind = EFSignAggregation

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        # The rate goes into the memory, so that a later rate does not rescale errors of earlier
        # steps.
        return self._direction(parameter, group, group["lr"])
