r"""Learning rate schedules.

Every schedule is a :class:`torch.optim.lr_scheduler.LRScheduler`. Call ``step()`` after each
update, or after each epoch if :math:`t` counts epochs. Read the rates with ``get_last_lr()`` and
save ``state_dict()``. The rates of every schedule except :class:`ReduceLROnPlateauWithWarmup`
depend only on the number of steps :math:`t` (``last_epoch``), so a resumed schedule sets exactly
the same rates. With ``verbose=True`` a schedule logs each change of a rate at the level INFO.

A schedule uses the optimizer's own rates in one of two ways:

- A schedule whose formula has each group's initial rate :math:`\eta` multiplies the ``lr`` of each
  parameter group.
- Every other schedule has arguments for its rates, such as ``scaled_lr``. It sets the same rate in
  *all* parameter groups and ignores the ``lr`` that the optimizer was created with.

References:
    Goyal et al. 2017, Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv 1706.02677
    (linear warm-up).
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import numbers
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, SupportsFloat

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mlbench_core.arguments import check_finite_at_least_0, check_positive

__all__ = [
    "ExponentialWarmupMultiStepLR",
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "PolyDecayLRLinearWarmup",
    "ReduceLROnPlateauWithWarmup",
    "SQRTTimeDecayLR",
    "SQRTTimeDecayLRWithWarmup",
    "SparsifiedSGDLR",
    "TimeDecayLR",
    "TrapezoidLR",
]

logger = logging.getLogger(__name__)


class _LoggedLR(LRScheduler):
    """A schedule that can log the rates it sets."""

    verbose: bool

    @contextlib.contextmanager
    def _logging(self, message: str) -> Iterator[None]:
        """Log each group whose rate changes in the ``with`` block, if the schedule is verbose."""
        # Without verbose nothing is read: float() of a rate in a CUDA tensor would wait for the
        # device.
        if not self.verbose:
            yield
            return
        groups = self.optimizer.param_groups
        # Copy the rates as numbers: a rate that is a tensor changes in place, so its old value
        # would be lost.
        before = [float(group["lr"]) for group in groups]
        yield
        for i, (old, group) in enumerate(zip(before, groups, strict=True)):
            rate = float(group["lr"])
            if rate != old:
                logger.info(message, i, rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; ``verbose`` is not part of it, so a resumed schedule keeps its own."""
        state_dict = super().state_dict()
        state_dict.pop("verbose", None)
        return state_dict


class _Schedule(_LoggedLR):
    """A schedule whose rates depend only on the number of steps."""

    def __init__(self, optimizer: Optimizer, *, verbose: bool = False) -> None:
        # torch's constructor already calls step() once, so this and the arguments of subclasses
        # must be set before.
        self.verbose = verbose
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Args:
            epoch: Number of the step to go to. torch deprecates this argument.
        """
        with self._logging("Adjusting learning rate of group %d to %.4e."):
            super().step(epoch)


class _AbsoluteLR(_Schedule):
    """A schedule that sets the same rate, a function of the step, in every parameter group."""

    @abstractmethod
    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the current step, one per group."""
        return [self.lr_at(self.last_epoch) for _ in self.optimizer.param_groups]


class _RelativeLR(_Schedule):
    """A schedule that multiplies each parameter group's initial rate by a function of the step."""

    @abstractmethod
    def factor_at(self, t: int) -> float:
        """Return the factor after ``t`` steps."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the current step, one per group."""
        factor = self.factor_at(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]


def _linear(start: float, end: float, t: float, duration: float) -> float:
    """Interpolate from ``start`` at 0 to exactly ``end`` at ``duration`` and after."""
    # A duration of 0 always returns here, so the division below is safe.
    if t >= duration:
        return end
    progress = t / duration
    return progress * end + (1.0 - progress) * start


def _check_at_least_0(**arguments: float) -> None:
    for name, value in arguments.items():
        check_finite_at_least_0(name, value)


def _check_positive(**arguments: float) -> None:
    for name, value in arguments.items():
        check_positive(name, value)


