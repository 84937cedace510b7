"""Call one host about all runs with workers on it: one call per interval, from its own thread."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlbench_core import __version__
from mlbench_master.engines.hosts.results import ARCHIVE_BYTES, UnpackError, unpack
from mlbench_master.engines.hosts.run_state import Answer, HostRun
from mlbench_master.engines.hosts.ssh import HostError, Ssh
from mlbench_master.engines.worker_command import python_environment

__all__ = ["HostLink"]

_log = logging.getLogger(__name__)
_AGENT = "mlbench_master.engines.hosts.agent"
_TIMEOUT_S = 60.0
_FETCH_TIMEOUT_S = 3600.0
_ANSWER_BYTES = 64 * 2**20
# Changes that are expected soon do not lead to more calls than this.
_SHORTEST_PAUSE_S = 0.2


class _Answers(TypedDict):
    version: Annotated[str, Field(max_length=100)]
    now: FiniteFloat
    runs: dict[str, Answer]


_answers = TypeAdapter(_Answers)


class HostLink:
    """The calls of one host.

    Args:
        name: The host.
        python: Path of Python on it.
        ssh: The program that calls it.
        interval_s: Seconds between two calls. There are none without a run that has something to do
            there.

    Attributes:
        asked_at: The start of the last call that has ended, by the monotonic clock.
    """

    def __init__(self, name: str, python: str, ssh: Ssh, interval_s: float) -> None:
        self.name = name
        self.asked_at = 0.0
        self._ssh = ssh
        self._command = [python, "-m", _AGENT]
        path = python_environment()["PYTHONPATH"]
        if path:
            # In the command, because sshd takes over only the variables that its configuration
            # names.
            self._command = ["env", f"PYTHONPATH={path}", *self._command]
        self._interval_s = interval_s
        self._runs: dict[str, HostRun] = {}  # by the root on the host
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._fetching: threading.Thread | None = None
        self._thread = threading.Thread(target=self._loop, name=f"mlbench-host-{name}", daemon=True)
        self._thread.start()

    def watch(self, run: HostRun) -> None:
        """Ask about a run from now on, until it is over."""
        with self._lock:
            self._runs[run.root(self.name)] = run
        self._wake.set()

    def look_soon(self) -> None:
        """Ask again without waiting for the interval to pass."""
        self._wake.set()

    def end(self) -> None:
        """End the thread after the current call."""
        self._closed.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout=timeout_s)

    def _loop(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            # Before the steps are read: a run that changes later wakes this thread again.
            self._wake.clear()
            has_more = False
            with self._lock:
                runs = dict(self._runs)
            steps: dict[str, dict[str, Any]] = {}
            for root, run in runs.items():
                step = run.step(self.name)
                if step is not None:
                    steps[root] = step
            if steps:
                has_more = self._try(runs, steps, partial(self._ask, runs, steps))
            self._start_fetching(runs)
            with self._lock:
                # Of a run that is over, the host may still have to delete its folder.
                for root, run in list(self._runs.items()):
                    if run.is_over and run.step(self.name) is None:
                        del self._runs[root]
                is_idle = not self._runs
            if not has_more:
                interval_s: float | None = self._interval_s
                if is_idle:
                    interval_s = None
                self._wake.wait(interval_s)
            pause = min(_SHORTEST_PAUSE_S, self._interval_s)
            self._closed.wait(max(0.0, began + pause - time.monotonic()))

    def _try(
        self, runs: dict[str, HostRun], steps: dict[str, Any], call: Callable[[], bool]
    ) -> bool:
        """Make a call, and notify the runs if it fails."""
        began = time.monotonic()
        try:
            return call()
        except HostError as error:
            _log.warning("%s", error)
            problem = str(error)
        except Exception as error:  # the thread must outlive a full disk
            _log.exception("the call of host %s failed; trying again", self.name)
            problem = f"the answer of host {self.name} cannot be kept: {error}"
        finally:
            # The begin: for a run that is being stopped, only calls that began later count.
            self.asked_at = began
        for root in steps:
            runs[root].failed(self.name, problem)
        return False

    def _ask(self, runs: dict[str, HostRun], steps: dict[str, dict[str, Any]]) -> bool:
        """Send the steps of all runs and give each run its answer; return if there is more."""
        request = json.dumps({"version": __version__, "runs": steps}).encode()
        with self._ssh.call(self.name, self._command, request, _TIMEOUT_S, _ANSWER_BYTES) as file:
            content = file.read()
        try:
            answers = _answers.validate_json(content)
        except ValidationError as error:
            why = " ".join(str(error).splitlines()[-2:])
            raise HostError(f"host {self.name} gave a damaged answer: {why}") from error
        if answers["version"] != __version__:
            raise HostError(
                f"host {self.name} has MLBench {answers['version']}, and the master has "
                f"{__version__}: "
                "install the same version there, or name another Python with --python"
            )
        offset = answers["now"] - time.time()
        has_more = False
        for root, run in runs.items():
            if root in answers["runs"] and run.answered(self.name, answers["runs"][root], offset):
                has_more = True
        return has_more

    def _start_fetching(self, runs: dict[str, HostRun]) -> None:
        """Fetch the files of runs that have ended here."""
        # In another thread, because they may be large.
        wanted = [run for run in runs.values() if run.to_fetch(self.name)]
        if wanted and (self._fetching is None or not self._fetching.is_alive()):
            self._fetching = threading.Thread(target=self._fetch_all, args=(wanted,), daemon=True)
            self._fetching.start()

    def _fetch_all(self, wanted: list[HostRun]) -> None:
        for run in wanted:
            if not self._closed.is_set():
                self._try({"": run}, {"": None}, partial(self._fetch, run))

    def _fetch(self, run: HostRun) -> bool:
        root = run.root(self.name)
        parts = run.to_fetch(self.name)
        request = json.dumps({"fetch": root, "id": run.run_id, "parts": parts}).encode()
        limits = (_FETCH_TIMEOUT_S, ARCHIVE_BYTES)
        problem = ""
        try:
            with self._ssh.call(self.name, self._command, request, *limits) as archive:
                unpack(archive, run.folder, run.hosts.index(self.name))
        except (UnpackError, HostError) as error:
            # Another attempt can get over a broken connection, but not over a wrong archive.
            if isinstance(error, HostError) and not error.is_too_large:
                raise
            problem = f"the files in {root} on host {self.name} stay there: {error}"
        run.fetched(self.name, problem)
        return False
