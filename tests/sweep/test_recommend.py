"""The advice on a method and a number of workers, from invented runs of a known time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network import get_network
from mlbench_core.prediction import collective_s
from mlbench_core.sweep.recommend import Advice, Runs, recommend
from mlbench_core.sweep.toml_file import parse_sweep
from tests.sweep.test_modelled import FILE, PARTS, STEPS, result

MOBILE = "mobile-lte"


def with_steps(record: RunRecord, steps: int) -> RunRecord:
    """The same run with another number of steps to the goal, each as long as before."""
    factor = steps / (record.steps_to_goal or 1)
    changes: dict[str, Any] = {"steps_to_goal": steps, "batches": 2 * steps}
    for name in (
        "time_to_goal_s", "train_s", "communication_exposed_s", "communication_cpu_s",
        "compute_cpu_s",
    ):  # fmt: skip
        value = getattr(record, name)
        changes[name] = None if value is None else factor * value
    for name in ("collectives", "collectives_to_goal"):
        changes[name] = [
            {**entry, "calls": entry["calls"] * factor, "bytes": entry["bytes"] * factor}
            for entry in getattr(record, name)
        ]
    return dataclasses.replace(record, **changes)


def alone_is_slow(found: Runs) -> Runs:
    """One worker needs a hundred times the steps."""
    records = dict(found.records)
    for name, record in records.items():
        if record.workers == 1:
            records[name] = with_steps(record, 100 * (record.steps_to_goal or 0))
    return dataclasses.replace(found, records=records)


def runs(seeds: int = 3, file: Mapping[str, Any] = FILE, **changes: Any) -> Runs:
    """The runs of a sweep; with a later seed, a run needs 1 % more steps."""
    sweep = parse_sweep({**file, "seeds": seeds})
    records = {}
    for point in sweep.points():
        steps = round(STEPS[point.algorithm] * (1 + (point.seed - 42) / 100))
        records[point.name] = with_steps(
            result(
                point.algorithm,
                point.workers,
                name=point.name,
                configuration={
                    **result(point.algorithm, point.workers).configuration,
                    "task": "1a",
                    "seed": point.seed,
                    "network": point.network and str(get_network(point.network)),
                },
                **changes,
            ),
            steps,
        )
    return Runs(sweep.points(), records, sweep.networks, is_modelled=sweep.is_modelled)


def advice(found: Runs, *workers: int, network: str = MOBILE, machine: str = "") -> Advice:
    pricing = Pricing(load_prices()[machine] if machine else None)
    return recommend(found, [get_network(network)], workers, pricing)


def seconds(algorithm: str, workers: int, network: str = MOBILE, compute_s: float = 0.02) -> float:
    """The seconds of a step: computing, compressing, and the time of its message."""
    size = PARTS[algorithm]
    if workers == 1:
        return compute_s
    return compute_s + 0.001 + collective_s("all_reduce", size, workers, get_network(network))


def test_times_on_a_new_network_are_steps_times_modelled_seconds() -> None:
    found = advice(runs(), 1, 2)
    expected = []
    for (algorithm, steps), workers in ((item, k) for item in STEPS.items() for k in (1, 2)):
        # The median seed has 1 % more steps.
        time_s = round(steps * 1.01) * seconds(algorithm, workers)
        expected.append((pytest.approx(time_s), algorithm, workers))
    rows = [(row["time_to_goal_s"], row["algorithm"], row["workers"]) for row in found.rows]
    assert sorted(rows) == rows and len(rows) == 4
    assert {row[1:] for row in rows} == {row[1:] for row in expected}
    for time_s, *case in expected:
        assert next(row[0] for row in rows if list(row[1:]) == case) == time_s
    for row in found.rows:
        step_s = seconds(row["algorithm"], row["workers"])
        assert row["step_s"] == pytest.approx(step_s)
        assert (row["runs"], row["missed"], row["seconds"]) == (3, 0, "modelled")
        if row["workers"] == 2:
            # 2.4 % is the mean error of the model on this network.
            assert row["step_range_s"] == pytest.approx((step_s / 1.024, step_s / 0.976))
            assert row["compute_share"] == pytest.approx(0.02 / step_s)
            assert row["bytes_to_goal_of_worker"] == pytest.approx(4e6)
            assert row["interval_s"][0] < row["time_to_goal_s"] < row["interval_s"][1]


def test_one_machine_that_is_faster_is_the_advice() -> None:
    text = " ".join(advice(runs(), 2).sentences)
    # 101 steps of 20 ms; two workers need as many, and wait for the network.
    assert (
        "On mobile-lte, more workers are not worth it: one machine is faster, 2.02 s to the goal "
        "(median of 3 runs) with centralized_sgd. The next, " in text
    )
    assert "a difference is shown." in text


def test_the_best_method_the_second_and_one_worker_are_named() -> None:
    found = alone_is_slow(runs())
    (first, second) = advice(found, 2).rows
    assert first["algorithm"] == "power_sgd"
    _, text, price = advice(found, 2, machine="aws-c5.xlarge").sentences
    ratio = second["time_to_goal_s"] / first["time_to_goal_s"]
    alone_s = 10100 * 0.02
    assert text.startswith("On mobile-lte: power_sgd with 2 workers has the least modelled time, ")
    assert f"Second: centralized_sgd with 2 workers, {ratio:.2f} times as long; a dif" in text
    ratio = alone_s / first["time_to_goal_s"]
    assert f"One machine needs {alone_s:.3g} s to the goal (median of 3 runs)" in text
    assert f"with centralized_sgd, {ratio:.2f} times as long; a difference is shown." in text
    assert price.startswith("Cheapest on mobile-lte: power_sgd with 2 workers, ")
    assert price.endswith("USD, which also has the least time.")


def test_a_difference_within_the_error_of_the_model_is_not_shown() -> None:
    # The error is 38 % on a network that was not a part of the validation.
    (text,) = (t for t in advice(runs(), 2, network="unlimited").sentences if t.startswith("On "))
    assert "one machine has the least median" in text
    assert text.endswith("1.06 times as long; this is within the error of the model.")


def test_with_one_seed_no_difference_is_tested() -> None:
    text = " ".join(advice(alone_is_slow(runs(seeds=1)), 2).sentences)
    assert "times as long; not tested." in text


@pytest.mark.parametrize("is_modelled", [True, False])
def test_a_number_of_workers_without_runs_has_no_time_to_the_goal(is_modelled: bool) -> None:
    time = "modelled" if is_modelled else "measured"
    found = advice(runs(file={**FILE, "time": time}), 2, 16, machine="aws-c5.xlarge")
    rows = [row for row in found.rows if row["workers"] == 16]
    assert rows == list(found.rows[2:]) and len(rows) == 2
    for row in rows:
        assert row["seconds"] == "predicted"
        # The record of two workers, with messages for sixteen.
        assert row["step_s"] == pytest.approx(seconds(row["algorithm"], 16))
        names = ("time_to_goal_s", "interval_s", "bytes_to_goal_of_worker", "price", "runs")
        assert [row[name] for name in names] == [None] * 5
    text = " ".join(found.sentences)
    assert (
        "The folder has runs of 1 and 2 workers. The time to the goal with 16 is not known" in text
    )
    assert "with 16 workers has" not in text and "have ended" not in text
    assert "Less certain: mobile-lte (16 workers): the model was not validated with more" in text
    only = " ".join(advice(runs(), 16).sentences)
    assert "no time to the goal is known with 16 workers, so no advice. One machine needs" in only


def test_only_a_tuned_folder_has_a_fastest_method() -> None:
    found = alone_is_slow(runs())
    for workers in ((2,), (1,), (1, 2, 16)):
        first, *others = advice(found, *workers).sentences
        assert first.startswith("The methods are not tuned")
        assert "fastest" not in " ".join([first, *others])
        tuned = " ".join(advice(dataclasses.replace(found, is_tuned=True), *workers).sentences)
        assert "not tuned" not in tuned and "is modelled as fastest" in tuned


def test_missed_goals_are_counted_and_give_no_time() -> None:
    found = runs()
    records: dict[str, RunRecord] = dict(found.records)
    for name in ("power-sgd-2-s42", "power-sgd-2-s43", "centralized-sgd-2-s44"):
        records[name] = dataclasses.replace(
            records[name], reached=False, time_to_goal_s=None, steps_to_goal=None
        )
    del records["power-sgd-2-s44"]
    found = alone_is_slow(dataclasses.replace(found, records=records, failed={"power-sgd-2-s44"}))
    first, last = advice(found, 2).rows
    assert (first["algorithm"], first["runs"], first["missed"]) == ("centralized_sgd", 3, 1)
    assert first["time_to_goal_s"] is not None and first["interval_s"] is None
    assert (last["runs"], last["missed"], last["time_to_goal_s"]) == (3, 3, None)
    text = " ".join(advice(found, 2).sentences)
    assert "has the least modelled median" in text and "3 runs, 1 without the goal" in text


def test_a_measured_network_has_its_measured_times() -> None:
    found = runs(file={**FILE, "time": "measured"})
    rows = advice(found, 2, network="home-fibre").rows
    assert [row["algorithm"] for row in rows] == ["centralized_sgd", "power_sgd"]
    for row in rows:
        steps = round(STEPS[row["algorithm"]] * 1.01)
        assert row["time_to_goal_s"] == pytest.approx(5.0 * steps)
        assert (row["seconds"], row["step_range_s"]) == ("measured", None)
    text = " ".join(advice(found, 2, network="home-fibre").sentences)
    assert "Less certain: home-fibre (2 workers): measured with more workers than cores" in text


def test_measured_runs_without_processor_time_are_modelled_from_their_seconds() -> None:
    changes = {"compute_cpu_s": None, "communication_cpu_s": None, "machine": {}}
    found = advice(runs(file={**FILE, "time": "measured"}, **changes), 2)
    assert {row["seconds"] for row in found.rows} == {"modelled"}
    for row in found.rows:
        # A step of 5 s, of which 1 s is waiting that its network explains in part.
        assert 4.0 < row["step_s"] < 5.0 + seconds(row["algorithm"], 2)
    assert "all waiting that the measured network does not explain" in " ".join(found.sentences)
    # In a modelled sweep, workers shared cores, and their seconds say nothing.
    lost = advice(runs(**changes), 2)
    assert {(row["seconds"], row["step_s"]) for row in lost.rows} == {("none", None)}
    assert "No seconds: centralized_sgd and power_sgd on mobile-lte (2 workers)" in " ".join(
        lost.sentences
    )


def test_a_sweep_that_goes_on_says_so() -> None:
    found = runs()
    records = dict(list(found.records.items())[:-2])
    text = advice(dataclasses.replace(found, records=records), 2).sentences[1]
    assert text.startswith("10 of 12 planned runs have ended.")


def test_bad_numbers_and_different_goals_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        advice(runs(), 0)
    found = runs()
    name, record = next(iter(found.records.items()))
    configuration = {**record.configuration, "goal": {**(record.goal or {}), "threshold": 1.0}}
    other = dataclasses.replace(record, configuration=configuration)
    with pytest.raises(ConfigurationError, match="the same goal"):
        advice(dataclasses.replace(found, records={**found.records, name: other}), 2)


def without_goal(found: Runs) -> Runs:
    """The runs until their goal, with 32 samples of each worker in a step, as if without a goal."""
    records = {}
    for name, record in found.records.items():
        steps, workers = record.steps_to_goal or 1, record.workers or 1
        records[name] = dataclasses.replace(
            record,
            configuration={**record.configuration, "goal": None},
            reached=None,
            time_to_goal_s=None,
            steps_to_goal=None,
            train_s=record.time_to_goal_s,
            batches=steps,
            collectives=record.collectives_to_goal,
            samples_per_s=32 * workers * steps / (record.time_to_goal_s or 1.0),
        )
    return dataclasses.replace(found, records=records)


def test_without_a_goal_samples_are_compared() -> None:
    found = advice(without_goal(runs()), 2, 4)
    for row in found.rows:
        step_s = seconds(row["algorithm"], row["workers"])
        assert row["samples_per_s"] == pytest.approx(32 * row["workers"] / step_s, rel=1e-3)
        assert row["time_to_goal_s"] is row["bytes_to_goal_of_worker"] is row["runs"] is None
    rates = [row["samples_per_s"] for row in found.rows]
    assert sorted(rates, reverse=True) == rates
    text, no_goal, *_ = found.sentences
    # 20 ms of one worker, and messages of much longer.
    assert text.startswith(
        "On mobile-lte, more workers are not worth it: one machine trains the most samples, "
        "1,600 a second with "
    )
    assert no_goal.startswith("The runs have no goal")
    fast, *_ = advice(without_goal(runs()), 2, network="lan-1g").sentences
    assert "trains the most samples, " in fast and "One machine trains 1,600 a second" in fast


def test_without_samples_or_runs_of_several_workers_there_is_no_advice() -> None:
    found = without_goal(runs())
    uncounted = {
        name: dataclasses.replace(record, samples_per_s=None)
        for name, record in found.records.items()
    }
    text, *_ = advice(dataclasses.replace(found, records=uncounted), 2).sentences
    assert text == (
        "On mobile-lte, no samples per second of several workers are known, so no advice."
    )
    alone = {name: record for name, record in found.records.items() if record.workers == 1}
    _, text, *others = advice(dataclasses.replace(found, records=alone), 4).sentences
    assert text.endswith("so no advice. One machine trains 1,600 a second with centralized_sgd.")
    assert any("there is no run of several workers to predict from" in other for other in others)


def test_a_step_of_a_run_that_ended_at_the_limit_has_its_own_seconds() -> None:
    """A run goes on for some steps after the limit, which have their seconds, too."""
    measured = runs(file={**FILE, "time": "measured"})
    for found, missed in ((measured, 3), (without_goal(measured), None)):
        # The least training takes 500 s.
        found = dataclasses.replace(found, limit_s=300.0)
        for row in advice(found, 2, network="home-fibre").rows:
            assert (row["seconds"], row["missed"]) == ("measured", missed)
            assert row["step_s"] == pytest.approx(5.0)
            assert row["compute_share"] == pytest.approx(4.0 / 5.0)
            if missed is None:
                assert row["samples_per_s"] == pytest.approx(2 * 32 / 5.0)


def test_workers_that_share_cores_are_counted_with_their_threads() -> None:
    found = runs(file={**FILE, "time": "measured"}, machine={"cores": 4, "hosts": 1})
    text = " ".join(advice(found, 2, network="home-fibre").sentences)
    assert "than cores" not in text
    records = {}
    for name, record in found.records.items():
        configuration = {**record.configuration, "threads": 4}
        records[name] = dataclasses.replace(record, configuration=configuration)
    found = dataclasses.replace(found, records=records)
    text = " ".join(advice(found, 2, network="home-fibre").sentences)
    assert "home-fibre (2 workers): measured with more threads than cores" in text
