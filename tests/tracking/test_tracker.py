"""What a tracker measures, names, sends and keeps."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest

from mlbench_core.errors import CheckpointError
from mlbench_core.running_statistics import QuantileSketch
from mlbench_core.tracking.sinks import CSVSink, JSONLSink, TensorBoardSink
from mlbench_core.utils import AverageMeter, Tracker

ACCURACY = SimpleNamespace(name="Prec@1")
STEPS = ("load", "fwd_pass", "comp_loss", "backprop", "agg", "opt_step", "comp_metrics")
Clock = Any


def make(**options: Any) -> Tracker:
    return Tracker([ACCURACY], "7", options.pop("rank", 0), **options)


def run_batch(tracker: Tracker, clock: Clock, seconds: dict[str, float]) -> None:
    tracker.batch_start()
    for step, duration in seconds.items():
        clock.tick(duration)
        getattr(tracker, f"record_batch_{step}")()
    tracker.batch_end()


def run_quick_batches(tracker: Tracker, batches: int) -> None:
    for _ in range(batches):
        tracker.batch_start()
        for step in STEPS:
            getattr(tracker, f"record_batch_{step}")()
        tracker.batch_end()


# ---------------------------------------------------------------------- times


def test_each_step_gets_exactly_its_time(clock: Clock) -> None:
    tracker = make()
    tracker.start()
    durations = {step: float(2**i) for i, step in enumerate(STEPS)}
    run_batch(tracker, clock, durations)
    clock.tick(1000)  # between two batches
    run_batch(tracker, clock, durations)
    assert tracker.get_total_preprocess_time() == 2 * 1
    assert tracker.get_total_compute_time() == 2 * (2 + 4 + 8 + 32)
    assert tracker.get_total_communication_time() == 2 * 16
    assert tracker.get_total_metrics_time() == 2 * 64
    assert tracker.get_total_train_time() == 2 * 127
    assert tracker.summary().wall_s == 2 * 127 + 1000


def test_validation_time_is_real_and_no_part_of_training(clock: Clock) -> None:
    tracker = make()
    run_batch(tracker, clock, {"fwd_pass": 1})
    tracker.validation_start()
    clock.tick(5)
    tracker.validation_end()
    tracker.validation_end()  # without a start: nothing
    assert (tracker.get_total_val_time(), tracker.get_total_train_time()) == (5, 1)


def test_validation_inside_a_batch_is_no_part_of_it(clock: Clock) -> None:
    tracker = make()
    tracker.batch_start()
    clock.tick(1)
    tracker.validation_start()
    clock.tick(5)
    tracker.validation_end()
    clock.tick(2)
    tracker.record_batch_fwd_pass()
    tracker.batch_end()
    assert tracker.get_total_train_time() == tracker.get_total_compute_time() == 3
    assert tracker.get_total_val_time() == 5


def test_the_wall_clock_may_jump() -> None:
    tracker = make()
    with patch("time.time", side_effect=AssertionError("the wall clock was read")):
        run_quick_batches(tracker, 3)
    assert tracker.get_total_train_time() > 0


def test_a_step_may_come_first_in_a_later_epoch_and_an_epoch_may_be_empty(
    clock: Clock, log: MagicMock
) -> None:
    tracker = make()
    run_batch(tracker, clock, {"fwd_pass": 1})
    tracker.epoch_end()
    first = {"fwd_pass": 1, "CumulativeTrainTimeEpoch": 1, "cum_fwd_pass": 1}
    assert log.call_args_list == [call("7", 0, 0, name, value) for name, value in first.items()]
    log.reset_mock()
    tracker.epoch_end()
    log.assert_not_called()  # nothing again for an epoch without batches
    run_batch(tracker, clock, {"fwd_pass": 4, "agg": 2})
    tracker.epoch_end()
    third = {
        "fwd_pass": 4,
        "agg": 2,
        "CumulativeTrainTimeEpoch": 6,
        "cum_fwd_pass": 5,
        "cum_agg": 2,
    }
    assert log.call_args_list == [call("7", 0, 2, name, value) for name, value in third.items()]
    assert tracker.current_epoch == 3
    assert tracker.epoch_metrics == {"fwd_pass": [1, 0, 4], "agg": [0, 0, 2]}


def test_batch_end_and_marks_without_batch_start_book_nothing(clock: Clock) -> None:
    tracker = make()
    run_batch(tracker, clock, {"fwd_pass": 1})
    clock.tick(7)
    tracker.record_batch_agg()
    tracker.batch_end()
    assert tracker.get_total_train_time() == 1
    assert tracker.get_total_communication_time() == 0
    assert tracker.summary().batches == 1


def test_a_batch_left_open_gives_the_time_of_its_steps(clock: Clock) -> None:
    tracker = make()
    tracker.batch_start()
    clock.tick(2)
    tracker.record_batch_fwd_pass()
    clock.tick(100)
    run_batch(tracker, clock, {"fwd_pass": 1})
    assert tracker.get_total_train_time() == tracker.get_total_compute_time() == 3


def test_times_of_each_epoch_add_up_to_the_totals(clock: Clock, log: MagicMock) -> None:
    tracker = make()
    assert tracker.epoch_metrics == {}
    assert tracker.cumulative_train_time == tracker.batch_times == []
    assert tracker.start_time is None
    tracker.start()
    assert tracker.start_time == time.time()
    for epoch in range(2):
        for _ in range(2):
            run_batch(
                tracker, clock, {"load": 1, "fwd_pass": 2 + epoch, "agg": 4, "comp_metrics": 8}
            )
        tracker.validation_start()
        clock.tick(16)
        tracker.validation_end()
        tracker.epoch_end()
    assert tracker.cumulative_train_time == [30, 32]
    assert tracker.cumulative_val_time == [16, 16]
    assert tracker.cumulative_compute_time == tracker.epoch_metrics["fwd_pass"] == [4, 6]
    assert tracker.cumulative_communication_time == tracker.epoch_metrics["agg"] == [8, 8]
    assert tracker.cumulative_metrics_time == [16, 16]
    assert tracker.cumulative_preprocess_time == tracker.epoch_metrics["batch_load"] == [2, 2]
    run_batch(tracker, clock, {"agg": 1})  # the epoch that runs
    assert tracker.cumulative_communication_time == [8, 8, 1]
    assert sum(tracker.cumulative_train_time) == tracker.get_total_train_time() == 63
    assert tracker.batch_times == [15, 15, 16, 16, 1]
    assert tracker.history[-1] == (2, "batch_time_s", 1, 5, 95)


def test_times_of_epochs_are_bounded_and_go_on_after_a_resume(clock: Clock, log: MagicMock) -> None:
    tracker = make(history_size=2)
    for epoch in range(4):
        run_batch(tracker, clock, {"agg": 2**epoch})
        tracker.epoch_end()
    resumed = make(history_size=2)
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    for one in (tracker, resumed):
        assert one.epoch_metrics == {"agg": [1 + 2 + 4, 8]}
        run_batch(one, clock, {"agg": 16})
        assert one.cumulative_train_time == [1 + 2 + 4, 8, 16]


def test_own_steps_and_single_strings(clock: Clock) -> None:
    tracker = make(
        communication_steps="send",
        compute_steps=["a", "b"],
        metrics_steps="m",
        preprocess_steps="p",
    )
    tracker.batch_start()
    for i, step in enumerate(("send", "a", "b", "m", "p", "other")):
        clock.tick(2**i)
        tracker.record_batch_step(step)
    tracker.record_batch_init()
    tracker.batch_end()
    assert tracker.get_total_communication_time() == 1
    assert tracker.get_total_compute_time() == 6
    assert tracker.get_total_metrics_time() == 8
    assert tracker.get_total_preprocess_time() == 16
    assert tracker.summary().steps_s["other"] == 32
    assert "init" in tracker.summary().steps_s


def test_wrong_steps_are_refused() -> None:
    with pytest.raises(TypeError, match=r"compute_steps must be names of steps, .* not 3"):
        make(compute_steps=["a", 3])
    tracker = make()
    tracker.batch_start()
    with pytest.raises(TypeError, match="name must be a string, not 3"):
        tracker.record_batch_step(3)  # type: ignore[arg-type]


def test_a_second_start_raises() -> None:
    tracker = make()
    tracker.start()
    with pytest.raises(RuntimeError, match="started before"):
        tracker.start()


# ---------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_batches() -> None:
    tracker = make(history_size=100)
    run_quick_batches(tracker, 2_000)
    size = len(json.dumps(tracker.state_dict()))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    run_quick_batches(tracker, 20_000)
    for _ in range(1000):
        tracker.record_loss(1.0)
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 40_000  # 833 bytes a batch would be 16 MB
    assert len(tracker.history) == 100
    assert len(json.dumps(tracker.state_dict())) < 1.5 * size


def test_records_keep_a_bounded_number_of_epochs() -> None:
    tracker = make(history_size=3)
    for _ in range(5):
        tracker.record_loss(1.0)
        tracker.epoch_end()
    assert list(tracker.records["train_loss"]) == [2, 3, 4]


def test_the_global_random_generator_is_left_alone() -> None:
    before = random.getstate()
    run_quick_batches(make(), 10)
    assert random.getstate() == before


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_quantiles_are_within_one_percent(scale: float) -> None:
    values = [scale * random.Random(1).lognormvariate(0, 1) * (1 + i / 500) for i in range(500)]
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = sorted(values)[math.floor(share * (len(values) - 1))]
        assert sketch.quantile(share) == pytest.approx(exact, rel=0.0101)


def test_quantiles_of_nothing_zero_and_giants() -> None:
    sketch = QuantileSketch()
    assert sketch.quantile(0.5) is None
    sketch.add(0.0)
    assert sketch.quantile(0.5) == 0.0
    sketch.add(1e300)
    assert sketch.quantile(1.0) == pytest.approx(1e9, rel=0.02)
    with pytest.raises(ValueError, match="99"):
        sketch.quantile(99)


# ---------------------------------------------------------------------- statistics and the best
# value


def test_average_meter() -> None:
    meter = AverageMeter()
    meter.update(3.0, 0)
    assert (meter.val, meter.avg, meter.count) == (3.0, 0, 0)
    meter.update(1.0, 3)
    meter.update(5.0)
    assert (meter.val, meter.avg, meter.sum, meter.count) == (5.0, 2.0, 8.0, 4)
    meter.reset()
    assert (meter.val, meter.avg, meter.sum, meter.count) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="n must be at least 0, not -1"):
        meter.update(1.0, -1)


def test_statistics_are_prefixed_averaged_and_sent(log: MagicMock) -> None:
    tracker = make(rank=2)
    tracker.record_loss(1.0, n=3, log_to_api=True)
    tracker.record_loss(5.0, n=1)
    tracker.validation()
    tracker.record_metric(ACCURACY, 50, n=10, log_to_api=True)
    tracker.record_stat("global_Prec@1", 60, log_to_api=True)
    assert tracker.epoch_stats["train_loss"].avg == 2.0
    assert tracker.epoch_stats["val_Prec@1"].avg == 50
    assert log.call_args_list == [
        call("7", 2, 0, "train_loss", 1.0),
        call("7", 2, 0, "val_Prec@1", 50),
        call("7", 2, 0, "val_global_Prec@1", 60),
    ]
    assert tracker.records["train_loss"] == {0: 2.0}
    assert tracker.history[0] == (0, "train_loss", 1.0, 0, 0.0)
    tracker.epoch_end()
    assert not any(meter.count for meter in tracker.epoch_stats.values())
    tracker.train()
    assert tracker.is_training


def test_tensors_lose_their_graph_and_nonsense_is_refused() -> None:
    torch = pytest.importorskip("torch")
    tracker = make()
    tracker.record_loss((torch.ones(1, requires_grad=True) * 2).squeeze().detach())
    assert type(tracker.epoch_stats["train_loss"].val) is float
    with pytest.raises(TypeError, match=r"train_loss must be a number .*, not 'high'"):
        tracker.record_loss("high")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("minimize", "values"), [(False, (-5.0, -7.0, -1.0)), (True, (5.0, 7.0, 1.0))]
)
def test_the_first_value_is_best_whatever_it_is(
    minimize: bool, values: tuple[float, float, float]
) -> None:
    tracker = make(minimize=minimize)
    assert not tracker.is_best()
    best = []
    for value in values:
        tracker.update_primary_metric(value)
        best.append(tracker.is_best())
        tracker.epoch_end()
        assert not tracker.is_best()
    assert best == [True, False, True]
    assert (tracker.best_epoch, tracker.best_metric_value) == (2, values[2])


def test_equal_worse_and_nan_are_not_best() -> None:
    tracker = make()
    tracker.update_primary_metric(math.nan)
    assert not tracker.is_best()
    tracker.update_primary_metric(1.0)
    tracker.update_primary_metric(0.5)  # in the same epoch
    assert not tracker.is_best()
    tracker.update_primary_metric(1.0)
    assert not tracker.is_best()


def test_statistics_of_loss_and_metrics_are_there_from_the_start() -> None:
    tracker = make()
    tracker.record_loss(3.0)
    tracker.epoch_end()
    names = [tracker.train_prefix, tracker.val_prefix, tracker.val_prefix + "global_"]
    for name in (prefix + what for prefix in names for what in ("loss", "Prec@1")):
        assert tracker.epoch_stats[name].avg == tracker.epoch_stats[name].val == 0
    assert "train_loss" not in str(tracker)


# Validation as scripts of version 3.0 write it: record_metric, then perhaps update_primary_metric,
# then is_best.


@pytest.mark.parametrize(
    "told",
    [
        "recorded",
        "by name",
        "recorded and told",
        "told and recorded",
        "in parts",
        "in parts, then told",
    ],
)
@pytest.mark.parametrize("begin", ["validation", "validation_start"])
def test_a_metric_recorded_in_validation_may_be_the_best(told: str, begin: str) -> None:
    tracker = make()
    best = []
    for value in (50.0, 60.0, 55.0, 60.0, 60.1):
        tracker.train()
        tracker.record_metric(ACCURACY, 99.0)
        tracker.is_training = False
        getattr(tracker, begin)()
        if told == "told and recorded":
            tracker.update_primary_metric(value)
        if told.startswith("in parts"):
            for part, n in ((value + 30, 1), (value - 10, 3)):
                tracker.record_metric(ACCURACY, part, n)
        elif told == "by name":
            tracker.record_metric("Prec@1", value, n=3)
        else:
            tracker.record_metric(ACCURACY, value, n=3)
        tracker.record_metric(SimpleNamespace(name="Prec@5"), 100.0)
        if told.endswith("told"):
            tracker.update_primary_metric(value)
        best.append(tracker.is_best())
        tracker.epoch_end()
    assert best == [True, True, False, False, True]
    assert tracker.best_epoch == 4
    assert tracker.best_metric_value == pytest.approx(60.1)


def test_validations_of_one_epoch_are_judged_one_by_one() -> None:
    tracker = make(minimize=True)
    tracker.validation()
    tracker.record_metric(ACCURACY, 3.0)
    tracker.train()
    tracker.validation()
    tracker.record_metric(ACCURACY, 5.0)
    assert not tracker.is_best()
    tracker.validation_start()
    tracker.record_metric(ACCURACY, 2.0)
    tracker.validation_end()
    assert tracker.is_best()
    assert tracker.best_metric_value == 2.0
    tracker.validation_start()
    tracker.record_metric(ACCURACY, 0.0, n=0)
    tracker.record_metric(ACCURACY, math.nan)
    assert not tracker.is_best()
    assert tracker.best_metric_value == 2.0


def test_the_value_of_all_workers_replaces_what_this_one_recorded() -> None:
    tracker = make()
    tracker.validation_start()
    tracker.validation()
    tracker.record_metric(ACCURACY, 81.0)  # of this worker's part
    tracker.validation()  # as record_validation_stats does
    tracker.update_primary_metric(80.0)
    assert tracker.is_best()
    assert tracker.best_metric_value == 80.0


def test_no_metrics() -> None:
    tracker = Tracker([], "7", 0)
    assert tracker.primary_metric is None
    tracker.update_primary_metric(1.0)
    assert "best metric 1" in str(tracker)


def test_one_line_of_status() -> None:
    tracker = make()
    tracker.record_loss(0.25)
    assert (
        "Epoch 0" in str(tracker) and "train_loss 0.25" in str(tracker) and "\n" not in str(tracker)
    )
    tracker.epoch_end()
    assert str(tracker) == "1 epoch done | train time 0.0 s", "not epoch 1, which has not begun"
    tracker.record_loss(0.5)
    assert str(tracker).startswith("Epoch 1 | train_loss 0.5")
    tracker.epoch_end()
    assert str(tracker).startswith("2 epochs done")


# ---------------------------------------------------------------------- goals


def goal_at_80(metric_name: str, value: float, tracker: Tracker) -> str | None:
    if metric_name == "val_global_Prec@1" and value >= 80:
        return f"80% in {tracker.get_total_train_time():.0f} seconds"
    return None


def goal_factory() -> Callable[[str, float, Tracker], str | None]:
    return goal_at_80


@pytest.mark.parametrize("goal", [goal_at_80, goal_factory])
def test_rank_0_sends_the_result_once(
    goal: Any, clock: Clock, log: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(goal=goal)
    run_batch(tracker, clock, {"fwd_pass": 2, "agg": 1})
    tracker.record_stat("global_Prec@1", 99)  # in training: not watched
    tracker.validation()
    tracker.record_stat("global_Prec@1", 79)
    assert not tracker.goal_reached
    with patch("time.sleep", side_effect=AssertionError("slept")):
        tracker.record_stat("global_Prec@1", 80)
        tracker.record_stat("global_Prec@1", 81)
    sent = {entry.args[3]: entry.args[4] for entry in log.call_args_list}
    assert json.loads(sent.pop("goal"))["time_to_goal_s"] == 3
    assert log.call_count == len(sent) + 1
    assert sent == {
        "TaskResult": "80% in 3 seconds",
        "TotalCumulativeTrainTime": 3,
        "global_cum_batch_load": 0,
        "global_cum_fwd_pass": 2,
        "global_cum_comp_loss": 0,
        "global_cum_backprop": 0,
        "global_cum_opt_step": 0,
        "global_cum_agg": 1,
        "global_cum_comp_metrics": 0,
    }
    assert all(entry.args[:3] == ("7", 0, 0) for entry in log.call_args_list)
    assert tracker.goal_reached and tracker.time_to_goal_s == 3
    assert capsys.readouterr() == ("", "")


def test_epochs_end_at_the_goal_and_none_follows_it_when_a_run_is_resumed() -> None:
    tracker = make()
    for epoch in tracker.epochs(5):
        tracker.goal_reached = epoch == 2
        tracker.epoch_end()
    assert tracker.current_epoch == 3
    resumed = make()
    resumed.load_state_dict(tracker.state_dict())
    assert list(resumed.epochs(5)) == []
    assert list(resumed.epochs(5, past_goal=True)) == [3, 4]
    resumed.goal_reached = False
    assert list(resumed.epochs(5)) == [3, 4]
    assert list(resumed.epochs(3)) == []


def test_other_ranks_reach_the_goal_in_silence(log: MagicMock) -> None:
    tracker = make(rank=1, goal=goal_at_80)
    tracker.validation()
    tracker.record_stat("global_Prec@1", 80)
    assert tracker.goal_reached
    log.assert_not_called()


@pytest.mark.parametrize("goal", [3, "80", lambda a: None, lambda: 80])
def test_what_is_no_goal_is_refused(goal: Any) -> None:
    with pytest.raises(TypeError, match="goal must be callable"):
        make(goal=goal)


# ---------------------------------------------------------------------- the device


class FakeDevice:
    """A device that lags behind: it passes an event when it may."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.passed = True
        self.made = 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.ms = self.device.now_ms

    def query(self) -> bool:
        return self.device.passed

    def synchronize(self) -> None:
        self.device.passed = True

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return end_event.ms - self.ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr("mlbench_core.tracking.clock.cuda_event", device.event)
    return device


