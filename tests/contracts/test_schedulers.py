"""Rules that every learning rate schedule obeys."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mlbench_core.lr_scheduler.pytorch import lr

STEPS = 30

FAMILY: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "linear": lambda o: lr.LRLinearWarmUp(o, 0.01, 0.3, 7),
    "linear without warm-up": lambda o: lr.LRLinearWarmUp(o, 0.01, 0.3, 0),
    "multi-step": lambda o: lr.MultiStepLRLinearWarmUp(o, 0.1, [9, 15], 0.3, 0.01, 5),
    "multi-step without milestones": lambda o: lr.MultiStepLRLinearWarmUp(o, 0.1, [], 0.3),
    "plateau by epochs": lambda o: lr.ReduceLROnPlateauWithWarmup(
        o, 0.01, 0.3, 5, factor=0.5, patience=2
    ),
    "plateau by batches": lambda o: lr.ReduceLROnPlateauWithWarmup(
        o, 0.01, 0.3, 2, 4, factor=0.5, patience=2
    ),
    "sparsified": lambda o: lr.SparsifiedSGDLR(o, 2.0, 0.1, 10.0),
    "time": lambda o: lr.TimeDecayLR(o, 2.0),
    "time without shift": lambda o: lr.TimeDecayLR(o, 0),
    "root of time": lambda o: lr.SQRTTimeDecayLR(o),
    "exponential": lambda o: lr.ExponentialWarmupMultiStepLR(o, 30, 4, 0.5, 0.1),
    "root of time with warm-up": lambda o: lr.SQRTTimeDecayLRWithWarmup(o, 0.3, 0.01, 6),
    "polynomial": lambda o: lr.PolyDecayLRLinearWarmup(o, 0.01, 0.3, 6, 15, 0.001),
    "trapezoid": lambda o: lr.TrapezoidLR(o, 4, 20),
}
every_schedule = pytest.mark.parametrize("make", FAMILY.values(), ids=FAMILY.keys())


def optimizer_of(*rates: float) -> SGD:
    """An optimizer with one parameter group a rate."""
    return SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def advance(schedule: LRScheduler) -> None:
    """One update and one step of any schedule."""
    schedule.optimizer.step()
    if isinstance(schedule, lr.ReduceLROnPlateauWithWarmup):
        if schedule.batches_per_epoch is not None:
            schedule.batch_step()
        schedule.step(1.0)
    else:
        schedule.step()


def rates_of(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """The rates now and after each of ``steps`` steps."""
    rates = [list(schedule.get_last_lr())]
    for _ in range(steps):
        advance(schedule)
        rates.append(list(schedule.get_last_lr()))
    return rates


@every_schedule
def test_it_is_a_torch_schedule(make) -> None:
    optimizer = optimizer_of(0.1)
    schedule = make(optimizer)
    assert isinstance(schedule, LRScheduler)
    assert schedule.optimizer is optimizer
    with pytest.raises(TypeError, match="Optimizer"):
        make(torch.nn.Linear(1, 1))


@every_schedule
def test_get_last_lr_is_what_the_groups_have(make) -> None:
    schedule = make(optimizer_of(0.1, 0.4))
    for _ in range(STEPS):
        assert schedule.get_last_lr() == [group["lr"] for group in schedule.optimizer.param_groups]
        assert all(math.isfinite(rate) and rate >= 0 for rate in schedule.get_last_lr())
        advance(schedule)


@every_schedule
def test_groups_do_not_touch_each_other(make) -> None:
    """Two groups have the rates that each would have alone."""
    both = rates_of(make(optimizer_of(0.1, 0.4)), STEPS)
    first, second = (
        rates_of(make(optimizer_of(0.1)), STEPS),
        rates_of(make(optimizer_of(0.4)), STEPS),
    )
    assert both == [[a[0], b[0]] for a, b in zip(first, second, strict=True)]


@every_schedule
@pytest.mark.parametrize("stop", [0, 1, 6, 17])
def test_a_resumed_schedule_goes_on_bit_by_bit(make, stop: int) -> None:
    expected = rates_of(make(optimizer_of(0.1, 0.4)), STEPS)
    interrupted = make(optimizer_of(0.1, 0.4))
    rates_of(interrupted, stop)
    file = io.BytesIO()
    torch.save(
        {"schedule": interrupted.state_dict(), "optimizer": interrupted.optimizer.state_dict()},
        file,
    )
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    resumed = make(optimizer_of(0.1, 0.4))
    resumed.load_state_dict(saved["schedule"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert rates_of(resumed, STEPS - stop) == expected[stop:]


@every_schedule
def test_loading_restores_the_arguments(make) -> None:
    schedule = make(optimizer_of(0.1))
    state = copy.deepcopy(schedule.state_dict())
    rates_of(schedule, 5)
    schedule.load_state_dict(state)
    assert {key: schedule.state_dict()[key] for key in state} == state


@every_schedule
def test_two_schedules_of_one_kind_share_nothing(make) -> None:
    expected = rates_of(make(optimizer_of(0.1)), STEPS)
    other = make(optimizer_of(0.1))
    schedule = make(optimizer_of(0.1))
    rates_of(other, 9)
    assert rates_of(schedule, STEPS) == expected


@every_schedule
def test_a_rate_kept_in_a_tensor_works(make) -> None:
    """Capturable and compiled optimizers keep their rate in a tensor, which must stay the same
    object."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    expected = rates_of(make(optimizer_of(0.1)), STEPS)
    schedule = make(optimizer)
    for (value,) in expected[1:]:
        advance(schedule)
        assert optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(value, rel=1e-12)


CLOSED_FORMS = {key: make for key, make in FAMILY.items() if not key.startswith("plateau")}


@pytest.mark.parametrize("make", CLOSED_FORMS.values(), ids=CLOSED_FORMS.keys())
def test_the_rate_is_a_function_of_the_step_alone(make) -> None:
    """Asked for any step in any order, a fresh schedule gives what one that walked there has."""
    walked = rates_of(make(optimizer_of(0.1)), 50)
    fresh = make(optimizer_of(0.1))
    for t in (50, 3, 29, 0, 50):
        rate = fresh.lr_at(t) if hasattr(fresh, "lr_at") else 0.1 * fresh.factor_at(t)
        assert rate == walked[t][0]
