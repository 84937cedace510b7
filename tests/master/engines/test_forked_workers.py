"""Workers that are forks look like new programs to their scripts and to other processes."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlbench_master.engines import Job
from mlbench_master.engines.interface import JobStatus
from mlbench_master.engines.local import engine as local
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.engines.logs import LogReader
from mlbench_master.engines.supervisor.fork_server import ForkServer
from mlbench_master.engines.supervisor.forked import startup_variables

# What a script sees of its process; the sessions and the names of files differ in any case.
STATE = """
# torch
import json, os, random, signal, sys, threading
import __main__
known = set(sys.modules)
handlers = {name: str(signal.getsignal(getattr(signal, name)))
            for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD", "SIGPIPE")}
state = {
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "file": __file__, "name": __name__,
    "main": __main__.__dict__.get("WORD"), "handlers": handlers, "env": dict(os.environ),
    "files": sorted(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "leads_session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "encoding": sys.stdout.encoding, "orig_argv": sys.orig_argv,
}
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    json.dump(state, file)
"""

TRAINS = """
import sys
import torch
import torch.distributed as dist
before = set(sys.modules)
dist.init_process_group("gloo")
torch.manual_seed(3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
print("imports", sorted(set(sys.modules) - before), flush=True)
print("weights", model.module.weight.double().sum().item().hex(), flush=True)
print("unseeded", torch.random.seed(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def server_that_ends() -> Iterator[None]:
    """The tests share a fork server, which spends seconds on its imports."""
    yield
    if local._fork_server is not None:
        local._fork_server.close()
        local._fork_server = None


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numbers of the runs that were started by a fork server."""
    numbers: list[str] = []
    start = ForkServer.start_supervisor

    def start_and_note(server: ForkServer, folder: Path, held: socket.socket) -> int:
        numbers.append(folder.name)
        return start(server, folder, held)

    monkeypatch.setattr(ForkServer, "start_supervisor", start_and_note)
    return numbers


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    monkeypatch.setenv(local.FORK_VARIABLE, "1")
    return LocalEngine(tmp_path / "runs", grace_s=1)


def run(
    engine: LocalEngine, number: int, command: str, env: dict[str, str] | None = None
) -> JobStatus:
    """Run a job with two workers to its end."""
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    job = Job(run_id=number, name=f"run-{number}", command=command, num_workers=2, env=env)
    job_id = engine.start(job)
    while (status := engine.poll(job_id)).state == "running":
        time.sleep(0.05)
    return status


def said(folder: Path, number: int, word: str) -> list[str]:
    """Return the lines of all workers that begin with a word."""
    # Not all lines of the file: the last one may be written just now.
    lines = LogReader(folder / "runs" / str(number)).read(0, 1000).lines
    return sorted(line["text"] for line in lines if line["text"].startswith(word))


def processes_of_run(folder: Path) -> list[list[str]]:
    """Return the words of each process whose variables name the folder of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MLBENCH_RUN_DIR") == str(folder):
                found.append([word for word in process.cmdline() if word])
        except (psutil.Error, OSError):
            continue
    return found


def test_a_script_sees_what_a_new_program_sees(
    engine: LocalEngine, tmp_path: Path, forked: list[str]
) -> None:
    script = tmp_path / "state.py"
    script.write_text(STATE)
    states = {}
    for number, forks in enumerate("01", 1):
        env = {local.FORK_VARIABLE: forks, "OWN": "a b"}
        status = run(engine, number, f"python {script} {tmp_path}/{forks}- 'two words'", env=env)
        assert status.state == "finished", status
        states[forks] = json.loads((tmp_path / f"{forks}-1").read_text())
    for state in states.values():
        # The number of the run, its port and its folders differ.
        for name in (
            "MASTER_PORT",
            "MLBENCH_RUN_ID",
            "MLBENCH_RUN_DIR",
            "MLBENCH_SPOOL",
            "MLBENCH_OUTPUT",
            "MLBENCH_RUN_NAME",
            "PWD",
            local.FORK_VARIABLE,
        ):
            state["env"].pop(name, None)
        del state["argv"][1], state["cwd"], state["orig_argv"][2]
    assert states["1"] == states["0"]
    assert forked == ["2"]


def test_the_same_bits_and_no_further_imports(
    engine: LocalEngine, tmp_path: Path, forked: list[str]
) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    for number, forks in enumerate("011", 1):
        assert (
            run(engine, number, str(script), env={local.FORK_VARIABLE: forks}).state == "finished"
        )
    assert forked == ["2", "3"]
    weights = said(tmp_path, 1, "weights")
    assert len(set(weights)) == 1
    assert said(tmp_path, 2, "weights") == said(tmp_path, 3, "weights") == weights
    assert said(tmp_path, 2, "imports") == ["imports []"] * 2
    # As in new programs, nothing random repeats.
    assert len({*said(tmp_path, 2, "unseeded"), *said(tmp_path, 3, "unseeded")}) == 4


def test_other_processes_see_the_run(engine: LocalEngine, tmp_path: Path) -> None:
    """The workers and the supervisor are found by their words and by the folder of their run."""
    script = tmp_path / "sleeps.py"
    script.write_text("import time, torch\nprint('here', flush=True)\ntime.sleep(60)\n")
    job = Job(run_id=1, name="a", command=f"{script} word", num_workers=2)
    job.env["OMP_NUM_THREADS"] = "1"
    job_id = engine.start(job)
    while len(said(tmp_path, 1, "here")) < 2:
        time.sleep(0.05)
    folder = tmp_path / "runs" / "1"
    found = processes_of_run(folder)
    workers = [words for words in found if words[-1] == "word"]
    assert len(workers) == 2
    assert [words[-1] for words in found if words not in workers] == [str(folder)]
    # Without its supervisor, the run is lost and its workers are ended.
    supervisor = json.loads((tmp_path / "runs" / "1" / "supervisor.json").read_text())["pid"]
    os.kill(supervisor, 9)
    while engine.poll(job_id).state == "running":
        time.sleep(0.05)
    assert engine.poll(job_id).state == "lost"
    assert processes_of_run(folder) == []


def test_a_module_of_the_user_is_imported_as_in_a_new_program(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """A folder with a module of a name that is imported already needs a new program."""
    (tmp_path / "psutil.py").write_text("OWN = True\n")
    script = tmp_path / "imports.py"
    script.write_text("# torch\nimport psutil\nprint('own', psutil.OWN, flush=True)\n")
    assert run(engine, 1, str(script)).state == "finished"
    assert said(tmp_path, 1, "own") == ["own True"] * 2


def test_variables_that_are_read_at_the_start(
    engine: LocalEngine, tmp_path: Path, forked: list[str]
) -> None:
    """A fork server has those of its own start, so other workers get another one."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import sys, torch\nprint('got', torch.get_num_threads(), sys.flags.hash_randomization)\n"
    )
    assert run(engine, 1, str(script)).state == "finished"
    env = {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0"}
    assert run(engine, 2, str(script), env=env).state == "finished"
    assert said(tmp_path, 1, "got") == ["got 1 1"] * 2
    assert said(tmp_path, 2, "got") == ["got 2 0"] * 2
    assert forked == ["1", "2"]
    assert startup_variables({"OMP_NUM_THREADS": "1", "PYTHONPATH": "a", "HOME": "b"}) == {
        "OMP_NUM_THREADS": "1"
    }


def test_other_programs_are_not_forked(
    engine: LocalEngine, tmp_path: Path, forked: list[str]
) -> None:
    script = tmp_path / "light.py"
    script.write_text("print(1)\n")
    assert run(engine, 3, str(script)).state == "finished"
    assert run(engine, 1, f"{sys.executable} -c 'print(1)'").state == "finished"
    assert run(engine, 2, "true").state == "finished"
    assert forked == []


def test_variables_of_any_size_reach_the_workers(
    engine: LocalEngine, forked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(6):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    script = tmp_path / "large.py"
    script.write_text("import os, torch\nprint('size', len(os.environ['LARGE_5']))\n")
    assert run(engine, 1, f"{sys.executable} {script}").state == "finished"
    assert forked == ["1"]
    assert said(tmp_path, 1, "size") == ["size 100000"] * 2


def test_a_supervisor_that_cannot_start_says_why(
    engine: LocalEngine, forked: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "short.py"
    script.write_text("import torch\n")
    command = f"{sys.executable} {script}"
    assert run(engine, 1, command).state == "finished"
    server = local._fork_server
    assert server is not None
    with socket.socket() as held, pytest.raises(OSError, match=r"FileNotFoundError: .*missing"):
        server.start_supervisor(tmp_path / "missing", held)
    # It goes on.
    assert run(engine, 2, command).state == "finished"
    assert forked == ["1", "missing", "2"]
