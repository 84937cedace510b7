"""The engine for Slurm, with a small Slurm of this package's tests; ``test_slurm_real`` has a
real one."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_master import create_app
from mlbench_master.engines import (
    ENGINES,
    EngineError,
    Job,
    JobStatus,
    engine_names,
    make_engine,
)
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.engines.slurm import engine as slurm
from mlbench_master.engines.slurm import job_states as slurm_queue
from mlbench_master.engines.slurm.engine import SlurmEngine
from mlbench_master.engines.slurm.rank_logs import RankLogs
from tests.master.engines import fake_slurm
from tests.master.engines.test_local_engine import create, lines, wait_state
from tests.master.helpers import TestClient, wait_for

TOKEN = "token-of-the-test"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake Slurm, whose programs come first."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{fake_slurm.install(folder)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(fake_slurm, "ROOT", folder)
    monkeypatch.setattr(slurm, "_LOOK_S", 0.0)
    monkeypatch.setattr(slurm, "_FILES_S", 0.0)
    monkeypatch.setattr(slurm_queue, "_SHORTEST_PAUSE_S", 0.05)
    return folder


@pytest.fixture
def engine(fake: Path, tmp_path: Path) -> Iterator[SlurmEngine]:
    with contextlib.closing(SlurmEngine(tmp_path / "runs", interval_s=0.1)) as made:
        yield made


class Controller:
    """Slurm's programs as functions, where a test needs its answers and no processes."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.accounting = ""
        self.calls: list[str] = []

    def __call__(self, *command: str, **_: Any) -> str:
        self.calls.append(" ".join(command))
        if command[0] == "sbatch":
            number = str(len(self.jobs) + 1)
            comment = next(word for word in command if word.startswith("--comment=")).partition(
                "="
            )[2]
            self.jobs[number] = f"PENDING|Resources|1:00||{comment}"
            return f"{number};a-cluster\n"
        if command[0] == "scancel":
            self.jobs[command[1]] = "CANCELLED|None|1:00||"
        if command[0] == "sacct" and not self.accounting:
            raise EngineError("sacct: Slurm accounting storage is disabled")
        if command[0] == "sacct":
            return self.accounting
        wanted = [word.partition("=")[2] for word in command if word.startswith("--jobs=")] or list(
            self.jobs
        )
        return "".join(f"{number}|{self.jobs[number]}\n" for number in wanted)

    def called(self, program: str) -> list[str]:
        return [call for call in self.calls if call.startswith(program)]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(slurm, "run_slurm", made)
    monkeypatch.setattr(slurm_queue, "run_slurm", made)
    monkeypatch.setattr(slurm, "_PROGRAMS", ())
    monkeypatch.setattr(slurm, "_FILES_S", 0.0)
    monkeypatch.setattr(slurm_queue, "_SHORTEST_PAUSE_S", 0.01)
    return made


@pytest.fixture
def queued(controller: Controller, tmp_path: Path) -> Iterator[SlurmEngine]:
    """An engine for the controller."""
    with contextlib.closing(SlurmEngine(tmp_path / "runs", interval_s=0.01)) as made:
        yield made


@pytest.fixture
def client(fake: Path, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(
        data_dir=tmp_path / "data",
        engine=SlurmEngine(tmp_path / "data" / "runs", interval_s=0.1),
        token=TOKEN,
    )
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=headers) as test_client:
        yield test_client


def job(command: str, **changes: Any) -> Job:
    return Job(**{"run_id": 1, "name": "a", "num_workers": 2, "command": command, **changes})


def end_of(engine: SlurmEngine, job_id: str) -> JobStatus:
    def look() -> JobStatus | None:
        status = engine.poll(job_id)
        return None if status.state in ("waiting", "running") else status

    found = wait_for(look, what="the end of the run")
    assert isinstance(found, JobStatus)
    return found


def reason_of(engine: SlurmEngine, job_id: str) -> str:
    return str(wait_for(lambda: engine.poll(job_id).reason, what="a reason"))


