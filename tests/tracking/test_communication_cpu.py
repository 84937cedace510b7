"""The processor time of communication: work counts, waiting does not."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.distributed.pytorch.timing import CommunicationClock, Interval
from mlbench_core.optim.pytorch import CentralizedSGD, LocalSGD, SparsifiedSGD
from mlbench_core.processor_time import polling
from mlbench_core.results.folder import verify_folder
from mlbench_core.results.raw_lines import LinesSink, read_lines
from mlbench_core.tracking import Tracker
from tests.helpers.ranks import run_ranks
from tests.results.helpers import write_run

LATE_S = 0.5
CPU = torch.device("cpu")


def work(seconds: float = 0.1) -> None:
    """Use the processor for some seconds of processor time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def work_elsewhere() -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def work_as_polling() -> None:
    with polling():
        work()


@pytest.mark.parametrize("wait", [lambda: time.sleep(0.1), work_elsewhere, work_as_polling])
def test_waiting_is_not_work(wait: Callable[[], None]) -> None:
    interval = Interval(CPU)
    with interval.exposed():
        wait()
    assert interval.exposed_s() >= 0.09
    cpu_s = interval.cpu_s()
    assert cpu_s is not None and cpu_s < interval.exposed_s() / 4
    with interval.exposed():
        work()
    # Work after polling counts, in the same interval too.
    assert interval.cpu_s() == pytest.approx(cpu_s + 0.1, rel=0.3)


def test_it_is_not_measured_on_a_gpu() -> None:
    class Stream:
        """Passes each event at once."""

    interval = Interval(CPU)
    interval._stream = Stream()  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Interval,
            "_now",
            lambda self: SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 100.0),
        )
        with interval.exposed():
            work(0.01)
    assert (interval.exposed_s(), interval.cpu_s()) == (0.1, None)
    clock, tracker = CommunicationClock(), Tracker([], "run", 0)
    clock.add(interval)
    clock.report(tracker)
    summary = tracker.summary()
    assert (summary.communication_exposed_s, summary.communication_cpu_s) == (0.1, None)


def test_a_clock_reports_it_to_trackers_that_take_it() -> None:
    class Earlier:
        calls = 0

        def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
            self.calls += 1

    tracker, earlier = Tracker([], "run", 0), Earlier()
    clock = CommunicationClock()
    for receiver in (tracker, earlier, tracker):
        with clock.measure(CPU):
            work(0.01)
        clock.report(receiver)
    assert earlier.calls == 1
    summary = tracker.summary()
    assert summary.communication_cpu_s is not None
    assert 0.02 <= summary.communication_cpu_s <= summary.communication_exposed_s


def cpu_after(*parts: tuple[float, float | None]) -> float | None:
    tracker = Tracker([], "run", 0)
    for exposed_s, cpu_s in parts:
        tracker.record_communication(exposed_s, exposed_s, 8, cpu_s=cpu_s)
    return tracker.summary().communication_cpu_s


def test_it_is_unknown_if_a_part_of_it_is() -> None:
    assert cpu_after() is None
    assert cpu_after((1.0, 0.25), (1.0, 0.5)) == 0.75
    assert cpu_after((1.0, 0.0)) == 0.0
    assert cpu_after((1.0, None)) is None
    assert cpu_after((1.0, 0.25), (1.0, None), (1.0, 0.25)) is None
    assert cpu_after((1.0, None), (1.0, 0.25)) is None
    # Nothing was waited for, so nothing is unknown. And no more than was waited.
    assert cpu_after((0.0, None), (1.0, 0.25)) == 0.25
    assert cpu_after((1.0, 3.0)) == 1.0
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="cpu_s must be at least 0"):
            cpu_after((1.0, wrong))


def test_a_resumed_run_goes_on_counting() -> None:
    first = Tracker([], "run", 0)
    first.record_communication(1.0, 1.0, 8, cpu_s=0.25)
    state = json.loads(json.dumps(first.state_dict()))
    second, from_earlier = Tracker([], "run", 0), Tracker([], "run", 0)
    second.load_state_dict(state)
    second.record_communication(1.0, 1.0, 8, cpu_s=0.5)
    assert second.summary().communication_cpu_s == 0.75
    # A checkpoint of an earlier version lacks it, so the first part stays unknown.
    del state["communication_cpu_s"]
    from_earlier.load_state_dict(state)
    from_earlier.record_communication(1.0, 1.0, 8, cpu_s=0.5)
    assert from_earlier.summary().communication_cpu_s is None


