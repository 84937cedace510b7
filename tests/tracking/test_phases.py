"""A synthetic run with known phases: the times are those of the phases, and leave no gap to the
wall clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
from freezegun import freeze_time

from mlbench_core.tracking.memory import memory_peak_bytes
from mlbench_core.tracking.tracker import Tracker

PHASES_S = {
    "load": 0.0625,
    "fwd_pass": 0.125,
    "backprop": 0.25,
    "agg": 0.5,
    "comp_metrics": 0.03125,
}
GROUPS = {
    "preprocess_s": ("load",),
    "compute_s": ("fwd_pass", "backprop"),
    "communication_s": ("agg",),
    "metrics_s": ("comp_metrics",),
}
VALIDATION_S, CHECKPOINT_S, NO_STEP_S = 1.0, 4.0, 8.0


@pytest.fixture(autouse=True)
def _no_cuda() -> Iterator[None]:
    with patch("mlbench_core.tracking.tracker.cuda_in_use", return_value=False):
        yield


def synthetic_run(
    tracker: Tracker, pause: Callable[[str, float], None], epochs: int, batches: int
) -> None:
    """Train: ``pause`` receives the name of each phase and its seconds, and lets them pass."""
    tracker.start()
    for _ in range(epochs):
        for _ in range(batches):
            tracker.batch_start()
            for step, seconds in PHASES_S.items():
                pause(step, seconds)
                getattr(tracker, f"record_batch_{step}")()
            tracker.batch_end()
        tracker.validation_start()
        pause("validation", VALIDATION_S)
        tracker.validation_end()
        tracker.epoch_end()


def test_with_a_frozen_clock_each_phase_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    with freeze_time("2026-01-01") as clock:
        tracker = Tracker([], "7", 0, check_times=True)
        synthetic_run(tracker, lambda _, seconds: clock.tick(seconds), epochs=3, batches=5)
        summary = tracker.summary()
        tracker.close()
    for group, steps in GROUPS.items():
        assert getattr(summary, group) == 15 * sum(PHASES_S[step] for step in steps)
    assert summary.train_s == sum(summary.steps_s.values()) == 15 * sum(PHASES_S.values())
    assert summary.validation_s == 3 * VALIDATION_S
    assert summary.wall_s == summary.train_s + summary.validation_s
    assert summary.other_s == summary.outside_s == 0
    assert caplog.messages == []


def test_with_real_sleeps_each_phase_is_within_2_percent_and_the_sum_within_1() -> None:
    def differences() -> dict[str, float]:
        slept: dict[str, float] = {}

        def sleep(phase: str, seconds: float) -> None:
            start = time.perf_counter()
            time.sleep(seconds / 16)
            # A sleep takes longer than asked for, so the tracker is compared with the time that it
            # took.
            slept[phase] = slept.get(phase, 0.0) + time.perf_counter() - start

        tracker = Tracker([], "7", 0, progress=False)
        start = time.perf_counter()
        synthetic_run(tracker, sleep, epochs=1, batches=3)
        wall_s = time.perf_counter() - start
        summary = tracker.summary()
        times = {group: sum(slept[step] for step in steps) for group, steps in GROUPS.items()}
        times["validation_s"] = slept["validation"]
        found = {
            group: abs(getattr(summary, group) - real) / real / 0.02
            for group, real in times.items()
        }
        return {
            **found,
            "sum": abs(summary.train_s + summary.validation_s - wall_s) / wall_s / 0.01,
        }

    # In shares of what is allowed. Another process may take the core between a sleep and the
    # reading of a clock, so the best of some attempts counts.
    attempts = []
    for _ in range(20):
        attempts.append(differences())
        if max(attempts[-1].values()) <= 1:
            return
    raise AssertionError(attempts)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_check_names_gaps_of_more_than_one_percent(
    is_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with freeze_time("2026-01-01") as clock:
        tracker = Tracker([], "7", 0, check_times=is_on)
        synthetic_run(tracker, lambda _, seconds: clock.tick(seconds), epochs=1, batches=1)
        tracker.batch_start()
        clock.tick(NO_STEP_S)
        tracker.batch_end()
        clock.tick(CHECKPOINT_S)
        tracker.close()
        summary = tracker.summary()
    assert (summary.other_s, summary.outside_s) == (NO_STEP_S, CHECKPOINT_S)
    assert summary.to_dict().items() >= {"other_s": NO_STEP_S, "outside_s": CHECKPOINT_S}.items()
    assert summary.report(2).items() >= {"other_s": NO_STEP_S, "outside_s": CHECKPOINT_S}.items()
    if not is_on:
        assert caplog.messages == []
        return
    inside, outside = caplog.messages
    assert (
        "the steps take 0.969 s of 8.969 s inside batches, so 8.000 s belong to no step" in inside
    )
    assert "take 9.969 s of 13.969 s of wall time, so 4.000 s are outside" in outside


@pytest.mark.parametrize(("gap_s", "is_named"), [(0.99, False), (1.01, True)])
def test_a_gap_of_one_percent_is_no_problem(gap_s: float, is_named: bool) -> None:
    with freeze_time("2026-01-01") as clock:
        tracker = Tracker([], "7", 0)
        tracker.start()
        tracker.batch_start()
        clock.tick(100 - gap_s)
        tracker.record_batch_fwd_pass()
        clock.tick(gap_s)
        tracker.batch_end()
        assert len(tracker.summary().gaps()) == is_named


def test_the_peak_of_the_gpu_memory_outlives_a_resumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_core.tracking.tracker.memory_peak_bytes", lambda: 500)
    first = Tracker([], "7", 0)
    assert first.summary().report(1)["memory_peak_bytes"] == 500
    state = json.loads(json.dumps(first.state_dict()))
    second = Tracker([], "7", 0)
    second.load_state_dict(state)
    for now, most in ((300, 500), (None, 500), (700, 700)):
        monkeypatch.setattr("mlbench_core.tracking.tracker.memory_peak_bytes", lambda now=now: now)
        assert second.summary().memory_peak_bytes == most
    del state["memory_peak_bytes"]  # a checkpoint of an earlier version
    second.load_state_dict(state)
    assert second.summary().memory_peak_bytes == 700


def test_the_peak_is_that_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    for in_use, peak in ((True, 700), (False, None)):
        monkeypatch.setattr(
            "mlbench_core.tracking.memory.cuda_in_use", lambda in_use=in_use: in_use
        )
        assert memory_peak_bytes() == peak


@pytest.mark.gpu
def test_the_peak_of_a_real_device() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device to allocate memory on")
    large = torch.zeros(2**20, device="cuda")
    del large
    peak = Tracker([], "7", 0).summary().memory_peak_bytes
    assert peak is not None and peak >= 2**22