def calls(fake: Path, program: str) -> list[str]:
    made = (fake / "calls").read_text().splitlines() if (fake / "calls").exists() else []
    return [call for call in made if call.startswith(program + " ")]


def test_a_command_runs_once_for_each_worker(client: TestClient, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
        "OMP_NUM_THREADS MLBENCH_RUN_ID"
    )
    script.write_text(
        "import os, pathlib, sys\nprint('args', sys.argv[1:], *(os.environ[name] "
        f"for name in '{names}'.split()))\nprint('to stderr', os.environ['RANK'], "
        "file=sys.stderr)\npathlib.Path(os.environ['MLBENCH_OUTPUT'], "
        "os.environ['RANK']).write_text('result')\nprint('progress 1\\rprogress "
        "2\\nx' + 'y' * 20_000, end='')\n"
    )
    run = create(
        client, f"python {script} '{{run_id}} $HOME' {{rank}} {{hosts}} {{backend}}", workers=3
    )
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["state"] == "finished", done
    found = lines(client, run["id"])
    said = {line["rank"]: line["text"] for line in found if line["text"].startswith("args")}
    hosts = "127.0.0.1,127.0.0.1,127.0.0.2"
    for rank, local, of in ((0, 0, 2), (1, 1, 2), (2, 0, 1)):
        args = [f"{run['id']} $HOME", str(rank), hosts, "gloo"]
        assert said[rank] == f"args {args} {rank} 3 {local} {of} 127.0.0.1 15001 1 {run['id']}"
    assert all(line["date"] for line in found)
    of_one = [
        (line["stream"], len(line["text"]), line["text"][:10])
        for line in found
        if line["rank"] == 1
    ]
    assert sorted(
        part for part in of_one if part[2] != "args ['1 $" and part[2] != "yyyyyyyyyy"
    ) == [
        ("stderr", 11, "to stderr "),
        ("stdout", 10, "progress 2"),
        ("stdout", 16384, "xyyyyyyyyy"),
    ]
    assert sum(length for _, length, text in of_one if text[0] in "xy") == 20_001
    assert found[-1]["text"] == "finished"
    assert sorted(path.name for path in (tmp_path / "data/runs/1/output").iterdir()) == [
        "0",
        "1",
        "2",
    ]


@pytest.mark.parametrize(
    ("ending", "state", "reason"),
    [
        ("sys.exit(3)", "failed", "worker 1 failed: exit status 3"),
        ("int('x')", "failed",
         "worker 1 failed: exit status 1: ValueError: invalid literal for int() with base 10: 'x'"),
        ("os.kill(os.getpid(), 9)", "failed", "worker 1 died: signal 9 (SIGKILL)"),
        ("os.kill(os.getppid(), 9); time.sleep(9)", "failed", "worker 1 on node f1 died: Killed"),
        ("time.sleep(0)", "finished", ""),
    ],
)  # fmt: skip
def test_the_reason_says_which_rank_failed_and_how(
    engine: SlurmEngine, tmp_path: Path, ending: str, state: str, reason: str
) -> None:
    """The other worker is ended by srun, which must not be taken for the first failure."""
    script = tmp_path / "fails.py"
    sleep = 100 if reason else 0
    # Worker 1 waits for the other one, which srun might end before its shell can note its status.
    script.write_text(
        f"import os, pathlib, sys, time\nbegun = pathlib.Path({str(tmp_path / 'begun')!r})\n"
        f"if os.environ['RANK'] != '1': begun.touch(); time.sleep({sleep}); sys.exit()\n"
        f"while not begun.exists(): time.sleep(0.01)\n{ending}\n"
    )
    job_id = engine.start(job(str(script)))
    status = end_of(engine, job_id)
    assert (status.state, status.reason) == (state, reason)
    if "exit" in ending:
        statuses = {
            path.name: path.read_text()
            for path in (engine.results(job_id).parent / "status").iterdir()
        }
        assert statuses == {"0": "143\n", "1": "3\n"}


