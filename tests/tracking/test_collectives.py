"""The counts of collectives, in a tracker and in a result."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlbench_core.aggregation.pytorch.timing import CommunicationClock, count_collective, uncounted
from mlbench_core.tracking import Tracker
from mlbench_core.tracking.collectives import CollectiveCounts
from tests.results.helpers import write_run

ENTRY = {"op": "all_reduce", "group": 2, "calls": 3, "bytes": 300, "overlapped": False}


def count() -> None:
    for _ in range(3):
        count_collective("all_reduce", 2, 100)


def ended(tracker: Tracker) -> object:
    return tracker._end_event()["collectives"]


def test_a_tracker_receives_each_collective_once() -> None:
    tracker = Tracker([], "run", 0)
    assert ended(tracker) == []
    count()
    for _ in range(2):
        CommunicationClock().report(tracker)
    assert ended(tracker) == [ENTRY]


def test_a_collective_before_the_first_tracker_belongs_to_none() -> None:
    count()
    CommunicationClock().report(None)
    tracker = Tracker([], "run", 0)
    CommunicationClock().report(tracker)
    assert ended(tracker) == []


def test_collectives_outside_of_a_step_do_not_count() -> None:
    tracker = Tracker([], "run", 0)
    count()
    with pytest.raises(ZeroDivisionError), uncounted():
        count()
        raise ZeroDivisionError
    CommunicationClock().report(tracker)
    assert ended(tracker) == [ENTRY]
    with uncounted(), ThreadPoolExecutor() as other:
        other.submit(count).result()
    CommunicationClock().report(tracker)
    assert ended(tracker) == [{**ENTRY, "calls": 6, "bytes": 600}]


def test_a_resumed_run_goes_on_counting() -> None:
    first, second = Tracker([], "run", 0), Tracker([], "run", 0)
    count()
    CommunicationClock().report(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    count()
    CommunicationClock().report(second)
    assert ended(second) == [{**ENTRY, "calls": 6, "bytes": 600}]


def test_a_run_from_an_older_checkpoint_has_no_record() -> None:
    tracker = Tracker([], "run", 0)
    state = tracker.state_dict()
    del state["collectives"]
    tracker.load_state_dict(state)
    count()
    CommunicationClock().report(tracker)
    assert ended(tracker) is None


def test_many_sizes_are_merged_by_powers_of_two() -> None:
    counts = CollectiveCounts({("all_gather", 4, size, False): 1 for size in range(64, 128)})
    counts["all_gather", 4, 128, False] = 2
    merged = counts.as_list()
    assert [(entry["calls"], entry["bytes"]) for entry in merged] == [(64, sum(range(64, 128))), (2, 256)]
    # A checkpoint keeps every size.
    assert CollectiveCounts.from_list(counts.as_list(merged_if_many=False)) == counts


def test_a_result_has_the_collectives_or_says_nothing(tmp_path: Path) -> None:
    def written(name: str, **options: object) -> object:
        folder = write_run(tmp_path / name, **options)  # type: ignore[arg-type]
        return json.loads((folder / "result.json").read_text()).get("collectives")

    assert written("counted", collectives=[ENTRY]) == [ENTRY]
    assert written("alone", workers=1, collectives=[]) == []
    # torch's DistributedDataParallel communicates without reporting it.
    assert written("ddp", collectives=[]) is None
    assert written("old", collectives=None) is None