def run_device_batch(tracker: Tracker, device: FakeDevice) -> None:
    tracker.batch_start()
    device.now_ms += 1000
    tracker.record_batch_fwd_pass()
    device.now_ms += 2000
    tracker.record_batch_agg()
    device.now_ms += 500
    tracker.batch_end()


def test_device_times_are_read_when_the_device_has_passed_them(device: FakeDevice) -> None:
    tracker = make(use_cuda=True)
    device.passed = False
    run_device_batch(tracker, device)
    assert tracker.get_total_train_time() == tracker.get_total_compute_time() == 0
    device.passed = True
    assert tracker.get_total_compute_time() == 1
    assert tracker.get_total_communication_time() == 2
    assert tracker.get_total_train_time() == 3.5


def test_device_events_are_reused_and_close_waits_for_the_last(device: FakeDevice) -> None:
    tracker = make(use_cuda=True)
    for _ in range(50):
        run_device_batch(tracker, device)
    assert device.made == 4
    device.passed = False
    run_device_batch(tracker, device)
    tracker.close()
    assert tracker.get_total_train_time() == 51 * 3.5


def test_a_state_has_the_times_of_all_batches_that_it_counts(device: FakeDevice) -> None:
    tracker = make(use_cuda=True)
    device.passed = False
    run_device_batch(tracker, device)
    state = tracker.state_dict()
    assert (state["batches"], state["train_s"]) == (1, 3.5)
    assert state["steps_s"] == {"fwd_pass": 1, "agg": 2}
    assert [entry[1] for entry in state["history"]] == ["batch_time_s"]


