r"""Non-monotonically triggered averaged SGD: averages weights once validation stops improving.

References:
    Merity, Keskar and Socher 2017, Regularizing and Optimizing LSTM Language Models, arXiv
    1708.02182, algorithm 1.

    Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from mlbench_core.arguments import check_int
from mlbench_core.optim.pytorch.compression.compressed import CompressedOptimizer
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    OptimizerWrapper,
    evaluate,
    grouped_parameters,
)
from mlbench_core.optim.pytorch.updates.one_pass_sgd import sgd_step

__all__ = ["NTASGD", "AveragedSGD", "scaled_rate"]

_log = logging.getLogger(__name__)


class AveragedSGD(SGD):
    r"""SGD that also keeps the mean of all weights on the way, the starting point included.

    .. math:: x_k = x_{k-1} - \eta_k g_k, \qquad \bar x_k = \frac{1}{k + 1} \sum_{i=0}^{k} x_i

    It is averaged SGD with :math:`t_0 = 0` and :math:`\lambda = 0`. It differs from
    :class:`torch.optim.ASGD`, which computes its step with the rate of the step before, forgets the
    first step, and reads numbers back from a GPU in every step. The rate of the step before is
    wrong if the rate follows the length of each batch.

    The state of each parameter holds ``average`` and ``averaged``, the number of weights in it. A
    step in which a parameter has no gradient counts too: its weights stay, and the average moves
    toward them. A parameter is averaged from the first step on in which it requires a gradient.
    Before that, it is its own average.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        **options: Other options of :class:`torch.optim.SGD`.

    Example:
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> optimizer = AveragedSGD([weight], lr=1.0)
        >>> for gradient in (-1.0, -4.0):  # 0, 1, 5
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> weight.item(), optimizer.state[weight]["average"].item()
        (5.0, 2.0)
    """

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Take one step and add the weights after it to the averages.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the
                loss.

        Returns:
            The closure's result; None without a closure.
        """
        loss = evaluate(closure)
        averaged = []
        for parameter in grouped_parameters(self):
            if parameter.requires_grad or "average" in self.state.get(parameter, {}):
                averaged.append(parameter)
        # Before the step, because the mean contains the starting point.
        for parameter in averaged:
            if "average" not in self.state[parameter]:
                self.state[parameter].update(average=parameter.detach().clone(), averaged=1)
        sgd_step(self)
        for parameter in averaged:
            state = self.state[parameter]
            state["averaged"] += 1
            # The n-th value has the share 1 / n in the mean of n values.
            state["average"].lerp_(parameter, 1 / state["averaged"])
        return loss