def test_a_command_that_does_not_exist_says_so(engine: SlurmEngine) -> None:
    status = end_of(engine, engine.start(job("no-such-program --x", num_workers=1)))
    assert status.reason.startswith("worker 0 failed: exit status 127: ")
    assert "no-such-program: not found" in status.reason


@pytest.mark.parametrize(
    ("state", "files", "expected"),
    [
        ("TIMEOUT|TimeLimit|1:00", {}, "reached its time limit (1:00): give a longer --time"),
        ("CANCELLED|None|1:00", {}, "job 1 of Slurm was cancelled, but not by MLBench"),
        ("PREEMPTED|None|1:00", {}, "was preempted by a job of higher priority"),
        ("OUT_OF_MEMORY|OutOfMemory|1:00", {}, "used more memory than it had"),
        ("NODE_FAIL|NodeDown|1:00", {"logs/job.out": ("*** STEP 1.0 ON n1 CANCELLED DUE TO NODE "
                                                     "n2 FAILURE ***\n")},
         "node n2 failed, which ended job 1 of Slurm"),
        ("NODE_FAIL|NodeDown|1:00", {}, "a node of f[1-2] failed"),
        ("DEADLINE|DeadLine|1:00", {}, "ended with the state DEADLINE (DeadLine)"),
        ("FAILED|NonZeroExitCode|1:00", {}, "ended before its script began: is "),
        ("FAILED|None|1:00", {"begun": "1", "exit": "2", "logs/job.out": ("srun: error: Unable "
                                                                         "to create step\n")},
         "the script of job 1 of Slurm failed: exit status 2: srun: error: Unable to create step"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "1", "status/0": "143", "status/1": "x",
         "status/2": "7"},
         "worker 2 failed: exit status 7"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "1", "status/0": "143"},
         "worker 0 died: signal 15 (SIGTERM)"),
        # The shell of the worker that was killed has left no status.
        ("FAILED|None|1:00", {"begun": "1", "exit": "137", "status/0": "143", "status/1": "143",
         "logs/job.out": "srun: error: f1: tasks 0-1: Exited with exit code 143\n"
                         "srun: error: f2: task 2: Killed\n"},
         "worker 2 on node f2 died: Killed"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "137", "status/1": "143",
         "logs/job.out": "srun: error: f1: tasks 0-1,3: Terminated\n"
                         "srun: error: f2: tasks 1-2: Killed\n"},
         "worker 2 on node f2 died: Killed"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "143", "status/0": "143",
         "logs/job.out": "srun: error: f1: tasks 0-1: Terminated\n"},
         "worker 1 on node f1 died: Terminated"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "137", "status/0": "1",
         "logs/0.err": "RuntimeError: Connection closed by peer\n",
         "logs/job.out": "srun: error: f1: task 0: Exited with exit code 1\n"
                         "srun: error: f2: task 1: Killed\n"},
         "worker 1 on node f2 died: Killed"),
        ("FAILED|None|1:00", {"begun": "1", "exit": "137", "status/0": "1",
         "logs/0.err": "ValueError: bad\n",
         "logs/job.out": "srun: error: f1: task 0: Exited with exit code 1\n"
                         "srun: error: f2: task 1: Killed\n"},
         "worker 0 failed: exit status 1: ValueError: bad"),
        (None, {}, "lost: Slurm has forgotten the job 1 of Slurm, and it left no status"),
        (None, {"begun": "1", "exit": "3", "status/1": "3"}, "worker 1 failed: exit status 3"),
        (None, {"accounting": "1|CANCELLED by 1000|01:00:00|n1\n"},
         "was cancelled, but not by MLBench"),
    ],
)  # fmt: skip
def test_each_end_that_slurm_knows_has_a_reason(
    queued: SlurmEngine,
    controller: Controller,
    state: str | None,
    files: dict[str, str],
    expected: str,
) -> None:
    job_id = queued.start(job("true"))
    assert reason_of(queued, job_id) == "job 1 waits in Slurm's queue: Resources"
    controller.accounting = files.pop("accounting", "")
    for name, content in files.items():
        (queued.results(job_id).parent / name).write_text(content)
    if state is None:
        del controller.jobs["1"]
    else:
        controller.jobs["1"] = f"{state}|f[1-2]|"
    status = end_of(queued, job_id)
    assert status.state == ("lost" if "lost" in expected else "failed")
    assert expected in status.reason
    assert queued.log_tail(job_id)[-1]["text"] == status.reason
    assert queued.poll(job_id) == status
    assert len([line for line in queued.logs(job_id).lines if line["text"] == status.reason]) == 1


