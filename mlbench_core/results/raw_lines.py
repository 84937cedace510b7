r"""Write and read the raw lines of a run: the records of each worker, one JSON object per line.

Every line has the fields ``rank``, ``kind`` and ``time`` (ISO 8601, UTC). The kinds, in the order
in which a worker writes them::

    start   the run begins or is resumed: run_id, host, resumed, epoch, step, configuration,
            schema_version
    stat    a recorded statistic: epoch, step, time_s, name, value (null if it is not finite)
    epoch   an epoch has ended: epoch, step, time_s, totals
    goal    the goal is reached: metric, threshold, minimize, value, text, time_to_goal_s, totals,
            epoch, step, time_s
    end     the run ends: state, reason, totals, epochs, best_metric_value, best_epoch,
            batch_times, ...

``step`` is the number of finished training batches, and ``time_s`` the seconds since the start of
the run's clock. ``totals`` holds times (seconds) and counts since the start of the run.

A killed worker can leave half a line at the end of its file. :class:`RawLines` skips and lists such
a line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["SCHEMA_VERSION", "LinesSink", "RawLines", "ends_line", "read_lines", "statistics"]

SCHEMA_VERSION = 1
"""Version of the format of raw lines and of ``result.json``."""

# Lines are written when this number of records waits, or when the last write is this long ago.
_MOST_PENDING = 5000
_WRITE_EVERY_S = 10.0
# The longest line of a run, its end, has some kilobytes. A longer one is not ours, and may not fit
# into memory.
_MOST_LINE_BYTES = 4 << 20
# Larger integers are not exact as floats.
_MOST_STEPS = 1 << 53
_STATISTIC = re.compile(rb'\{"rank":\d+,"kind":"stat",')


class LinesSink:
    """A sink that writes the raw lines of one worker; see :mod:`mlbench_core.tracking.sinks`.

    Records are kept in memory and written at the end of an epoch, after 10 seconds, or when 5,000
    of them wait. So a record in a training batch costs less than a microsecond in most cases, and a
    killed worker loses little.

    Args:
        path: The file to append to; its folder is created.
        rank: Rank of this worker.
        run_id: Id of the run.
        configuration: The program of the run and its settings, see
            :mod:`mlbench_core.results.configuration`.
        before_start: Called before the first line is written; None for nothing.

    Attributes:
        has_started: True as soon as the line ``start`` is written.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        run_id: str,
        configuration: Mapping[str, Any],
        before_start: Callable[[], object] | None = None,
    ) -> None:
        self.path = path
        self._before_start = before_start
        self._rank = rank
        self._start: dict[str, Any] = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "configuration": dict(configuration),
        }
        self.has_started = False
        self._end: dict[str, Any] = {}
        self._lost: str | None = None
        self._pending: list[tuple[float, int, int, float, str, float | str]] = []
        self._last_write_s = time.monotonic()

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Set settings that are known only when the run begins, before the line ``start``.

        Args:
            settings: Fields of the configuration by name.
        """
        self._start["configuration"].update(settings)

    def add_to_end(self, content: Mapping[str, Any]) -> None:
        """Add fields to the line ``end``, after the tracker has ended and before :meth:`finish`."""
        self._end.update(content)

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Do nothing: the totals of the line ``epoch`` contain the times that arrive here."""

    def record(self, name: str, value: float | str, epoch: int, step: int, time_s: float) -> None:
        """Keep one statistic for the next write."""
        self._pending.append((time.time(), epoch, step, time_s, name, value))
        waited_s = time.monotonic() - self._last_write_s
        if len(self._pending) >= _MOST_PENDING or waited_s > _WRITE_EVERY_S:
            self.flush()

    def event(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write a line of another kind than ``stat``; the line ``end`` waits for :meth:`finish`."""
        if kind == "end":
            self._end = dict(content)
            # finish() says how the run ended.
            self._end.pop("state", None)
            return
        fields = dict(content)
        if kind == "start":
            self.has_started = True
            # The file has the numbers from before the resume already.
            fields.pop("latest", None)
            fields = {"schema_version": SCHEMA_VERSION, **self._start, **fields}
            if self._before_start is not None:
                with self._noting_loss():
                    self._before_start()
        self._write([self._line(kind, fields)])

    def finish(self, state: str, reason: str | None = None) -> None:
        """Write the line ``end``.

        The tracker is closed before it is known how the run ended, so the line waits for this call.

        Args:
            state: ``"finished"`` or ``"failed"``. A run whose lines could not all be written is
                written as failed: the goal may be among the lost ones.
            reason: The reason of a failure, in one line.
        """
        if self._lost is not None and state == "finished":
            state = "failed"
            reason = f"raw lines are missing, because they could not be written: {self._lost}"
        # A run that fails before its first batch has not started its tracker.
        if not self.has_started:
            self.event("start", {"resumed": False, "epoch": 0, "step": 0})
        self._write([self._line("end", {"state": state, "reason": reason, **self._end})])

    def _line(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"rank": self._rank, "kind": kind, "time": _text(time.time()), **content}

    def flush(self) -> None:
        """Write the statistics that wait."""
        self._write([])

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        # Before the write, so that a full disk does not fill the memory, too; the loss is noted.
        pending, self._pending = self._pending, []
        self._last_write_s = time.monotonic()
        # Not json.dumps: it takes ten times as long, and some of these writes happen inside
        # training batches.
        records = "".join(
            f'{{"rank":{self._rank},"kind":"stat","time":"{_text(now)}","epoch":{epoch},'
            f'"step":{step},"time_s":{time_s!r},"name":{_quoted(name)},'
            f'"value":{_json_value(value)}}}\n'
            for now, epoch, step, time_s, name, value in pending
        )
        text = records + "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        if not text:
            return
        with self._noting_loss():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # A killed process may have left half a line, which must not swallow the next one.
                if not ends_line(file):
                    file.write(b"\n")
                file.write(text.encode())

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._lost = f"{error.strerror or error}: {self.path}"
            raise


def ends_line(file: BinaryIO) -> bool:
    """Return True if an open file is empty or ends with a line feed.

    The position in the file is then at its end.
    """
    if not file.seek(0, 2):
        return True
    file.seek(-1, 2)
    return file.read(1) == b"\n"


_quoted = functools.lru_cache(maxsize=1024)(json.dumps)


def _json_value(value: float | str) -> str:
    """Return a statistic as JSON; null if it is not finite."""
    if isinstance(value, str):
        return _quoted(value)
    # JSON has no numbers for infinity and NaN.
    if not math.isfinite(value):
        return "null"
    return repr(float(value))


def _text(seconds: float) -> str:
    # The text of a whole second is kept, because many records fall into each of them.
    whole = math.floor(seconds)
    return f"{_second(whole)}.{int((seconds - whole) * 1e6):06d}+00:00"


@functools.lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


@dataclass
class RawLines:
    """The raw lines in some files, read one after the other; iterate over it any number of times.

    Attributes:
        paths: The files.
        skipped: After an iteration, the lines that could not be read: ``"FILE:NUMBER: REASON"``.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"rank": 0, "kind": "end"}' + chr(10) + '{"rank": 0, "ki')
        >>> lines = RawLines([path])
        >>> [line["kind"] for line in lines], len(lines.skipped)
        (['end'], 1)
    """

    paths: list[Path]
    skipped: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._read(lambda text: False)

    def without_statistics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of other kinds than ``stat``.

        Most lines are statistics. Those that :class:`LinesSink` wrote are known by their first
        characters, and are not parsed.
        """
        lines = self._read(lambda text: _STATISTIC.match(text) is not None)
        return (line for line in lines if line["kind"] != "stat")

    def _read(self, is_left_out: Callable[[bytes], bool]) -> Iterator[dict[str, Any]]:
        self.skipped.clear()
        for path in self.paths:
            with path.open("rb") as file:
                texts = iter(partial(file.readline, _MOST_LINE_BYTES), b"")
                for number, text in enumerate(texts, 1):
                    if len(text) == _MOST_LINE_BYTES:
                        size = f"{_MOST_LINE_BYTES >> 20} MiB or more"
                        self.skipped.append(f"{path.name}:{number}: line of {size}")
                        break
                    if is_left_out(text):
                        continue
                    line = _parsed(text)
                    if line is None:
                        kind = "damaged"
                        # Its worker was killed while it wrote this line.
                        if not text.endswith(b"\n"):
                            kind = "half-written"
                        self.skipped.append(f"{path.name}:{number}: {kind} line")
                    else:
                        yield line


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line as a dictionary, or None if it is not a raw line."""
    try:
        line = json.loads(text)
    # A line of many nested brackets raises RecursionError.
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not _is_sound(line):
        return None
    return line


# Unknown in a run that continues from a checkpoint of an earlier version; the processor time also
# on a GPU.
_MAY_BE_UNKNOWN = (
    "communication_cpu_s",
    "compute_cpu_s",
    "communication_wire_bytes",
    "exchanges",
)


def _is_sound(line: Mapping[str, Any]) -> bool:
    """Return True if the fields of a line that are used in computations have the right types."""
    kind, rank = line.get("kind"), line.get("rank")
    # Not isinstance: in Python a bool is an int.
    if not isinstance(kind, str) or type(rank) is not int or rank < 0:
        return False
    if kind == "stat":
        has_fields = line.keys() >= {"epoch", "step", "time_s"}
        if not has_fields or not isinstance(line.get("name"), str):
            return False
    for name in ("epoch", "step"):
        number = line.get(name, 0)
        if type(number) is not int or not 0 <= number < _MOST_STEPS:
            return False
    for name in ("time_s", "time_to_goal_s"):
        if not _is_number(line.get(name, 0.0)):
            return False
    return _are_sound_totals(line.get("totals", {}))


def _are_sound_totals(totals: Any) -> bool:
    if not isinstance(totals, dict):
        return False
    steps_s = totals.get("steps_s", {})
    if not isinstance(steps_s, dict) or not all(map(_is_number, steps_s.values())):
        return False
    if type(totals.get("communication_measured", False)) is not bool:
        return False
    for name, value in totals.items():
        if name in ("steps_s", "communication_measured"):
            continue
        may_be_unknown = value is None and name in _MAY_BE_UNKNOWN
        if not may_be_unknown and not _is_number(value):
            return False
    return True


def _is_number(value: Any) -> bool:
    # An integer of hundreds of digits cannot be used with a float.
    return type(value) in (int, float) and abs(value) < 1e300


def read_lines(folder: Path) -> RawLines:
    """Return the raw lines of all workers in a result folder.

    A run that ended has them in ``metrics.jsonl``. A run that was killed has one file for each
    worker.

    Args:
        folder: The result folder.
    """
    whole = folder / "metrics.jsonl"
    # By length first, so that rank 2 comes before rank 10.
    parts = folder.glob("metrics.rank-*.jsonl")
    in_order = sorted(parts, key=lambda path: (len(path.name), path.name))
    # Reading a pipe or a device may never end.
    return RawLines([path for path in (whole, *in_order) if path.is_file()])


def before_start(lines: Iterable[dict[str, Any]], start: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines up to the step at which a run continues; it repeats the later ones.

    Args:
        lines: Earlier lines of the worker.
        start: Its line ``start``.
    """
    first_step = start.get("step", 0)
    return [line for line in lines if line["step"] <= first_step]


def statistics(
    lines: Iterable[Mapping[str, Any]], name: str, rank: int = 0
) -> list[dict[str, Any]]:
    """Return the lines of one statistic of one worker, in the order of the training.

    A run that is resumed from a checkpoint repeats the batches after it. Their first lines are left
    out.

    Args:
        lines: Raw lines.
        name: Name of the statistic, for example ``"val_global_Prec@1"``.
        rank: The worker.
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line["rank"] != rank:
            continue
        if line["kind"] == "start" and line.get("resumed"):
            kept = before_start(kept, line)
        elif line["kind"] == "stat" and line.get("name") == name:
            kept.append(dict(line))
    return kept
