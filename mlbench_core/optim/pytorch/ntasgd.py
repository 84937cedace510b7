r"""Non-monotonically triggered averaged SGD: plain SGD until validation stands still, then SGD with averaged weights.

References:
    Merity, Keskar and Socher 2017, Regularizing and Optimizing LSTM Language Models, arXiv 1708.02182, algorithm 1.

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

from mlbench_core.optim.pytorch.generic import Closure
from mlbench_core.optim.pytorch.wrapper import OptimizerWrapper

__all__ = ["NTASGD", "AveragedSGD", "scaled_rate"]

_log = logging.getLogger(__name__)


class AveragedSGD(SGD):
    r"""SGD that also keeps the mean of all weights on the way, the starting point included.

    .. math:: x_k = x_{k-1} - \eta_k g_k, \qquad \bar x_k = \frac{1}{k + 1} \sum_{i=0}^{k} x_i

    It is averaged SGD with :math:`t_0 = 0` and :math:`\lambda = 0`. :class:`torch.optim.ASGD` computes its step with
    the rate of the step before, which matters where the rate follows the length of each batch, forgets the first step,
    and reads numbers back from a GPU in every step; this one does neither.

    The state of each parameter holds ``average`` and ``averaged``, how many weights are in it. Without a step there is
    none, and the parameter is its own average.

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
        """Take one step and take the weights after it into the averages.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the loss.

        Returns:
            What the closure returned; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepping = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in stepping:
            if "average" not in self.state[parameter]:
                self.state[parameter].update(average=parameter.detach().clone(), averaged=1)
        _plain_step(self)
        for parameter in stepping:
            state = self.state[parameter]
            state["averaged"] += 1
            state["average"].lerp_(parameter, 1 / state["averaged"])
        return loss


def _plain_step(optimizer: SGD) -> None:
    """SGD's step without hooks, which torch adds to a class once it has an object: they would run twice."""
    step: Any = SGD.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


class NTASGD:
    r"""Decides when SGD has come as far as it can, and lets it average from then on.

    It is told a value of each validation, smaller being better. When the best is ``patience`` values old, the SGD
    inside the optimizer is swapped for an :class:`AveragedSGD` with the same groups and rates, for good. Validate
    within :meth:`averaged_weights`; training goes on with the weights that are not averaged.

    Every worker must tell it the same value, that of all workers. A run that goes on from a checkpoint restores both
    this object and the optimizer, in any order, and goes on as if it had never stopped.

    Attributes:
        optimizer: As given.
        patience: As given.
        best: The best value so far; infinite before the first.
        checks_since_best: How many values came since.
        is_averaging: Whether the optimizer averages.

    Args:
        optimizer: An optimizer of this package whose inside is a :class:`torch.optim.SGD`, for example a
            :class:`~mlbench_core.optim.pytorch.centralized.CentralizedSGD`.
        patience: How many values in a row may be no better than the best before them.

    Raises:
        TypeError: The optimizer has no SGD inside.
        ValueError: ``patience`` is not positive.

    Example:
        >>> from mlbench_core.optim.pytorch import CentralizedSGD
        >>> model = torch.nn.Linear(2, 1)
        >>> trigger = NTASGD(CentralizedSGD(model=model, lr=30.0), patience=2)
        >>> [trigger.check(perplexity) for perplexity in (90.0, 80.0, 81.0, 80.5)]
        [False, False, False, True]
        >>> type(trigger.optimizer.optimizer).__name__
        'AveragedSGD'
    """

    def __init__(self, optimizer: OptimizerWrapper, patience: int = 5) -> None:
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(optimizer, OptimizerWrapper) or not isinstance(inside, SGD):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__} around {type(inside).__name__}; it must be one of "
                "mlbench_core.optim.pytorch that has a torch.optim.SGD inside, as CentralizedSGD has"
            )
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1")
        self.optimizer = optimizer
        self.patience = patience
        self.best = math.inf
        self.checks_since_best = 0

    @property
    def is_averaging(self) -> bool:
        """Whether the optimizer averages."""
        return isinstance(self.optimizer.optimizer, AveragedSGD)

    def check(self, value: float) -> bool:
        """Take the value of one validation, and start to average if it is time.

        Args:
            value: For example the perplexity of all workers' data; a nan is no improvement.

        Returns:
            Whether this value made the optimizer start to average.
        """
        if value < self.best:
            self.best, self.checks_since_best = value, 0
        else:
            self.checks_since_best += 1
        if self.is_averaging or self.checks_since_best < self.patience:
            return False
        _log.info("no improvement on %g in %d validations: averaging from here on", self.best, self.patience)
        self._start_averaging()
        return True

    def _start_averaging(self) -> None:
        """Swap the SGD inside for an averaging one with the same groups and state."""
        plain = self.optimizer.optimizer
        assert plain is not None
        averaged = AveragedSGD([dict(group) for group in plain.param_groups], **plain.defaults)
        averaged.load_state_dict(plain.state_dict())
        self.optimizer.optimizer = averaged

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averages in the parameters' place while the block runs; before they are any, nothing happens.

        Afterwards the parameters have their own values back, bit by bit, also after an exception. They stay the same
        tensors on the same memory.
        """
        averages = self._averages()
        own = {parameter: parameter.detach().clone() for parameter in averages}
        try:
            _copy(averages)
            yield
        finally:
            _copy(own)

    def _averages(self) -> dict[Tensor, Tensor]:
        """The average of each parameter that has one."""
        if not self.is_averaging:
            return {}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = self.optimizer.state
        return {p: states[p]["average"] for p in parameters if "average" in states.get(p, {})}

    def state_dict(self) -> dict[str, Any]:
        """Return what there is to remember beside the optimizer's own state."""
        return {
            "best": self.best,
            "checks_since_best": self.checks_since_best,
            "is_averaging": self.is_averaging,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; swaps the optimizer inside if it was.

        Args:
            state_dict: Of an object with an optimizer of the same kind.

        Raises:
            ValueError: The state is from before the optimizer began to average, and this one has begun.
        """
        if self.is_averaging and not state_dict["is_averaging"]:
            raise ValueError("the optimizer averages already, and the state is from before that: make both anew")
        self.best = state_dict["best"]
        self.checks_since_best = state_dict["checks_since_best"]
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

    For steps on batches of different length: with the mean loss over the :math:`\ell` words of each sequence, rate
    :math:`\eta \ell / T` gives every word the same weight, whatever the length of its batch.

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
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