def test_a_job_that_waits_for_a_dead_node_says_so(
    queued: SlurmEngine, controller: Controller
) -> None:
    job_id = queued.start(job("true"))
    controller.jobs["1"] = "COMPLETING|None|1:00|f2|"
    expected = JobStatus("running", "job 1 ends when Slurm has cleaned up on f2")
    wait_for(lambda: queued.poll(job_id) == expected, what="the reason")


def test_a_job_that_slurm_has_forgotten_may_have_finished(
    queued: SlurmEngine, controller: Controller
) -> None:
    job_id = queued.start(job("true"))
    for name in ("begun", "exit"):
        (queued.results(job_id).parent / name).write_text("0")
    del controller.jobs["1"]
    assert end_of(queued, job_id) == JobStatus("finished", returncode=0)


def test_the_files_of_a_node_may_come_late(
    queued: SlurmEngine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_FILES_S", 100.0)
    job_id = queued.start(job("true"))
    reason_of(queued, job_id)
    controller.jobs["1"] = "FAILED|NonZeroExitCode|1:00|f1|"
    wait_for(lambda: queued.poll(job_id).reason == "")
    assert queued.poll(job_id).state == "running"
    for name, content in (("begun", "1"), ("status/1", "4"), ("exit", "4")):
        (queued.results(job_id).parent / name).write_text(content)
    assert queued.poll(job_id).reason == "worker 1 failed: exit status 4"


def test_a_controller_that_does_not_answer_is_a_problem_that_passes(
    client: TestClient, fake: Path
) -> None:
    run = create(client, "sleep 100")
    wait_for(lambda: calls(fake, "srun"))
    (fake / "down").touch()
    reason = (
        "Slurm refused or does not answer: squeue: slurm_load_jobs error: Unable to "
        "contact slurm controller (connect failure)"
    )

    def shown() -> str | None:
        metadata = client.get(f"/api/runs/{run['id']}/").json()["job_metadata"]
        return metadata.get("reason")

    # Until Slurm is asked again, the reason may be that the job waits in the queue.
    wait_for(lambda: shown() == reason, what="the reason")
    answer = client.post(f"/api/runs/{run['id']}/stop/")
    assert (answer.status_code, answer.json()["message"]) == (503, reason)
    assert client.get(f"/api/runs/{run['id']}/").json()["state"] == "started"
    (fake / "down").unlink()
    wait_for(lambda: not shown(), what="the end of the problem")
    stopped = client.post(f"/api/runs/{run['id']}/stop/").json()
    assert (stopped["state"], stopped["job_metadata"]["reason"]) == ("failed", "stopped by a user")


def test_stop_and_delete_cancel_the_job(client: TestClient, fake: Path, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(100)\n")
    run = create(client, str(script), workers=1)
    pid = wait_for(
        lambda: [
            int(x["text"][4:]) for x in lines(client, run["id"]) if x["text"].startswith("pid")
        ]
    )[0]
    assert client.delete(f"/api/runs/{run['id']}/").status_code == 204
    assert calls(fake, "scancel") == ["scancel 1"]
    wait_for(lambda: not psutil.pid_exists(pid))
    assert not (tmp_path / "data" / "runs" / str(run["id"])).exists()


def test_the_next_master_goes_on_with_a_job(
    engine: SlurmEngine, fake: Path, tmp_path: Path
) -> None:
    script = tmp_path / "talks.py"
    script.write_text(
        "import pathlib, sys, time\nprint('before', flush=True)\nwhile not "
        f"pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)\nprint('after')\n"
    )
    job_id = engine.start(job(str(script), num_workers=1))
    wait_for(
        lambda: (
            engine.poll(job_id) and any(x["text"] == "before" for x in engine.logs(job_id).lines)
        )
    )
    engine.close()
    following = SlurmEngine(tmp_path / "runs", interval_s=0.1)
    assert following.place == engine.place
    assert following.poll(job_id).state == "running"
    (tmp_path / "go").touch()
    assert end_of(following, job_id).state == "finished"
    assert [x["text"] for x in following.logs(job_id).lines if x["rank"] == 0] == [
        "before",
        "after",
    ]
    following.close()


@pytest.mark.parametrize("is_known_to", ["the queue", "the script", "nobody"])
def test_a_master_that_died_while_it_submitted_a_job(
    queued: SlurmEngine, controller: Controller, tmp_path: Path, is_known_to: str
) -> None:
    job_id = queued.start(job("true"))
    folder = queued.results(job_id).parent
    (folder / "slurm_job").unlink()
    if is_known_to == "nobody":
        (folder / "job.json").write_text('{"mark": "another"}')
    elif is_known_to == "the script":
        (folder / "begun").write_text("1\n")
        (folder / "job.json").unlink()
    queued.close()
    with contextlib.closing(SlurmEngine(tmp_path / "runs", interval_s=0.01)) as following:
        state = following.poll(job_id).state
        following.stop(job_id)
    # Slurm's first answer may have arrived already.
    assert state in (["unstarted"] if is_known_to == "nobody" else ["running", "waiting"])
    assert controller.called("scancel") == ([] if is_known_to == "nobody" else ["scancel 1"])
    # The worker's script is gone, so a job that is found nowhere and starts later ends at once.
    assert (folder / "worker.sh").exists() == (is_known_to != "nobody")


def test_an_answer_of_sbatch_that_is_lost_leaves_no_orphan(engine: SlurmEngine, fake: Path) -> None:
    for name in ("hold", "no-answer"):
        (fake / name).touch()
    reason_of(engine, engine.start(job("true")))
    (fake / "down").touch()
    with pytest.raises(EngineError, match="sbatch: Batch job submission failed: Socket timed out"):
        engine.start(job("true", run_id=2))
    assert not (engine.results("slurm-2").parent / "worker.sh").exists()


def test_the_token_is_only_in_a_file_of_its_user(
    client: TestClient, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_TOKEN", TOKEN)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SBATCH_PARTITION", "kept")
    script = tmp_path / "token.py"
    script.write_text(
        "import os\nprint('worker has', os.environ['MLBENCH_TOKEN'], "
        "os.environ['MLBENCH_MASTER_URL'])\n"
    )
    run = create(client, str(script), workers=1)
    wait_state(client, run["id"], "finished")
    assert f"worker has {TOKEN} http://127.0.0.1:5080" in [
        line["text"] for line in lines(client, run["id"])
    ]
    environment = json.loads((fake / "environment-1.json").read_text())
    assert (environment.get("SLURM_JOB_ID"), environment["SBATCH_PARTITION"]) == (None, "kept")
    folder = tmp_path / "data" / "runs" / str(run["id"])
    places = [path for path in (*fake.rglob("*"), *folder.rglob("*")) if path.is_file()]
    assert [
        path.name for path in places if TOKEN in path.read_text() and path.parent.name != "logs"
    ] == [
        *(["env.sh"]),
        *([path.name for path in places if path.name == "log.jsonl"]),
    ]
    assert (folder / "env.sh").stat().st_mode & 0o777 == 0o600


def test_variables_that_are_options_of_slurm_do_not_reach_it(
    engine: SlurmEngine, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = (
        "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
        "SBATCH_OUTPUT",
        "SBATCH_EXPORT",
        "SQUEUE_FORMAT",
        "SQUEUE_STATES",
    )
    dropped += (
        "SCANCEL_STATE",
        "SACCT_FEDERATION",
        "SRUN_EXPORT_ENV",
        "SLURM_CLUSTERS",
        "SLURM_NTASKS_PER_NODE",
    )
    for name in dropped:
        monkeypatch.setenv(name, "1-4")
    for name in ("SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, f"the {name}")
    call = {"SBATCH_ACCOUNT": "of the call", "PATH": os.environ["PATH"]}
    assert end_of(engine, engine.start(job("true"))).state == "finished"
    assert end_of(engine, engine.start(job("true", run_id=2, caller_env=call))).state == "finished"
    first, second = (
        json.loads((fake / f"environment-{number}.json").read_text()) for number in (1, 2)
    )
    assert not {*first, *second} & set(dropped)
    assert (first["SLURM_CONF"], first["SBATCH_ACCOUNT"]) == (
        "the SLURM_CONF",
        "the SBATCH_ACCOUNT",
    )
    # The account and the partition belong to the call: the second one has no partition.
    assert (second["SBATCH_ACCOUNT"], second.get("SBATCH_PARTITION")) == ("of the call", None)


def test_workers_start_in_the_folder_and_with_the_environment_of_the_call(
    engine: SlurmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "of-the-master")
    monkeypatch.setenv("HF_TOKEN", "of-the-master")
    folder = tmp_path / "it's mine"
    folder.mkdir()
    names = "('NCCL_ALGO', 'HF_TOKEN', 'CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS', 'MINE')"
    (folder / "show.py").write_text(
        f"import os\nprint(os.getcwd(), *(os.environ.get(name) for name in {names}))\n"
    )
    call = {
        "NCCL_ALGO": "Tree",
        "CUDA_VISIBLE_DEVICES": "7",
        "OMP_NUM_THREADS": "3",
        "PATH": os.environ["PATH"],
    }
    job_id = engine.start(
        job("python show.py", cwd=str(folder), caller_env=call, env={"MINE": "$x"})
    )
    assert end_of(engine, job_id).state == "finished"
    said = [line["text"] for line in engine.logs(job_id).lines]
    # Slurm gives a job its devices, not the call.
    assert said.count(f"{folder} Tree None {os.environ.get('CUDA_VISIBLE_DEVICES')} 3 $x") == 2


@pytest.mark.parametrize("is_task", [False, True])
def test_only_a_task_may_start_without_the_folder_of_the_call(
    engine: SlurmEngine, tmp_path: Path, is_task: bool
) -> None:
    job_id = engine.start(job("pwd", cwd=str(tmp_path / "gone"), is_task=is_task))
    assert end_of(engine, job_id).state == ("finished" if is_task else "failed")
    assert any(f"{tmp_path / 'gone'}" in line["text"] for line in engine.logs(job_id).lines)


def test_options_come_between_the_defaults_and_what_mlbench_needs(
    queued: SlurmEngine, controller: Controller
) -> None:
    queued.start(job("true", num_cpus=1.5, gpu_enabled=True, options=("--time=10", "-p", "gpu")))
    (call,) = controller.called("sbatch")
    start = (
        "sbatch --parsable --cpus-per-task=2 --gpus-per-task=1 --time=10 "
        "-p gpu --ntasks=2 --job-name=mlbench-a "
    )
    assert call.startswith(start) and call.endswith(" --no-requeue job.sh")
    queued.start(job("true", run_id=2, gpu_enabled=True, options=("--gres=gpu:4",)))
    assert "--gpus-per-task" not in controller.called("sbatch")[1]


@pytest.mark.parametrize(
    "option",
    [
        "--array=1-3",
        "--arr=1-3",
        "--nt=4",
        "-a",
        "-n4",
        "--ntasks=4",
        "--wrap=ls",
        "--requeue",
        "-o",
        "-W",
    ],
)
def test_options_that_contradict_the_script_are_refused(queued: SlurmEngine, option: str) -> None:
    with pytest.raises(
        ValueError, match=f"that MLBench does not set itself, not '{option}': leave it out"
    ):
        queued.start(job("true", options=("--time=1", option)))


def test_a_word_before_the_options_is_not_taken_for_the_script(queued: SlurmEngine) -> None:
    with pytest.raises(
        ValueError, match="must begin with an option, for example --time=10, not 'partition=gpu'"
    ):
        queued.start(job("true", options=("partition=gpu", "--time=1")))


def test_the_options_of_a_run_reach_sbatch(client: TestClient, fake: Path) -> None:
    body = {
        "name": "a",
        "num_workers": 1,
        "command": "true",
        "engine_options": "--comment2=x --time '1:00'",
    }
    run = client.post("/api/runs/", json=body).json()
    refused = client.post(
        "/api/runs/", json={**body, "name": "b", "engine_options": ["--array=1-2"]}
    )
    assert (refused.status_code, refused.json()["message"][:15]) == (400, "engine_options:")
    assert " --comment2=x --time 1:00 --ntasks=1 " in wait_for(lambda: calls(fake, "sbatch"))[0]
    assert run["job_metadata"]["engine_options"] == ["--comment2=x", "--time", "1:00"]


@pytest.mark.parametrize(
    ("visible", "place"), [("3", "0 1"), (None, "1 2")]
)  # fmt: skip
def test_a_worker_that_sees_only_its_own_gpu_has_the_local_rank_0(
    engine: SlurmEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    visible: str | None,
    place: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script = tmp_path / "place.py"
    script.write_text(
        "import os\nprint('place', os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])\n"
    )
    job_id = engine.start(job(str(script), gpu_enabled=True, num_workers=3))
    end_of(engine, job_id)
    assert f"place {place}" in [
        line["text"] for line in engine.logs(job_id).lines if line["rank"] == 1
    ]


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An mpirun that starts two workers, as Open MPI does: through srun, which counts one task on
    each node."""
    program = tmp_path / "mpi" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n[ $1 != --version ] || { echo 'mpirun (Open MPI) 5.0'; exit; }\n"
        'while [ "$1" != -n ]; do shift; done\nshift 2\n'
        'for rank in 0 1; do SLURM_NTASKS=1 OMPI_COMM_WORLD_RANK=$rank "$@" || exit; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr("mlbench_master.engines.local.mpirun._find_mpirun", lambda: str(program))
    return program


@pytest.mark.parametrize("has_pmix", [True, False])
def test_mpi_starts_through_srun_or_through_its_own_mpirun(
    engine: SlurmEngine, fake: Path, mpirun: Path, tmp_path: Path, has_pmix: bool
) -> None:
    if not has_pmix:
        (fake / "no-pmix").touch()
    # Worker 1 fails when worker 0, which srun then ends, has said its line.
    said_0 = tmp_path / "said-0"
    worker = (
        "sh -c 'echo $RANK of $WORLD_SIZE $SLURM_MPI_TYPE; [ $RANK = 1 ] || touch "
        f"{said_0}; while [ ! -e {said_0} ]; do sleep 0.02; done; exit $RANK'"
    )
    status = end_of(engine, engine.start(job(worker, backend="mpi")))
    said = sorted(
        (line["rank"], line["text"])
        for line in engine.logs("slurm-1").lines
        if line["stream"] == "stdout"
    )
    by = " pmix" if has_pmix else ""
    assert said == [(0, f"0 of 2{by}"), (1, f"1 of 2{by}")]
    assert status.reason == "worker 1 failed: exit status 1"


@pytest.mark.parametrize("changes", [{"backend": "mpi"}, {"all_nodes": False}])
def test_a_command_that_starts_all_workers_is_one_task(
    engine: SlurmEngine, mpirun: Path, changes: dict[str, Any]
) -> None:
    command = f"{mpirun} -n 2 sh -c 'echo $RANK {{rank}} $MASTER_ADDR'"
    assert end_of(engine, engine.start(job(command, **changes))).state == "finished"
    said = [
        (line["rank"], line["text"])
        for line in engine.logs("slurm-1").lines
        if line["stream"] == "stdout"
    ]
    assert said == [(0, "0 127.0.0.1")] * 2


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_slurm.install(tmp_path / "slurm", "sbatch", "squeue")))
    with pytest.raises(
        ConfigurationError,
        match=r"needs sbatch, squeue, scancel, but scancel cannot be found: start",
    ):
        make_engine("slurm", tmp_path)


@pytest.mark.parametrize("text", ["0", "-1", "x", "inf", "nan"])
def test_the_interval_must_be_a_positive_number(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MLBENCH_SLURM_INTERVAL_S", text)
    with pytest.raises(
        ConfigurationError, match="MLBENCH_SLURM_INTERVAL_S must be a positive number"
    ):
        SlurmEngine(tmp_path)


def test_a_thousand_jobs_take_one_call_per_interval(
    queued: SlurmEngine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts and logs are left out, because to write them a thousand times takes long."""
    monkeypatch.setattr(queued, "_write_files", lambda _, folder, __: folder.mkdir())
    monkeypatch.setattr(slurm.RankLogs, "note", lambda *_: None)
    monkeypatch.setattr(queued._queue, "_interval_s", 3600.0)
    monkeypatch.setattr(slurm_queue, "_SHORTEST_PAUSE_S", 0.2)
    jobs = [queued.start(job("true", run_id=number)) for number in range(1, 1001)]
    wait_for(lambda: queued.poll(jobs[-1]).state == "waiting")
    before = len(controller.called("squeue"))
    monkeypatch.setattr(slurm_queue, "_SHORTEST_PAUSE_S", 0.01)
    for number, job_id in enumerate(jobs, 1):
        expected = JobStatus("waiting", f"job {number} waits in Slurm's queue: Resources")
        assert [queued.poll(job_id) for _ in range(3)] == [expected] * 3
    time.sleep(0.4)
    assert len(controller.called("sbatch")) == 1000
    # About five calls per second while jobs are added, and none after the last of them, because
    # nothing is expected.
    assert before < 100
    assert len(controller.called("squeue")) <= before + 1


def test_a_master_with_another_engine_does_not_touch_runs_that_continue(
    client: TestClient, tmp_path: Path
) -> None:
    run = create(client, "sleep 100")
    wait_state(client, run["id"], "started")
    client.app.state.scheduler.close()  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigurationError,
        match=r"run 'a-run' was started by the engine slurm and has not ended",
    ):
        create_app(data_dir=tmp_path / "data")
    client.post(f"/api/runs/{run['id']}/stop/")
    app = create_app(data_dir=tmp_path / "data")
    with TestClient(app, base_url="http://127.0.0.1:5080") as local:
        assert lines(local, run["id"])[-1]["text"].startswith("submitted as job 1") or lines(
            local, run["id"]
        )
        assert local.delete(f"/api/runs/{run['id']}/").status_code == 204


def test_the_engine_of_a_master_is_known(client: TestClient) -> None:
    assert client.get("/api/health/").json()["engine"] == "slurm"


def test_other_packages_add_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[mlbench.engines]\nours = "
        "mlbench_master.engines.local.engine:LocalEngine\nwrong = pathlib:Path\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engine_names() == (*ENGINES, "ours", "wrong")
    assert isinstance(make_engine("ours", tmp_path), LocalEngine)
    with pytest.raises(
        ConfigurationError, match=r"entry point 'wrong' of mlbench.engines must return an Engine"
    ):
        make_engine("wrong", tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"0.out": null}', '{"0.out": -1}', "[" * 100_000])
def test_a_damaged_list_of_merged_files_costs_only_repeated_lines(
    tmp_path: Path, content: str
) -> None:
    """A worker can write it, too."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.out").write_text("hello\n")
    (tmp_path / "merged.json").write_text(content)
    RankLogs(tmp_path, 10**6).collect()
    assert "hello" in (tmp_path / "log.jsonl").read_text()