class LRLinearWarmUp(_AbsoluteLR):
    r"""Linear warm-up, constant afterwards.

    .. math::
        \eta_t = \begin{cases}
            \eta_0 + \frac{t}{w} (\eta_s - \eta_0) & t < w \\
            \eta_s & t \ge w
        \end{cases}

    with :math:`\eta_0` = ``init_lr``, :math:`\eta_s` = ``scaled_lr``, :math:`w` =
    ``warmup_duration``. For ``LRLinearWarmUp(optimizer, init_lr=0.02, scaled_lr=0.08,
    warmup_duration=3)``:

    ==  ====  ====  ====  ====  ====
    t   0     1     2     3     4
    lr  0.02  0.04  0.06  0.08  0.08
    ==  ====  ====  ====  ====  ====

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        init_lr: Rate at t = 0.
        scaled_lr: Rate from t = ``warmup_duration`` on.
        warmup_duration: Number of steps of the warm-up; 0 starts at ``scaled_lr``.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is negative or not finite.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = LRLinearWarmUp(optimizer, init_lr=0.02, scaled_lr=0.08, warmup_duration=3)
        >>> [round(schedule.lr_at(t), 6) for t in range(5)]
        [0.02, 0.04, 0.06, 0.08, 0.08]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        init_lr: float,
        scaled_lr: float,
        warmup_duration: float,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(init_lr=init_lr, scaled_lr=scaled_lr, warmup_duration=warmup_duration)
        self.init_lr = init_lr
        self.scaled_lr = scaled_lr
        self.warmup_duration = warmup_duration
        super().__init__(optimizer, verbose=verbose)

    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""
        return _linear(self.init_lr, self.scaled_lr, t, self.warmup_duration)


class MultiStepLRLinearWarmUp(_AbsoluteLR):
    r"""Linear warm-up, then a rate that is multiplied by a factor at each milestone.

    .. math::
        \eta_t = \begin{cases}
            \eta_0 + \frac{t}{w} (\eta_s - \eta_0) & t < w \\
            \eta_s \gamma^{|\{m \,:\, m \le t\}|} & t \ge w
        \end{cases}

    with :math:`\eta_0` = ``warmup_init_lr``, :math:`\eta_s` = ``scaled_lr``, :math:`w` =
    ``warmup_duration`` and milestones :math:`m`. For ``MultiStepLRLinearWarmUp(optimizer,
    gamma=0.1, milestones=[4, 6], scaled_lr=0.4, warmup_duration=2)``:

    ==  ===  ===  ===  ===  ====  ====  =====  =====
    t   0    1    2    3    4     5     6      7
    lr  0    0.2  0.4  0.4  0.04  0.04  0.004  0.004
    ==  ===  ===  ===  ===  ====  ====  =====  =====

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        gamma: Factor that multiplies the rate at each milestone.
        milestones: Steps at which the rate is multiplied, in increasing order; may be empty.
        scaled_lr: Rate after the warm-up.
        warmup_init_lr: Rate at t = 0; has no effect without a warm-up.
        warmup_duration: Number of steps of the warm-up; at most the first milestone.
        verbose: Log each change of a rate.

    Raises:
        ValueError: The milestones are not in order, one lies within the warm-up, or another
            argument is negative or not finite.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = MultiStepLRLinearWarmUp(
        ...     optimizer, 0.1, [4, 6], scaled_lr=0.4, warmup_duration=2)
        >>> [round(schedule.lr_at(t), 6) for t in range(8)]
        [0.0, 0.2, 0.4, 0.4, 0.04, 0.04, 0.004, 0.004]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gamma: float,
        milestones: Sequence[int],
        scaled_lr: float,
        warmup_init_lr: float = 0,
        warmup_duration: float = 0,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(
            gamma=gamma,
            scaled_lr=scaled_lr,
            warmup_init_lr=warmup_init_lr,
            warmup_duration=warmup_duration,
        )
        milestones = list(map(int, milestones))
        if milestones != sorted(milestones):
            raise ValueError(f"milestones must be in increasing order, not {milestones}")
        if milestones and warmup_duration > milestones[0]:
            raise ValueError(
                f"warmup_duration must be at most the first milestone, {milestones[0]}, not "
                f"{warmup_duration}: shorten the warm-up, or move the milestone"
            )
        self.gamma = gamma
        self.milestones = milestones
        self.scaled_lr = scaled_lr
        self.warmup_init_lr = warmup_init_lr
        self.warmup_duration = warmup_duration
        super().__init__(optimizer, verbose=verbose)

    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""
        if t < self.warmup_duration:
            return _linear(self.warmup_init_lr, self.scaled_lr, t, self.warmup_duration)
        # bisect_right counts the milestones up to and including t, as the formula does.
        return float(self.scaled_lr * self.gamma ** bisect.bisect_right(self.milestones, t))