def test_validation_inside_a_device_batch_is_left_out(device: FakeDevice) -> None:
    tracker = make(use_cuda=True)
    tracker.batch_start()
    tracker.validation_start()
    device.now_ms += 9000
    tracker.validation_end()
    device.now_ms += 1000
    tracker.record_batch_fwd_pass()
    tracker.batch_end()
    assert tracker.get_total_train_time() == tracker.get_total_compute_time() == 1


def test_a_state_replaces_the_energy_that_was_measured_before(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_j = 0.0

    def count() -> Callable[[], float]:
        start_j = used_j
        return lambda: used_j - start_j

    monkeypatch.setattr("mlbench_core.tracking.tracker.energy_counter", count)
    tracker = make(use_cuda=True)
    run_device_batch(tracker, device)
    used_j = 5.0
    state = tracker.state_dict()
    assert state["energy_j"] == 5
    run_device_batch(tracker, device)
    used_j = 7.0
    tracker.load_state_dict(state)
    assert tracker.summary().energy_j == 5
    run_device_batch(tracker, device)
    used_j = 8.0
    assert tracker.summary().energy_j == 6


# ---------------------------------------------------------------------- summary, sinks, progress


def test_summary(clock: Clock) -> None:
    tracker = make()
    tracker.start()
    for _ in range(4):
        tracker.batch_start()
        clock.tick(3)
        tracker.record_batch_fwd_pass()
        clock.tick(1)
        tracker.record_batch_agg()
        clock.tick(1)
        tracker.batch_end(samples=10, tokens=100)
    tracker.count(samples=10)
    tracker.record_communication(total_s=2.0, exposed_s=0.5, size_bytes=1000)
    tracker.record_communication(total_s=1.0, exposed_s=1.5, size_bytes=1)
    summary = tracker.summary()
    assert summary.shares == pytest.approx(
        {"compute": 0.6, "communication": 0.2, "metrics": 0, "preprocess": 0, "other": 0.2}
    )
    assert (summary.samples, summary.samples_per_s, summary.tokens_per_s) == (50, 2.5, 20)
    assert summary.batch_p50_s == pytest.approx(5, rel=0.01)
    assert summary.batch_p99_s == pytest.approx(5, rel=0.01)
    assert (summary.communication_total_s, summary.communication_exposed_s) == (3.0, 1.5)
    assert summary.communication_size_bytes == 1001
    assert summary.energy_j is None
    assert json.loads(json.dumps(summary.to_dict()))["train_s"] == 20


def test_waiting_within_another_step_is_booked_on_communication(clock: Clock) -> None:
    tracker = make()
    tracker.batch_start()
    clock.tick(5)
    tracker.record_batch_backprop()
    tracker.book_as_communication("backprop", 3.0)
    tracker.batch_end()
    assert (tracker.get_total_compute_time(), tracker.get_total_communication_time()) == (2.0, 3.0)
    tracker.book_as_communication("backprop", 3.0)  # no more than is booked there
    tracker.book_as_communication("no such step", 3.0)
    assert (tracker.get_total_compute_time(), tracker.get_total_communication_time()) == (0.0, 5.0)
    assert tracker.get_total_train_time() == 5.0
    with pytest.raises(ValueError, match="seconds must be at least 0"):
        tracker.book_as_communication("backprop", -1.0)


def test_a_summary_before_anything_happened() -> None:
    summary = make().summary()
    assert (summary.shares, summary.samples_per_s, summary.batch_p50_s, summary.best_epoch) == (
        {},
        None,
        None,
        None,
    )


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, math.nan, 0), (0, 0, -1)])
def test_negative_communication_is_refused(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        make().record_communication(*arguments)


def test_files_of_lines(tmp_path: Path) -> None:
    lines, rows = tmp_path / "new" / "run.jsonl", tmp_path / "run.csv"
    with make(sinks=[JSONLSink(lines, rank=0), CSVSink(rows)]) as tracker:
        run_quick_batches(tracker, 2)
        tracker.record_loss(0.5)
        tracker.record_loss(math.inf)
        tracker.epoch_end()
    entries = [json.loads(line) for line in lines.read_text().splitlines()]
    first = {key: entries[0][key] for key in ("rank", "epoch", "step", "name", "value")}
    assert first == {"rank": 0, "epoch": 0, "step": 2, "name": "train_loss", "value": 0.5}
    assert entries[1]["value"] is None
    assert entries[-1]["summary"]["batches"] == 2
    assert rows.read_text().splitlines()[:2] == ["epoch,step,name,value", "0,2,train_loss,0.5"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with make(sinks=[TensorBoardSink(tmp_path)]) as tracker:
        tracker.record_loss(0.5)
    assert [path for path in tmp_path.iterdir() if path.stat().st_size > 0]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyError("No space left")]
)
def test_a_sink_that_fails_is_named_once_and_the_run_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        calls = 0

        def __call__(self, *record: Any) -> None:
            self.calls += 1
            raise error

        def __repr__(self) -> str:
            return "Full('disk')"

    full, seen = Full(), []
    tracker = make(sinks=[full, lambda *record: seen.append(record)])
    tracker.record_loss(1.0)
    tracker.record_loss(2.0)
    tracker.close()
    assert full.calls == 1
    assert [value for _, value, *_ in seen] == [1.0, 2.0]
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert (
        "Full('disk')" in message and type(error).__name__ in message and "No space left" in message
    )
    with pytest.raises(TypeError, match="sinks must be callable"):
        make(sinks=["file.csv"])


