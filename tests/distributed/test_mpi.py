"""torch.distributed over MPI: real workers started by mpirun, which report what went wrong in each
scenario."""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mlbench_core.distributed.environment import MPIWorldEnvironment
from mlbench_core.distributed.pytorch import mpi
from mlbench_core.distributed.pytorch.mpi import store as stores
from mlbench_core.distributed.pytorch.mpi.buffers import Buffer
from mlbench_core.distributed.pytorch.mpi.queue import Work, WorkQueue
from mlbench_core.distributed.pytorch.mpi.watchdog import Watchdog
from mlbench_core.errors import BackendError, MissingDependencyError
from mlbench_core.processor_time import work_s
from mlbench_core.utils.pytorch import initialize_backends
from tests.distributed.mpi_worker import SCENARIOS
from tests.helpers.thorough import some

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("mpi_worker.py")


def _mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


MPIRUN = _mpirun()
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or mpi.why_not() is not None,
    reason=f"needs mpirun and mpi4py here: {mpi.why_not() or 'there is no mpirun'}",
)


def _variables() -> dict[str, str]:
    """This process's environment without what another mpirun, torchrun or SLURM may have left in
    it."""
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        kept.pop(name, None)
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(workers: int, *command: str) -> subprocess.CompletedProcess[str]:
    options = (
        ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if _is_open_mpi() else []
    )
    return subprocess.run(
        [str(MPIRUN), *options, "-n", str(workers), sys.executable, *command],
        env=_variables(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=280,
    )


@functools.cache
def _is_open_mpi() -> bool:
    version = subprocess.run(
        [str(MPIRUN), "--version"], capture_output=True, text=True, env=_variables()
    )
    return "Open MPI" in version.stdout


@pytest.fixture(scope="module", params=some([2, 4]))
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str | None]]:
    """What each worker of one launch reports: for each scenario None, or what went wrong."""
    folder = tmp_path_factory.mktemp(f"mpi{request.param}")
    ended = _run(request.param, str(WORKER), str(folder))
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(found) == request.param, ended.stderr
    assert ended.returncode == 0 or any(any(report.values()) for report in found), ended.stderr
    return found


@needs_mpi
@pytest.mark.parametrize("scenario", ["in_and_out_of_worlds", *SCENARIOS])
def test_workers_find_everything_right(reports: list[dict[str, str | None]], scenario: str) -> None:
    for report in reports:
        assert scenario in report, (
            f"not reached, because of {[name for name, wrong in report.items() if wrong]}"
        )
        assert report[scenario] is None, report[scenario]


DYING = """
import sys, torch, torch.distributed as dist
from mlbench_core.utils.pytorch import initialize_backends
torch.set_num_threads(1)
settings = {"ckpt_run_dir": sys.argv[1], "timeout_s": float(sys.argv[3])}
with initialize_backends("mpi", logging_level="WARNING", **settings):
    dist.barrier()
    if dist.get_rank() == 1:
        if sys.argv[2] == "dies":
            raise KeyError("no such sample")
        dist.recv(torch.empty(1), 0)
    dist.all_reduce(torch.ones(3))
"""


@needs_mpi
@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("dies", "1000", "worker 1 of 2 failed and ends the others: KeyError: 'no such sample'"),
        ("is late", "0.5", "timed out, the other workers did not come within 0.5 s"),
    ],
)
def test_a_worker_that_fails_ends_the_others(
    how: str, timeout_s: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DYING)
    ended = _run(2, str(script), str(tmp_path), how, timeout_s)
    assert ended.returncode != 0
    assert message in ended.stderr, ended.stderr


ALONE = """
import os, sys
from mlbench_core.errors import ConfigurationError
from mlbench_core.utils.pytorch import initialize_backends
import torch, torch.distributed as dist

def refused(variables, **arguments):
    os.environ.update(variables)
    try:
        arguments["ckpt_run_dir"] = sys.argv[1]
        with initialize_backends("mpi", logging_level="WARNING", **arguments):
            print("not refused")
    except ConfigurationError as error:
        print(error)
    for name in variables:
        del os.environ[name]

refused({}, hosts="a,b", rank=1)
refused({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"})
refused({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"})
with initialize_backends(logging_level="WARNING", ckpt_run_dir=sys.argv[1]) as (rank, size, graph):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    print(rank, size, dist.get_backend(), tensor.tolist())
"""


