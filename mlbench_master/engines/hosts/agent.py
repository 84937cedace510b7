"""The remote side of the engine hosts: ``python -m mlbench_master.engines.hosts.agent``.

The master calls it through ssh. It reads a request from its standard input, does it, writes the
answer to its standard output and ends. A request concerns all runs with workers on this host. Each
run has a folder ``<root>/<run id>`` with the files of a local run, and its supervisor is the one of
local runs. A step for a run is one of::

    prepare  check the script and the GPUs, and choose a port
    run      start the supervisor, if it was not started before; then look
    look     return the state and the lines since the last call
    stop     ask the supervisor to end the workers; then look
    remove   delete the folder

So a request may be repeated after an answer was lost. Only psutil and the standard library are
imported, because each call starts a new Python on a machine whose workers are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import mlbench_core
from mlbench_core.client.masters import boot_id
from mlbench_master.engines.hosts.ssh import MARK
from mlbench_master.engines.interface import WORKERS_PER_CORE
from mlbench_master.engines.local.gpus import find_gpus
from mlbench_master.engines.logs import LogReader, NumberedLine
from mlbench_master.engines.supervisor.start import (
    end_marked,
    find_supervisor,
    folder_variables,
    hold_port,
    read_state,
    signal_to,
    start_supervisor,
    write_private,
)
from mlbench_master.engines.worker_command import (
    threads_per_worker,
    usable_cores,
    variables_to_remove,
    worker_environment,
)

__all__ = ["answer"]

_LINES = 5000
_ANSWER_BYTES = 8 * 2**20
_STARTING_S = 20.0
_NEVER = "stopped before the start"
# Formats the master accepts; see the module run_state.
_STREAM = re.compile("[a-z]{1,10}")
_DATE = re.compile("[0-9T:.Z-]{0,40}")


class _Refused(Exception):
    """A step cannot be done; the message says why."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do the steps of a request.

    Args:
        request: ``version`` of the master, and ``runs``: the step of each run by its root.

    Returns:
        ``version``, ``now``, ``boot``, and ``runs``: the answer of each run by its root.
    """
    runs: dict[str, dict[str, Any]] = {}
    # Another version could mean something else by a step, so none is done.
    if request["version"] == mlbench_core.__version__:
        left = _ANSWER_BYTES
        for root, step in request["runs"].items():
            try:
                runs[root] = _do(_Run(root, step), step, left)
            except _Refused as error:
                runs[root] = {"state": "refused", "reason": str(error)}
            except OSError as error:
                # It may pass, and the workers continue.
                reason = f"{error.filename or root}: {error.strerror}"
                runs[root] = {"state": "troubled", "reason": reason}
            # About 100 bytes for the other fields of a line.
            left -= sum(len(line["text"]) + 100 for line in runs[root].get("lines", ()))
    # The time last: the master computes from it how much the clock of this host differs.
    return {
        "version": mlbench_core.__version__,
        "boot": boot_id(),
        "runs": runs,
        "now": time.time(),
    }


def _do(run: _Run, step: dict[str, Any], left_bytes: int) -> dict[str, Any]:
    if step["want"] == "prepare":
        return {"state": "prepared", "port": run.prepare()}
    if step["want"] == "remove":
        shutil.rmtree(run.root, ignore_errors=True)
        return {"state": "missing"}
    if step["want"] == "run":
        run.start()
    if step["want"] == "stop":
        run.stop()
    state = run.look()
    state["lines"], state["next"], more = _lines(run.folder, step["log"], left_bytes)
    state["load"], state["load_next"], more_load = _lines(
        run.folder / "load", step["load"], left_bytes
    )
    state["more"] = more or more_load
    return state


def _lines(
    folder: Path, since_line: int, left_bytes: int
) -> tuple[list[dict[str, Any]], int, bool]:
    """Return the next lines of a log, the number of the line after them, and if there are more."""
    reader = LogReader(folder)
    if left_bytes <= 0:
        return [], since_line, reader.end() > since_line
    page = reader.read(since_line, _LINES)
    lines = list(map(_sound, page.lines))
    return lines, page.next, bool(lines) and reader.end() > page.next


def _sound(line: NumberedLine) -> dict[str, Any]:
    """Return a line as the master accepts it."""
    rank, stream, date = line["rank"], line["stream"], line["date"]
    has_valid_rank = rank is None or rank >= 0
    # A worker may write anything into the log, which must not stop the run.
    if not (has_valid_rank and _STREAM.fullmatch(stream) and _DATE.fullmatch(date)):
        rank, stream, date = None, "system", ""
    return {"rank": rank, "stream": stream, "text": line["text"], "date": date}


class _Run:
    """The part of a run on this host."""

    def __init__(self, root: str, step: dict[str, Any]) -> None:
        self.root = Path(root).expanduser()
        self.folder = self.root / str(int(step["id"]))
        self._job: dict[str, Any] = step.get("job", {})
        self._launched = self.folder / "launched"

    def prepare(self) -> int:
        """Check the GPUs, the scripts and the folders of the run; return a free port."""
        self._gpus()
        cwd = self._cwd()
        if cwd and not os.access(cwd, os.R_OK | os.X_OK):
            raise _Refused(
                f"{cwd} does not exist: use a file system that all hosts share, or name a folder "
                "with --cwd"
            )
        for word in self._job["commands"][0]["argv"][:3]:
            # A script without a path may also be a program on the PATH.
            if word.endswith(".py") and (cwd or "/" in word[:1]) and not Path(cwd, word).is_file():
                raise _Refused(
                    f"{Path(cwd, word)} does not exist: use a file system that all hosts share, "
                    "or the same path"
                )
        most = WORKERS_PER_CORE * usable_cores()
        if len(self._job["slots"]) > most and not self._job.get("oversubscribe"):
            raise _Refused(
                f"it can get at most {most} workers, not {len(self._job['slots'])}: more than "
                f"{WORKERS_PER_CORE} on each core mostly wait for each other; give it fewer slots, "
                "or start the run with --oversubscribe"
            )
        self.root.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not os.access(self.root.parent, os.W_OK):
            raise _Refused(
                f"{self.root.parent} cannot be written: name another folder with --folder"
            )
        with contextlib.closing(hold_port("")) as port_socket:
            return int(port_socket.getsockname()[1])

    def start(self) -> None:
        """Start the supervisor once, also if the request arrives twice."""
        for part in ("work", "output"):
            (self.folder / part).mkdir(parents=True, mode=0o700, exist_ok=True)
        try:
            with self._launched.open("x") as file:
                file.write(boot_id())
        except FileExistsError:
            return
        try:
            port = 0
            # The host of rank 0 gets the port that all workers know, the others any.
            if self._job["holds_port"]:
                port = self._job["port"]
            # The port is one of all addresses, because workers of other hosts connect to it.
            port_socket = hold_port("", port)
        except OSError as error:
            raise _Refused(
                f"the port {self._job['port']} was taken: start the run again ({error.strerror})"
            ) from error
        with port_socket:
            write_private(self.folder / "job.json", json.dumps(self._content()))
            start_supervisor(self.folder, port_socket)

    def stop(self) -> None:
        """Ask the supervisor to end the workers."""
        # A request to start that arrives late must start none.
        if self.root.parent.exists():
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError), self._launched.open("x") as file:
                file.write(_NEVER)
        pid = find_supervisor(self.folder)
        if pid is not None:
            signal_to(pid, signal.SIGTERM)

    def look(self) -> dict[str, Any]:
        """Return the state of the run here."""
        # Checked before the status. Otherwise the supervisor could write the status and end between
        # the two steps, and the run would count as lost.
        if find_supervisor(self.folder) is not None:
            return {"state": "running", "dropping": (self.folder / "dropping").exists()}
        with contextlib.suppress(OSError):
            return {
                "state": "ended",
                "status": read_state(self.folder / "status.json").decode(errors="replace"),
            }
        try:
            booted = read_state(self._launched).decode(errors="replace")
        except OSError:
            booted = _NEVER
        if booted == _NEVER:
            return {"state": "missing"}
        has_begun = (self.folder / "supervisor.json").exists()
        # A clock that was set back must not keep the run in this state.
        if not has_begun and 0 <= time.time() - self._launched.stat().st_mtime < _STARTING_S:
            return {"state": "running"}
        # A supervisor that was killed leaves its workers behind.
        end_marked(self.folder, 3.0)
        if booted != boot_id():
            return {"state": "lost", "reason": "it was restarted while the run continued"}
        if not has_begun:
            why = "it gave no reason"
            # Its last line is the exception that ended it.
            with contextlib.suppress(OSError, IndexError):
                log = read_state(self.folder / "supervisor.log").strip()
                why = log.splitlines()[-1].decode(errors="replace")
            reason = f"the supervisor of the workers did not start: {why}"
            return {"state": "lost", "reason": reason}
        return {"state": "lost", "reason": "the supervisor of the workers was killed"}

    def _content(self) -> dict[str, Any]:
        """Return the supervisor's ``job.json``."""
        job = self._job
        gpus = self._gpus()
        threads = threads_per_worker(job["num_cpus"], len(job["slots"]), usable_cores())
        commands = []
        for index, command in enumerate(job["commands"]):
            env = {"MASTER_PORT": str(job["port"]), **command["env"]}
            if gpus and len(job["commands"]) < len(gpus):
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # this worker starts the others
            elif gpus:
                env.update(CUDA_VISIBLE_DEVICES=gpus[index], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
            argv = list(command["argv"])
            # The Python of the master may have another path on this host.
            if argv[:1] == [job["python"]]:
                argv[0] = sys.executable
            commands.append({"argv": argv, "env": env, "rank": command["rank"]})
        by_rank: list[str] = []
        if gpus:
            by_rank = [""] * job["num_workers"]
        # A single worker that starts the others has more GPUs than there are commands.
        for gpu, command in zip(gpus, commands, strict=False):
            by_rank[command["rank"]] = gpu
        own = folder_variables(self.folder)
        return {
            "commands": commands,
            "env": worker_environment(job["env"], job.get("caller_env"), own, threads),
            "remove": variables_to_remove(job.get("caller_env")),
            "cwd": self._cwd(),
            "grace_s": 3.0,
            "log_limit_bytes": job["log_limit_bytes"],
            "num_workers": job["num_workers"],
            "gpus": by_rank,
            "load_interval_s": job["load_interval_s"],
            "container": "",
        }

    def _cwd(self) -> str:
        """Return the folder in which the workers start; empty for that of the run."""
        cwd = str(self._job.get("cwd", ""))
        # The script of a task needs no file of the user's folder.
        if self._job.get("is_task") and not os.path.isdir(cwd):
            return ""
        return cwd

    def _gpus(self) -> list[str]:
        """Return the GPU of each worker here by its slot; none for a run without GPUs."""
        if not self._job["gpu_enabled"]:
            return []
        gpus = find_gpus()
        last = max(self._job["slots"])
        if last >= len(gpus):
            raise _Refused(f"slot {last} has no GPU: there are {len(gpus)}; give it fewer slots")
        return [gpus[slot] for slot in self._job["slots"]]


def _send_files(request: dict[str, Any]) -> None:
    """Write an archive of folders of a run to the standard output."""
    folder = _Run(request["fetch"], request).folder
    sys.stdout.buffer.write(MARK)
    # As a stream, because a pipe has no positions to go back to.
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        for part in request["parts"]:
            # A worker may make a link or a pipe there, or a file that nobody may read.
            for path in sorted((folder / part).rglob("*")):
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        tar.add(path, str(path.relative_to(folder)), recursive=False)


def _main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.umask(0o077)  # the files of a run are only for its user
    if "fetch" in request:
        _send_files(request)
    else:
        sys.stdout.buffer.write(MARK + json.dumps(answer(request)).encode())


if __name__ == "__main__":
    _main()
