"""``mlbench run --no-master``: runs of a small Slurm, whose results come from its folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlbench_cli import _wait
from mlbench_core.client.masters import read_record
from mlbench_core.results.folder import FILES, verify_folder
from mlbench_master.engines import EngineError
from mlbench_master.engines.slurm import engine as slurm
from mlbench_master.engines.slurm import job_states as slurm_queue
from mlbench_master.runs import masterless as direct
from tests.cli.conftest import Call
from tests.master.engines import fake_slurm
from tests.results.helpers import write_run

SLURM = ("--engine", "slurm", "--no-master")


@pytest.fixture
def fake(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake Slurm, whose programs come first."""
    folder = tmp_path / "slurm"
    patch.setenv("PATH", f"{fake_slurm.install(folder)}{os.pathsep}{os.environ['PATH']}")
    patch.setenv("MLBENCH_SLURM_INTERVAL_S", "0.05")
    patch.setattr(fake_slurm, "ROOT", folder)
    patch.setattr(slurm, "_LOOK_S", 0.0)
    patch.setattr(slurm, "_FILES_S", 0.0)
    patch.setattr(slurm_queue, "_SHORTEST_PAUSE_S", 0.05)
    patch.setattr(_wait, "POLL_S", 0.05)
    patch.chdir(tmp_path)
    return folder


def home() -> Path:
    return Path(os.environ["MLBENCH_HOME"]) / "no-master"


def leave(script: Path, results: dict[int, Path], end: str) -> str:
    """A command whose worker 0 leaves the results that fit the number of workers, and then ends."""
    cases = "".join(
        f"{workers}) cp -r {folder} $MLBENCH_OUTPUT/task1a/;;\n"
        for workers, folder in results.items()
    )
    script.write_text(
        f'echo "says $RANK"\n[ "$RANK" = 0 ] || exit 0\nmkdir -p "$MLBENCH_OUTPUT/task1a"\n'
        f'case "$WORLD_SIZE" in\n{cases}esac\n{end}\n'
    )
    return f"sh {script}"


def test_the_results_come_from_the_shared_folder(
    fake: Path, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setenv("MLBENCH_MASTER_URL", "http://127.0.0.1:1")
    patch.setenv("MLBENCH_TOKEN", "secret")
    results = {
        workers: write_run(tmp_path / f"made-{workers}", workers=workers) for workers in (1, 2)
    }
    command = leave(
        tmp_path / "train.sh", results, 'echo "master $MLBENCH_MASTER_URL$MLBENCH_TOKEN."'
    )
    done = call("run", "demo", "1", "2", "--command", command, *SLURM, "--wait", "--num-cpus", "2")
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:3]] == [
        ["made-1", "1", "yes", "30.0"], ["made-2", "2", "yes", "30.1"]
    ]  # fmt: skip
    assert f"demo-2 is job 2 in {home()}/demo/2\n" in done.stderr
    for workers in (1, 2):
        copied = tmp_path / "mlbench-results" / "demo" / f"demo-{workers}"
        assert {path.name for path in copied.iterdir()} == set(FILES) and verify_folder(
            copied
        ) == []
        saved = json.loads(copied.with_suffix(".json").read_text())
        assert (saved["run"]["name"], saved["run"]["state"]) == (f"demo-{workers}", "finished")
        assert saved["metrics"]["val_global_Prec@1 @ 0"][-1]["value"] == "90.0"
        assert json.loads(saved["metrics"]["result @ 0"][0]["value"])["goal"]["reached"]
        assert (
            "master ."
            in (home() / "demo" / str(workers) / "logs" / "0.out").read_text().splitlines()
        )
        record = json.loads((home() / "demo" / str(workers) / "run.json").read_text())
        assert record["state"] == "finished" and record["started_at"] <= record["finished_at"]
    assert (tmp_path / "mlbench-results" / "demo" / "overview.png").is_file()
    assert read_record() is None
    assert "--cpus-per-task=2 " in (fake / "calls").read_text()


def test_a_failed_run_shows_its_log_and_how_far_it_came(
    fake: Path, call: Call, tmp_path: Path
) -> None:
    killed = write_run(tmp_path / "made", workers=2, finish=False)
    command = leave(tmp_path / "train.sh", {2: killed}, "echo 'ValueError: bad' >&2; exit 3")
    text = call("run", "x", "2", "--command", command, *SLURM, "--wait", "--json", code=1)
    (result,) = json.loads(text.stdout)["results"]
    assert (result["state"], result["epochs"]) == ("unfinished", 3)
    assert f"--- the last lines of x-2 (all lines: {home()}/x/1/log.jsonl)\n" in text.stderr
    assert "[0] ValueError: bad\n" in text.stderr
    assert "worker 0 failed: exit status 3" in text.stderr
    assert text.stderr.endswith("mlbench: run x-2 failed\n")
    copied = {path.name for path in (tmp_path / "mlbench-results" / "x" / "x-2").iterdir()}
    assert copied == {"environment.json", "metrics.rank-0.jsonl", "metrics.rank-1.jsonl"}


