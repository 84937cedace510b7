"""Average weights and both moments of Adam, each in its own period (DES-LOC)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import check_average
from mlbench_core.aggregation.pytorch.local_steps.periodic import PeriodicAggregation, count_step
from mlbench_core.arguments import check_int

__all__ = ["DESLOCAggregation", "check_adam"]


class DESLOCAggregation(PeriodicAggregation):
    r"""Average weights, first moments and second moments of local Adam in three periods.

    Let :math:`t = 1, 2, \ldots` count the steps. After step :math:`t`, with the weights
    :math:`x_i`, the first moments :math:`u_i` and the second moments :math:`v_i` of worker
    :math:`i` of :math:`k`,

    .. math::

        x_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} x_j \quad \text{if } K_x \mid t \\
        u_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} u_j \quad \text{if } K_u \mid t \\
        v_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} v_j \quad \text{if } K_v \mid t.

    **Ours:** an averaged first moment is limited to :math:`|u_i| \le C \sqrt{v_i}` in each
    coordinate, with

    .. math:: C = \frac{1 - \beta_1}{\sqrt{(1 - \beta_2)(1 - \beta_1^2 / \beta_2)}}.

    Moments of the same gradients are always within this limit, by the inequality of Cauchy and
    Schwarz, and so are averages of both at the same step. But the average of the first moments may
    be large where a worker has had small gradients or none, for example those of a pixel that is
    black in its images, or of a rare word. Its second moment is about zero there, so without the
    limit, a step of Adam divides by about ``eps``.

    The paper itself was not read. According to secondary texts, its algorithm averages the old
    weights and moments between the gradient and the step. According to the same texts, the version
    that its proofs analyze averages the weights after the step, as here, and the moments before the
    step uses them.

    All tensors that are due travel in one all-reduce, in the dtype of the weights (those of at
    least 8 MiB in separate ones). So a worker sends :math:`b d (1 / K_x + 1 / K_u + 1 / K_v)` bytes
    per step on average for :math:`d` weights of :math:`b` bytes, and the floating-point buffers
    with the weights. With the default periods this is half of what equal periods :math:`K_x` need.
    See :class:`PeriodicAggregation` for the counters, and for layers that are frozen or added
    later.

    Every worker keeps its own number of steps for Adam's bias correction. These numbers agree if
    every worker has a gradient of every parameter in every step. A worker that has had no gradient
    of a parameter yet counts with moments of zero, and gets none.

    Attributes:
        period: :math:`K_x`.
        first_moment_period: :math:`K_u`.
        second_moment_period: :math:`K_v`.

    Args:
        world_size: Number of workers; None takes that of the process group.
        period: :math:`K_x`, the number of steps from one average of the weights to the next.
        first_moment_period: :math:`K_u`; None for :math:`3 K_x`.
        second_moment_period: :math:`K_v`; None for :math:`6 K_x`.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        TypeError: A period is not an integer.
        ValueError: A period is not positive, or ``world_size`` is not the number of workers in the
            process group.

    Example:
        >>> aggregation = DESLOCAggregation(period=4)
        >>> aggregation.first_moment_period, aggregation.second_moment_period
        (12, 24)

    References:
        A. Iacob et al.: DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
        Foundation Models. arXiv:2505.22549
    """

    def __init__(
        self,
        world_size: int | None = None,
        period: int = 8,
        *,
        first_moment_period: int | None = None,
        second_moment_period: int | None = None,
        use_cuda: bool = False,
        process_group: Any = None,
    ) -> None:
        inside = AllReduceAggregation(world_size, use_cuda=use_cuda, process_group=process_group)
        super().__init__(inside, period)
        if first_moment_period is None:
            first_moment_period = 3 * self.period
        if second_moment_period is None:
            second_moment_period = 6 * self.period
        self.first_moment_period = check_int("first_moment_period", first_moment_period)
        self.second_moment_period = check_int("second_moment_period", second_moment_period)
        self._parameters: Mapping[str, Tensor] = {}
        self._state: Mapping[Tensor, Any] = {}
        self._groups: Sequence[Mapping[str, Any]] = ()

    def watch(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Take the moments in the next calls from an optimizer.

        Args:
            parameters: By the names that :meth:`aggregate` gets.
            optimizer: Adam or AdamW without ``amsgrad``.

        Raises:
            TypeError: It is another optimizer.
        """
        check_adam(optimizer)
        self._parameters, self._state = parameters, optimizer.state
        self._groups = optimizer.param_groups

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Count a step of every tensor, and average those that are due, with their moments.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
        """
        check_average(op)
        count_step(self._counts, tensors)
        due = {name: tensor for name, tensor in tensors.items() if self._due(name)}
        if not due:
            return
        sent = {}
        for name, tensor in self._traveling(due).items():
            state = {}
            if name in self._parameters:
                state = self._state.get(self._parameters[name], {})
            for key in self._due(name):
                if key == "weights":
                    sent[name] = tensor
                elif state:
                    sent[f"{key} of {name}"] = state[key]
                else:
                    # All workers must send it, but the average of a missing moment is not kept.
                    sent[f"{key} of {name}"] = torch.zeros_like(tensor)
        self._delegate(self.inside, sent, op)
        self._limit_first_moments(due)

    def _limit_first_moments(self, names: Iterable[str]) -> None:
        """Limit first moments that were averaged now, without the second moments."""
        betas = {}
        for group in self._groups:
            betas.update(dict.fromkeys(group["params"], group["betas"]))
        for name in names:
            parameter = self._parameters.get(name)
            # A buffer has no moments, and the optimizer may leave out frozen parameters.
            if parameter is None or parameter not in betas:
                continue
            if self._due(name)[-1] != "exp_avg":
                continue
            first, second = betas[parameter]
            state = self._state.get(parameter)
            # Otherwise a moment may be larger than any multiple of the other's root.
            if state and first**2 < second:
                ratio = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
                limit = state["exp_avg_sq"].sqrt().mul_(ratio)
                state["exp_avg"].clamp_(-limit, limit)

    def _due(self, name: str) -> list[str]:
        """Return what is due of a tensor: its weights, or moments by their keys in the state."""
        periods = {"weights": self.period}
        # Buffers have no moments.
        if name in self._parameters:
            periods["exp_avg"] = self.first_moment_period
            periods["exp_avg_sq"] = self.second_moment_period
        return [key for key, period in periods.items() if self._counts[name] % period == 0]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the moments, which belong to an optimizer."""
        return {**super().__getstate__(), "_parameters": {}, "_state": {}, "_groups": ()}


def check_adam(optimizer: Optimizer) -> None:
    """Raise a TypeError if an optimizer is not Adam or AdamW without ``amsgrad``."""
    is_adam = isinstance(optimizer, (Adam, AdamW))
    if not is_adam or any(group["amsgrad"] for group in optimizer.param_groups):
        raise TypeError(
            "optimizer must be Adam or AdamW without amsgrad, not "
            f"{type(optimizer).__name__}: only their two moments can be averaged"
        )