class ReduceLROnPlateauWithWarmup(_LoggedLR, ReduceLROnPlateau):
    r"""Linear warm-up, then a smaller rate whenever a metric stops improving.

    The warm-up counts batches if ``batches_per_epoch`` is given, and epochs if not:

    .. math:: \eta_i = \eta_0 + \frac{i}{w} (\eta_s - \eta_0), \quad i = 0, \dots, w

    with :math:`\eta_0` = ``warmup_init_lr``, :math:`\eta_s` = ``scaled_lr`` and :math:`w` =
    ``warmup_epochs`` (times ``batches_per_epoch``); ``warmup_epochs`` may be a fraction. In a
    warm-up by batches, each call of :meth:`batch_step` adds 1 to :math:`i`; in a warm-up by epochs,
    each call of :meth:`step` does. During the warm-up :meth:`step` ignores its metric. After the
    warm-up, the rules of :class:`torch.optim.lr_scheduler.ReduceLROnPlateau` apply.

    For ``ReduceLROnPlateauWithWarmup(optimizer, 0.02, 0.08, warmup_epochs=2, factor=0.5,
    patience=1)`` and a loss that stays at 1, the rate after n calls of ``step`` is:

    ==  ====  ====  ====  ====  ====  ====  ====
    n   0     1     2     3     4     5     6
    lr  0.02  0.05  0.08  0.08  0.08  0.04  0.04
    ==  ====  ====  ====  ====  ====  ====  ====

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        warmup_init_lr: Rate at the start.
        scaled_lr: Rate at the end of the warm-up.
        warmup_epochs: Duration of the warm-up in epochs; 0 starts at ``scaled_lr``.
        batches_per_epoch: Number of batches in an epoch, for a warm-up by batches.
        verbose: Log each reduction after the warm-up.
        plateau_kwargs: Arguments of :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`: ``mode``,
            ``factor``, ``patience``, ``threshold``, ``threshold_mode``, ``cooldown``, ``min_lr``,
            ``eps``.

    Raises:
        ValueError: An argument is negative, or ``batches_per_epoch`` is not positive.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = ReduceLROnPlateauWithWarmup(
        ...     optimizer, 0.02, 0.08, warmup_epochs=2, factor=0.5, patience=1)
        >>> rates = []
        >>> for loss in [1.0] * 7:
        ...     rates.append(round(schedule.get_last_lr()[0], 6))
        ...     schedule.step(loss)
        >>> rates
        [0.02, 0.05, 0.08, 0.08, 0.08, 0.04, 0.04]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_init_lr: float,
        scaled_lr: float,
        warmup_epochs: float,
        batches_per_epoch: int | None = None,
        *,
        verbose: bool = False,
        **plateau_kwargs: Any,
    ) -> None:
        _check_at_least_0(
            warmup_init_lr=warmup_init_lr, scaled_lr=scaled_lr, warmup_epochs=warmup_epochs
        )
        if batches_per_epoch is not None:
            _check_positive(batches_per_epoch=batches_per_epoch)
        self.warmup_init_lr = float(warmup_init_lr)
        self.scaled_lr = float(scaled_lr)
        self.warmup_epochs = float(warmup_epochs)
        self.batches_per_epoch = batches_per_epoch
        self.warmup_duration = self.warmup_epochs * (batches_per_epoch or 1)
        self.warmup_step = 0
        self.verbose = verbose
        super().__init__(optimizer, **plateau_kwargs)
        self._set_warmup_lr()

    @property
    def is_warming_up(self) -> bool:
        """Return True until the warm-up has reached ``scaled_lr``."""
        return self.warmup_step < self.warmup_duration

    def batch_step(self) -> None:
        """Advance the warm-up by one batch; do nothing after its end. Call it after each batch.

        Raises:
            ValueError: ``batches_per_epoch`` was not given, and the warm-up by epochs is not over.
        """
        if self.batches_per_epoch is None and self.is_warming_up:
            raise ValueError(
                "batches_per_epoch must be a number for batch_step(), not None: pass it to the "
                "schedule to warm up by batches, or call only step(metrics), once per epoch"
            )
        self._warm_up()

    def step(  # type: ignore[override]
        self, metrics: SupportsFloat, epoch: int | None = None
    ) -> None:
        """End an epoch: advance the warm-up, or reduce the rates if the metric has not improved.

        Args:
            metrics: Value that should improve, for example the validation loss.
            epoch: Number of the epoch; the last number plus 1 if None.
        """
        # torch warns that its own argument is deprecated. Setting the count has the same effect.
        if epoch is not None:
            self.last_epoch = epoch - 1
        if not self.is_warming_up:
            with self._logging(
                f"Epoch {self.last_epoch + 1}: reducing learning rate of group %d to %.4e."
            ):
                super().step(metrics)
            return
        # Epochs count from the start of training, so those of the warm-up count too.
        self.last_epoch += 1
        if self.batches_per_epoch is None:
            self._warm_up()

    def _warm_up(self) -> None:
        if self.is_warming_up:
            self.warmup_step += 1
            self._set_warmup_lr()

    def _set_warmup_lr(self) -> None:
        lr = _linear(self.warmup_init_lr, self.scaled_lr, self.warmup_step, self.warmup_duration)
        for group in self.optimizer.param_groups:
            # In place, because the optimizer may hold this tensor elsewhere.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        # get_last_lr() returns this list, which torch itself updates only in its own step().
        self._last_lr = [lr for _ in self.optimizer.param_groups]


class SparsifiedSGDLR(_AbsoluteLR):
    r"""The rate under which SGD with memory converges on strongly convex problems.

    .. math:: \eta_t = \frac{\gamma}{\lambda (t + a)}

    with :math:`\lambda` = ``l2_coef`` and :math:`a` = ``shifting_param``. For
    ``SparsifiedSGDLR(optimizer, gamma=2, l2_coef=0.5, shifting_param=1)``:

    ==  =  =  =====  =
    t   0  1  2      3
    lr  4  2  1.333  1
    ==  =  =  =====  =

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        gamma: Numerator :math:`\gamma` of the rate, at least 0.
        l2_coef: Strong convexity of the loss, for example the weight of its L2 penalty; above 0.
        shifting_param: Number of steps :math:`a` added to :math:`t`, above 0. A larger number makes
            the first rates smaller.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is out of its range.

    References:
        Stich, Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv 1809.07599.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = SparsifiedSGDLR(optimizer, gamma=2, l2_coef=0.5, shifting_param=1)
        >>> [round(schedule.lr_at(t), 3) for t in range(4)]
        [4.0, 2.0, 1.333, 1.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gamma: float,
        l2_coef: float,
        shifting_param: float,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(gamma=gamma)
        _check_positive(l2_coef=l2_coef, shifting_param=shifting_param)
        self.gamma = gamma
        self.l2_coef = l2_coef
        self.shifting_param = shifting_param
        super().__init__(optimizer, verbose=verbose)

    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""
        return self.gamma / (self.l2_coef * (t + self.shifting_param))


class TimeDecayLR(_RelativeLR):
    r"""Decay with the inverse of time.

    .. math:: \eta_t = \frac{\eta}{t + \beta}

    with each group's initial rate :math:`\eta`. If :math:`t + \beta = 0`, that is at the start with
    :math:`\beta = 0`, the rate is :math:`\eta`. For :math:`\eta = 6, \beta = 1`:

    ==  =  =  =  ===
    t   0  1  2  3
    lr  6  3  2  1.5
    ==  =  =  =  ===

    Args:
        optimizer: Optimizer whose parameter groups get the rates, each from its own initial rate.
        beta: Number of steps :math:`\beta` added to :math:`t`, at least 0.
        verbose: Log each change of a rate.

    Raises:
        ValueError: ``beta`` is negative or not finite.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=6.0)
        >>> schedule = TimeDecayLR(optimizer, beta=1)
        >>> [6.0 * schedule.factor_at(t) for t in range(4)]
        [6.0, 3.0, 2.0, 1.5]
    """

    def __init__(self, optimizer: Optimizer, beta: float, *, verbose: bool = False) -> None:
        _check_at_least_0(beta=beta)
        self.beta = beta
        super().__init__(optimizer, verbose=verbose)

    def factor_at(self, t: int) -> float:
        """Return the factor after ``t`` steps."""
        # With beta = 0 the formula would divide by 0 at the start.
        if t + self.beta == 0:
            return 1.0
        return 1.0 / (t + self.beta)


class SQRTTimeDecayLR(_RelativeLR):
    r"""Decay with the inverse square root of time.

    .. math:: \eta_t = \frac{\eta}{\sqrt{\max(1, t)}}

    with each group's initial rate :math:`\eta`. For :math:`\eta = 6`:

    ==  =  =  =====  =====  =
    t   0  1  2      3      4
    lr  6  6  4.243  3.464  3
    ==  =  =  =====  =====  =

    Args:
        optimizer: Optimizer whose parameter groups get the rates, each from its own initial rate.
        verbose: Log each change of a rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=6.0)
        >>> schedule = SQRTTimeDecayLR(optimizer)
        >>> [round(6.0 * schedule.factor_at(t), 3) for t in range(5)]
        [6.0, 6.0, 4.243, 3.464, 3.0]
    """

    def factor_at(self, t: int) -> float:
        """Return the factor after ``t`` steps."""
        return 1.0 / math.sqrt(max(1, t))


class TrapezoidLR(_RelativeLR):
    r"""Linear warm-up, a constant rate, then a linear decay to 0.

    .. math::
        \eta_t = \eta \cdot \max\left(0, \min\left(\frac{t + 1}{w}, 1,
            \frac{T - t}{s T}\right)\right)

    with each group's initial rate :math:`\eta`, :math:`w` = ``warmup_steps``, :math:`T` =
    ``total_steps`` and :math:`s` = ``decay_share``. A training that is stopped or extended before
    the decay has followed the schedule of another length, which a cosine has not. For
    ``TrapezoidLR(optimizer, warmup_steps=2, total_steps=10, decay_share=0.4)`` and :math:`\eta =
    1`:

    ==  ===  =  =  =  =  =  =  ====  ===  ====  ==
    t   0    1  2  3  4  5  6  7     8    9     10
    lr  0.5  1  1  1  1  1  1  0.75  0.5  0.25  0
    ==  ===  =  =  =  =  =  =  ====  ===  ====  ==

    Args:
        optimizer: Optimizer whose parameter groups get the rates, each from its own initial rate.
        warmup_steps: Number of steps of the warm-up; 0 starts at the initial rates.
        total_steps: Number of steps of the whole training.
        decay_share: Share of all steps in which the rate decays, above 0 and at most 1.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = TrapezoidLR(optimizer, warmup_steps=2, total_steps=10)
        >>> [schedule.factor_at(t) for t in (0, 1, 6, 7, 9, 10)]
        [0.5, 1.0, 1.0, 0.75, 0.25, 0.0]

    References:
        Hägele et al. 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed Training
        Durations, arXiv 2405.18392.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        total_steps: int,
        decay_share: float = 0.4,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(warmup_steps=warmup_steps)
        _check_positive(total_steps=total_steps)
        if not 0 < decay_share <= 1:
            raise ValueError(
                f"decay_share must be above 0 and at most 1, not {decay_share}: "
                "give the share of all steps"
            )
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.decay_share = decay_share
        super().__init__(optimizer, verbose=verbose)

    def factor_at(self, t: int) -> float:
        """Return the factor after ``t`` steps."""
        factors = [1.0, (self.total_steps - t) / (self.decay_share * self.total_steps)]
        if t < self.warmup_steps:
            factors.append((t + 1) / self.warmup_steps)
        return max(0.0, min(factors))


class ExponentialWarmupMultiStepLR(_RelativeLR):
    r"""Exponential warm-up, a constant rate, then decay by a factor at regular intervals.

    .. math::
        \eta_t = \eta \cdot \begin{cases}
            0.01^{(w - t) / w} & t < w \\
            1 & w \le t < r \\
            f^{\min(n,\, 1 + \lfloor (t - r) / d \rfloor)} & t \ge r
        \end{cases}

    with each group's initial rate :math:`\eta`, :math:`w` = ``warmup_steps``, :math:`r` =
    ``remain_steps``, :math:`d` = ``decay_interval``, :math:`n` = ``decay_steps`` and :math:`f` =
    ``decay_factor``. The values of ``warmup_steps``, ``remain_steps`` and ``decay_interval`` count
    iterations if they are integers; a float is a fraction of ``iterations``. For
    ``ExponentialWarmupMultiStepLR(optimizer, iterations=10, warmup_steps=2, remain_steps=0.4,
    decay_interval=2, decay_steps=2)`` and :math:`\eta = 1`:

    ==  ====  ===  =  =  ===  ===  ====  ====
    t   0     1    2  3  4    5    6     9
    lr  0.01  0.1  1  1  0.5  0.5  0.25  0.25
    ==  ====  ===  =  =  ===  ===  ====  ====

    Args:
        optimizer: Optimizer whose parameter groups get the rates, each from its own initial rate.
        iterations: Number of iterations of the whole training.
        warmup_steps: End of the warm-up. If it is after ``remain_steps``, the warm-up ends at
            ``remain_steps`` and the schedule logs a warning.
        remain_steps: Iteration of the first decay.
        decay_interval: Iterations between decays. If None, the number of iterations after
            ``remain_steps`` divided by ``decay_steps``, at least 1.
        decay_steps: Largest number of decays.
        decay_factor: Factor that multiplies the rate at each decay.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is out of its range.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = ExponentialWarmupMultiStepLR(
        ...     optimizer, 10, warmup_steps=2, remain_steps=0.4, decay_interval=2, decay_steps=2)
        >>> [round(schedule.factor_at(t), 3) for t in (0, 1, 2, 3, 4, 5, 6, 9)]
        [0.01, 0.1, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    WARMUP_START = 0.01

    def __init__(
        self,
        optimizer: Optimizer,
        iterations: int,
        warmup_steps: int | float = 0,
        remain_steps: int | float = 1.0,
        decay_interval: int | float | None = None,
        decay_steps: int = 4,
        decay_factor: float = 0.5,
        *,
        verbose: bool = False,
    ) -> None:
        _check_positive(iterations=iterations)
        _check_at_least_0(
            warmup_steps=warmup_steps,
            remain_steps=remain_steps,
            decay_steps=decay_steps,
            decay_factor=decay_factor,
        )
        self.iterations = iterations
        self.warmup_steps = _in_iterations(warmup_steps, iterations)
        self.remain_steps = _in_iterations(remain_steps, iterations)
        if self.warmup_steps > self.remain_steps:
            logger.warning(
                "the warm-up of %d iterations is cut to %d, because the decay begins then",
                self.warmup_steps,
                self.remain_steps,
            )
            self.warmup_steps = self.remain_steps
        if decay_interval is None:
            interval = (iterations - self.remain_steps) // max(1, decay_steps)
        else:
            _check_positive(decay_interval=decay_interval)
            interval = _in_iterations(decay_interval, iterations)
        # Few iterations or a small fraction give 0, and factor_at divides by this number.
        self.decay_interval = max(1, interval)
        self.decay_steps = decay_steps
        self.decay_factor = decay_factor
        super().__init__(optimizer, verbose=verbose)

    def factor_at(self, t: int) -> float:
        """Return the factor after ``t`` steps."""
        if t < self.warmup_steps:
            return float(self.WARMUP_START ** ((self.warmup_steps - t) / self.warmup_steps))
        if t < self.remain_steps:
            return 1.0
        decays = min(self.decay_steps, 1 + (t - self.remain_steps) // self.decay_interval)
        return float(self.decay_factor**decays)


def _in_iterations(value: int | float, iterations: int) -> int:
    """Convert a count of iterations, or a fraction of all iterations, to a count."""
    # Compare with the abstract class, because numpy's integers are not of type int.
    if isinstance(value, numbers.Integral):
        return int(value)
    # Truncation alone would lose an iteration: 0.29 * 100 is 28.999999999999996.
    return int(value * iterations + 1e-9)


class SQRTTimeDecayLRWithWarmup(_AbsoluteLR):
    r"""Linear warm-up, then decay with the inverse square root of time.

    .. math::
        \eta_t = \begin{cases}
            \eta_0 + \frac{t}{w} (\eta_b - \eta_0) & t < w \\
            \eta_b \sqrt{w / t} & t \ge w
        \end{cases}

    with :math:`\eta_0` = ``warmup_init_lr``, :math:`\eta_b` = ``base_lr`` and :math:`w` =
    ``warmup_steps``. Without a warm-up, the second line applies with :math:`w = 1`, and the rate at
    :math:`t = 0` is :math:`\eta_b`. For ``SQRTTimeDecayLRWithWarmup(optimizer, base_lr=2,
    warmup_init_lr=0, warmup_steps=4)``:

    ==  =  ===  =  ===  =  =====  =
    t   0  1    2  3    4  8      16
    lr  0  0.5  1  1.5  2  1.414  1
    ==  =  ===  =  ===  =  =====  =

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        base_lr: Rate at the end of the warm-up.
        warmup_init_lr: Rate at t = 0; has no effect without a warm-up.
        warmup_steps: Number of steps of the warm-up.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is negative or not finite.

    References:
        Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = SQRTTimeDecayLRWithWarmup(
        ...     optimizer, base_lr=2, warmup_init_lr=0, warmup_steps=4)
        >>> [round(schedule.lr_at(t), 3) for t in (0, 1, 2, 3, 4, 8, 16)]
        [0.0, 0.5, 1.0, 1.5, 2.0, 1.414, 1.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float,
        warmup_init_lr: float,
        warmup_steps: int,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(base_lr=base_lr, warmup_init_lr=warmup_init_lr, warmup_steps=warmup_steps)
        self.base_lr = base_lr
        self.warmup_init_lr = warmup_init_lr
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, verbose=verbose)

    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""
        if t < self.warmup_steps:
            return _linear(self.warmup_init_lr, self.base_lr, t, self.warmup_steps)
        # Without a warm-up the formula would be 0 / 0 at the start.
        return self.base_lr * math.sqrt(max(1, self.warmup_steps) / max(1, t))


class PolyDecayLRLinearWarmup(LRLinearWarmUp):
    r"""Linear warm-up, then polynomial decay to a smallest rate.

    .. math::
        \eta_t = \begin{cases}
            \eta_0 + \frac{t}{w} (\eta_s - \eta_0) & t < w \\
            \eta_{\min} + (\eta_s - \eta_{\min}) \bigl(1 - \frac{t - w}{d}\bigr)^p
                & w \le t < w + d \\
            \eta_{\min} & t \ge w + d
        \end{cases}

    with :math:`\eta_0` = ``init_lr``, :math:`\eta_s` = ``scaled_lr``, :math:`w` =
    ``warmup_duration``, :math:`d` = ``decay_steps``, :math:`\eta_{\min}` = ``min_lr`` and :math:`p`
    = ``power``. For ``PolyDecayLRLinearWarmup(optimizer, init_lr=0, scaled_lr=1.6,
    warmup_duration=2, decay_steps=4)``:

    ==  =  ===  ===  ===  ===  ===  =  =
    t   0  1    2    3    4    5    6  7
    lr  0  0.8  1.6  0.9  0.4  0.1  0  0
    ==  =  ===  ===  ===  ===  ===  =  =

    Args:
        optimizer: Optimizer whose parameter groups all get the rate.
        init_lr: Rate at t = 0; has no effect without a warm-up.
        scaled_lr: Rate at the end of the warm-up.
        warmup_duration: Number of steps of the warm-up.
        decay_steps: Number of steps of the decay, counted from the end of the warm-up; above 0.
        min_lr: Rate at the end of the decay and after it.
        power: Exponent of the polynomial.
        verbose: Log each change of a rate.

    Raises:
        ValueError: An argument is negative or not finite, or ``decay_steps`` is 0.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = PolyDecayLRLinearWarmup(
        ...     optimizer, 0, scaled_lr=1.6, warmup_duration=2, decay_steps=4)
        >>> [round(schedule.lr_at(t), 6) for t in range(8)]
        [0.0, 0.8, 1.6, 0.9, 0.4, 0.1, 0.0, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        init_lr: float,
        scaled_lr: float,
        warmup_duration: int,
        decay_steps: int,
        min_lr: float = 0,
        power: float = 2,
        *,
        verbose: bool = False,
    ) -> None:
        _check_at_least_0(min_lr=min_lr, power=power)
        _check_positive(decay_steps=decay_steps)
        self.decay_steps = decay_steps
        self.min_lr = min_lr
        self.power = power
        super().__init__(optimizer, init_lr, scaled_lr, warmup_duration, verbose=verbose)

    def lr_at(self, t: int) -> float:
        """Return the rate after ``t`` steps."""
        if t < self.warmup_duration:
            return super().lr_at(t)
        # Later steps would make the base of the power negative.
        if t >= self.warmup_duration + self.decay_steps:
            return float(self.min_lr)
        remaining = 1.0 - (t - self.warmup_duration) / self.decay_steps
        return self.min_lr + (self.scaled_lr - self.min_lr) * remaining**self.power
