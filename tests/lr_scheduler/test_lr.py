"""The ten schedules against values worked out by hand."""

from __future__ import annotations

import logging
import math

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mlbench_core.lr_scheduler.pytorch.lr import (
    ExponentialWarmupMultiStepLR,
    LRLinearWarmUp,
    MultiStepLRLinearWarmUp,
    PolyDecayLRLinearWarmup,
    ReduceLROnPlateauWithWarmup,
    SparsifiedSGDLR,
    SQRTTimeDecayLR,
    SQRTTimeDecayLRWithWarmup,
    TimeDecayLR,
    TrapezoidLR,
)


@pytest.fixture
def optimizer() -> SGD:
    """SGD with two groups whose rates are 0.1 and 0.4."""
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": rate} for rate in (0.1, 0.4)]
    return SGD(groups)


def walk(schedule: LRScheduler, steps: int) -> list[tuple[float, ...]]:
    """The rates of the groups before the first and after each step."""
    rates = []
    for _ in range(steps):
        rates.append(tuple(group["lr"] for group in schedule.optimizer.param_groups))
        schedule.optimizer.step()
        schedule.step()
    return rates


def in_both_groups(values: list[float]) -> list[object]:
    return [pytest.approx((value, value)) for value in values]


def scaled(factors: list[float]) -> list[object]:
    return [pytest.approx((0.1 * factor, 0.4 * factor)) for factor in factors]


