"""The result of a run from its raw lines: resumed runs, and the times of batches."""

from __future__ import annotations

from typing import Any

import pytest

from mlbench_core.results.summary import summarize


def line(kind: str, **content: Any) -> dict[str, Any]:
    """A raw line of the only worker."""
    return {"rank": 0, "kind": kind, "time": "2026-11-28T00:00:00+00:00", **content}


def start(**content: Any) -> dict[str, Any]:
    return line("start", configuration={"workers": 1}, run_id="r", epoch=0, **content)


def goal(step: int) -> dict[str, Any]:
    return line(
        "goal",
        metric="m",
        threshold=1.0,
        minimize=False,
        value=1.0,
        time_to_goal_s=2.0,
        step=step,
        epoch=0,
    )


def test_a_run_that_was_resumed_and_then_killed_has_not_ended() -> None:
    lines = [start(step=0), line("end", state="finished"), start(step=3, resumed=True)]
    assert summarize(lines, {})["run"]["state"] == "unfinished"
    assert summarize([*lines, line("end", state="finished")], {})["run"]["state"] == "finished"


@pytest.mark.parametrize(("step", "is_kept"), [(2, True), (3, True), (4, False)])
def test_a_goal_up_to_the_step_of_the_checkpoint_stays_reached(step: int, is_kept: bool) -> None:
    result = summarize([start(step=0), goal(step), start(step=3, resumed=True)], {})
    assert (result["goal"] is not None) == is_kept


@pytest.mark.parametrize(
    ("totals", "unknown"),
    [
        ({}, {"compute_s", "communication_s", "metrics_s", "data_s", "other_s"}),
        ({"batches": 2, "steps_s": {"backprop": 1.0}}, {"metrics_s", "data_s"}),
        ({"batches": 2, "steps_s": {"batch_load": 1.0, "comp_metrics": 0.1}}, set()),
    ],
)
def test_a_script_that_loads_its_data_by_itself_was_killed(
    totals: dict[str, Any], unknown: set[str]
) -> None:
    """Without its last line, too, a time that nobody measured is unknown, not 0."""
    first = start(step=0)
    first["configuration"]["unit"] = "steps"
    times = summarize([first, line("epoch", epoch=0, totals=totals)], {})["times"]["rank_0"]
    phases = {"compute_s", "communication_s", "metrics_s", "data_s", "other_s"}
    assert {name for name in phases if times[name] is None} == unknown


def test_batches_of_no_time_count_in_the_quantiles() -> None:
    ends = [line("end", state="finished", batch_times=[[0, 60], [0, 40]])]
    found = summarize([start(step=0), *ends], {})["batch_s"]
    assert found["p50"] == 0.0
    assert found["p90"] > 0.0


@pytest.mark.parametrize(
    ("of_workers", "sum_j"),
    [
        ([3.0, 4.5], 7.5),
        ([0.0, 0.0], 0.0),
        ([3.0, None], None),
        # The second worker has no line, or no end.
        ([3.0], None),
        ([3.0, "killed"], None),
    ],
)
def test_energy_is_that_of_all_workers_or_unknown(
    of_workers: list[float | str | None], sum_j: float | None
) -> None:
    lines = []
    for rank, energy_j in enumerate(of_workers):
        lines.append({**start(step=0), "rank": rank, "configuration": {"workers": 2}})
        if energy_j != "killed":
            lines.append({**line("end", state="finished", energy_j=energy_j), "rank": rank})
    assert summarize(lines, {})["energy_j"] == sum_j