@pytest.mark.parametrize("method", ["record", "event", "flush", "write_summary", "close"])
def test_any_method_of_a_sink_may_fail(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("broken")

    class Broken:
        def __call__(self, *_: Any) -> None: ...

    setattr(Broken, method, fail)
    with make(sinks=[Broken()]) as tracker:
        tracker.record_loss(1.0)
        run_quick_batches(tracker, 1)
        tracker.epoch_end()
    assert "ArithmeticError: broken" in caplog.text


def test_a_sink_may_end_the_process() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(sinks=[interrupt]).record_loss(1.0)


def test_progress_shows_on_a_terminal_on_rank_0_alone() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for rank in (0, 1):
        with patch("sys.stderr", Terminal()) as terminal:
            tracker = make(rank=rank)
            run_quick_batches(tracker, 3)
            tracker.epoch_end()
            tracker.close()
            shown[rank] = terminal.getvalue()
    assert "epoch 0" in shown[0]
    assert shown[1] == ""


def test_no_progress_where_standard_error_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = make()
    run_quick_batches(tracker, 3)
    tracker.close()
    tracker.close()
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------- state


def test_a_resumed_run_continues_its_time_to_goal(clock: Clock, log: MagicMock) -> None:
    first = make(minimize=False, compute_steps="fwd_pass")
    first.start()
    run_batch(first, clock, {"fwd_pass": 2, "agg": 1})
    first.record_loss(0.5)
    first.record_metric(ACCURACY, 50)
    first.update_primary_metric(-3.0)
    first.epoch_end()
    first.record_loss(0.25, n=4)
    state = json.loads(json.dumps(first.state_dict()))

    clock.tick(1000)
    second = make(goal=goal_at_80)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.start()
    run_batch(second, clock, {"fwd_pass": 2, "agg": 1})
    second.validation()
    second.record_stat("global_Prec@1", 80)
    assert second.time_to_goal_s == second.get_total_train_time() == 6
    assert second.summary().wall_s == 6
    assert (second.current_epoch, second.best_epoch, second.best_metric_value) == (1, 0, -3.0)
    assert second.records["train_loss"] == {0: 0.5, 1: 0.25}
    assert second.epoch_stats["train_loss"].count == 4
    second.update_primary_metric(-4.0)
    assert not second.is_best()


def test_a_state_before_any_value_keeps_the_best_open() -> None:
    tracker = Tracker([], "7", 0)
    tracker.load_state_dict(make(minimize=True).state_dict())
    assert tracker.best_metric_value == math.inf
    assert tracker.primary_metric.name == "Prec@1"


def test_a_state_has_means_and_communication(clock: Clock) -> None:
    first = make()
    first.record_loss(0.5)
    first.record_loss(0.25, n=3)
    first.record_communication(total_s=3.0, exposed_s=1.0, size_bytes=400)
    second = make()
    second.load_state_dict(first.state_dict())
    meter = second.epoch_stats["train_loss"]
    assert (meter.avg, meter.val, meter.count) == (0.3125, 0.25, 4)
    second.record_loss(0.25, n=4)
    assert meter.avg == 0.28125
    second.record_communication(total_s=1.0, exposed_s=0.5, size_bytes=1)
    summary = second.summary()
    assert summary.communication_size_bytes == 401
    assert (summary.communication_total_s, summary.communication_exposed_s) == (4.0, 1.5)


def test_a_state_replaces_the_mean_of_a_validation_and_the_place_of_an_exchange() -> None:
    state = make().state_dict()
    used = make()
    used.validation()
    used.record_metric(ACCURACY, 90)
    used.record_communication(total_s=1.0, exposed_s=1.0, size_bytes=4)
    used.load_state_dict({**state, "is_training": False})
    used.record_metric(ACCURACY, 50)
    used.record_communication(total_s=1.0, exposed_s=1.0, size_bytes=4)
    assert used.best_metric_value == 50
    assert used.summary().exchanges == 1


def test_torch_reads_the_state_without_pickled_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tracker = make()
    run_quick_batches(tracker, 5)
    torch.save(tracker.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True)["batches"] == 5


@pytest.mark.parametrize("damage", [{}, {"version": 99}, None])
def test_a_damaged_state_changes_nothing(damage: Any) -> None:
    tracker = make()
    before = copy.deepcopy(tracker.state_dict())
    with pytest.raises(CheckpointError, match="must be that of a tracker"):
        tracker.load_state_dict(damage)
    half = {key: value for key, value in before.items() if key != "records"}
    with pytest.raises(CheckpointError, match="records"):
        tracker.load_state_dict({**half, "current_epoch": 5})
    assert tracker.state_dict() == before


def test_rank_0_publishes_the_totals_as_one_metric(clock: Clock, log: MagicMock) -> None:
    for rank in (0, 1):
        tracker = make(rank=rank)
        tracker.start()
        tracker.train()
        tracker.batch_start()
        clock.tick(1)
        tracker.record_batch_load()
        clock.tick(2)
        tracker.record_batch_fwd_pass()
        clock.tick(1)
        tracker.record_batch_agg()
        tracker.record_communication(1.0, 0.5, 400)
        tracker.batch_end(samples=8)
        log.reset_mock()
        tracker.publish_summary(world_size=2)
        if rank == 1:
            log.assert_not_called()
            continue
        (run_id, sender, epoch, name, value) = log.call_args.args
        assert (run_id, sender, epoch, name) == ("7", 0, 0, "summary")
        report = json.loads(value)
        assert report["workers"] == 2
        assert report["samples_per_s"] == pytest.approx(
            2 * 8 / 4
        )  # both workers' samples over the same 4 seconds
        assert report["goal_reached"] is False
        assert report["bytes_sent"] == 400
        total_s = report["total_s"]
        assert total_s["train"] == pytest.approx(4)
        assert [total_s[k] for k in ("preprocess", "compute", "communication")] == pytest.approx(
            [1, 2, 1]
        )
        assert total_s["exposed_communication"] == pytest.approx(0.5)
