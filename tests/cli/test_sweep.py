"""``mlbench sweep``, with a fake master."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli._sweep_progress import _Bar, _Lines
from mlbench_cli.commands import sweep as module
from mlbench_core.experiments import Comparison
from mlbench_core.sweep import runner
from mlbench_core.sweep.toml_file import load_sweep
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster
from tests.results.helpers import write_run

FILE = """\
task = "1a"
workers = [1, 2]
networks = ["lan-1g"]
limit = "2min"
algorithms = ["centralized_sgd", "power_sgd"]
"""


@pytest.fixture
def file(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setattr(runner, "POLL_S", 0.0)
    # The page has tests of its own, and its figures take seconds.
    patch.setattr(module, "_write_page", lambda path, described: path / "index.html")
    (tmp_path / "lab.toml").write_text(FILE)
    return tmp_path / "lab.toml"


def test_a_dry_run_shows_the_plan_and_starts_nothing(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    lines = call(
        "sweep", str(file), "--output", str(tmp_path / "out"), "--dry-run"
    ).stdout.splitlines()
    assert lines[1].split() == [
        "centralized-sgd-1-s42",
        "centralized_sgd",
        "1",
        "-",
        "42",
        "to",
        "run",
    ]
    assert lines[-2:] == [
        "runs:         4, of which 0 are done and 4 are to run",
        "at limit:     8:12 if every run reaches the limit, and its validations and last epochs",
    ]
    assert fake.requests == [] and not (tmp_path / "out").exists()


def test_a_sweep_runs_and_is_not_repeated(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    arguments = ("sweep", str(file), "--output", str(tmp_path / "out"))
    shown = call(*arguments)
    assert [line.split() for line in shown.stdout.splitlines()[2:5]] == [
        ["ALGORITHM", "WORKERS", "NETWORK", "RUNS", "REACHED", "MEDIAN", "S"],
        ["centralized_sgd", "1", "-", "1", "1", "81.5"],
        ["power_sgd", "1", "-", "1", "1", "81.5"],
    ]
    assert shown.stdout.splitlines()[-1] == f"page: {tmp_path}/out/index.html"
    assert shown.stderr.splitlines()[-1].startswith("[4/4] power-sgd-2-lan-1g-s42: finished")
    content = json.loads(call(*arguments, "--json").stdout)
    assert [point["time_to_goal_s"] for point in content["points"]] == [81.5, 81.5, 45.5, 45.5]
    assert content["left"]["runs"] == 0
    assert len(fake.requests) == 4


def test_a_tuned_sweep_shows_its_trials_and_runs_them_first(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    file.write_text(FILE + '[tuning]\nparameter = "--lr"\ndefault = 0.1\nfactors = [1, 2, 3]\n')
    arguments = ("sweep", str(file), "--output", str(tmp_path / "out"))
    lines = call(*arguments, "--dry-run").stdout.splitlines()
    assert lines[1].split()[0] == "centralized-sgd-1-lr-0-1-s1"
    assert lines[-3:-1] == [
        "runs:         16, of which 0 are done and 16 are to run",
        "tuning:       3 trials of each algorithm and number of workers are among them, and come "
        "first; more follow if the best value is at the edge",
    ]

    def result(run: dict[str, Any]) -> Path:
        # The middle of the grid is the best.
        epochs = 1 if "-lr-0-2-" in run["name"] else 2
        folder = tmp_path / "results" / run["name"]
        return write_run(folder, workers=run["num_workers"], accuracies=(80.0,) * epochs + (90.0,))

    fake.result_folder = result
    shown = call(*arguments)
    assert shown.stderr.splitlines()[-1].startswith("[16/16] power-sgd-2-lan-1g-s42: finished")
    assert [request["arguments"][-3:-2] for request in fake.requests[12:]] == [["0.2"]] * 4
    points = json.loads(call(*arguments, "--json").stdout)["points"]
    assert points[0]["trial"] == {"parameter": "--lr", "factor": 1.0, "value": 0.1}
    assert [point["trial"] for point in points[12:]] == [None] * 4


def test_the_workers_of_a_sweep_start_in_the_folder_of_its_file(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setenv("NCCL_ALGO", "Ring")
    call("sweep", str(file), "--output", str(tmp_path / "out"))
    places = {
        (caller["cwd"], caller["environment"]["NCCL_ALGO"]) for caller in fake.callers if caller
    }
    assert (places, len(fake.callers)) == ({(str(tmp_path), "Ring")}, 4)
    # They are not part of a run, which a call from another folder may continue.
    assert all(
        "caller" not in json.dumps(json.loads(path.read_text()))
        for path in (tmp_path / "out").rglob("*.json")
    )


def test_a_sweep_with_too_many_workers_starts_no_run(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    fake.most_workers = 1
    error = call("sweep", str(file), "--output", str(tmp_path / "out"), code=1).stderr
    assert "the number of workers must be at most 1 at" in error
    assert fake.requests == []
    call("sweep", str(file), "--output", str(tmp_path / "out"), "--oversubscribe")
    assert [request["oversubscribe"] for request in fake.requests] == [True] * 4
    # The dashboard shows the runs of a sweep as one group.
    assert [request["tags"] for request in fake.requests] == [["out"]] * 4


def test_the_workers_of_a_modelled_sweep_may_share_cores(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    file.write_text(FILE.replace('limit = "2min"', 'time = "modelled"'))
    fake.most_workers = 1
    shown = call("sweep", str(file), "--output", str(tmp_path / "out"))
    assert [request["oversubscribe"] for request in fake.requests] == [True] * 4
    assert not any("network" in request for request in fake.requests)
    # The runs of the fake master have no result folders.
    assert "MODELLED MEDIAN S" in shown.stdout and "not modelled" in shown.stdout
    assert "not modelled: it did not record the number of its steps to the goal" in shown.stderr
    found = json.loads(call("sweep", str(file), "--output", str(tmp_path / "out"), "--json").stdout)
    assert [point["time_to_goal_s"] for point in found["points"]] == [None] * 4


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_sweep_that_begins_with_a_byte_order_mark_is_read(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path, end: str
) -> None:
    file.write_bytes(f"\ufeff{FILE}".replace("\n", end).encode())
    call("sweep", str(file), "--output", str(tmp_path / "out"), "--dry-run")


def test_the_first_run_that_lacks_a_metric_says_so(
    fake: FakeMaster, call: Call, tmp_path: Path, file: Path
) -> None:
    file.write_text(
        'script = "train.py"\nmethods = ["as-is", "bf16"]\nworkers = [2]\nnetworks = ["lan-1g"]\n'
        "metrics = {acc = 'my_acc ([0-9.]+)'}\ngoal = 'acc>=0.9'\n"
    )
    (tmp_path / "train.py").touch()
    reason = "val_acc: no line of the output has 'my_acc ([0-9.]+)'"

    def result(run: dict[str, Any]) -> Path:
        goal = {"metric": "val_acc", "threshold": 1000.0, "minimize": False}
        folder = write_run(tmp_path / "results" / run["name"], task=None, goal=goal)
        content = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps({**content, "not_measured": [reason]}))
        return folder

    fake.result_folder = result
    arguments = ("sweep", str(file), "--output", str(tmp_path / "out"))
    lines = call(*arguments).stderr.splitlines()
    ends = [at for at, line in enumerate(lines) if "finished after" in line]
    assert lines[ends[0] + 1] == f"as-is-2-lan-1g-s42: not measured: {reason}"
    assert sum(": not measured: " in line for line in lines) == 1, "once for all runs"
    note = f"Not measured in 2 of 2 runs (as-is and bf16): {reason}."
    assert lines[-1] == note
    # Also if nothing is left to run, and from Python.
    assert call(*arguments).stderr.splitlines()[-1] == note
    found = Comparison(tmp_path / "out")
    assert repr(found).splitlines()[-2] == note
    assert "goal not measured on lan-1g with 2 workers (1 of 1)" in found._repr_html_()
    assert "not_measured" not in (tmp_path / "out/runs/as-is-2-lan-1g-s42/run.json").read_text()


def test_a_run_says_why_it_waits_and_that_it_has_started(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    reason = "waits for cores: 2 needed, 1 free"
    create = fake._create

    def waiting(body: dict[str, Any]) -> tuple[int, Any]:
        status, run = create(body)
        fake.runs[run["id"]]["job_metadata"] = {"reason": reason}
        fake.states[run["id"]][:0] = ["initialized", "initialized"]
        return status, dict(fake.runs[run["id"]])

    patch.setattr(fake, "_create", waiting)
    lines = call("sweep", str(file), "--output", str(tmp_path / "out")).stderr.splitlines()
    runs = [line for line in lines if "-s42" in line]
    assert [re.sub(r" (at \d\d:\d\d:\d\d|after).*", "", line) for line in runs[:4]] == [
        f"centralized-sgd-1-s42: {reason}",
        "[1/4] centralized-sgd-1-s42: started",
        "[1/4] centralized-sgd-1-s42: finished",
        f"power-sgd-1-s42: {reason}",
    ]
    assert len(runs) == 3 * 4, "each is said once"


def test_the_bar_of_a_terminal_says_why_a_run_waits(file: Path) -> None:
    rich_progress = pytest.importorskip("rich.progress")
    sweep = load_sweep(file)
    points = sweep.points()
    bar = rich_progress.Progress()
    shown = _Bar(_Lines(sweep, points, {}), bar, bar.add_task(""))
    shown.watch(points[0], "initialized", 0.0, "waits for cores: 2 needed, 1 free")
    assert bar.tasks[0].description == f"{points[0].name} waits for cores: 2 needed, 1 free"
    shown.watch(points[0], "started", 3.2, "")
    assert bar.tasks[0].description == f"{points[0].name} 3 s"


def test_failed_runs_are_the_error(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    fake.final_state = "failed"
    arguments = ("sweep", str(file), "--output", str(tmp_path / "out"))
    result = call(*arguments, code=1)
    assert (
        f"mlbench: 4 of 4 runs failed (see {tmp_path}/out/failed): centralized-sgd-1-s42 (failed)"
        in result.stderr
    )
    content = json.loads(call(*arguments, "--dry-run", "--json").stdout)
    assert content["left"]["runs"] == 4, "each is tried again once"


def test_ctrl_c_says_how_to_continue(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    patch.setattr(runner.time, "sleep", interrupt)
    result = call("sweep", str(file), "--output", str(tmp_path / "out"), code=1)
    assert result.stderr.splitlines()[-2:] == [
        "stopping centralized-sgd-1-s42",
        "mlbench: ended by Ctrl-C; start the same command again to continue",
    ]
    assert [run["state"] for run in fake.runs.values()] == ["failed"]


def test_a_script_that_does_not_exist_starts_no_run(
    fake: FakeMaster, call: Call, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('script = "own.py --lr 1"\nmethods = ["as-is"]\nworkers = [1]\n')
    error = call("sweep", str(path), "--output", str(tmp_path / "out"), code=2).stderr
    assert f"the script {tmp_path / 'own.py'} does not exist" in " ".join(error.split())
    (tmp_path / "own.py").touch()
    answer = call("sweep", str(path), "--output", str(tmp_path / "out"), "--dry-run")
    assert answer.stdout.splitlines()[1].split()[:3] == ["as-is-1-s42", "as-is", "1"]
    assert not fake.requests


def test_the_workers_of_a_sweep_can_start_in_another_folder(
    fake: FakeMaster, call: Call, file: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    file.write_text(
        'script = "train.py"\nmethods = ["own.py:Mean"]\nworkers = [2]\nnetworks = ["lan-1g"]\n'
    )
    words = ("sweep", str(file), "--output", str(tmp_path / "out"), "--cwd", str(start))
    assert "train.py does not exist" in call(*words, code=2).stderr
    (start / "train.py").touch()
    assert "mlbench: methods must name a file from" in call(*words, code=1).stderr
    (start / "own.py").write_text("class Mean: pass\n")
    call(*words)
    assert [caller["cwd"] for caller in fake.callers if caller] == [str(start)]
    (request,) = fake.requests
    assert request["command"].endswith("--method own.py:Mean train.py")
    assert request["name"].startswith("mean-2-lan-1g-s42-")
