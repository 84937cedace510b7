"""The processor time of computation: that of the training thread in batches, less communication."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.processor_time import polling, work_s
from mlbench_core.results.folder import verify_folder
from mlbench_core.tracking import Tracker, clock
from tests.results.helpers import write_run


class Processor:
    """A processor clock that moves only if a test says so."""

    seconds = 0.0

    def work(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def processor() -> Iterator[Processor]:
    made = Processor()
    with (
        patch("mlbench_core.tracking.tracker.work_s", lambda: made.seconds),
        patch("mlbench_core.tracking.tracker.computes_in_this_thread", return_value=True),
    ):
        yield made


def run_batch(tracker: Tracker, processor: Processor, seconds: float) -> None:
    tracker.batch_start()
    processor.work(seconds)
    tracker.batch_end()


def test_only_work_in_batches_counts(processor: Processor) -> None:
    tracker = Tracker([], "run", 0)
    processor.work(100)
    run_batch(tracker, processor, 2)
    processor.work(100)
    tracker.batch_start()
    processor.work(3)
    tracker.validation_start()
    processor.work(100)
    tracker.validation_end()
    # 1 s of this batch is the work of communication, such as compression.
    tracker.record_communication(5.0, 5.0, 8, cpu_s=1.0)
    processor.work(4)
    tracker.batch_end()
    # An average for a validation is outside of batches.
    tracker.charge_validation_average(5.0, 8, cpu_s=2.0)
    summary = tracker.summary()
    assert (summary.compute_cpu_s, summary.communication_cpu_s) == (2 + 3 + 4 - 1, 3)
    assert tracker.totals()["compute_cpu_s"] == 8


def test_it_is_unknown_if_a_part_is(processor: Processor) -> None:
    tracker = Tracker([], "run", 0)
    run_batch(tracker, processor, 2)
    # Nothing was waited for, so nothing is unknown.
    tracker.record_communication(0.0, 0.0, 8)
    assert tracker.summary().compute_cpu_s == 2
    tracker.record_communication(1.0, 1.0, 8)
    run_batch(tracker, processor, 2)
    assert tracker.summary().compute_cpu_s is None


def test_a_resumed_run_goes_on_counting(processor: Processor) -> None:
    first, second, from_earlier = (Tracker([], "run", 0) for _ in range(3))
    run_batch(first, processor, 2)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    run_batch(second, processor, 3)
    assert second.summary().compute_cpu_s == 5
    # A checkpoint of an earlier version lacks it, so the first part stays unknown.
    del state["compute_cpu_s"]
    from_earlier.load_state_dict(state)
    run_batch(from_earlier, processor, 3)
    assert from_earlier.summary().compute_cpu_s is None


@pytest.mark.parametrize(
    ("threads", "on_gpu", "expected"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_it_needs_the_work_to_be_in_one_thread(threads: int, on_gpu: bool, expected: bool) -> None:
    tracker = Tracker([], "run", 0, use_cuda=False)
    with (
        patch.object(torch, "get_num_threads", return_value=threads),
        patch.object(clock, "cuda_in_use", return_value=on_gpu),
    ):
        tracker.batch_start()
        tracker.batch_end()
    assert (tracker.summary().compute_cpu_s is not None) == expected


def test_polling_is_not_work() -> None:
    before_s = work_s()
    with polling():
        end_s = work_s() + 0.02
        while work_s() < end_s:
            pass
    assert work_s() - before_s < 0.01


def test_a_result_has_it_until_the_goal(tmp_path: Path) -> None:
    folder = write_run(tmp_path, epochs=5, cpu_share=0.1)
    assert verify_folder(folder) == []
    result = json.loads((folder / "result.json").read_text())
    assert result["times"]["slowest"]["compute_cpu_s"] == pytest.approx(25.0)
    # 30 of the 50 s of training are until the goal.
    assert RunRecord.from_result(result).compute_cpu_s == pytest.approx(15.0)
    # The processor time of the whole run does not replace a missing one.
    del result["goal"]["times"]["slowest"]["compute_cpu_s"]
    assert RunRecord.from_result(result).compute_cpu_s is None


def test_a_result_has_the_collectives_until_the_goal(tmp_path: Path) -> None:
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 3000, "overlapped": False}
    later = {**entry, "op": "all_gather", "calls": 20}
    folder = write_run(tmp_path, epochs=5, collectives=[entry, later], collectives_to_goal=[entry])
    assert verify_folder(folder) == []
    record = RunRecord.from_result(json.loads((folder / "result.json").read_text()))
    assert (record.collectives, record.collectives_to_goal) == ([entry, later], [entry])
