"""Worker processes that do a block of work for each request.

All scripts that need several workers use this protocol. The parent starts N processes of the
calling script with ``--worker FOLDER``, which call :func:`serve` by :func:`run_script`.

    parent                      worker 0                          workers 1 to N-1
    ------                      --------                          ----------------
    start N processes           join a gloo group                 join a gloo group
    request (JSON line)    ->   broadcast the request         ->  receive it
                                handle it                         handle it
    list of N replies      <-   gather the replies            <-  send their reply
    close standard input   ->   broadcast the end             ->  leave

Only worker 0 talks to the parent, because mpirun forwards standard input to no other rank. A worker
whose handler raises ends, which breaks the group of the others. The parent then kills all, reports
a :class:`WorkerError` with the reason, and starts new processes at the next request. A handler must
therefore prepare a variant when it first sees its name."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlbench_core.network.emulated import EmulatedNetwork

REQUEST_TIMEOUT_S = 900.0
GROUP_TIMEOUT = datetime.timedelta(hours=2)  # longer than the turns of all other variants together
GRACE_S = 10.0
Reply = dict[str, Any]


class WorkerError(RuntimeError):
    """A worker ended or did not answer in time."""


class Workers:
    """A group of worker processes.

    Args:
        script: The calling script; it must call :func:`run_script` or :func:`serve`.
        count: Number of workers. Each uses one thread.
        setup: Passed to the script's handler factory in every worker.
        launcher: Program and arguments that start all workers at once, such as mpirun's; None
            starts them one by one.
        network: Hosts for the workers; None uses the loopback interface.

    Raises:
        WorkerError: From :meth:`ask`, with the exit code and the last line of the worker that
            failed.
    """

    def __init__(
        self,
        script: str,
        count: int,
        setup: Reply,
        launcher: Sequence[str] | None = None,
        network: EmulatedNetwork | None = None,
    ) -> None:
        self.script, self.count, self.setup = script, count, setup
        self.launcher, self.network = launcher, network
        self.processes: list[subprocess.Popen[Any]] = []
        self.files = contextlib.ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, **request: Any) -> list[Reply]:
        """Let all workers handle a request, and return their replies by rank."""
        # Workers start at the first request, and again after a failure.
        if not self.processes:
            self._start()
        pipe = self.processes[0].stdin
        assert pipe is not None
        # If the worker has ended, _receive returns nothing and _failure the reason.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{json.dumps(request)}\n")
            pipe.flush()
        line = self._receive()
        if not line:
            reason = self._failure()
            self.end()
            raise WorkerError(reason)
        return list(json.loads(line))

    def end(self) -> None:
        """End all workers."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
        self.files.close()

    def _start(self) -> None:
        self.folder = Path(self.files.enter_context(tempfile.TemporaryDirectory(prefix="workers-")))
        (self.folder / "setup.json").write_text(json.dumps(self.setup))
        command = [sys.executable, self.script, "--worker", str(self.folder)]
        for rank in range(1 if self.launcher else self.count):
            # Only worker 0 talks to the parent.
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            # A pipe that nobody reads would block a worker that prints much, so standard error goes
            # to a file.
            log = self.files.enter_context((self.folder / f"log{rank}").open("w"))
            options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": log, "text": True}
            variables = {"OMP_NUM_THREADS": "1"}
            if not self.launcher:
                # mpirun gives each worker its rank, and the MPI backend refuses another in RANK.
                variables |= {"RANK": str(rank), "WORLD_SIZE": str(self.count)}
            if self.network:
                process = self.network.popen(rank, command, variables, **options)
            else:
                environment = {**os.environ, **variables}
                full_command = [*(self.launcher or ()), *command]
                process = subprocess.Popen(full_command, env=environment, **options)
            self.processes.append(process)
        for pipe in (self.processes[0].stdin, self.processes[0].stdout):
            assert pipe is not None
            self.files.callback(_close, pipe)

    def _receive(self) -> str:
        """Return worker 0's line; an empty text if it ends, another one fails, or time is over."""
        pipe = self.processes[0].stdout
        assert pipe is not None
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while not select.select([pipe], [], [], 0.1)[0]:
            # The others notice a lost worker only at their next message, so they get some seconds
            # to report it.
            if any(process.poll() for process in self.processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                return ""
        return str(pipe.readline())

    def _failure(self) -> str:
        """Return the exit code and the last words of the worker that failed first."""
        # The exit codes of all workers are needed to find the one that failed first.
        end = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in self.processes) and time.monotonic() < end:
            time.sleep(0.1)
        failures = []
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code:
                lines = (self.folder / f"log{rank}").read_text().splitlines() or ["no message"]
                errors = [line for line in lines if "Error" in line] or lines
                reason = errors[-1].strip()[:200]
                # A signal or a worker's own error is the cause. A connection that a peer closed is
                # the consequence.
                failures.append((code > 0, "peer" in reason, rank, f"exit code {code}: {reason}"))
        if not failures:
            return f"no answer within {REQUEST_TIMEOUT_S:.0f} s"
        return min(failures)[-1]


def _close(pipe: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def largest(replies: Sequence[Reply]) -> Reply:
    """Return the largest of each figure in the replies; of times, those of the slowest worker."""
    figures = dict(replies[0])
    for reply in replies[1:]:
        for name in figures:
            figures[name] = max(figures[name], reply[name])
    return figures


def mpirun_command(count: int) -> list[str] | None:
    """Return the command that starts a number of processes of MPI; None if MPI cannot be used."""
    # Wheels of Open MPI put the program into the folder of this Python, which may not be on the
    # path.
    own_folder = str(Path(sys.executable).parent)
    program = shutil.which("mpirun") or shutil.which("mpirun", path=own_folder)
    if program is None or importlib.util.find_spec("mpi4py") is None:
        return None
    command = [program, "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        # mpirun refuses to run as root without this option, and containers often have no other
        # user.
        command.append("--allow-run-as-root")
    return [*command, "-n", str(count)]


def run_script(
    main: Callable[[], None], make_handler: Callable[[Reply], Callable[[Reply], Reply]]
) -> None:
    """Be a worker if the parent started this process as one; else run the script's ``main``."""
    if sys.argv[1:2] == ["--worker"]:
        serve(make_handler)
    else:
        main()


def serve(make_handler: Callable[[Reply], Callable[[Reply], Reply]]) -> None:
    """Be a worker: join the others, then handle requests until the parent closes standard input.

    Args:
        make_handler: Gets the parent's ``setup``, and returns the function that handles a request.
    """
    folder = Path(sys.argv[2])
    # The replies get a copy of standard output.
    replies_out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Text that a library prints must not become a reply.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    rank_name, size_name = "RANK", "WORLD_SIZE"
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        rank_name, size_name = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    rank, world_size = int(os.environ[rank_name]), int(os.environ[size_name])
    torch.set_num_threads(1)
    # A file needs no port, which another program could take in the meantime.
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    handle = make_handler(json.loads((folder / "setup.json").read_text()))
    while True:
        request = [sys.stdin.readline() if rank == 0 else ""]
        # The other workers wait here, without use of the processor, while another variant has its
        # turn.
        dist.broadcast_object_list(request, src=0)
        if not request[0]:
            break
        replies: list[Any] = [None] * world_size
        try:
            dist.all_gather_object(replies, handle(json.loads(request[0])))
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            # Threads of a group whose peers have left can abort Python's shutdown, which would hide
            # the exit code.
            os._exit(1)
        if rank == 0:
            print(json.dumps(replies), file=replies_out, flush=True)
    dist.destroy_process_group()