@needs_mpi
def test_a_process_that_no_mpirun_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    command = [sys.executable, str(script), str(tmp_path)]
    ended = subprocess.run(command, env=_variables(), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert (
        "--hosts says 2 workers, but MPI's world has 1: this process was not started by an mpirun"
        in lines[0]
    )
    assert "mpirun -n 2 python script.py" in lines[0]
    assert "torchrun" in lines[1] and "mpirun -n 3 python script.py" in lines[1]
    assert "Open MPI's mpirun (OMPI_COMM_WORLD_SIZE) says 4 workers" in lines[2]
    assert lines[3] == "0 1 mpi [1.0, 1.0]"


def test_without_mpi4py_the_extra_is_named() -> None:
    with (
        mock.patch("torch.distributed.is_mpi_available", return_value=False),
        mock.patch("importlib.util.find_spec", return_value=None),
    ):
        assert not mpi.is_available()
        assert "pip install 'mlbench-core[mpi]'" in str(mpi.why_not())
        with (
            pytest.raises(MissingDependencyError, match=r"mlbench-core\[mpi\]"),
            initialize_backends("mpi"),
        ):
            pass
    assert not dist.is_initialized()


def test_a_torch_with_mpi_keeps_its_own() -> None:
    with mock.patch("torch.distributed.is_mpi_available", return_value=True):
        assert mpi.is_available()
        assert not mpi.register()
    assert not mpi.is_registered()


def test_platforms_and_limits_that_cannot_work() -> None:
    with mock.patch("sys.platform", "win32"), pytest.raises(BackendError, match="Linux and macOS"):
        mpi.register()
    with pytest.raises(ValueError, match="timeout_s must be positive, not 0"):
        mpi.register(timeout_s=0)


def test_only_mpirun_makes_the_environment_active() -> None:
    assert MPIWorldEnvironment(environment={"OMPI_COMM_WORLD_SIZE": "2"}).is_active()
    assert not MPIWorldEnvironment(environment={"RANK": "1", "WORLD_SIZE": "2"}).is_active()


class Request:
    """An MPI request that has completed after being asked some times."""

    def __init__(self, asked: int, error: str | None = None) -> None:
        self.left, self.error = asked, error

    def Test(self) -> bool:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.left -= 1
        return self.left < 0


def _work(
    jobs: WorkQueue,
    log: list[str],
    name: str,
    request: Request,
    timeout_s: float = 50.0,
    in_order: bool = True,
) -> Work:
    def post() -> list[Any]:
        log.append(f"post {name}")
        return [request.Test]

    return Work(
        jobs, None, name, post, lambda: log.append(f"finish {name}"), [], timeout_s, in_order
    )


def test_collectives_are_done_in_order_and_messages_pass_them() -> None:
    jobs, log = WorkQueue(), list[str]()
    works = [
        _work(jobs, log, "slow", Request(5)),
        _work(jobs, log, "fast", Request(0)),
        _work(jobs, log, "message", Request(0), in_order=False),
    ]
    for work in works:
        jobs.submit(work, background=False)
    assert works[1].wait()
    assert log == [
        "post slow",
        "post fast",
        "post message",
        "finish message",
        "finish slow",
        "finish fast",
    ]
    assert all(work.is_success() for work in works)
    jobs.close(drain=True)


def test_a_blocking_call_that_does_not_return_ends_the_process_with_its_name() -> None:
    told = threading.Event()
    messages: list[str] = []

    def end(message: str) -> None:
        messages.append(message)
        told.set()

    jobs = WorkQueue()
    jobs.watchdog = Watchdog(end)
    for name, call, limit_s in [
        ("broadcast", lambda: None, 50.0),
        ("all_reduce", lambda: told.wait(60), 0.01),
    ]:  # what finish does
        work = Work(
            jobs, None, name, lambda: [Request(0).Test], call, [], timeout_s=limit_s, in_order=True
        )
        jobs.submit(work, background=False)
        work.wait()
    jobs.close(drain=True)
    (message,) = messages
    assert (
        "MPI: all_reduce: timed out, all workers came but "
        "the data did not get through within 0.01 s"
    ) in message


class Comm:
    """Rank 0's communicator with a worker of another machine; it keeps what it broadcasts."""

    def __init__(self) -> None:
        self.said: tuple[str, list[str], int] = ("", [], 0)

    def Get_rank(self) -> int:
        return 0

    def allgather(self, machine: str) -> list[str]:
        return [machine, "another"]

    def bcast(self, said: tuple[str, list[str], int], root: int) -> tuple[str, list[str], int]:
        self.said = said
        return said


def test_workers_find_the_store_of_rank_0_or_go_without() -> None:
    comm = Comm()
    store, (host, addresses, port) = stores.serve(comm)
    assert store is not None and comm.said == (host, addresses, port)
    store.set("key", "1")
    nowhere = "127.0.0.2"  # answers at once that nobody listens there, or leads to the same store
    for found in (
        stores.connect(host, [], port),
        stores.connect("another machine", [nowhere, "127.0.0.1"], port),
    ):
        assert found is not None and found.get("key") == b"1"
    assert stores.connect("another machine", [], port) is None
    assert stores.connect(host, addresses, 0) is None


LAST_WORDS = """
import atexit, logging.handlers, sys
from mlbench_core.distributed.pytorch.mpi import watchdog
sys.argv[0] = "/somewhere/main.py"
file = logging.FileHandler(sys.argv[1])
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=file))
logging.warning("held back")
sys.stdout.write("begun")
atexit.register(lambda: sys.stdout.write("finalizers ran"))
if sys.argv[2] == "now":
    watchdog.end_process("lost worker 1;\\n  the backend says so")
watchdog.end_process_after(0.01)
atexit.register(lambda: [None for _ in iter(int, 1)])  # hangs at the end of the process
"""


@pytest.mark.parametrize("how", ["now", "late"])
def test_an_ended_process_runs_no_finalizer_and_loses_no_log(how: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    command = [sys.executable, "-c", LAST_WORDS, str(path), how]
    ended = subprocess.run(command, env=_variables(), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert "finalizers ran" not in ended.stdout
    if how == "now":
        assert ended.stderr == "main.py: error: lost worker 1; the backend says so\n"
        assert (ended.stdout, path.read_text()) == ("begun", "held back\n")
    else:
        assert ended.stderr == ""


def test_the_thread_works_on_its_own_and_ends_with_the_last_group() -> None:
    jobs, log = WorkQueue(), list[str]()
    for _ in range(2):
        jobs.add_group()
        work = _work(jobs, log, "background", Request(300))
        jobs.submit(work, background=True)
        assert work.get_future().wait() == []  # nobody drives it
        other = _work(jobs, log, "left", Request(10))
        jobs.submit(other, background=True)
        jobs.remove_group(None, drain=True)
        assert other.is_success()
    assert log.count("finish left") == 2


def test_a_thread_that_polls_for_messages_does_not_work() -> None:
    jobs, log = WorkQueue(), list[str]()
    work = _work(jobs, log, "late", Request(5000))
    jobs.submit(work, background=False)
    with mock.patch("mlbench_core.distributed.pytorch.mpi.queue._SPIN_S", 60.0):
        work_before_s, cpu_before_s = work_s(), time.thread_time()
        assert work.wait()
        worked_s, used_s = work_s() - work_before_s, time.thread_time() - cpu_before_s
    assert 0 <= worked_s < used_s / 4
    jobs.close(drain=True)


class Unlimited(queue.SimpleQueue[bool]):
    """Refuses a time limit, past which CPython's queue (up to 3.12) may wait without end."""

    def get(self, block: bool = True, timeout: float | None = None) -> bool:
        assert timeout is None
        return super().get(block)


def test_the_thread_never_pauses_without_end() -> None:
    jobs, log = WorkQueue(), list[str]()
    at_once = mock.patch("mlbench_core.distributed.pytorch.mpi.queue._SPIN_S", 0.0)
    with mock.patch("queue.SimpleQueue", Unlimited), at_once:
        for _ in range(3):
            work = _work(jobs, log, "background", Request(9))
            jobs.submit(work, background=True)
            done = threading.Event()
            work.get_future().add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            assert done.wait(60), "the thread sleeps although a work is under way"
    jobs.close(drain=True)


def test_errors_reach_those_who_wait() -> None:
    jobs, log = WorkQueue(), list[str]()
    work = _work(jobs, log, "all_reduce", Request(0, "message truncated"))
    jobs.submit(work, background=True)
    with pytest.raises(dist.DistBackendError, match="MPI: all_reduce: message truncated"):
        work.wait()
    assert work.is_completed() and not work.is_success() and "truncated" in str(work.exception())
    with pytest.raises(dist.DistBackendError, match="truncated"):
        work.get_future().wait()
    late = _work(jobs, log, "broadcast", Request(10**9), timeout_s=0.01)
    jobs.submit(late, background=True)
    with pytest.raises(
        dist.DistBackendError, match=r"broadcast: timed out, .* did not come within 0.01"
    ):
        late.wait()
    with pytest.raises(dist.DistBackendError, match="impossible after an earlier failure"):
        jobs.submit(_work(jobs, log, "barrier", Request(0)), background=False)
    jobs.close(drain=True)


def test_tensors_that_mpi_cannot_read_as_they_are_are_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    buffer = Buffer(tensor)
    assert buffer.memory.is_contiguous() and torch.equal(buffer.memory, tensor)
    buffer.memory.zero_()
    buffer.write_back()
    assert not tensor.any()
    conjugated = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    assert not Buffer(conjugated).memory.is_conj()
    contiguous = torch.ones(3)
    assert Buffer(contiguous).memory is contiguous


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_go_by_way_of_pinned_memory() -> None:
    tensor = torch.arange(6.0, device="cuda")
    buffer = Buffer(tensor, on_host=True)
    assert buffer.memory.is_pinned() and buffer.memory.tolist() == tensor.tolist()
    buffer.memory.add_(1)
    buffer.write_back()
    assert tensor.tolist() == [1, 2, 3, 4, 5, 6]
