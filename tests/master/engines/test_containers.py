"""Workers of the local engine in containers, with a program in the place of Podman that starts
processes."""

from __future__ import annotations

import ast
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines import Job, containers
from mlbench_master.engines.containers import Containers, read_options, remove_containers
from mlbench_master.engines.local.engine import LocalEngine, worker_commands
from tests.master.helpers import TestClient, processes_of, wait_for

TOKEN = "secret-of-the-master"
# Its containers are not its children for long, and do not have the variable by which the engine
# finds processes.
FAKE = """\
import contextlib, os, pathlib, signal, subprocess, sys
state = pathlib.Path(__file__).parent / "state"
state.mkdir(exist_ok=True)
words = sys.argv[1:]
with (state / "calls").open("a") as calls:
    calls.write(repr(words) + "\\n")
def values(option):
    return [words[i + 1] for i, word in enumerate(words) if word == option]
if words[0] == "ps":
    label = words[-1].partition("label=")[2]
    for path in state.glob("*.container"):
        # A container may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.read_text().split("\\n")[1] == label:
                print(path.stem)
elif words[0] == "rm":
    for name in words[2:]:
        path = state / f"{name}.container"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(path.read_text().split("\\n")[0]), signal.SIGKILL)
        path.unlink(missing_ok=True)
elif "no/such:1" in words:
    sys.stderr.write("Error: no/such:1: image not known\\n")
    sys.exit(125)
else:
    image = words.index("me/mine:1")
    given = [word.partition("=") for word in values("--env")]
    env = {name: value if mark else os.environ[name] for name, mark, value in given}
    env.pop("MLBENCH_RUN_DIR", None)
    command = [*values("--entrypoint"), *words[image + 1:]]
    container = subprocess.Popen(command, env=env, start_new_session=True)
    # Before the file, after which the test may send the signal.
    signal.signal(signal.SIGTERM, lambda *_: container.terminate())
    path = state / f"{values('--name')[0]}.container"
    # Nobody reads a file without its content.
    new = path.with_suffix(".new")
    new.write_text(f"{container.pid}\\n{values('--label')[0]}")
    new.rename(path)
    status = container.wait()
    path.unlink(missing_ok=True)
    sys.exit(status if status >= 0 else 128 - status)
"""


