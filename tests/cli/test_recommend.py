"""``mlbench recommend``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_core import experiments
from mlbench_core.errors import ConfigurationError, MLBenchError
from tests.cli.conftest import Call
from tests.results.helpers import write_run

SLOW = "10mbit,40ms"
ON = ("--network", SLOW, "--workers", "2", "--workers", "4")


def write(folder: Path, network: str | None = SLOW, **changes: Any) -> Path:
    """Two methods with 1 worker and 2, two seeds each; the goal takes 30 steps."""
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    for epoch_s, name in ((10.0, "centralized_sgd"), (20.0, "power_sgd")):
        for seed in (1, 2):
            shared = {"algorithm": name, "seed": seed, "epoch_s": epoch_s + seed, **changes}
            write_run(folder / f"{name}-1-{seed}", workers=1, collectives=[], **shared)
            write_run(folder / f"{name}-2-{seed}", collectives=[entry], network=network, **shared)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs"))


def test_result_folders_are_advised_from(folder: Path, call: Call) -> None:
    header, *lines = call("recommend", str(folder), *ON).stdout.splitlines()
    assert header.split()[:4] == ["NETWORK", "METHOD", "WORKERS", "SECONDS"]
    assert [line.split()[:4] for line in lines[:4]] == [
        [SLOW, "centralized_sgd", "2", "measured"],
        [SLOW, "power_sgd", "2", "measured"],
        [SLOW, "centralized_sgd", "4", "predicted"],
        [SLOW, "power_sgd", "4", "predicted"],
    ]
    # Three epochs of 11 or 12 s; rank 1 reached the goal 0.1 s later.
    assert " 34.6 (" in lines[0]
    assert [line.count("not known") for line in lines[:4]] == [0, 0, 1, 1]
    blank, first, advice, *_ = lines[4:]
    assert blank == "" and first.startswith("The methods are not tuned")
    assert advice.startswith(f"On {SLOW}, more workers are not worth it: one machine has the least")
    assert not any("fastest" in line for line in lines)


def test_json_has_the_rows_and_the_sentences(folder: Path, call: Call) -> None:
    arguments = ("--network", "home-fibre", "--workers", "2", "--machine", "aws-c5.xlarge")
    found = json.loads(call("recommend", str(folder), *arguments, "--json").stdout)
    assert found["tuned"] is False and found["sentences"][0].startswith("The methods are not")
    first = found["rows"][0]
    assert (first["network"], first["seconds"], first["runs"]) == ("home-fibre", "modelled", 2)
    # 0.17 USD an hour for each of two workers.
    assert first["price"] == pytest.approx(first["time_to_goal_s"] / 3600 * 2 * 0.17, rel=0.02)
    table = call("recommend", str(folder), *arguments).stdout
    assert "PRICE (USD)" in table.splitlines()[0] and "Cheapest on home-fibre: " in table


def test_a_sweep_has_its_own_limit_and_networks(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        f'task = "1a"\nworkers = [1, 2]\nnetworks = ["{SLOW}"]\nlimit = "40s"\n'
        'algorithms = ["centralized_sgd", "power_sgd"]\nseeds = 2\n'
    )
    for path in folder.iterdir():
        name, workers, seed = path.name.rsplit("-", 2)
        name = f"{name.replace('_', '-')}-{workers}"
        if workers == "2":
            name += "-10mbit-40ms"
        (tmp_path / "runs" / f"{name}-s{41 + int(seed)}").parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / f"{name}-s{41 + int(seed)}").symlink_to(path)
    lines = call("recommend", str(tmp_path), *ON).stdout.splitlines()
    # power_sgd needs 63 s and more.
    assert [line.split()[1:4] for line in lines[1:3]] == [
        ["centralized_sgd", "2", "measured"],
        ["power_sgd", "2", "measured"],
    ]
    assert "not reached in 2 of 2" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--network", SLOW, "--workers", "0"), 2, "0 is not in the range 1<=x<=1024"),
        (("--network", "mobil-lte", "--workers", "2"), 2, "mobile-lte"),
        (("--network", SLOW, "--workers", "2", "4"), 2, "unexpected extra argument (4)"),
        (("--network", SLOW), 2, "Missing option '--workers'"),
    ],
)
def test_wrong_options_are_refused(
    folder: Path, call: Call, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert message in call("recommend", str(folder), *arguments, code=code).stderr


def test_folders_without_an_answer_say_why(call: Call, tmp_path: Path) -> None:
    def error(path: Path, code: int = 1) -> str:
        return " ".join(call("recommend", str(path), *ON, code=code).stderr.split())

    assert "has no result" in error(tmp_path)
    (tmp_path / "a.zip").touch()
    assert "FOLDER must be a folder, not the file" in error(tmp_path / "a.zip", 2)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.toml").write_text(
        f'task = "1a"\nworkers = [1, 2]\nnetworks = ["{SLOW}"]\nalgorithms = ["power_sgd"]\n'
    )
    assert "FOLDER must have runs that have ended" in error(sweep)
    for rank in (1, 2):
        write_run(tmp_path / "mixed" / str(rank), options={"rank": rank})
    text = error(tmp_path / "mixed")
    assert "one configuration of centralized_sgd, not several that differ in options.rank" in text


def test_runs_without_a_goal_are_compared_by_their_samples(call: Call, tmp_path: Path) -> None:
    write(tmp_path, goal=None)
    shown = call("recommend", str(tmp_path), *ON)
    header, *lines = shown.stdout.splitlines()
    assert header.split()[-1] == "SAMPLES/S" and "GOAL" not in header
    assert [line.split()[1:3] for line in lines[:4]] == [
        ["centralized_sgd", "4"],
        ["centralized_sgd", "2"],
        ["power_sgd", "4"],
        ["power_sgd", "2"],
    ]
    # 64 samples in a step of 1.1 or 1.2 s.
    assert lines[1].split()[-1] == "55.7"
    rows = json.loads(call("recommend", str(tmp_path), *ON, "--json").stdout)["rows"]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(32 * row["workers"] / row["step_s"])
        assert row["time_to_goal_s"] is row["price"] is row["runs"] is None
    blank, advice, no_goal, *_ = lines[4:]
    assert blank == ""
    assert advice.startswith(f"On {SLOW}: centralized_sgd with 4 workers trains the most samples, ")
    assert "One machine trains " in advice and " a second with centralized_sgd" in advice
    assert no_goal.startswith("The runs have no goal")
    assert "not tuned" not in shown.stdout


SCRIPT = ("--network", SLOW, "--network", "lan-1g", "--workers", "4")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The arguments of each comparison, in whose place two methods have run."""
    calls: list[dict[str, Any]] = []

    def compare(methods: Any, **arguments: Any) -> None:
        calls.append({"methods": tuple(methods), **arguments})
        write(Path(arguments["output"]) / "runs", goal=None)

    monkeypatch.setattr(experiments, "compare", compare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    return calls


def test_a_script_runs_for_a_short_time_with_each_method(
    call: Call, probes: list[dict[str, Any]]
) -> None:
    shown = call("recommend", *SCRIPT, "own.py", "--lr", "0.1", "--workers", "3")
    assert "centralized_sgd  " in shown.stdout and "SAMPLES/S" in shown.stdout
    (used,) = probes
    output = used.pop("output")
    assert output.parent == Path("mlbench-results") and output.name.startswith("recommend-own-")
    text = " ".join(shown.stderr.split())
    assert f"the runs are in {output}: give this folder in place of the script" in text
    assert "--workers goes to the script: put options of mlbench before it" in text
    # Half of ten minutes for four methods, each with one worker and on two networks.
    assert used == {
        "methods": ("as-is", "bf16", "power_sgd:rank=4", "diloco:period=20"),
        "script": "own.py --lr 0.1 --workers 3",
        "workers": (1, 2),
        "networks": [SLOW, "lan-1g"],
        "limit": "25.0s",
        "budget": "600.0s",
        "goal": None,
    }


def test_a_script_takes_methods_a_goal_and_a_budget(
    call: Call, probes: list[dict[str, Any]], tmp_path: Path
) -> None:
    options = ["--method", "bf16", "--metric", "val_loss=loss (.*)", "--goal", "val_loss<=1"]
    options += ["--budget", "2min", "--output", str(tmp_path / "out"), "--workers", "2"]
    call("recommend", *SCRIPT, *options, "own.py")
    (used,) = probes
    assert (used["methods"], used["goal"], used["limit"]) == (("bf16",), "val_loss<=1", "20.0s")
    assert used["metrics"] == {"val_loss": "loss (.*)"}
    assert used["output"] == tmp_path / "out"


def test_methods_that_fail_are_left_out(
    call: Call, probes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = experiments.compare

    def failing(methods: Any, **arguments: Any) -> None:
        if len(methods) > 1:
            compare(methods, **arguments)
        raise MLBenchError("2 of 6 runs failed (bf16-1: no gradients)")

    monkeypatch.setattr(experiments, "compare", failing)
    shown = call("recommend", *SCRIPT, "own.py")
    assert "2 of 6 runs failed" in shown.stderr and "SAMPLES/S" in shown.stdout

    def refusing(methods: Any, **arguments: Any) -> None:
        write(Path(arguments["output"]) / "runs", goal=None)
        raise ConfigurationError("limit changed: give another output")

    monkeypatch.setattr(experiments, "compare", refusing)
    shown = call("recommend", *SCRIPT, "--output", "other", "own.py", code=1)
    assert "limit changed: give another output" in shown.stderr and shown.stdout == ""
    monkeypatch.setattr(experiments, "compare", failing)
    (tmp_path / "mlbench-results").rename(tmp_path / "before")
    shown = call("recommend", *SCRIPT, "--method", "bf16", "own.py", code=1)
    assert "2 of 6 runs failed" in shown.stderr and shown.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["own.py", *SCRIPT], "Missing option '--network'. Options of this command come before"),
        ([*SCRIPT], "Missing argument FOLDER or SCRIPT.py"),
        ([*SCRIPT, "-m"], "-m needs the name of a module"),
        ([*SCRIPT, "none"], "FOLDER must exist, unlike none"),
        ([*SCRIPT, "--budget", "1h", "."], "--goal, --budget and --output need a script"),
        ([*SCRIPT, "--goal", "val_loss<=1", "own.py"], "--workers must have 1 or 2 with a goal"),
        ([*SCRIPT, ".", "own.py"], "give a folder or a script, not . and own.py"),
        ([*SCRIPT, "--goal", "loss<=1", "."], "--budget and --output need a script"),
        ([*SCRIPT, "none.py"], "none.py does not exist"),
        ([*SCRIPT, "--method", "power", "own.py"], "--method must be NAME or NAME:key=value,..."),
        ([*SCRIPT, "--method", "own.py:Mean", "own.py"], "--method must name a class that own.py"),
        ([*SCRIPT, "--metric", "loss", "own.py"], "--metric must be NAME=REGEX, not 'loss'"),
        (
            [*SCRIPT, "--workers", "2", "--goal", "loss<=1", "own.py"],
            "--goal must be on a metric of the script",
        ),
        ([*SCRIPT, "--budget", "soon", "own.py"], "Error: --budget must be a time such as"),
    ],
)
def test_wrong_calls_with_a_script_start_nothing(
    call: Call, probes: list[dict[str, Any]], words: list[str], message: str
) -> None:
    error = " ".join(call("recommend", *words, code=2).stderr.split())
    assert message in error
    assert probes == []
