"""The script that makes convergence references: which runs it starts, and what it makes of their
results."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlbench_core.comparison.convergence import Reference

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "references" / "make.py"
EPOCHS = {seed: 5 + seed % 4 for seed in range(1, 11)}


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_references", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(seed: int) -> dict[str, Any]:
    goal = {"metric": "Prec@1", "threshold": 95.0, "minimize": False}
    return {
        "run": {"id": f"reference-digits-{seed}", "state": "finished",
                "ended_at": f"2026-11-{10 + seed}T10:00:00"},
        "configuration": {
            "task": "1a", "dataset": "digits", "preset": None, "algorithm": "centralized_sgd",
            "workers": 1,
            "options": {"channels_last": True, "data": f"/data/{seed}"}, "goal": goal, "seed": seed,
        },
        "goal": {**goal, "reached": True, "epochs": EPOCHS[seed], "step": 12 * EPOCHS[seed]},
        "machine": {"cpu": "A", "cores": 2, "memory_bytes": 24 << 30, "gpu": None},
        "software": {"mlbench_core": "4.0"},
    }  # fmt: skip


@pytest.fixture
def started(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the runs; each writes the result of its seed instead of training."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert options["env"]["OMP_NUM_THREADS"] == "1"
        assert options["env"]["PYTHONPATH"].startswith(str(SCRIPT.parents[2]))
        assert Path(command[1]).is_relative_to(SCRIPT.parents[1])
        given = dict(itertools.pairwise(command))
        folder = Path(given["--root-output"]) / "task1a" / given["--run-id"]
        assert not folder.exists()
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result_of(int(given["--seed"]))))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(make.subprocess, "run", run)
    return commands


def test_the_script_runs_every_seed_once_and_writes_the_reference(
    make: ModuleType, started: list[list[str]], tmp_path: Path
) -> None:
    runs, output = tmp_path / "runs", tmp_path / "reference.json"
    arguments = [
        "digits",
        "--runs",
        str(runs),
        "--output",
        str(output),
        "--data",
        "/data",
        "--jobs",
        "2",
    ]
    make.main(arguments)
    assert sorted(int(command[command.index("--seed") + 1]) for command in started) == list(EPOCHS)
    assert all(command[command.index("--data") + 1] == "/data" for command in started)
    reference = Reference.load(output)
    assert reference.values == EPOCHS
    assert (reference.task, reference.dataset, reference.batch_size, reference.options) == (
        "1a",
        "digits",
        128,
        {},
    )
    assert (reference.version, reference.date, reference.machine) == (
        "4.0",
        "2026-11-20",
        "A, 2 cores, 24 GiB",
    )
    assert reference.command == "python benchmarks/references/make.py digits"
    # With --keep, only runs that have not finished start again.
    started.clear()
    unfinished = {**result_of(3), "run": {**result_of(3)["run"], "state": "failed"}}
    (runs / "task1a" / "reference-digits-3" / "result.json").write_text(json.dumps(unfinished))
    make.main([*arguments, "--keep"])
    assert [command[command.index("--seed") + 1] for command in started] == ["3"]
    make.main(arguments)
    assert len(started) == 1 + 10


def test_a_failed_run_ends_the_script_with_its_output(
    make: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "main.py: error: no data")
    monkeypatch.setattr(make.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"the run with seed 1 failed:\nmain\.py: error: no data"):
        make.main(["digits", "--runs", str(tmp_path), "--output", str(tmp_path / "reference.json")])
    assert not (tmp_path / "reference.json").exists()


def miss(results: dict[int, dict[str, Any]]) -> None:
    results[4]["goal"] |= {"reached": False, "epochs": None}


def change(results: dict[int, dict[str, Any]]) -> None:
    results[4]["configuration"]["options"]["no_augment"] = True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (miss, "error: run reference-digits-4 did not reach its goal"),
        (change, "error: the runs differ in more than the seed"),
    ],
)
def test_runs_that_are_not_repeats_make_no_reference(
    make: ModuleType, spoil: Callable[[dict[int, dict[str, Any]]], None], message: str
) -> None:
    results = {seed: result_of(seed) for seed in EPOCHS}
    assert make.make_reference("digits", results).values == EPOCHS
    spoil(results)
    with pytest.raises(SystemExit, match=f"^{message}"):
        make.make_reference("digits", results)


@pytest.mark.parametrize(
    "arguments", [["digits", "--seeds", "9"], ["digits", "--jobs", "0"], ["cifar100"]]
)
def test_wrong_arguments_are_refused(
    make: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        make.main(arguments)
    assert arguments[-1] in capsys.readouterr().err