def train(rank: int, world_size: int, method: str) -> tuple[float, float | None]:
    """Train for two steps, of which the second worker comes late to each."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 300)
    optimizer: Any
    if method == "compressed":
        optimizer = SparsifiedSGD(model.named_parameters(), lr=0.1, sparse_grad_size=0.01)
    else:
        aggregation = AllReduceAggregation(
            world_size, shared_memory=method == "shared memory", overlap=method == "overlapped"
        )
        optimizer = CentralizedSGD(
            model=model, lr=0.1, world_size=world_size, aggregation=aggregation
        )
    tracker = Tracker([], "run", rank)
    for _ in range(2):
        tracker.batch_start()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1000)).square().mean()
        if rank == 1:
            time.sleep(LATE_S)
        loss.backward()
        tracker.record_batch_backprop()
        optimizer.step(tracker=tracker)
        tracker.batch_end()
    summary = tracker.summary()
    return summary.communication_exposed_s, summary.communication_cpu_s


@pytest.mark.parametrize("method", ["plain", "shared memory", "overlapped", "compressed"])
def test_a_worker_that_waits_for_a_slower_one_does_not_work(method: str) -> None:
    (waited_s, cpu_s), (_, late_cpu_s) = run_ranks(2, train, method)
    assert waited_s > LATE_S
    assert cpu_s is not None and late_cpu_s is not None
    # Packing or compressing is some work. A worker that polls without a pause would have a ratio
    # near 1.
    assert 0 < cpu_s < waited_s / 4
    assert late_cpu_s > 0


def average(rank: int, world_size: int) -> tuple[float, float | None]:
    torch.manual_seed(rank)
    model, tracker = nn.Linear(3, 2), Tracker([], "run", rank)
    LocalSGD(model=model, world_size=world_size, lr=0.1, period=100)
    with torch.no_grad():
        model.weight.fill_(rank)
    with averaged_weights(model, tracker=tracker):
        pass
    return tracker.summary().communication_exposed_s, tracker.summary().communication_cpu_s


def test_an_average_for_a_validation_counts() -> None:
    for exposed_s, cpu_s in run_ranks(2, average):
        assert cpu_s is not None
        assert 0 < cpu_s <= exposed_s


def test_a_result_has_it_and_an_earlier_one_does_not(tmp_path: Path) -> None:
    def times(folder: Path) -> list[Any]:
        result = json.loads((folder / "result.json").read_text())
        return [
            result["times"]["slowest"],
            result["times"]["rank_0"],
            result["goal"]["times"]["slowest"],
        ]

    new, old = (
        write_run(tmp_path / "new", epochs=5, cpu_share=0.1),
        write_run(tmp_path / "old", epochs=5),
    )
    assert verify_folder(new) == verify_folder(old) == []
    assert [found["communication_cpu_s"] for found in times(new)] == pytest.approx([5.0, 5.0, 3.0])
    assert not any("communication_cpu_s" in found for found in times(old))
    result = json.loads((new / "result.json").read_text())
    # Until the goal, as the exposed time.
    assert RunRecord.from_result(result).communication_cpu_s == pytest.approx(3.0)
    assert (
        RunRecord.from_result(json.loads((old / "result.json").read_text())).communication_cpu_s
        is None
    )
    for found in result["goal"]["times"].values():
        del found["communication_cpu_s"]
    assert RunRecord.from_result(result).communication_cpu_s is None
    result["times"]["slowest"]["communication_cpu_s"] = result["goal"]["times"]["slowest"][
        "communication_cpu_s"
    ] = None
    assert RunRecord.from_result(result).communication_cpu_s is None


def test_raw_lines_may_have_it_as_unknown(tmp_path: Path) -> None:
    sink = LinesSink(tmp_path / "metrics.jsonl", 0, "run", {})
    tracker = Tracker([], "run", 0, sinks=[sink])
    tracker.start()
    tracker.record_communication(1.0, 1.0, 8)
    tracker.epoch_end()
    sink.finish("finished")
    totals = [line["totals"] for line in read_lines(tmp_path) if line["kind"] == "epoch"]
    assert [found["communication_cpu_s"] for found in totals] == [None]
