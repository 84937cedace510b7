"""Write the numbers of a tracker to files, TensorBoard, other services or any function, in addition to the master.

A sink is called ``sink(name, value, epoch, step)``. It may also have these methods:

* ``record(name, value, epoch, step, time_s)`` receives the statistics instead of the sink itself. ``time_s`` is the
  time that the number belongs to, in seconds since ``Tracker.start()``. The sink itself is then called only for numbers
  that the events contain, too: the times of the steps, and the result of the goal.
* ``event(kind, content)`` receives the events of the run, see :meth:`SinkList.event`.
* ``flush()`` is called after each epoch and at the end.
* ``write_summary(summary)`` and ``close()`` are called at the end.

A sink that raises an exception receives nothing more. The tracker names it once in a warning, and the run continues.

:func:`make_sink` makes a sink from a text, for example from an option of a command. A package adds sinks with the
entry point group ``mlbench.sinks``: a name, and a function or class that returns a sink. It takes no argument, or one
text.

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
import inspect
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, TextIO

from mlbench_core.errors import ConfigurationError, require

__all__ = [
    "CSVSink",
    "JSONLSink",
    "MLflowSink",
    "Sink",
    "SinkList",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
]

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
        """Pass a statistic to every sink; without ``time_s`` to those that have no method ``record``."""
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


class WandbSink:
    """A sink that writes to a run of Weights & Biases, by the number of finished batches.

    Numbers are rows of the run's history. Texts and the summary of the tracker are entries of the run's summary.

    Args:
        project: Name of the project; None for the default of ``wandb``.
        options: Other arguments of ``wandb.init``, for example ``mode="offline"`` or ``name="run 7"``.

    Raises:
        MissingDependencyError: The package ``wandb`` is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        wandb: Any = require("wandb", "wandb")
        self._run = wandb.init(project=project, **options)
        # Not the step of wandb: it must not decrease, but numbers that are read later belong to earlier batches.
        self._run.define_metric("*", step_metric="batch")

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one row of the history, or a text."""
        if isinstance(value, str):
            self._run.summary[name] = value
        else:
            self._run.log({name: value, "epoch": epoch, "batch": step})

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Add the totals of the run to the run's summary."""
        self._run.summary.update(summary)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflowSink:
    """A sink that writes to a run of MLflow, by the number of finished batches.

    Numbers are metrics, and characters that MLflow does not allow in their names become ``_``. Texts are tags. The
    summary is the artifact ``summary.json``. ``MLFLOW_TRACKING_URI`` names the server, file or folder of the runs.

    Args:
        experiment: Name of the experiment, which is created if it does not exist.
        run_name: Name of the run; None for one that MLflow chooses.

    Raises:
        MissingDependencyError: The package ``mlflow`` is not installed.
    """

    # The largest number of metrics that a server accepts in one request.
    _MOST = 1000

    def __init__(self, experiment: str = "Default", run_name: str | None = None) -> None:
        mlflow: Any = require("mlflow", "mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        folder = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run: str = self._client.create_run(folder, run_name=run_name).info.run_id
        self._metrics: list[Any] = []

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Queue one metric, or write a text."""
        name = re.sub(r"[^\w./ -]", "_", name)
        if isinstance(value, str):
            self._client.set_tag(self._run, name, value)
            return
        self._metrics.append(self._metric(name, value, round(time.time() * 1000), step))
        # A request for each number would slow training down.
        if len(self._metrics) == self._MOST:
            self.flush()

    def flush(self) -> None:
        """Write the queued metrics."""
        if self._metrics:
            self._client.log_batch(self._run, metrics=self._metrics)
            self._metrics = []

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary as an artifact."""
        self._client.log_dict(self._run, summary, "summary.json")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


_BUILT_IN: dict[str, Callable[..., Sink]] = {
    "csv": CSVSink,
    "jsonl": JSONLSink,
    "mlflow": MLflowSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}


def make_sink(text: str) -> Sink:
    """Make a sink from ``NAME`` or ``NAME:ARGUMENT``.

    Args:
        text: The name is one of

            * ``jsonl:PATH``, ``csv:PATH``, ``tensorboard:FOLDER``: see :class:`JSONLSink`, :class:`CSVSink` and
              :class:`TensorBoardSink`;
            * ``wandb`` or ``wandb:PROJECT``, ``mlflow`` or ``mlflow:EXPERIMENT``: see :class:`WandbSink` and
              :class:`MLflowSink`;
            * the name of an entry point of the group ``mlbench.sinks``.

    Returns:
        The sink, for the argument ``sinks`` of a tracker.

    Raises:
        ConfigurationError: The name is unknown, the argument is missing or not expected, or the code of an entry point
            cannot be imported.
        MissingDependencyError: The sink needs a package that is not installed.

    Example:
        >>> make_sink("jsonl:run.jsonl")
        JSONLSink('run.jsonl')
    """
    name, _, argument = text.partition(":")
    # A package must not replace a sink of this one.
    makers: dict[str, Callable[..., Sink] | EntryPoint] = {
        **{entry.name: entry for entry in entry_points(group="mlbench.sinks")},
        **_BUILT_IN,
    }
    if name not in makers:
        raise ConfigurationError(f"sink must be NAME or NAME:ARGUMENT, not {text!r}: NAME is one of {sorted(makers)}")
    maker = makers[name]
    if isinstance(maker, EntryPoint):
        entry_point = maker
        try:
            maker = entry_point.load()
        # All errors, because the code of another package may raise any while it is imported.
        except Exception as error:
            raise ConfigurationError(f"sink {name!r} ({entry_point.value}) cannot be imported: {error}") from error
    arguments = [argument] if argument else []
    try:
        inspect.signature(maker).bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(f"sink must be {name!r} with the right argument, not {text!r}: {error}") from error
    return maker(*arguments)
