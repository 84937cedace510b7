"""Copy the logs of pods into the log of a run.

The API gives each line its date, with nanoseconds, but its beginning can be chosen only to the
second. So the place up to which a log has been read is a date, and the number of lines with this
date. ``log_places.json`` has it for each rank, so that the next master continues there. The API
does not distinguish standard output from standard error.

One thread reads the logs of all running pods, several at once, because a node that does not answer
takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_master.engines.interface import EngineError
from mlbench_master.engines.kubernetes.api import KubernetesApi
from mlbench_master.engines.kubernetes.states import has_log, rank_of
from mlbench_master.engines.logs import LogWriter, open_at_once, readable, readable_line
from mlbench_master.engines.supervisor.supervise import write_json

__all__ = ["LogCollector", "PodLogs"]

_log = logging.getLogger(__name__)

_PLACES = "log_places.json"
_PLACES_BYTES = 2**24
_READERS = 8
# Longer lines are divided, as by the supervisor of local runs.
_MAX_LINE_BYTES = 16_384
# A line that is not complete is read again, unless it is longer than this.
_LONGEST_LINE_BYTES = 2**20
# A worker that writes more per call than this does not keep the others waiting.
_BYTES_PER_CALL = 2**20
_MOST_ATTEMPTS = 3
_LONGEST_MESSAGE = 300
_DATE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")


class Place(NamedTuple):
    """The place up to which a log has been read.

    Attributes:
        time_ns: The date of its last line, in nanoseconds since 1970.
        lines: Number of lines with this date.
    """

    time_ns: int = 0
    lines: int = 0


class PodLogs:
    """The logs of the pods of one run.

    Args:
        folder: The run's folder.
        limit_bytes: Largest size of the merged log.

    Attributes:
        problem: One line on a log that cannot be read; empty while all can.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.problem = ""
        self._folder = folder
        self._writer = LogWriter(folder, limit_bytes)
        self._places: dict[int, Place] | None = None
        self._complete: set[int] = set()
        self._attempts: dict[int, int] = {}  # that failed after the worker had ended
        # A request that stops the run also reads the last lines.
        self._reading: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Add a line of the master."""
        self._writer.write(None, "system", text)
        self._writer.close()

    def unread(self, pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the pods whose logs may have new lines."""
        # Without a folder, there is no place to keep the lines.
        if not self._folder.is_dir():
            return []
        return [pod for pod in pods if has_log(pod)[0] and rank_of(pod) not in self._complete]

    def collect(self, api: KubernetesApi, pod: dict[str, Any]) -> None:
        """Copy the new lines of a pod.

        An error stays in :attr:`problem`, and the next call tries again.
        """
        rank = rank_of(pod)
        if rank is None:
            return
        is_ended = has_log(pod)[1]
        with self._lock:
            reading = self._reading.setdefault(rank, threading.Lock())
        with reading:
            self._collect(api, pod, rank, is_ended)

    def _collect(self, api: KubernetesApi, pod: dict[str, Any], rank: int, is_ended: bool) -> None:
        try:
            at_end = self._copy(api, pod["metadata"]["name"], rank, is_ended)
            self.problem = ""
            if is_ended and at_end:
                self._complete.add(rank)
        except EngineError as error:
            self.problem = f"the log of worker {rank} cannot be read: {error}"
            if is_ended:
                self._attempts[rank] = self._attempts.get(rank, 0) + 1
            # The log of a lost node is lost, too.
            if self._attempts.get(rank, 0) >= _MOST_ATTEMPTS:
                self.note(self.problem)
                self._complete.add(rank)
        finally:
            self._writer.close()

    def _copy(self, api: KubernetesApi, name: str, rank: int, is_ended: bool) -> bool:
        """Copy new lines, and return whether the end was reached."""
        with self._lock:
            before = self._read_places().get(rank, Place())
        place, size, at_end = before, 0, True
        since = ""
        if before.time_ns:
            moment = datetime.fromtimestamp(before.time_ns // 10**9, timezone.utc)
            since = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
        # The answer begins with lines of this second that were copied before.
        same_date = 0  # lines with the date of the place
        is_new = not before.time_ns
        try:
            lines = _lines(api.log(name, since), keep_rest=is_ended)
            for time_ns, raw, is_begin in _dated(lines):
                if not is_new:
                    if is_begin and time_ns == before.time_ns:
                        same_date += 1
                    is_new = time_ns > before.time_ns or same_date > before.lines
                    if not is_new:
                        continue
                if is_begin and size > _BYTES_PER_CALL:
                    at_end = False
                    break
                self._writer.write(rank, "stdout", readable_line(raw), _date(time_ns))
                size += len(raw)
                num_lines = 0
                if time_ns == place.time_ns:
                    num_lines = place.lines
                if is_begin:
                    num_lines += 1
                place = Place(time_ns, num_lines)
        finally:
            if place != before:
                self._remember(rank, place)
        return at_end

    def _remember(self, rank: int, place: Place) -> None:
        with self._lock:
            places = self._read_places()
            places[rank] = place
            # A full disk repeats lines after a restart of the master, which is better than to lose
            # them.
            with contextlib.suppress(OSError):
                write_json(self._folder / _PLACES, {str(rank): places[rank] for rank in places})

    def _read_places(self) -> dict[int, Place]:
        if self._places is None:
            # A file that is damaged counts as none: lines are repeated, and none is lost.
            self._places = {}
            with (
                contextlib.suppress(OSError, ValueError, TypeError),
                open_at_once(self._folder / _PLACES) as file,
            ):
                content = json.loads(file.read(_PLACES_BYTES))
                places = {}
                for rank, (time_ns, lines) in content.items():
                    places[int(rank)] = Place(int(time_ns), int(lines))
                self._places = places
        return self._places


class LogCollector:
    """A thread that copies the logs of pods at an interval.

    Args:
        api: The API.
        interval_s: Seconds between two reads of a log.
        sources: A function that returns the logs of each run with the pods of the run.
    """

    def __init__(
        self,
        api: KubernetesApi,
        interval_s: float,
        sources: Callable[[], list[tuple[PodLogs, list[dict[str, Any]]]]],
    ) -> None:
        self._api = api
        self._interval_s = interval_s
        self._sources = sources
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="mlbench-pod-logs", daemon=True)
            self._thread.start()

    def look_soon(self) -> None:
        """Read the logs without waiting for the interval to pass."""
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="mlbench-pod-log") as readers:
            while not self._closed:
                began = time.monotonic()
                try:
                    unread: list[tuple[PodLogs, dict[str, Any]]] = []
                    for logs, pods in self._sources():
                        unread += [(logs, pod) for pod in logs.unread(pods)]
                    list(readers.map(self._collect, unread))
                except Exception:  # the thread must outlive an answer of an unknown form
                    _log.exception("reading the logs of pods failed; trying again")
                self._wake.wait(max(0.0, began + self._interval_s - time.monotonic()))
                self._wake.clear()

    def _collect(self, source: tuple[PodLogs, dict[str, Any]]) -> None:
        if not self._closed:
            logs, pod = source
            logs.collect(self._api, pod)


