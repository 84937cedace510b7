"""The counts of collectives, in a tracker and in a result."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.distributed.pytorch.timing import (
    CommunicationClock,
    count_collective,
    uncounted,
)
from mlbench_core.optim.pytorch import LocalSGD
from mlbench_core.tracking import Tracker
from mlbench_core.tracking.collectives import CollectiveCounts
from mlbench_core.wire_bytes import total_wire_bytes, wire_bytes
from tests.helpers.ranks import run_ranks
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
    assert [(entry["calls"], entry["bytes"]) for entry in merged] == [
        (64, sum(range(64, 128))),
        (2, 256),
    ]
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


def test_the_bytes_on_the_wire_are_those_of_the_algorithms() -> None:
    # Of 12 bytes, each of 4 workers sends parts of 3 bytes: 3 times to sum, and 3 times to pass on
    # the sums.
    assert wire_bytes("all_reduce", 4, 12) == 3 * 3 + 3 * 3
    assert wire_bytes("reduce_scatter", 4, 12) == 3 * 3
    # Each passes on the 12 bytes of every worker, except those of its neighbor.
    assert wire_bytes("all_gather", 4, 12) == 3 * 12
    # 3 of 4 workers receive the 12 bytes once, whoever sends them.
    assert wire_bytes("broadcast", 4, 12) * 4 == 3 * 12
    assert wire_bytes("neighbors", 4, 12) == 12
    assert wire_bytes("shared_memory_sum", 4, 12) == 0
    assert wire_bytes("something new", 4, 12) is None
    assert [
        wire_bytes(op, 1, 12) for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    ] == [0] * 4


def test_the_bytes_on_the_wire_of_a_run_are_the_sum_of_its_collectives() -> None:
    tracker = Tracker([], "run", 0)
    assert tracker.totals()["communication_wire_bytes"] == 0
    # More sizes than the list of a result has are merged, and their bytes are not.
    for size_bytes in range(100, 140):
        tracker.record_collective("all_reduce", 4, size_bytes, 2, False)
    expected = round(1.5 * 2 * sum(range(100, 140)))
    assert tracker.totals()["communication_wire_bytes"] == expected
    assert total_wire_bytes(tracker._end_event()["collectives"]) == expected
    tracker.record_collective("something new", 4, 8, 1, False)
    assert tracker.totals()["communication_wire_bytes"] is None


def train_without_an_average(rank: int, world_size: int) -> list[Any]:
    model = nn.Linear(3, 2)
    optimizer = LocalSGD(model=model, world_size=world_size, lr=0.1, period=100)
    tracker = Tracker([], "run", rank, sinks=[])
    for _ in range(3):
        tracker.batch_start()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step(tracker=tracker)
        tracker.batch_end()
    report = tracker.summary().report(world_size)
    return [report[name] for name in ("bytes_sent", "bytes_on_wire", "exchanges")]


def test_an_optimizer_that_has_sent_nothing_was_measured() -> None:
    assert run_ranks(2, train_without_an_average) == [[0, 0, 0]] * 2


def test_a_script_that_counts_its_collectives_itself_was_measured() -> None:
    tracker = Tracker([], "run", 0)
    tracker.record_collective("all_gather", 3, 100, 2, False)
    assert tracker.summary().report(3)["bytes_on_wire"] == 400


def test_an_exchange_is_a_batch_in_which_something_was_sent() -> None:
    tracker = Tracker([], "run", 0)
    for messages in ((4, 4), (0,), (), (8,)):
        tracker.batch_start()
        for size_bytes in messages:
            tracker.record_communication(0.5, 0.5, size_bytes)
        tracker.batch_end()
    assert (tracker.totals()["exchanges"], tracker.totals()["communication_measured"]) == (2, True)
    tracker.charge_validation_average(2.0, 16)
    totals = tracker.totals()
    assert (totals["exchanges"], totals["communication_size_bytes"]) == (3, 32)
    assert totals["train_s"] > 2.0
    assert totals["steps_s"]["agg"] == totals["communication_s"] == 2.0
    assert (totals["communication_total_s"], totals["communication_exposed_s"]) == (4.0, 4.0)
    other = Tracker([], "run", 0)
    state = tracker.state_dict()
    other.load_state_dict(state)
    assert other.totals()["exchanges"] == 3
    for name in ("exchanges", "communication_measured"):
        del state[name]
    other.load_state_dict(state)
    assert (other.totals()["exchanges"], other.totals()["communication_measured"]) == (
        None,
        True,
    ), "an old checkpoint"
