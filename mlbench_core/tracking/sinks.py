"""Write the numbers of a tracker to files, TensorBoard, or any function, in addition to the master.

A sink is called ``sink(name, value, epoch, step)``. It may also have these methods:

* ``record(name, value, epoch, step, time_s)`` is called instead of the sink itself. ``time_s`` is the time that the
  number belongs to, in seconds since ``Tracker.start()``.
* ``event(kind, content)`` receives the events of the run, see :meth:`SinkList.event`.
* ``flush()`` is called after each epoch and at the end.
* ``write_summary(summary)`` and ``close()`` are called at the end.

A sink that raises an exception receives nothing more. The tracker names it once in a warning, and the run continues.

Example:
    >>> from mlbench_core.tracking.tracker import Tracker
    >>> seen = []
    >>> tracker = Tracker([], run_id="1", rank=0, sinks=[lambda *record: seen.append(record)])
    >>> tracker.record_loss(0.5)
    >>> seen
    [('train_loss', 0.5, 0, 0)]
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TextIO

from mlbench_core.errors import require

__all__ = ["CSVSink", "JSONLSink", "Sink", "SinkList", "TensorBoardSink"]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A receiver of recorded numbers."""

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> Any:
        """Receive one number.

        Args:
            name: Prefixed name, for example ``"val_loss"``.
            value: The number. Only ``"TaskResult"``, the result of a reached goal, is a text.
            epoch: Epoch, from 0.
            step: Training batches finished so far.
        """


class SinkList(list[Sink]):
    """The sinks of a tracker. A sink that raises an exception (a full disk) is removed, and the run continues.

    Raises:
        TypeError: A sink is not callable.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        super().__init__(sinks)
        for sink in self:
            if not callable(sink):
                raise TypeError(f"sinks must be callable, not {sink!r}: a sink is called (name, value, epoch, step)")

    def record(self, name: str, value: float | str, epoch: int, step: int, time_s: float) -> None:
        """Pass a number to every sink; without ``time_s`` to those that have no method ``record``."""
        # A copy, because a sink that fails is removed while the loop runs.
        for sink in tuple(self):
            record = getattr(sink, "record", None)
            if record is None:
                self._try(sink, sink, name, value, epoch, step)
            else:
                self._try(sink, record, name, value, epoch, step, time_s)

    def event(self, kind: str, content: Callable[[], Mapping[str, Any]]) -> None:
        """Pass an event of the run to every sink that has a method ``event``.

        Args:
            kind: ``"start"`` when the run starts, ``"epoch"`` at the end of an epoch, ``"goal"`` when the goal is
                reached, or ``"end"`` when the tracker is closed.
            content: Return the content of the event as plain containers. It is called only if a sink wants it.
        """
        receivers = [sink for sink in self if hasattr(sink, "event")]
        if receivers:
            made = content()
            for sink in receivers:
                self._try(sink, sink.event, kind, made)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every sink that has it."""
        for sink in tuple(self):
            self._try(sink, getattr(sink, method, lambda *_: None), *arguments)

    def _try(self, sink: Sink, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        # All errors, because a sink may be anybody's code and training must not end because of it.
        except Exception as error:
            # Not self.remove(sink), which compares with ==: a sink may define its own equality.
            self[:] = [other for other in self if other is not sink]
            logger.warning(
                "sink %r failed and receives no more numbers; the run continues: %s: %s",
                sink, type(error).__name__, error,
            )  # fmt: skip


class _FileSink:
    """A sink that appends to a text file, which is opened on first use."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.path)!r})"

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", newline="")
        return self._file

    def flush(self) -> None:
        """Flush the buffered lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file. The next number opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class JSONLSink(_FileSink):
    """A sink that writes one JSON object per line: time, epoch, step, name and value.

    The last line is the summary of the run. JSON has no infinities, so a value that is not finite is written as null.

    Args:
        path: The file to append to; its folder is created.
        fields: Additional fields of every line, for example ``rank=0``.
    """

    def __init__(self, path: str | os.PathLike[str], **fields: str | int | float) -> None:
        super().__init__(path)
        self._fields = fields

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one line."""
        finite = value if isinstance(value, str) or math.isfinite(value) else None
        self._write({"epoch": epoch, "step": step, "name": name, "value": finite})

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's summary as a line ``{"summary": {...}}``."""
        self._write({"summary": summary})

    def _write(self, content: dict[str, Any]) -> None:
        line = {"time": datetime.now(timezone.utc).isoformat(), **self._fields, **content}
        self._open().write(json.dumps(line) + "\n")


class CSVSink(_FileSink):
    """A sink that writes rows of epoch, step, name and value, below one header line.

    Args:
        path: The file to append to; its folder is created.
    """

    HEADER = ("epoch", "step", "name", "value")

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one row."""
        file = self._open()
        writer = csv.writer(file, lineterminator="\n")
        # A resumed run appends to a file that already has its header.
        if file.tell() == 0:
            writer.writerow(self.HEADER)
        writer.writerow((epoch, step, name, value))


class TensorBoardSink:
    """A sink that writes scalars and texts for TensorBoard, by the number of finished batches.

    Args:
        folder: Folder of the event files.

    Raises:
        MissingDependencyError: TensorBoard or torch is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboard", "tensorboard")
        writers: Any = require("torch.utils.tensorboard", "torch")
        self._writer = writers.SummaryWriter(os.fspath(folder))

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one scalar or text."""
        if isinstance(value, str):
            self._writer.add_text(name, value, step)
        else:
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the queued values."""
        self._writer.flush()

    def close(self) -> None:
        """Write the queued values and end the writer's thread."""
        self._writer.close()
