"""Optimizers that send signs or a few coordinates."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.sign import EFSignAggregation, SignAggregation
from mlbench_core.aggregation.pytorch.sparsified import SparsifiedAggregation, check_size, coordinates_sent
from mlbench_core.optim.pytorch.compressed import CompressedOptimizer, Params, sgd_defaults

__all__ = ["CentralizedSparsifiedSGD", "EFSignSGD", "SignSGD", "SparsifiedSGD"]


class _OneBitSGD(CompressedOptimizer):
    """Base of the optimizers that send one bit per weight."""

    _make_aggregation: ClassVar[type[SignAggregation] | type[EFSignAggregation]]

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
        process_group: Any = None,
    ) -> None:
        defaults = sgd_defaults(lr, momentum, weight_decay, dampening, nesterov)
        aggregation = self._make_aggregation(world_size=world_size, process_group=process_group)
        super().__init__(params, defaults, aggregation)


class SignSGD(_OneBitSGD, SGD):  # type: ignore[misc]  # their step takes a tracker too
    r"""SignSGD with majority vote, which sends one bit per weight.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` (gradient, weight decay, momentum)
    and votes with its signs; with :math:`k` workers and the learning rate :math:`\eta`,

    .. math:: x \leftarrow x - \eta \operatorname{sign}\Bigl(\sum_{i=1}^{k} \operatorname{sign}(d_i)\Bigr).

    With momentum this is Signum. A tie moves nothing. For zeros and bytes see
    :class:`~mlbench_core.aggregation.pytorch.sign.SignAggregation`. Every step has the size :math:`\eta`, so
    the rate must decay for the parameters to settle. The class is a :class:`torch.optim.SGD`, since its options are
    those of SGD; only the step is another one.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`, the distance that each parameter moves per step.
        momentum: Momentum factor of the local direction.
        weight_decay: L2 penalty, part of the direction.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        world_size: Number of workers; None takes that of the process group, when the optimizer is made.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the process group.
        TypeError: An option is not a number.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> optimizer = SignSGD([x], lr=0.25)
        >>> x.grad = torch.tensor([0.001, -30.0])
        >>> optimizer.step()
        >>> x.tolist()
        [0.75, -0.75]

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimisation for Non-Convex Problems.
        arXiv:1802.04434
    """

    _make_aggregation = SignAggregation

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # SGD's would add options that this one does not have

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group)

    def _rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])


class EFSignSGD(_OneBitSGD):
    r"""Scaled signs with error feedback, which send one bit per weight and converge like SGD.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` and, for each tensor of :math:`d`
    coordinates, with the learning rate :math:`\eta` and :math:`k` workers,

    .. math::

        p_i &= \eta d_i + e_i \\
        \Delta_i &= \frac{\lVert p_i \rVert_1}{d} \operatorname{sign}(p_i) \\
        e_i &\leftarrow p_i - \Delta_i \\
        x &\leftarrow x - \frac{1}{k} \sum_{i=1}^{k} \Delta_i

    The memory :math:`e_i` is in units of steps, as in the paper, and contains the learning rate. So
    :math:`x - \frac{1}{k} \sum_i e_i` moves as SGD does under any schedule. Steps that are sent later keep the rate of
    their own step.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        momentum: Momentum factor of the local direction.
        weight_decay: L2 penalty, part of the direction.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        world_size: Number of workers; None takes that of the process group, when the optimizer is made.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the process group.
        TypeError: An option is not a number.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = EFSignSGD([x], lr=1.0)
        >>> x.grad = torch.tensor([3.0, -1.0])
        >>> optimizer.step()
        >>> x.tolist(), optimizer.aggregation.memory("group0.0").tolist()
        ([-2.0, 2.0], [1.0, 1.0])

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
        arXiv:1901.09847
    """

    _make_aggregation = EFSignAggregation

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group).mul_(group["lr"])


class SparsifiedSGD(CompressedOptimizer):
    r"""SGD that sends the :math:`k` largest coordinates of each tensor and remembers the rest (Mem-SGD).

    With gradient :math:`g_i` (and weight decay) of worker :math:`i` of :math:`n`, and the learning rate
    :math:`\eta`, for each tensor

    .. math::

        m_i &\leftarrow m_i + \eta g_i \\
        c_i &= \operatorname{comp}_k(m_i) \\
        x &\leftarrow x - \frac{1}{n} \sum_{i=1}^{n} c_i \\
        m_i &\leftarrow m_i - c_i

    The memory :math:`m_i` is in units of steps: the learning rate is inside.
    :class:`~mlbench_core.lr_scheduler.pytorch.lr.SparsifiedSGDLR` is the paper's schedule. For messages and bytes see
    :class:`~mlbench_core.aggregation.pytorch.sparsified.SparsifiedAggregation`.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        weight_decay: L2 penalty.
        sparse_grad_size: :math:`k`, coordinates sent per tensor (an integer), or their share (a float).
        random_sparse: Send random coordinates, the same on all workers, instead of the largest.
        momentum: Momentum factor of the local direction, which then stands for :math:`g_i`.
        world_size: Number of workers; None takes that of the process group, when the optimizer is made.
        average_world: Divide the sum over workers by their number; False leaves the sum.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the process group.
        TypeError: An option is not a number.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = SparsifiedSGD([x], lr=1.0, sparse_grad_size=1)
        >>> x.grad = torch.tensor([1.0, -3.0, 2.0])
        >>> optimizer.step()
        >>> x.tolist(), optimizer.aggregation.memory("group0.0").tolist()
        ([0.0, 3.0, 0.0], [1.0, 0.0, 2.0])

    References:
        Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. arXiv:1809.07599
    """

    def __init__(
        self,
        params: Params | None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        sparse_grad_size: int | float = 10,
        *,
        random_sparse: bool = False,
        momentum: float = 0,
        world_size: int | None = None,
        average_world: bool = True,
        process_group: Any = None,
    ) -> None:
        self._size = check_size(sparse_grad_size, "sparse_grad_size")
        aggregation = SparsifiedAggregation(
            None, size=self._size, random=random_sparse, world_size=world_size, process_group=process_group
        )
        super().__init__(params, sgd_defaults(lr, momentum, weight_decay), aggregation, average_world)

    def get_estimated_weights(self) -> list[Tensor]:
        r"""Return the weighted average of the iterates, the estimate for which the paper proves convergence.

        .. math:: \bar{x}_T = \frac{1}{\sum_t w_t} \sum_{t=0}^{T-1} w_t x_t, \qquad w_t = (a + t)^2

        with :math:`x_t` the parameters before step :math:`t` and the shift :math:`a` = d/k of the tensor of which the
        smallest share is sent, one for all parameters. A step that a gradient scaler skips is not counted.

        Returns:
            One tensor per parameter, in the order of the groups and their parameters, on its device in its dtype. It is
            the running average itself, so copy it before you write to it. Before the first step, copies of the
            parameters.

        Example:
            >>> import torch
            >>> x = torch.nn.Parameter(torch.tensor([2.0]))
            >>> optimizer = SparsifiedSGD([x], lr=1.0)
            >>> for _ in range(2):  # x is 2, then 1
            ...     x.grad = torch.tensor([1.0])
            ...     optimizer.step()
            >>> optimizer.get_estimated_weights()  # (1 * 2 + 4 * 1) / 5
            [tensor([1.2000])]
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return [self.state[p].get("estimated_weights", p.detach().clone()) for p in parameters]

    def update_estimated_weights(self, iteration: int | None = None, sparse_vector_size: int | None = None) -> None:
        """Do nothing, because :meth:`step` keeps the estimate up to date; for scripts of version 3.0.

        Args:
            iteration: Not used; the steps are counted here.
            sparse_vector_size: Not used; the number of coordinates sent is known here.
        """

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group).mul_(group["lr"])

    def _before_step(self) -> None:
        """Add the parameters before a step to the averages."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.numel() > 0]
        a = max((p.numel() / coordinates_sent(self._size, p.numel()) for p in parameters), default=1.0)
        for x in parameters:
            state = self.state[x]
            t = state["step"] = state.get("step", -1) + 1
            average = state.setdefault("estimated_weights", x.detach().clone())
            average.lerp_(x, _newest_share(t, a))


class CentralizedSparsifiedSGD(SparsifiedSGD):
    r"""SGD that sends a few coordinates of each tensor, the largest or random ones, and remembers the rest.

    See :class:`SparsifiedSGD`, which this is with the number of workers stated and the choice of coordinates.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate.
        weight_decay: L2 penalty.
        sparse_grad_size: Coordinates sent per tensor (an integer), or their share (a float).
        random_sparse: Send random coordinates, the same on all workers, instead of the largest.
        world_size: Number of workers; None takes that of the process group. In a group of several, the default of 1 is
            refused rather than letting the workers train apart.
        average_world: Divide the sum over workers by their number; False leaves the sum.
        momentum: Momentum factor of the local direction.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``params`` or ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the
            process group.
        TypeError: An option is not a number.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(100))
        >>> optimizer = CentralizedSparsifiedSGD([x], lr=1.0, sparse_grad_size=0.05, random_sparse=True)
        >>> x.grad = torch.ones(100)
        >>> optimizer.step()
        >>> x.count_nonzero()
        tensor(5)

    References:
        Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. arXiv:1809.07599
    """

    def __init__(
        self,
        params: Params | None = None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        sparse_grad_size: int | float = 10,
        random_sparse: bool = False,
        world_size: int | None = 1,
        average_world: bool = True,
        *,
        momentum: float = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            weight_decay,
            sparse_grad_size,
            random_sparse=random_sparse,
            momentum=momentum,
            world_size=world_size,
            average_world=average_world,
            process_group=process_group,
        )


def _newest_share(t: int, a: float) -> float:
    r"""Return :math:`w_t / \sum_{s \le t} w_s` for :math:`w_t = (a + t)^2`.

    Example:
        >>> _newest_share(0, 3.0), _newest_share(1, 1.0)
        (1.0, 0.8)
    """
    # The closed form of the sum of (a + s)^2 over s = 0, ..., t.
    total = (t + 1) * (a * a + a * t + t * (2 * t + 1) / 6)
    return (a + t) ** 2 / total
