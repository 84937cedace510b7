"""The process between the master and the workers of a local run: ``python -m mlbench_master.launchers.supervise DIR``.

It outlives the master, so a run goes on while the master restarts. It starts what ``DIR/job.json`` says, writes
every line of the workers to ``DIR/log.jsonl``, ends all workers when one dies, leaves no process behind, and says
how it ended in ``DIR/status.json``. It needs nothing of the package but psutil, so it starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import psutil

__all__ = ["append_log", "describe_exit", "end_processes", "main", "write_json"]

_POLL_S = 0.1
_MAX_LINE_BYTES = 65_536
_PR_SET_CHILD_SUBREAPER = 36
_TORCHRUN_PREFIX = r"^\[worker(\d+)\]:"
_TORCHRUN_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_MPIRUN_FAILURE = re.compile(r"process rank (\d+) with PID|^\s*Process name: \[.*,(\d+)\]\s*$")
_SHELL_SIGNAL = 128  # mpirun and shells report a signal as 128 plus its number


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


def append_log(path: Path, rank: int | None, stream: str, text: str) -> None:
    """Add one line to a run's log; lines of several processes do not mix."""
    date = datetime.now(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    line = json.dumps({"rank": rank, "stream": stream, "text": text, "date": date}) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def describe_exit(rank: int | None, returncode: int) -> str:
    """Say how a process ended.

    Args:
        rank: The worker's rank, or None for torchrun or mpirun itself.
        returncode: Its exit status, negative for a signal.

    Returns:
        One line.

    Example:
        >>> describe_exit(1, -9)
        'worker 1 died: signal 9 (SIGKILL)'
        >>> describe_exit(0, 3)
        'worker 0 failed: exit status 3'
    """
    who = "the launcher" if rank is None else f"worker {rank}"
    if returncode >= 0:
        return f"{who} failed: exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"{who} died: signal {-returncode} ({name})"


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """End processes: ask first, kill after ``grace_s`` seconds; returns when they are gone."""
    alive = list(processes)
    for process in alive:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(alive, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


class _Supervisor:
    """Runs the processes of one job to their end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log_path = folder / "log.jsonl"
        job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self._commands: list[dict[str, Any]] = job["commands"]
        self._env: dict[str, str] = job["env"]
        self._grace_s = float(job["grace_s"])
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._reason = ""
        self._blamed: int | None = None
        self._readers: list[threading.Thread] = []

    def run(self) -> None:
        """Start the processes, wait for their end, clean up, and write how it went."""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _adopt_orphans()
        processes: list[tuple[int | None, subprocess.Popen[bytes]]] = []
        returncode = 127
        try:
            for command in self._commands:
                processes.append((command["rank"], self._start(command)))
            returncode = self._wait(processes)
        except OSError as error:
            self._reason = f"cannot start {self._commands[len(processes)]['argv'][0]!r}: {error.strerror or error}"
        self._clean_up()
        for reader in self._readers:
            reader.join(timeout=5)
        if self._stopping.is_set():
            self._reason, returncode = "stopped", returncode or -signal.SIGTERM
        if returncode and not self._reason:
            by_signal = self._blamed is not None and _SHELL_SIGNAL < returncode < 2 * _SHELL_SIGNAL
            self._reason = describe_exit(self._blamed, _SHELL_SIGNAL - returncode if by_signal else returncode)
        self._log(None, "system", self._reason or "finished")
        write_json(
            self._folder / "status.json",
            {"returncode": returncode, "reason": self._reason, "finished_at": time.time()},
        )

    def _start(self, command: dict[str, Any]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command["argv"],
            cwd=self._folder / "work",
            env={**os.environ, **self._env, **command["env"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            prefix = re.compile(command.get("prefix", _TORCHRUN_PREFIX))
            reader = threading.Thread(target=self._read, args=(pipe, command["rank"], stream, prefix), daemon=True)
            reader.start()
            self._readers.append(reader)
        return process

    def _wait(self, processes: list[tuple[int | None, subprocess.Popen[bytes]]]) -> int:
        """Wait until all have ended, or one has failed and the others had their time to notice."""
        worst = 0
        deadline: float | None = None
        hurried = False
        waiting = list(processes)
        while waiting and not self._stopping.is_set():
            for rank, process in list(waiting):
                code = process.poll()
                if code is None:
                    continue
                waiting.remove((rank, process))
                if code and not worst:
                    worst = code
                    if rank is not None:
                        self._reason = describe_exit(rank, code)
            if deadline is None and (worst or self._closing.is_set()):
                deadline = time.monotonic() + self._grace_s
            if deadline is not None and time.monotonic() > deadline:
                if hurried or not (waiting and self._closing.is_set()):
                    return worst or 1
                # torchrun waits half a minute for workers that do not listen, and only then says who died.
                self._kill_grandchildren([process.pid for _, process in waiting])
                deadline, hurried = time.monotonic() + self._grace_s, True
            self._stopping.wait(_POLL_S)
        return worst

    def _read(self, pipe: IO[bytes], rank: int | None, stream: str, prefix: re.Pattern[str]) -> None:
        with pipe:
            while raw := pipe.readline(_MAX_LINE_BYTES):
                # A progress bar draws over itself with carriage returns: its last state counts.
                text = raw.rstrip(b"\r\n").rpartition(b"\r")[2].decode("utf-8", "replace")
                self._take(rank, stream, text, prefix)

    def _take(self, rank: int | None, stream: str, text: str, prefix: re.Pattern[str]) -> None:
        """Keep a line; of the launcher's own lines, understand the one that says who died."""
        marked = prefix.match(text) if rank is None else None
        if marked is not None:
            self._log(int(marked.group(1)), stream, text[marked.end() :])
            return
        self._log(rank, stream, text)
        if rank is None:
            failure = _TORCHRUN_FAILURE.search(text)
            if failure is not None and not self._reason:
                self._reason = describe_exit(int(failure.group(2)), int(failure.group(1)))
            if failure is not None or "closing signal" in text:
                self._closing.set()
            blamed = _MPIRUN_FAILURE.search(text)
            if blamed is not None and self._blamed is None:
                self._blamed = int(blamed.group(1) or blamed.group(2))

    def _log(self, rank: int | None, stream: str, text: str) -> None:
        with self._lock:
            append_log(self._log_path, rank, stream, text)

    def _kill_grandchildren(self, children: list[int]) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.pid not in children:
                _signal(process, signal.SIGKILL)

    def _clean_up(self) -> None:
        """End every descendant, orphans included, and collect them."""
        for _ in range(3):
            children = psutil.Process().children(recursive=True)
            if not children:
                break
            end_processes(children, self._grace_s)


def _adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent dies (Linux): then none can be lost sight of."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(arguments: list[str]) -> int:
    """Supervise the job in a folder.

    Args:
        arguments: The folder.

    Returns:
        Exit status: 0 if it could do its work, however the job went.
    """
    _Supervisor(Path(arguments[0])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
