"""The times of an observed script reach the tracker as if it had taken them itself."""

from __future__ import annotations

import random

import pytest

from mlbench_core.observe import host_times
from mlbench_core.observe.host_times import BATCH_END, HostTimes
from mlbench_core.tracking import tracker as tracking
from mlbench_core.tracking.tracker import Tracker

STEPS = ("other", "batch_load", "fwd_pass", "backprop", "opt_step")


class Clock:
    """A clock that stands still until it is moved; a thread computes half of the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work_s(self) -> float:
        return self.now / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (tracking, host_times):
        monkeypatch.setattr(module.time, "perf_counter", found.perf_counter)
        monkeypatch.setattr(module, "work_s", found.work_s)
    # The processor time counts with one thread only, whatever the machine has.
    monkeypatch.setattr(tracking, "computes_in_this_thread", lambda: True)
    return found


def mark(times: HostTimes | Tracker, clock: Clock, name: str) -> None:
    """Mark the end of a step, or that of the batch."""
    if isinstance(times, HostTimes):
        times.marks.append((name, clock.now))
    elif name == BATCH_END:
        times.record_batch_step("other")
        times.batch_end()
    else:
        times.record_batch_step(name)


def train(times: HostTimes | Tracker, clock: Clock, batches: int) -> None:
    """Train with random times, which are multiples of 1/8 s and so have exact sums."""
    draw = random.Random(batches)
    clock.now += 1.0
    for batch in range(batches):
        # On the host's clock, a batch begins at the end of the one before.
        if batch == 0 or isinstance(times, Tracker):
            times.batch_start()
        for name in STEPS:
            clock.now += draw.randrange(8) / 8
            mark(times, clock, name)
            if name == "batch_load" and batch % 3 == 0:
                times.validation_start()
                clock.now += draw.randrange(8) / 8
                times.validation_end()
        clock.now += draw.randrange(8) / 8
        mark(times, clock, BATCH_END)


def test_a_tracker_has_the_same_times_in_bulk(clock: Clock) -> None:
    found = []
    for in_bulk in (False, True):
        clock.now = 0.0
        tracker = Tracker([], "run", 0, progress=False)
        tracker.start()
        assert not tracker.prepare()
        times = HostTimes(tracker) if in_bulk else tracker
        for batches in (3, 1, 7):
            train(times, clock, batches)
            if isinstance(times, HostTimes):
                times.pass_on()
            tracker.epoch_end()
        epochs = (tracker.epoch_metrics, tracker.cumulative_train_time)
        found.append((tracker.totals(), epochs, tracker.batch_times, list(tracker.history)))
    assert found[0][0]["batches"] == 11 and found[0][0]["validation_s"] > 0
    cpu_s = [totals.pop("compute_cpu_s") for totals, *_ in found]
    assert found[0] == found[1]
    # The pauses between two batches are a part of it in bulk, and so is what a step has no name
    # for.
    train_s = found[0][0]["train_s"]
    assert cpu_s[0] == train_s / 2 and train_s / 2 <= cpu_s[1] <= clock.now / 2


def test_an_open_batch_counts_up_to_its_last_mark(clock: Clock) -> None:
    tracker = Tracker([], "run", 0, progress=False)
    tracker.start()
    tracker.prepare()
    times = HostTimes(tracker)
    train(times, clock, 2)
    times.pass_on()
    before = tracker.totals()
    times.batch_start()
    clock.now += 3
    mark(times, clock, "fwd_pass")
    clock.now += 1
    # In a batch and again, as when a script prints metrics.
    for _ in range(2):
        times.pass_on()
        after = tracker.totals()
        assert after["train_s"] - before["train_s"] == 3
        assert after["steps_s"]["fwd_pass"] - before["steps_s"]["fwd_pass"] == 3
        assert after["batches"] == before["batches"] == 2
    mark(times, clock, BATCH_END)
    times.pass_on()
    after = tracker.totals()
    assert after["train_s"] - before["train_s"] == 4
    assert after["batches"] == 3 and tracker.batch_times[-1] == 4


def test_no_moment_is_both_training_and_validation(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_work_s() -> float:
        clock.now += 1.0
        return 0.0

    for module in (tracking, host_times):
        monkeypatch.setattr(module, "work_s", slow_work_s)
    tracker = Tracker([], "run", 0, progress=False)
    tracker.start()
    times = HostTimes(tracker)
    times.batch_start()
    began_s = clock.now
    times.validation_start()
    clock.now += 8.0
    times.validation_end()
    mark(times, clock, BATCH_END)
    ended_s = clock.now
    times.pass_on()
    totals = tracker.totals()
    assert totals["validation_s"] >= 8.0
    assert totals["train_s"] + totals["validation_s"] <= ended_s - began_s
