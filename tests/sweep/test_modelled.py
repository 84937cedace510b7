"""A sweep whose seconds on networks are modelled from runs on one machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.network import get_network
from mlbench_core.prediction import collective_s
from mlbench_core.sweep import page
from mlbench_core.sweep.fastest_methods import predict_map
from mlbench_core.sweep.grouped_runs import Outcome, gather
from mlbench_core.sweep.modelled import measured_run, model_run, step_numbers
from mlbench_core.sweep.result_table import table_rows
from mlbench_core.sweep.sentences import map_sentence, per_network, summary
from mlbench_core.sweep.toml_file import Sweep, parse_sweep
from tests.sweep import trials

GOAL = {"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False}
FILE: dict[str, Any] = {
    "task": "1a", "time": "modelled", "workers": [1, 2],
    "networks": ["home-fibre", "wan-transatlantic"], "algorithms": ["centralized_sgd", "power_sgd"],
}  # fmt: skip
PARTS = {"centralized_sgd": 10**6, "power_sgd": 10**4}
STEPS = {"centralized_sgd": 100, "power_sgd": 150}


def result(algorithm: str, workers: int, **changes: Any) -> RunRecord:
    """A run that reached its goal on a machine without enough cores.

    Its steps took 5 s, 20 ms of processor time of computing, and 1 ms of compressing."""
    steps = STEPS[algorithm]
    entry = {
        "op": "all_reduce", "group": workers, "calls": steps, "bytes": steps * PARTS[algorithm],
        "overlapped": False,
    }  # fmt: skip
    found = RunRecord(
        f"{algorithm.replace('_', '-')}-{workers}-s42",
        configuration={"workers": workers, "seed": 42, "goal": GOAL, "algorithm": algorithm},
        machine={"cores": 1, "hosts": 1},
        reached=True,
        time_to_goal_s=5.0 * steps,
        train_s=10.0 * steps,
        communication_exposed_s=1.0 * steps if workers > 1 else 0.0,
        communication_cpu_s=0.001 * steps if workers > 1 else None,
        compute_cpu_s=0.02 * steps,
        steps_to_goal=steps,
        batches=2 * steps,
        bytes_on_wire=8e6,
        collectives=[entry, entry],
        collectives_to_goal=[entry] if workers > 1 else [],
    )
    return dataclasses.replace(found, **changes)


def gathered(sweep: Sweep, **changes: Any) -> Outcome:
    """Gather the runs of a sweep; the changes are those of the runs of power_sgd."""
    records = {}
    for point in sweep.points():
        own = changes if point.algorithm == "power_sgd" else {}
        records[point.name] = result(point.algorithm, point.workers, **own)
    return gather(sweep.points(), records, sweep.networks, is_modelled=sweep.is_modelled)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return parse_sweep(FILE)


def test_each_run_is_started_once_without_a_network(sweep: Sweep) -> None:
    points = sweep.points()
    assert [point.name for point in points] == [
        "centralized-sgd-1-s42", "power-sgd-1-s42", "centralized-sgd-2-s42", "power-sgd-2-s42",
    ]  # fmt: skip
    assert not any("network" in point.request for point in points)
    assert not parse_sweep({**FILE, "time": "measured"}).is_modelled


def test_each_run_is_in_the_cells_of_all_networks(sweep: Sweep) -> None:
    found = gathered(sweep)
    assert (found.planned, found.ended, found.modelled) == (4, 4, 4)
    for network, name in ((n, a) for n in FILE["networks"] for a in FILE["algorithms"]):
        cell = found.cell(name, network, 2)
        assert cell is not None and cell.runs == 1
        step_s = 0.021 + collective_s("all_reduce", PARTS[name], 2, get_network(network))
        assert cell.median_s == pytest.approx(STEPS[name] * step_s)
        (record,) = cell.group.records
        assert record.name == f"{name.replace('_', '-')}-2-s42"
        assert (record.bytes_on_wire, record.steps_to_goal) == (8e6, STEPS[name])
        assert record.configuration["network"] == str(get_network(network))
        # All other seconds of the machine without enough cores are gone.
        assert record.train_s == pytest.approx(2 * STEPS[name] * step_s)
        assert (record.wall_s, record.samples_per_s, dict(record.phases_s)) == (None, None, {})
        numbers = step_numbers(record)
        assert numbers["step_s"] == pytest.approx(step_s)
        assert numbers["compute_s"] == pytest.approx(0.02)
        assert numbers["compute_share"] == pytest.approx(0.02 / step_s)
        # 2.4 % is the mean error of the model on these networks.
        assert cell.model_range_s is not None and cell.median_s and cell.interval_s is None
        assert cell.model_range_s[1] == pytest.approx(cell.median_s / (1 - 0.024))
    alone = found.cell("power_sgd", None, 1)
    assert alone is not None and alone.median_s == pytest.approx(150 * 0.02)
    assert alone.model_range_s is None


@pytest.mark.parametrize(
    ("samples_per_s", "factor"),
    [
        pytest.param(3.2, 0.5, id="as many samples in a step"),
        pytest.param(6.4, 1.0, id="other steps"),
        pytest.param(None, 1.0, id="not counted"),
    ],
)
def test_computing_takes_as_long_as_for_a_worker_alone(
    sweep: Sweep, samples_per_s: float | None, factor: float
) -> None:
    records = {}
    for point in sweep.points():
        changes: dict[str, Any] = {"samples_per_s": 1.6}
        if point.workers == 2:
            # 8 samples of each worker in a step of 5 s, if there are 3.2 in a second.
            steps = STEPS[point.algorithm]
            cpu_s = {"compute_cpu_s": 0.04 * steps, "communication_cpu_s": 0.002 * steps}
            changes = {"samples_per_s": samples_per_s, **cpu_s}
        records[point.name] = result(point.algorithm, point.workers, **changes)
    found = gather(sweep.points(), records, sweep.networks, is_modelled=True)
    cell = found.cell("power_sgd", "home-fibre", 2)
    assert cell is not None and cell.median_s is not None
    message_s = collective_s("all_reduce", PARTS["power_sgd"], 2, get_network("home-fibre"))
    step_s = factor * (0.04 + 0.002) + message_s
    assert cell.median_s == pytest.approx(STEPS["power_sgd"] * step_s)
    # Predictions for other networks start from the same processor time.
    (record,) = cell.group.records
    assert measured_run(record).compute_cpu_s == pytest.approx(factor * 0.04 * STEPS["power_sgd"])


def test_a_missed_goal_stays_missed(sweep: Sweep) -> None:
    missed = {"reached": False, "time_to_goal_s": None, "steps_to_goal": None}
    cell = gathered(sweep, **missed).cell("power_sgd", "home-fibre", 2)
    assert cell is not None and (cell.missed, cell.median_s, cell.model_range_s) == (1, None, None)
    (record,) = cell.group.records
    # It is unknown when the run would have reached the goal, but not how long it trained.
    assert record.time_to_goal_s is None and 300 * 0.02 < (record.train_s or 0) < 300 * 0.1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute_cpu_s": None}, "the processor time of its computation was not measured"),
        ({"communication_cpu_s": None}, "the processor time of its communication was not"),
        ({"collectives": None, "collectives_to_goal": None}, "did not record the collectives"),
        ({"steps_to_goal": None}, "it did not record the number of its steps to the goal"),
        (
            {"collectives": [{"op": "shared_memory_sum", "calls": 1, "bytes": 1}]},
            "its workers share memory",
        ),
        (
            {"configuration": {"workers": 2, "goal": {**GOAL, "budget_s": 60}}},
            "its goal is the value after a fixed training time",
        ),
    ],
)
def test_a_run_without_a_number_of_the_model_says_so(
    sweep: Sweep, changes: dict[str, Any], reason: str
) -> None:
    record = result("power_sgd", 2, **changes)
    records = {record.name: record}
    found = gather(sweep.points(), records, sweep.networks, is_modelled=True)
    assert found.has_results and not found.groups and found.ended == 1
    rows = table_rows(found, Pricing())
    assert len(rows) == 2
    for row in rows:
        assert row["modelled"].startswith("not modelled: ") and reason in row["modelled"]
        numbers = ("median_s", "model_low_s", "cost_per_success_s", "sent_mb", "price")
        assert [row[name] for name in numbers] == [None] * 5
    (sentence,) = (text for text in summary(found) if text.startswith("Not modelled: "))
    assert "power_sgd on home-fibre (2 workers) and wan-transatlantic (2 workers)" in sentence
    with pytest.raises(Exception, match=reason):
        model_run(record, get_network("home-fibre"))


def test_words_say_what_is_modelled(sweep: Sweep) -> None:
    found = gathered(sweep)
    first, errors, *_ = summary(found)
    assert first.startswith(
        "Steps to the goal, bytes and processor time are measured in 4 runs of workers on one "
        "machine; seconds on networks are modelled"
    )
    assert "The methods are not tuned" in first
    assert "a time may be up to 2% shorter or 2% longer" in errors
    assert "power_sgd has the least modelled time" in per_network(found, "home-fibre")[0]
    tuned = dataclasses.replace(found, is_tuned=True)
    assert "not tuned" not in " ".join(summary(tuned))
    assert "power_sgd is modelled as fastest" in per_network(tuned, "home-fibre")[0]

    def predict(record: RunRecord, network: object, workers: int) -> float:
        # The map is predicted from the runs themselves.
        assert type(record) is RunRecord
        return record.time_to_goal_s or 0.0

    drawn = predict_map(found, 2, predict)
    assert drawn is not None and "measured fastest" not in map_sentence(drawn)
    (far,) = (
        text
        for text in summary(gathered(parse_sweep({**FILE, "workers": [16]})))
        if text.startswith("Less certain: ")
    )
    assert "home-fibre (16 workers)" in far and "not validated with more than 8 workers" in far


def test_the_page_of_a_folder(tmp_path: Path) -> None:
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in FILE.items())
    sweep = trials.make(tmp_path, text)
    for path in (tmp_path / "runs").glob("*/result.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for times in (content["times"], content["goal"]["times"]):
            for part in times.values():
                part.update(compute_cpu_s=1.5, communication_cpu_s=0.1)
        entry = {"op": "all_reduce", "group": 2, "calls": 72, "bytes": 72000, "overlapped": False}
        content["collectives"] = [entry]
        path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_figures", lambda *_: ([], {}, []))
        page.write_page(tmp_path, sweep=sweep)
    markdown = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "- Runs: 4 of 4 planned; 0 runs missed the goal" in markdown
    assert markdown.index("seconds on networks are modelled") < markdown.index("least median")
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [row["modelled"] for row in found["rows"]] == ["modelled"] * 6
    header = (tmp_path / "table.csv").read_text(encoding="utf-8").partition("\n")[0].split(",")
    assert {"modelled", "model_low_s", "model_high_s"} < set(header)
    # A run is in the cells of all networks, but its time counts once.
    assert len(found["records"]) == 6 and len({entry["run"] for entry in found["records"]}) == 4
    for entry in found["records"]:
        assert entry["compute_s"] == pytest.approx(1.5 / entry["steps_to_goal"])
        assert entry["step_s"] * entry["steps_to_goal"] == pytest.approx(entry["time_to_goal_s"])
