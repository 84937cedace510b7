"""SGD whose workers exchange a few coordinates of each tensor, and remember the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.sparsified import (
    SparsifiedAggregation,
    check_size,
    coordinates_sent,
)
from mlbench_core.optim.pytorch.compression.compressed import (
    CompressedOptimizer,
    Params,
    sgd_defaults,
)
from mlbench_core.optim.pytorch.distributed import check_aggregation, grouped_parameters

__all__ = ["CentralizedSparsifiedSGD", "SparsifiedSGD"]


class SparsifiedSGD(CompressedOptimizer):
    r"""SGD that sends the largest coordinates of each tensor and remembers the rest (Mem-SGD).

    With gradient :math:`g_i` (and weight decay) of worker :math:`i` of :math:`n`, and the learning
    rate :math:`\eta`, for each tensor

    .. math::

        m_i &\leftarrow m_i + \eta g_i \\
        c_i &= \operatorname{comp}_k(m_i) \\
        x &\leftarrow x - \frac{1}{n} \sum_{i=1}^{n} c_i \\
        m_i &\leftarrow m_i - c_i

    The memory :math:`m_i` is in units of steps: the learning rate is inside.
    :class:`~mlbench_core.lr_scheduler.pytorch.lr.SparsifiedSGDLR` is the paper's schedule. For
    messages and bytes see
    :class:`~mlbench_core.aggregation.pytorch.compression.sparsified.SparsifiedAggregation`.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        weight_decay: L2 penalty.
        sparse_grad_size: :math:`k`, coordinates sent per tensor (an integer), or their share (a
            float).
        momentum: Momentum factor of the local direction, which then replaces :math:`g_i`.
        world_size: Number of workers; None takes that of the process group, when the optimizer is
            made.
        aggregation: The exchange with all its settings, instead of ``sparse_grad_size``: for
            example ``SparsifiedAggregation(None, size=0.01, random=True)``.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, ``world_size`` is not that of the
            process group, or ``sparse_grad_size`` contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

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

    aggregation: SparsifiedAggregation

    def __init__(
        self,
        params: Params | None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        sparse_grad_size: int | float = 10,
        *,
        momentum: float = 0,
        world_size: int | None = None,
        aggregation: SparsifiedAggregation | None = None,
    ) -> None:
        if aggregation is None:
            size = check_size(sparse_grad_size, "sparse_grad_size")
            aggregation = SparsifiedAggregation(None, size=size, world_size=world_size)
        check_aggregation(aggregation, SparsifiedAggregation, world_size=world_size)
        self._size = aggregation.size
        # The default of version 3.0 counts as left out.
        if sparse_grad_size not in (10, self._size):
            raise ValueError(
                f"sparse_grad_size must be left out or {self._size}, not "
                f"{sparse_grad_size}, because the aggregation decides on it: write "
                f"size={sparse_grad_size} in SparsifiedAggregation(...)"
            )
        super().__init__(params, sgd_defaults(lr, momentum, weight_decay), aggregation)

    def get_estimated_weights(self) -> list[Tensor]:
        r"""Return the weighted average of the iterates, for which the paper proves convergence.

        .. math:: \bar{x}_T = \frac{1}{\sum_t w_t} \sum_{t=0}^{T-1} w_t x_t, \qquad w_t = (a + t)^2

        with :math:`x_t` the parameters before step :math:`t` and the shift :math:`a` = d/k of the
        tensor of which the smallest share is sent, one for all parameters. A step that a gradient
        scaler skips is not counted.

        Returns:
            One tensor per parameter, in the order of the groups and their parameters, on its device
            in its dtype. It is the running average itself, so copy it before you write to it.
            Before the first step, copies of the parameters.

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
        weights: list[Tensor] = []
        for x in grouped_parameters(self):
            weights.append(self.state[x].get("estimated_weights", x.detach().clone()))
        return weights

    def update_estimated_weights(
        self, iteration: int | None = None, sparse_vector_size: int | None = None
    ) -> None:
        """Do nothing, because :meth:`step` updates the estimate; for scripts of version 3.0.

        Args:
            iteration: Not used; the steps are counted here.
            sparse_vector_size: Not used; the number of coordinates sent is known here.
        """

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group, group["lr"])

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        changed = self.aggregation.changed(name)
        if changed is None or not (parameter.is_contiguous() and agreed.is_contiguous()):
            super()._update(name, parameter, agreed, group)
            return
        # All other coordinates of the result are zero. Several workers may have sent a coordinate;
        # each writes the same result.
        x, steps = parameter.view(-1), agreed.view(-1).index_select(0, changed)
        x.index_copy_(0, changed, x.index_select(0, changed).sub_(steps))

    def _before_step(self) -> None:
        """Add the parameters before a step to the averages."""
        parameters = [x for x in grouped_parameters(self) if x.numel() > 0]
        # The theorem needs a shift of at least d/k for every tensor, so the one for all is the
        # largest.
        shifts = [x.numel() / coordinates_sent(self._size, x.numel()) for x in parameters]
        a = max(shifts, default=1.0)
        for x in parameters:
            state = self.state[x]
            t = state["step"] = state.get("step", -1) + 1
            if "estimated_weights" in state:
                state["estimated_weights"].lerp_(x, _newest_share(t, a))
            else:
                state["estimated_weights"] = x.detach().clone()


class CentralizedSparsifiedSGD(SparsifiedSGD):
    r"""SGD that sends the largest or random coordinates of each tensor and remembers the rest.

    See :class:`SparsifiedSGD`, which this is with the number of workers stated and the choice of
    coordinates.

    Args:
        random_sparse: Send random coordinates, the same on all workers, instead of the largest.
        world_size: Number of workers; None takes that of the process group. In a group of several,
            the default of 1 is refused rather than letting the workers train apart.
        average_world: Divide the sum over workers by their number; False leaves the sum.
        aggregation: The exchange with all its settings, instead of ``sparse_grad_size``,
            ``random_sparse`` and ``world_size``.

    Other arguments: see :class:`SparsifiedSGD`.

    Raises:
        ValueError: ``params`` or ``lr`` is missing, an option is out of range, ``world_size`` is
            not that of the process group, or an argument contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(100))
        >>> options = {"sparse_grad_size": 0.05, "random_sparse": True}
        >>> optimizer = CentralizedSparsifiedSGD([x], lr=1.0, **options)
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
        aggregation: SparsifiedAggregation | None = None,
    ) -> None:
        if aggregation is None:
            size = check_size(sparse_grad_size, "sparse_grad_size")
            aggregation = SparsifiedAggregation(
                None, size=size, random=random_sparse, world_size=world_size
            )
        # The default of 1 comes from version 3.0, and counts as left out.
        if world_size == 1:
            world_size = None
        check_aggregation(aggregation, SparsifiedAggregation, world_size=world_size)
        if random_sparse and not aggregation.random:
            raise ValueError(
                "random_sparse must be left out or False, not True, because the aggregation sends "
                "the largest coordinates: write random=True in SparsifiedAggregation(...)"
            )
        super().__init__(
            params, lr, weight_decay, sparse_grad_size, momentum=momentum, aggregation=aggregation
        )
        self._average = average_world


def _newest_share(t: int, a: float) -> float:
    r"""Return :math:`w_t / \sum_{s \le t} w_s` for :math:`w_t = (a + t)^2`.

    Example:
        >>> _newest_share(0, 3.0), _newest_share(1, 1.0)
        (1.0, 0.8)
    """
    # The closed form of the sum of (a + s)^2 over s = 0, ..., t.
    total = (t + 1) * (a * a + a * t + t * (2 * t + 1) / 6)
    return (a + t) ** 2 / total