def _lines(parts: Iterator[bytes], *, keep_rest: bool) -> Iterator[bytes]:
    """Divide the parts of a log into lines.

    A last line without a line break is left out, unless ``keep_rest`` is true.
    """
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(rest) > _LONGEST_LINE_BYTES:
            yield rest
            rest = b""
    if rest and keep_rest:
        yield rest


def _dated(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Divide lines into pieces.

    Yields:
        The date of a line in nanoseconds, a piece of its text, and True for its first piece.
    """
    time_ns = 0
    is_begin = True
    for line in lines:
        match = None
        # The node puts a date before each line, but not before the rest of a long one.
        if is_begin:
            match = _DATE.match(line)
        text = line
        if match is not None:
            # Before Python 3.11, fromisoformat() reads neither "Z" nor nanoseconds.
            zone = match[3].decode().replace("Z", "+00:00")
            moment = datetime.fromisoformat(match[1].decode() + zone)
            time_ns = int(moment.timestamp()) * 10**9 + int((match[2] or b"").ljust(9, b"0"))
            text = line[match.end() :]
        elif not time_ns:
            # The node answers a request that failed with its message, as if that were the log.
            raise EngineError(readable(line[:_LONGEST_MESSAGE]).strip())
        for begin in range(0, max(len(text), 1), _MAX_LINE_BYTES):
            yield time_ns, text[begin : begin + _MAX_LINE_BYTES], is_begin and begin == 0
        is_begin = line.endswith(b"\n")


def _date(time_ns: int) -> str:
    """Return a date as the API of the master writes dates."""
    # In whole numbers, because a float would round the microseconds.
    seconds, fraction_ns = divmod(time_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None)
    moment += timedelta(microseconds=fraction_ns // 1000)
    return f"{moment.isoformat(timespec='microseconds')}Z"