def test_without_waiting_the_jobs_are_named(fake: Path, call: Call, tmp_path: Path) -> None:
    (fake / "hold").touch()
    command = ("--command", "true --seed {seed}", *SLURM, "--data-dir", "shared")
    text = call("run", "demo", "1", "2", *command, "--repeats", "2", "--engine-options", "--time=5")
    rows = [line.split() for line in text.stdout.splitlines()]
    assert rows[0] == ["RUN", "WORKERS", "JOB", "FOLDER"]
    assert rows[4] == ["demo-2-r2", "2", "4", f"{tmp_path}/shared/demo/4"]
    assert text.stderr.splitlines() == [
        "'squeue --jobs=1,2,3,4' shows the jobs, and 'scancel 1 2 3 4' ends them",
        f"when they have ended, 'mlbench compare {tmp_path}/shared/demo' shows their results",
    ]
    assert (tmp_path / "shared" / "demo" / "4" / "worker.sh").read_text().count(
        "true --seed 43"
    ) == 1
    assert "--time=5 " in (fake / "calls").read_text()
    # Names are unique, further runs get their own folders, and --replace ends the earlier run.
    assert (
        "run demo-2-r1 exists already"
        in call("run", "demo", "2", *command, "--repeats", "1", code=1).stderr
    )
    (started,) = json.loads(
        call("run", "demo", "2", *command, "--repeats", "1", "--replace", "--json").stdout
    )
    assert (started["name"], started["id"], started["job_metadata"]["slurm_job"]) == (
        "demo-2-r1",
        5,
        "5",
    )
    assert (
        "scancel 2\n" in (fake / "calls").read_text()
        and not (tmp_path / "shared" / "demo" / "2").exists()
    )


def test_ctrl_c_says_how_to_cancel_the_jobs(
    fake: Path, call: Call, patch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (fake / "hold").touch()
    patch.setattr(_wait, "wait_for", interrupted)
    text = call("run", "demo", "1", "2", "--command", "true", *SLURM, "--wait", code=1).stderr
    assert text.endswith("mlbench: stopped waiting; the runs continue ('scancel 1 2' stops them)\n")
    assert "scancel" not in (fake / "calls").read_text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--no-master",), 2, "--no-master works only with --engine slurm"),
        (("--no-master", "--engine", "local"), 2, "--no-master works only with --engine slurm"),
        ((*SLURM, "--exclusive"), 2, "--engine-options=--exclusive gives each run its own nodes"),
        (
            (*SLURM, "--dashboard-url", "http://x"),
            2,
            "--dashboard-url cannot be given with --no-master",
        ),
        (
            (*SLURM, "--container", "docker"),
            2,
            "--container must be left out with --engine slurm: only local has it",
        ),
        (("--data-dir", "x"), 2, "--data-dir needs --no-master"),
        (
            (*SLURM, "--engine-options", "--array=1-2"),
            1,
            "mlbench: engine_options: must be options of sbatch",
        ),
        (
            (*SLURM, "--num-cpus", "5000"),
            1,
            "mlbench: num_cpus: Input should be less than or equal to 4096",
        ),
    ],
)
def test_what_needs_a_master_or_cannot_be_is_refused(
    fake: Path, call: Call, options: tuple[str, ...], code: int, message: str
) -> None:
    text = call("run", "demo", "1", "--command", "true", *options, code=code).stderr
    assert message in " ".join(text.split())
    assert not (fake / "calls").exists()


def test_a_refused_job_leaves_nothing(fake: Path, call: Call, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise EngineError("Slurm refused: no such partition")

    patch.setattr(slurm, "_submit", refuse)
    text = call("run", "demo", "1", "--command", "true", *SLURM, code=1).stderr
    assert text == "mlbench: Slurm refused: no such partition\n"
    assert [path.name for path in (home() / "demo").iterdir() if path.is_dir()] == []


def test_metrics_of_a_run_that_continues_are_read_when_they_grow(
    fake: Path, tmp_path: Path
) -> None:
    (fake / "hold").touch()
    with direct.MasterlessRuns(tmp_path / "runs") as runs:
        run = runs.create({"name": "a", "num_workers": 1, "command": "true"})
        assert (runs.run(run["id"])["state"], runs.metrics(run["id"])) == ("initialized", {})
        made = write_run(tmp_path / "made", workers=1, accuracies=(70.0, 80.0), finish=False)
        target = tmp_path / "runs" / "1" / "output" / "task1a" / "1"
        shutil.copytree(made, target)
        name = "val_global_Prec@1 @ 0"
        found = runs.metrics(run["id"], metric_filter=name)
        assert [entry["value"] for entry in found.pop(name)] == ["70.0", "80.0"] and found == {}
        assert [entry["value"] for entry in runs.metrics(run["id"], last_n=1)[name]] == ["80.0"]
        with (target / "metrics.rank-0.jsonl").open("a") as lines:
            line = {
                "kind": "stat",
                "rank": 0,
                "time": "2026-01-01T00:00:00+00:00",
                "epoch": 2,
                "step": 30,
            }
            lines.write(
                json.dumps({**line, "time_s": 1.0, "name": "val_global_Prec@1", "value": None})
                + "\n"
            )
        assert [entry["value"] for entry in runs.metrics(run["id"], metric_filter=name)[name]] == [
            "70.0",
            "80.0",
            "nan",
        ]

        # While the files are joined, one of them may be gone: the values of before stay.
        def gone(_: object) -> None:
            raise FileNotFoundError

        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(direct, "read_lines", gone)
            assert len(runs.metrics(run["id"], metric_filter=name)[name]) == 3
        runs.stop(run["id"])
        (stopped,) = runs.runs()
        assert (stopped["state"], stopped["job_metadata"]["reason"]) == (
            "failed",
            "stopped by a user",
        )
        runs.delete(run["id"])
        assert runs.runs() == []