def test_linear_warm_up_reaches_the_rate_at_its_end(optimizer) -> None:
    rates = walk(LRLinearWarmUp(optimizer, init_lr=0.0, scaled_lr=0.5, warmup_duration=5), 8)
    assert rates == in_both_groups([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert rates[5] == (0.5, 0.5)  # exactly


def test_warm_up_downwards_and_of_fractional_duration(optimizer) -> None:
    schedule = LRLinearWarmUp(optimizer, init_lr=1.0, scaled_lr=0.0, warmup_duration=2.5)
    assert walk(schedule, 4) == in_both_groups([1.0, 0.6, 0.2, 0.0])


@pytest.mark.parametrize("warmup_duration", [0, 3])
def test_a_rate_of_zero(optimizer, warmup_duration) -> None:
    schedules = (
        LRLinearWarmUp(optimizer, 0.0, 0.0, warmup_duration),
        MultiStepLRLinearWarmUp(optimizer, 0.1, [4], 0.0, 0.0, warmup_duration),
        PolyDecayLRLinearWarmup(optimizer, 0.0, 0.0, warmup_duration, 4),
        SQRTTimeDecayLRWithWarmup(optimizer, 0.0, 0.0, warmup_duration),
        ReduceLROnPlateauWithWarmup(optimizer, 0.0, 0.0, warmup_duration),
    )
    for schedule in schedules[:-1]:
        assert walk(schedule, 6) == [(0.0, 0.0)] * 6
    assert schedules[-1].get_last_lr() == [0.0, 0.0]


def test_multi_step_with_warm_up(optimizer) -> None:
    schedule = MultiStepLRLinearWarmUp(
        optimizer,
        gamma=0.1,
        milestones=[4, 6],
        scaled_lr=0.8,
        warmup_init_lr=0.2,
        warmup_duration=3,
    )
    assert walk(schedule, 8) == in_both_groups([0.2, 0.4, 0.6, 0.8, 0.08, 0.08, 0.008, 0.008])


def test_a_milestone_at_the_end_of_the_warm_up(optimizer) -> None:
    schedule = MultiStepLRLinearWarmUp(optimizer, 0.1, [2, 4], 0.1, warmup_duration=2)
    assert walk(schedule, 5) == in_both_groups([0.0, 0.05, 0.01, 0.01, 0.001])


def test_multi_step_without_milestones_or_warm_up(optimizer) -> None:
    schedule = MultiStepLRLinearWarmUp(optimizer, gamma=0.1, milestones=[], scaled_lr=0.3)
    assert walk(schedule, 3) == in_both_groups([0.3, 0.3, 0.3])


def test_sparsified_sgd(optimizer) -> None:
    schedule = SparsifiedSGDLR(optimizer, gamma=2, l2_coef=0.1, shifting_param=5)
    assert walk(schedule, 30) == in_both_groups([2 / (0.1 * (t + 5)) for t in range(30)])


def test_time_decay(optimizer) -> None:
    assert walk(TimeDecayLR(optimizer, beta=4), 20) == scaled([1 / (t + 4) for t in range(20)])


def test_time_decay_without_shift_starts_at_the_rate(optimizer) -> None:
    assert walk(TimeDecayLR(optimizer, beta=0), 4) == scaled([1, 1, 1 / 2, 1 / 3])


def test_root_of_time_decay(optimizer) -> None:
    assert walk(SQRTTimeDecayLR(optimizer), 10) == scaled(
        [1 / math.sqrt(max(1, t)) for t in range(10)]
    )


def test_root_of_time_decay_with_warm_up(optimizer) -> None:
    schedule = SQRTTimeDecayLRWithWarmup(optimizer, base_lr=0.6, warmup_init_lr=0.2, warmup_steps=4)
    expected = [0.2, 0.3, 0.4, 0.5, *(0.6 * math.sqrt(4 / t) for t in range(4, 20))]
    assert walk(schedule, 20) == in_both_groups(expected)


def test_root_of_time_decay_without_warm_up(optimizer) -> None:
    schedule = SQRTTimeDecayLRWithWarmup(optimizer, base_lr=0.6, warmup_init_lr=0.2, warmup_steps=0)
    assert walk(schedule, 5) == in_both_groups([0.6, *(0.6 / math.sqrt(t) for t in range(1, 5))])


def test_exponential_warm_up_and_decay_given_in_iterations(optimizer) -> None:
    schedule = ExponentialWarmupMultiStepLR(
        optimizer,
        iterations=20,
        warmup_steps=4,
        remain_steps=8,
        decay_interval=3,
        decay_steps=2,
        decay_factor=0.5,
    )
    expected = [0.01 ** ((4 - t) / 4) for t in range(4)] + [1.0] * 4 + [0.5] * 3 + [0.25] * 9
    assert walk(schedule, 20) == scaled(expected)


def test_exponential_shares_of_the_training_are_those_counts(optimizer) -> None:
    shares = ExponentialWarmupMultiStepLR(optimizer, 100, 0.29, 0.4, 0.05)
    assert (shares.warmup_steps, shares.remain_steps, shares.decay_interval) == (29, 40, 5)
    rates = [shares.factor_at(t) for t in range(100)]
    assert rates[39:41] == [1.0, 0.5]
    assert rates[55:] == [0.5**4] * 45


def test_exponential_spreads_its_decays_over_what_remains(optimizer) -> None:
    schedule = ExponentialWarmupMultiStepLR(optimizer, 100, remain_steps=60)
    assert [schedule.factor_at(t) for t in (0, 59, 60, 69, 70, 80, 90, 99)] == [
        1, 1, 0.5, 0.5, 0.25, 0.125, 0.0625, 0.0625,
    ]  # fmt: skip
    assert ExponentialWarmupMultiStepLR(optimizer, 3, remain_steps=1.0).decay_interval == 1


def test_exponential_uses_the_step_it_is_asked_for(optimizer) -> None:
    schedule = ExponentialWarmupMultiStepLR(optimizer, 100, warmup_steps=10, remain_steps=50)
    assert schedule.factor_at(0) == pytest.approx(0.01)
    assert schedule.factor_at(5) == pytest.approx(0.1)
    assert schedule.last_epoch == 0


def test_exponential_cuts_a_warm_up_that_is_too_long(optimizer, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = ExponentialWarmupMultiStepLR(optimizer, 20, warmup_steps=200, remain_steps=0.4)
    assert schedule.warmup_steps == 8
    assert "200" in caplog.text


def test_polynomial_decay_ends_exactly_at_the_smallest_rate_and_stays(optimizer) -> None:
    schedule = PolyDecayLRLinearWarmup(
        optimizer, init_lr=0.1, scaled_lr=0.9, warmup_duration=2, decay_steps=4, min_lr=0.1, power=2
    )
    rates = walk(schedule, 12)
    assert rates == in_both_groups([0.1, 0.5, 0.9, 0.55, 0.3, 0.15, *[0.1] * 6])
    assert rates[6:] == [(0.1, 0.1)] * 6


def test_polynomial_decay_keeps_no_count_of_its_own(optimizer) -> None:
    schedule = PolyDecayLRLinearWarmup(optimizer, 0.0, 1.0, 10, 80, power=1)
    assert schedule.lr_at(50) == schedule.lr_at(50) == pytest.approx(0.5)


def test_plateau_warms_up_by_epochs_and_then_halves(optimizer) -> None:
    schedule = ReduceLROnPlateauWithWarmup(
        optimizer,
        0.02,
        0.16,
        2,
        factor=0.5,
        patience=2,
        threshold=0.01,
        threshold_mode="abs",
        min_lr=0.02,
    )
    rates = []
    for _ in range(16):
        rates.append(schedule.get_last_lr()[1])
        schedule.step(1.0)
    # Two epochs of warm-up, one that is best, then each third epoch without improvement halves the
    # rate.
    assert rates == pytest.approx(
        [0.02, 0.09, 0.16, *[0.16] * 3, *[0.08] * 3, *[0.04] * 3, *[0.02] * 4]
    )


def test_trapezoid_decays_in_the_last_part_of_the_training(optimizer) -> None:
    rates = walk(TrapezoidLR(optimizer, warmup_steps=4, total_steps=20), 22)
    rises, stays, falls = [0.25, 0.5, 0.75], [1.0] * 10, [(20 - t) / 8 for t in range(13, 20)]
    assert rates == scaled([*rises, *stays, *falls, 0.0, 0.0])
    assert rates[20:] == [(0.0, 0.0)] * 2  # exactly


def test_trapezoid_without_warm_up_may_decay_from_the_first_step(optimizer) -> None:
    schedule = TrapezoidLR(optimizer, warmup_steps=0, total_steps=4, decay_share=1.0)
    assert walk(schedule, 4) == scaled([1.0, 0.75, 0.5, 0.25])


def test_plateau_agrees_with_torch_when_there_is_no_warm_up(optimizer) -> None:
    theirs = ReduceLROnPlateau(
        SGD([torch.zeros(1)], lr=0.3), factor=0.3, patience=1, cooldown=2, mode="max"
    )
    ours = ReduceLROnPlateauWithWarmup(
        optimizer, 0.0, 0.3, 0, factor=0.3, patience=1, cooldown=2, mode="max"
    )
    assert ours.get_last_lr() == [0.3, 0.3]
    for metric in [1.0, 2.0, 2.0, 1.0, 0.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]:
        ours.step(metric)
        theirs.step(metric)
        assert ours.get_last_lr() == theirs.get_last_lr() * 2


def test_plateau_warms_up_by_batches(optimizer) -> None:
    schedule = ReduceLROnPlateauWithWarmup(
        optimizer, 0.0, 0.8, 2, batches_per_epoch=4, factor=0.5, patience=0
    )
    rates = []
    for _ in range(3):
        for _ in range(4):
            rates.append(schedule.get_last_lr()[0])
            schedule.batch_step()
        schedule.step(1.0)
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8])
    assert schedule.get_last_lr() == [0.4, 0.4]


def test_plateau_takes_a_duration_that_is_not_whole(optimizer) -> None:
    """log2(3) epochs, as three workers have it."""
    schedule = ReduceLROnPlateauWithWarmup(optimizer, 0.1, 0.3, math.log2(3))
    rates = []
    for _ in range(3):
        rates.append(schedule.get_last_lr()[0])
        schedule.step(1.0)
    assert rates == pytest.approx([0.1, 0.1 + 0.2 / math.log2(3), 0.3])


def test_plateau_counts_the_epoch_it_is_given(optimizer) -> None:
    schedule = ReduceLROnPlateauWithWarmup(optimizer, 0.0, 0.1, 1)
    schedule.step(1.0, epoch=7)
    assert schedule.last_epoch == 7
    schedule.step(1.0)
    assert schedule.last_epoch == 8
    schedule.step(1.0, 20)
    assert schedule.last_epoch == 20


def test_verbose_plateau_logs_each_reduction_as_torch_printed_it(optimizer, caplog) -> None:
    schedule = ReduceLROnPlateauWithWarmup(
        optimizer, 0.0, 0.4, 2, factor=0.5, patience=1, verbose=True
    )
    with caplog.at_level(logging.INFO):
        for _ in range(6):
            schedule.step(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "Epoch 5: reducing learning rate of group 0 to 2.0000e-01.",
        "Epoch 5: reducing learning rate of group 1 to 2.0000e-01.",
    ]


VERBOSE = {
    "linear": lambda o, **v: LRLinearWarmUp(o, 0.1, 0.3, 2, **v),
    "multi-step": lambda o, **v: MultiStepLRLinearWarmUp(o, 0.1, [3], 0.3, **v),
    "sparsified": lambda o, **v: SparsifiedSGDLR(o, 1.0, 1.0, 2.0, **v),
    "time": lambda o, **v: TimeDecayLR(o, 1.0, **v),
    "root of time": lambda o, **v: SQRTTimeDecayLR(o, **v),
    "exponential": lambda o, **v: ExponentialWarmupMultiStepLR(o, 5, 1, 2, 1, **v),
    "root of time with warm-up": lambda o, **v: SQRTTimeDecayLRWithWarmup(o, 0.3, 0.1, 2, **v),
    "polynomial": lambda o, **v: PolyDecayLRLinearWarmup(o, 0.1, 0.3, 1, 3, **v),
    "trapezoid": lambda o, **v: TrapezoidLR(o, 2, 5, **v),
}


@pytest.mark.parametrize("make", VERBOSE.values(), ids=VERBOSE.keys())
def test_verbose_schedules_log_each_change_and_others_nothing(make, caplog) -> None:
    def rates_and_messages(**verbose) -> tuple[list[tuple[float, ...]], list[str]]:
        caplog.clear()
        rates = walk(make(SGD([torch.zeros(1, requires_grad=True)], lr=0.9), **verbose), 6)
        return rates, [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        quiet, nothing = rates_and_messages()
        rates, messages = rates_and_messages(verbose=True)
    assert rates == quiet
    assert nothing == []
    changes = [
        rate for before, (rate,) in zip([(0.9,), *rates], rates, strict=False) if (rate,) != before
    ]
    assert changes
    expected = [f"Adjusting learning rate of group 0 to {rate:.4e}." for rate in changes]
    assert messages[: len(expected)] == expected


@pytest.mark.parametrize("make", VERBOSE.values(), ids=VERBOSE.keys())
def test_a_resumed_schedule_is_as_verbose_as_it_was_made(make, optimizer, caplog) -> None:
    quiet, verbose = make(optimizer), make(optimizer, verbose=True)
    verbose.load_state_dict(quiet.state_dict())
    with caplog.at_level(logging.INFO):
        walk(verbose, 6)
    assert caplog.records


def test_plateau_by_epochs_has_no_batch_step(optimizer) -> None:
    with pytest.raises(ValueError, match="batches_per_epoch"):
        ReduceLROnPlateauWithWarmup(optimizer, 0.0, 0.1, 1).batch_step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: LRLinearWarmUp(o, -0.1, 0.1, 3),
         "init_lr must be finite and at least 0, not -0.1"),
        (lambda o: LRLinearWarmUp(o, 0.1, float("nan"), 3),
         "scaled_lr must be finite and at least 0, not nan"),
        (lambda o: LRLinearWarmUp(o, 0.1, 0.1, -3),
         "warmup_duration must be finite and at least 0, not -3"),
        (lambda o: MultiStepLRLinearWarmUp(o, 0.1, [5, 3], 0.1),
         "milestones must be in increasing order, not [5, 3]"),
        (lambda o: MultiStepLRLinearWarmUp(o, 0.1, [5, 9], 0.1, 0, 6),
         "must be at most the first milestone, 5, not 6"),
        (lambda o: ReduceLROnPlateauWithWarmup(o, 0.1, 0.2, 3, 0),
         "batches_per_epoch must be finite and positive"),
        (lambda o: SparsifiedSGDLR(o, 1.0, 0.0, 1.0), "l2_coef must be finite and positive, not 0"),
        (lambda o: SparsifiedSGDLR(o, 1.0, 0.1, 0),
         "shifting_param must be finite and positive, not 0"),
        (lambda o: TimeDecayLR(o, -1), "beta must be finite and at least 0, not -1"),
        (lambda o: ExponentialWarmupMultiStepLR(o, 0),
         "iterations must be finite and positive, not 0"),
        (lambda o: ExponentialWarmupMultiStepLR(o, 10, decay_interval=0),
         "decay_interval must be finite and positive"),
        (lambda o: PolyDecayLRLinearWarmup(o, 0.1, 0.2, 3, 0),
         "decay_steps must be finite and positive, not 0"),
        (lambda o: TrapezoidLR(o, -1, 10), "warmup_steps must be finite and at least 0, not -1"),
        (lambda o: TrapezoidLR(o, 1, 0), "total_steps must be finite and positive, not 0"),
        (lambda o: TrapezoidLR(o, 1, 10, 1.5),
         "decay_share must be above 0 and at most 1, not 1.5"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(make, message, optimizer) -> None:
    with pytest.raises(ValueError) as error:
        make(optimizer)
    assert message in str(error.value)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]


def test_plateau_without_a_warm_up_has_nothing_to_do_after_a_batch() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = ReduceLROnPlateauWithWarmup(
        optimizer, warmup_init_lr=0.5, scaled_lr=0.5, warmup_epochs=0
    )
    for _ in range(3):
        schedule.batch_step()
    assert optimizer.param_groups[0]["lr"] == 0.5