class Fake:
    """The program in the place of Podman."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "podman"
        folder.mkdir()
        self.path.write_text(f"#!{sys.executable} -SE\n{FAKE}")
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [
            ast.literal_eval(line)
            for line in (self.folder / "state" / "calls").read_text().splitlines()
        ]

    @property
    def pids(self) -> list[int]:
        """The processes of the containers that are still there."""
        files = (self.folder / "state").glob("*.container")
        return [int(path.read_text().split("\n")[0]) for path in files]


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return fake


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(tmp_path / "runs", cores=4, grace_s=1)


def job(command: str, **others: Any) -> Job:
    options = ("--container", "podman", "--env", "NCCL_DEBUG", "--volume", "/data:/data:ro")
    given = {
        "image": "me/mine:1",
        "num_workers": 2,
        "options": options,
        "env": {"MLBENCH_TOKEN": TOKEN},
        **others,
    }
    return Job(run_id=7, name="own", command=command, **given)


def ended(engine: LocalEngine, job_id: str) -> Any:
    return wait_for(
        lambda: (s := engine.poll(job_id)).state != "running" and s, 60, "the end of the run"
    )


def after(words: list[str], option: str) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == option]


def test_each_worker_runs_in_a_container_of_the_image(podman: Fake, engine: LocalEngine) -> None:
    script = (
        "echo $RANK of $WORLD_SIZE, $NCCL_DEBUG, $SECRET_OF_THE_USER, {rank}, $HOME; "
        "touch $MLBENCH_OUTPUT/$RANK"
    )
    job_id = engine.start(job(f"sh -c '{script}'"))
    folder = engine.results(job_id).parent
    assert ended(engine, job_id).state == "finished", engine.logs(job_id).lines
    said = sorted(line["text"] for line in engine.logs(job_id).lines if line["stream"] == "stdout")
    assert said == [f"{rank} of 2, INFO, , {rank}, {folder / 'work'}" for rank in (0, 1)]
    assert {path.name for path in engine.results(job_id).iterdir()} == {"0", "1"}
    first = next(words for words in podman.calls if words[0] == "run" and "RANK" in words)
    for option in ("--rm", "--init", "--cap-drop"):
        assert option in first
    assert after(first, "--network") == ["host"] and after(first, "--cpus") == ["1"]
    assert after(first, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    # The folder of the run itself holds the token.
    mounted = [Path(volume.partition(":")[0]) for volume in after(first, "--volume")]
    assert {folder / "work", folder / "output", folder / "spool"} < set(mounted)
    assert (
        folder not in mounted
        and Path(os.environ["MLBENCH_HOME"]) not in mounted
        and Path("/data") in mounted
    )
    assert {"MLBENCH_TOKEN", "MLBENCH_SPOOL", "NCCL_DEBUG"} < set(after(first, "--env"))
    assert TOKEN not in repr(podman.calls) + repr(engine.logs(job_id).lines)
    assert stat.S_IMODE((folder / "job.json").stat().st_mode) == 0o600


def test_a_stopped_run_leaves_no_container(podman: Fake, engine: LocalEngine) -> None:
    job_id = engine.start(job("sh -c 'trap \"\" TERM; while :; do sleep 1; done'"))
    pids = wait_for(lambda: len(podman.pids) == 2 and podman.pids, 60, "both containers")
    engine.stop(job_id)
    assert podman.pids == []
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="their end")


def test_containers_of_a_killed_supervisor_are_found_by_their_label(
    podman: Fake, engine: LocalEngine
) -> None:
    job_id = engine.start(job("sleep 100"))
    pids = wait_for(lambda: len(podman.pids) == 2 and podman.pids, 60, "both containers")
    folder = engine.results(job_id).parent
    # The programs in the foreground are killed with their supervisor, but the containers go on.
    killed = [process for process in processes_of(folder) if process.pid not in pids]
    # All at once, so that none of them acts on the end of another.
    for kind in (signal.SIGSTOP, signal.SIGKILL):
        for process in killed:
            process.send_signal(kind)
    psutil.wait_procs(killed, timeout=60)
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert ended(engine, job_id).state == "lost"
    assert podman.pids == []
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="their end")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo >&2; exit 3", "exit status 3"),
        ("printf 'first\\nno \\377 daemon\\n' >&2; exit 1", "no \ufffd daemon"),
        ("echo oops >&2; exec sleep 100", "no answer within 2 s"),
    ],
)
def test_containers_that_cannot_be_removed_have_a_reason(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(containers, "_REMOVE_S", 2 if reason == "no answer within 2 s" else 60)
    found = remove_containers("docker", tmp_path)
    assert found == f"cannot remove containers of this run: docker: {reason}"


def test_a_new_run_of_the_same_id_removes_containers_of_the_old_one(
    podman: Fake, engine: LocalEngine
) -> None:
    state = podman.folder / "state"
    state.mkdir()
    left = psutil.Popen(["sleep", "100"])
    folder = engine.results("local-7").parent
    (state / "old.container").write_text(f"{left.pid}\nmlbench.folder={folder}")
    job_id = engine.start(job("true"))
    assert left.wait(60) == -signal.SIGKILL
    assert ended(engine, job_id).state == "finished"
    assert [words[0] for words in podman.calls][:3] == ["ps", "rm", "run"]


@pytest.mark.parametrize(
    ("command", "image", "reason"),
    [
        ("true", "no/such:1", "exit status 125: Error: no/such:1: image not known"),
        ("sh -c 'kill -9 $$'", "me/mine:1", "died: signal 9 (SIGKILL)"),
        ("sh -c 'exit 3'", "me/mine:1", "exit status 3"),
    ],
)
def test_a_failure_is_told_as_that_of_a_process(
    podman: Fake, engine: LocalEngine, command: str, image: str, reason: str
) -> None:
    job_id = engine.start(job(command, image=image, num_workers=1))
    assert ended(engine, job_id).reason in (f"worker 0 failed: {reason}", f"worker 0 {reason}")


def test_gpus_of_each_program() -> None:
    """In a container of Docker or Podman, the only GPU has the number 0."""
    wanted = job("main.py", gpus=("3", "5"), gpu_enabled=True)
    both = job("main.py", gpus=("3", "5"), backend="mpi")
    folder = Path("/runs/7")

    def wrapped(program: str, of: Job) -> list[dict[str, Any]]:
        commands = worker_commands(of, in_container=True)
        return Containers(program).wrap(of, commands, folder, [folder / "work"], ["MLBENCH_TOKEN"])

    podman, docker, apptainer = (
        wrapped(program, wanted)[1] for program in ("podman", "docker", "apptainer")
    )
    assert after(podman["argv"], "--device") == ["nvidia.com/gpu=5"]
    assert after(docker["argv"], "--gpus") == ['"device=5"']
    assert after(wrapped("docker", both)[0]["argv"], "--gpus") == ['"device=3,5"']
    for command in (podman, docker):
        assert (
            "CUDA_VISIBLE_DEVICES" not in command["env"]
            and "CUDA_VISIBLE_DEVICES" not in command["argv"]
        )
        assert command["env"]["LOCAL_RANK"] == "0"
        assert command["argv"][-3:] == ["python", "me/mine:1", "main.py"]
    assert "--nv" in apptainer["argv"] and apptainer["argv"][-3:] == [
        "docker://me/mine:1",
        "python",
        "main.py",
    ]
    assert apptainer["env"]["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "5"
    assert all(name.startswith("APPTAINERENV_") for name in apptainer["env"])


def test_one_container_for_all_workers_of_mpi() -> None:
    of_mpi = job("main.py", backend="mpi", num_cpus=2)
    (command,) = worker_commands(of_mpi, in_container=True)
    (wrapped,) = Containers("docker").wrap(
        of_mpi, [command], Path("/runs/7"), [Path("/runs/7/work")], []
    )
    argv = wrapped["argv"]
    assert after(argv, "--entrypoint") == ["mpirun"] and after(argv, "--cpus") == ["4"]
    assert argv[argv.index("me/mine:1") :][-4:] == ["-n", "2", "python", "main.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--container", "lxc"], "--container must be one of docker, podman, apptainer, not 'lxc'"),
        (["--container"], "expected one argument"),
        (["--volume", "/a:/b"], "--container must be given with --volume or --env"),
        (
            ["--container", "podman", "--volume", "a:/b"],
            "--volume must be /SOURCE:/TARGET or .*, not 'a:/b'",
        ),
        (
            ["--container", "podman", "--env", "TOKEN=secret"],
            "--env must be the name of a variable, not 'TOKEN'",
        ),
        (
            ["--container", "podman", "--privileged"],
            "must be --container, --volume or --env .*, not '--privileged'",
        ),
        (["x"], "must be --container, --volume or --env for the engine local, not 'x'"),
    ],
)
def test_options_that_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"engine_options: .*{message}") as refused:
        read_options(options)
    assert "secret" not in str(refused.value)


def test_a_missing_program_is_refused_at_once(
    podman: Fake, client: TestClient, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {
        "name": "own",
        "num_workers": 1,
        "task": "1a",
        "engine_options": ["--container", "apptainer"],
    }
    monkeypatch.setenv("PATH", str(podman.folder))
    refused = client.post("/api/runs/", json=body)
    assert (refused.status_code, refused.json()["message"]) == (
        400,
        "engine_options: apptainer was not found on the master's machine: give podman instead, or "
        "leave out --container to start processes",
    )
    podman.path.unlink()
    with pytest.raises((ValueError, ConfigurationError), match="install podman, or leave out"):
        engine.start(job("true"))


def test_an_own_image_needs_the_option(client: TestClient) -> None:
    own = {
        "image_name": "custom_image",
        "custom_image_name": "me/mine:1",
        "custom_image_command": "main.py",
    }
    refused = client.post("/api/runs/", json={"name": "own", "num_workers": 1, **own})
    assert refused.status_code == 400
    assert (
        "the engine local starts processes, not containers; add --container docker, podman"
        in refused.json()["message"]
    )
