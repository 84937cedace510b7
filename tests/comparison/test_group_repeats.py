"""Groups of repeats, and what differs between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlbench_core.comparison.group_repeats import (
    check_comparable,
    differences,
    pool,
    series,
    usable,
)
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError

GOAL = {"metric": "Prec@1", "threshold": 95.0, "minimize": False}
TASK = "/opt/benchmarks/task1a_resnet20_cifar10/main.py --run_id {run_id} --backend {backend}"


def a_record(
    name: str = "run",
    workers: int = 1,
    seed: int | None = None,
    *,
    time_s: float | None = 10.0,
    **others: Any,
) -> RunRecord:
    """Return a run of task 1a; ``machine`` and ``software`` are those of the record, others of its
    configuration."""
    machine, software = (
        others.pop("machine", {"cpu": "A", "hosts": 1}),
        others.pop("software", {"torch": "2.1"}),
    )
    configuration = {
        "task": "1a",
        "dataset": "digits",
        "algorithm": "sgd",
        "workers": workers,
        "goal": GOAL,
    }
    return RunRecord(
        name,
        configuration={**configuration, "seed": seed, **others},
        machine=machine,
        software=software,
        reached=time_s is not None,
        time_to_goal_s=time_s,
        train_s=20.0,
    )


def of_the_master(name: str, workers: int, command: str = TASK, **fields: object) -> RunRecord:
    """Return a run without a result folder, as the master describes it."""
    run = {
        "backend": "gloo",
        "gpu_enabled": False,
        "light_target": False,
        "num_cpus": 1.0,
        "state": "finished",
    }
    run |= {
        "name": name,
        "num_workers": workers,
        "command": command,
        "image": "task1a_resnet20_cifar10",
    }
    return RunRecord.from_metrics({}, {**run, **fields})


def test_only_repeats_are_pooled() -> None:
    records = [
        a_record("a", 1, 1),
        a_record("b", 1, 2),
        a_record("workers", 2, 3),
        a_record("algorithm", 1, 4, algorithm="adam"),
        a_record("options", 1, 5, options={"lr": 0.1}),
        a_record("backend", 1, 6, backend="mpi"),
        a_record("machine", 1, 7, machine={"cpu": "B", "hosts": 1}),
        a_record("software", 1, 8, software={"torch": "2.2"}),
        a_record("changed", 1, 9, changed=["lr"]),
    ]
    groups = {tuple(record.name for record in group.records) for group in pool(records)}
    assert groups == {("a", "b"), *((record.name,) for record in records[2:])}
    group = next(group for group in pool(records[:2]))
    assert "seed" not in group.configuration and group.configuration["algorithm"] == "sgd"


def test_a_seed_counts_once_with_a_remark() -> None:
    (group,) = pool([a_record("a", seed=1), a_record("b", seed=1), a_record("c"), a_record("d")])
    assert [record.name for record in group.records] == ["a", "c", "d"], (
        "an unknown seed is not the same seed"
    )
    assert group.remarks == ("b has the seed 1 of a: it counts once",)


def test_a_run_that_missed_the_goal_is_not_averaged() -> None:
    (group,) = pool([a_record("a", seed=1), a_record("b", seed=2, time_s=None)])
    assert (len(group.records), [record.name for record in group.reached]) == (2, ["a"])
    assert (group.missed, group.values("total_s")) == (1, []), "no mean over the others"


def test_series_differ_only_in_the_workers() -> None:
    records = [
        a_record(f"{name}-{k}", k, algorithm=name) for k in (4, 1, 2) for name in ("sgd", "adam")
    ]
    # More workers may need more machines.
    records[0] = a_record("sgd-4", 4, machine={"cpu": "A", "hosts": 2, "gpus": 4})
    found = series(pool(records))
    assert [(each.label, [group.workers for group in each.groups]) for each in found] == [
        ("adam", [1, 2, 4]),
        ("sgd", [1, 2, 4]),
    ]


def test_labels_and_differences_name_what_differs() -> None:
    groups = pool(
        [
            a_record("a", options={"lr": 0.1, "run_id": "1"}),
            a_record(
                "b",
                2,
                algorithm="power_sgd",
                options={"rank": 2, "lr": 0.1, "optimizer": "power_sgd"},
            ),
        ]
    )
    assert [group.label for group in groups] == ["power_sgd, rank 2", "sgd"]
    assert differences(groups) == {
        "workers": [2, 1],
        "algorithm": ["power_sgd", "sgd"],
        "options.rank": [2, None],
    }
    (group,) = pool([a_record("a")])
    assert (group.label, differences([group])) == ("sgd", {})


def test_a_label_names_the_machine_only_if_it_must() -> None:
    slow, fast = {"cpu": "A", "cores": 2}, {"cpu": "B", "cores": 8}
    groups = pool([a_record("a", machine=slow), a_record("b", machine=fast, algorithm="adam")])
    assert [group.label for group in groups] == ["adam", "sgd"]
    groups = pool([a_record("a", machine=slow), a_record("b", machine=fast)])
    assert [group.label for group in groups] == ["A", "B"], "not the cores, which differ as well"
    assert set(differences(groups)) == {"machine.cpu", "machine.cores"}


def test_labels_of_runs_without_a_result_folder() -> None:
    records = [
        of_the_master("a", 1),
        of_the_master("again", 1, f"{TASK} --seed 7", image="other/name"),
        of_the_master("ddp", 1, f"{TASK} --optimizer ddp"),
        of_the_master("mpi", 1, backend="mpi"),
        of_the_master("own", 1, "python /x/own.py --depth 3", image="custom_image"),
        of_the_master("cores", 1, num_cpus=4.0),
    ]
    names = {group.label: [record.name for record in group.records] for group in pool(records)}
    assert names == {
        "task 1a, cifar10, gloo, 1 thread": ["a", "again"],
        "task 1a, cifar10, optimizer ddp, gloo, 1 thread": ["ddp"],
        "task 1a, cifar10, mpi, 1 thread": ["mpi"],
        "own.py, depth 3, gloo, 1 thread": ["own"],
        "task 1a, cifar10, gloo, 4 threads": ["cores"],
    }
    same = pool([of_the_master("x", 1, "/a/x.py"), of_the_master("y", 1, "/b/x.py")])
    assert [group.label for group in same] == ["x.py", "x.py #2"], "labels are unique"


def test_different_goals_are_refused_with_both_named() -> None:
    light = {**GOAL, "threshold": 90.0}
    with pytest.raises(
        ConfigurationError, match=r"not 'Prec@1 >= 95' \(a\) and 'Prec@1 >= 90' \(b\)"
    ):
        check_comparable([a_record("a"), a_record("b", goal=light)])
    with pytest.raises(ConfigurationError, match=r"not 'Prec@1 >= 95' \(a\) and 'no goal' \(b\)"):
        check_comparable([a_record("a"), a_record("b", goal=None)])
    check_comparable([a_record("a"), a_record("b", task="2a", goal=light)])
    check_comparable([a_record("a"), of_the_master("b", 1, f"{TASK} --dataset faces")])


def test_runs_that_cannot_be_compared_are_named() -> None:
    failed = RunRecord("bad", state="failed", configuration={"workers": 1})
    late, early = (
        replace(a_record(name, time_s=t), state="unfinished")
        for name, t in (("late", 9.0), ("early", None))
    )
    kept, remarks = usable(
        [a_record("a"), failed, RunRecord("b", state="unknown"), late, replace(early, epochs=2)]
    )
    assert [record.name for record in kept] == ["a", "late"], (
        "late was killed after it reached its goal"
    )
    assert remarks == [
        "bad has the state 'failed': left out",
        "b has no recorded number of workers: left out",
        (
            "early has the state 'unfinished' and did not reach its goal "
            "(2 epochs, 20.0 s of training): left out"
        ),
    ]