class NTASGD:
    r"""A trigger that lets SGD average its weights once validation stops improving.

    :meth:`check` gets one value per validation, smaller being better. With :math:`v_t` the value of
    validation :math:`t = 0, 1, \dots` and the non-monotone interval :math:`n`, averaging starts at
    the first :math:`t` with

    .. math:: t > n \quad \text{and} \quad v_t > \min_{l \in \{0, \dots, t - n - 1\}} v_l,

    that is algorithm 1 of Merity et al.: a value is worse than the best of all but the last
    :math:`n` before it. With ``patience`` another rule decides: averaging starts when the best
    value is ``patience`` validations old.

    The :class:`torch.optim.SGD` in the optimizer is then replaced by an :class:`AveragedSGD` with
    the same groups and rates, for good. Validate within :meth:`averaged_weights`; training goes on
    with the weights that are not averaged.

    Every worker must give :meth:`check` the same value, that of all workers. A run that resumes
    from a checkpoint restores both this object and the optimizer, in any order, and continues as if
    it had never stopped.

    Attributes:
        optimizer: As given.
        interval: The non-monotone interval n; None with ``patience``.
        patience: As given.
        best: The best value so far; infinite before the first.
        checks_since_best: Number of values since the best one.
        is_averaging: True once the optimizer averages.

    Args:
        optimizer: An optimizer of this package that wraps a :class:`torch.optim.SGD`, for example a
            :class:`~mlbench_core.optim.pytorch.all_reduce.CentralizedSGD`.
        interval: Non-monotone interval n; None is 5.
        patience: Use the rule of patience instead: the number of values in a row that are not
            better than the best before them.

    Raises:
        TypeError: The optimizer does not wrap an SGD, or ``interval`` or ``patience`` is not an
            integer.
        ValueError: ``interval`` or ``patience`` is not positive, or both are given.

    Example:
        >>> from mlbench_core.optim.pytorch import CentralizedSGD
        >>> model = torch.nn.Linear(2, 1)
        >>> trigger = NTASGD(CentralizedSGD(model=model, lr=30.0), interval=2)
        >>> [trigger.check(perplexity) for perplexity in (90.0, 80.0, 81.0, 80.5, 82.0)]
        [False, False, False, False, True]
        >>> type(trigger.optimizer.optimizer).__name__
        'AveragedSGD'

    References:
        Merity, Keskar and Socher: Regularizing and Optimizing LSTM Language Models.
        arXiv:1708.02182
    """

    def __init__(
        self,
        optimizer: OptimizerWrapper,
        interval: int | None = None,
        *,
        patience: int | None = None,
    ) -> None:
        inside = getattr(optimizer, "optimizer", None)
        # SignSGD is a torch.optim.SGD by type only: its step is another one.
        is_sgd = isinstance(inside, SGD) and not isinstance(inside, CompressedOptimizer)
        if not isinstance(optimizer, OptimizerWrapper) or not is_sgd:
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__} around "
                f"{type(inside).__name__}; it must be one of mlbench_core.optim.pytorch "
                "that has a torch.optim.SGD inside, as CentralizedSGD has"
            )
        if interval is not None and patience is not None:
            raise ValueError(
                "interval and patience are both given, but "
                "select different rules: give only one of them"
            )
        self.optimizer = optimizer
        if patience is not None:
            patience = check_int("patience", patience)
        elif interval is not None:
            interval = check_int("interval", interval)
        else:
            # The paper's experiments have n = 5.
            interval = 5
        self.patience, self.interval = patience, interval
        self.best = math.inf
        self.checks_since_best = 0
        # The last n values, which a new one is not compared with.
        self._recent: list[float] = []
        self._best_before_recent = math.inf

    @property
    def is_averaging(self) -> bool:
        """Return whether the optimizer averages."""
        return isinstance(self.optimizer.optimizer, AveragedSGD)

    def check(self, value: float) -> bool:
        """Record the value of one validation, and start to average if the rule says so.

        Args:
            value: For example the perplexity of all workers' data; a nan counts as infinite.

        Returns:
            True if this value made the optimizer start to average.
        """
        # nan compares as False with everything and would never count as worse.
        if math.isnan(value):
            value = math.inf
        if value < self.best:
            self.best, self.checks_since_best = value, 0
        else:
            self.checks_since_best += 1
        if self.patience is not None:
            is_time = self.checks_since_best >= self.patience
        else:
            is_time = self._is_worse_than_before(value)
        if self.is_averaging or not is_time:
            return False
        _log.info("%g in a validation after a best of %g: averaging from here on", value, self.best)
        self._start_averaging()
        return True

    def _is_worse_than_before(self, value: float) -> bool:
        """Record a value; return whether it exceeds the best of all but the last n before it."""
        assert self.interval is not None
        is_worse = value > self._best_before_recent
        # The oldest value leaves the last n, and from now on new values are compared with it, too.
        self._recent.append(value)
        if len(self._recent) > self.interval:
            self._best_before_recent = min(self._best_before_recent, self._recent.pop(0))
        return is_worse

    def _start_averaging(self) -> None:
        """Swap the wrapped SGD for an averaging one with the same groups and state."""
        plain = self.optimizer.optimizer
        assert plain is not None
        averaged = AveragedSGD([dict(group) for group in plain.param_groups], **plain.defaults)
        # Momentum continues.
        averaged.load_state_dict(plain.state_dict())
        self.optimizer.optimizer = averaged

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averages in the parameters' place while the block runs.

        Before averaging has started, do nothing. Afterwards the parameters have their own values
        back, bit by bit, also after an exception. They stay the same tensors on the same memory.
        """
        averages = self._averages()
        own = {parameter: parameter.detach().clone() for parameter in averages}
        try:
            _copy(averages)
            yield
        finally:
            _copy(own)

    def _averages(self) -> dict[Tensor, Tensor]:
        """Return the average of each parameter that has one."""
        if not self.is_averaging:
            return {}
        averages: dict[Tensor, Tensor] = {}
        for parameter in grouped_parameters(self.optimizer):
            state = self.optimizer.state.get(parameter, {})
            if "average" in state:
                averages[parameter] = state["average"]
        return averages

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trigger; the averages are in the optimizer's own state."""
        return {
            "best": self.best,
            "checks_since_best": self.checks_since_best,
            "recent": list(self._recent),
            "best_before_recent": self._best_before_recent,
            "is_averaging": self.is_averaging,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; swap the wrapped optimizer if it is averaging.

        Args:
            state_dict: The state of an object with an optimizer of the same kind.

        Raises:
            ValueError: The state is from before the optimizer began to average, and this one has
                begun.
        """
        if self.is_averaging and not state_dict["is_averaging"]:
            raise ValueError(
                "the optimizer averages already, but the state does "
                "not: create the optimizer and NTASGD again"
            )
        self.best = state_dict["best"]
        self.checks_since_best = state_dict["checks_since_best"]
        self._recent = list(state_dict["recent"])
        self._best_before_recent = state_dict["best_before_recent"]
        # Plain SGD would accept the averages in the optimizer's own state, but not continue them.
        # That state may be loaded before or after this one.
        if state_dict["is_averaging"] and not self.is_averaging:
            self._start_averaging()


@torch.no_grad()
def _copy(values: dict[Tensor, Tensor]) -> None:
    """Copy each value into its parameter."""
    for parameter, value in values.items():
        parameter.copy_(value)


@contextlib.contextmanager
def scaled_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    r"""Multiply the learning rate of all groups while the block runs.

    This is for steps on batches of different length. With the mean loss over the :math:`\ell` words
    of each sequence, rate :math:`\eta \ell / T` gives every word the same weight, for every length
    of its batch.

    Args:
        optimizer: The optimizer; its schedulers do not notice.
        factor: For example :math:`\ell / T`.

    Example:
        >>> optimizer = SGD([torch.zeros(1)], lr=30.0)
        >>> with scaled_rate(optimizer, 35 / 70):
        ...     optimizer.param_groups[0]["lr"]
        15.0
        >>> optimizer.param_groups[0]["lr"]
        30.0
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        # Not in place: a rate that is a tensor could not be restored.
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
