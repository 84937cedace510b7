"""Write the numbers of a tracker to files, services or functions, in addition to the master.

A sink is called ``sink(name, value, epoch, step)``. It may also have these methods:

* ``record(name, value, epoch, step, time_s)`` is called with the statistics, instead of the sink
  itself. ``time_s`` is the time of the number, in seconds since ``Tracker.start()``. The sink
  itself is then called only for the times of the steps and the result of the goal, which are also
  in the events.
* ``event(kind, content)`` receives the events of the run, see :meth:`SinkList.event`. The event
  ``"end"`` has the state in which the run ended.
* ``flush()`` is called after each epoch and at the end.
* ``write_summary(summary)`` and ``close()`` are called at the end.

If a sink raises an exception, it is not called again. The tracker logs one warning that names the
sink, and the run continues.

:func:`make_sink` creates a sink from a text, for example from an option of a command. A package
adds sinks with the entry point group ``mlbench.sinks``. An entry point has a name, and names a
function or class that returns a sink. This function is called with no argument, or with one string.

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
import itertools
import json
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TextIO

from mlbench_core.errors import ConfigurationError, require
from mlbench_core.tracking.process_end import call_at_end, forget

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
            value: The number. Only ``"TaskResult"``, the result of a reached goal, is a string.
            epoch: Epoch, from 0.
            step: Training batches finished so far.
        """


class SinkList(list[Sink]):
    """The sinks of a tracker.

    A sink that raises an exception, for example on a full disk, is removed, and the run continues.

    Attributes:
        latest: The numbers of the latest step, a dictionary from name to [value, epoch]. A
            checkpoint of the tracker keeps them, because a resumed run begins at this step.

    Raises:
        TypeError: A sink is not callable.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        super().__init__(sinks)
        self.resume(0, {})
        for sink in self:
            if not callable(sink):
                raise TypeError(
                    f"sinks must be callable, not {sink!r}: "
                    "a sink is called (name, value, epoch, step)"
                )

    def resume(self, step: int, latest: dict[str, list[Any]]) -> None:
        """Continue from a step with the :attr:`latest` numbers of its checkpoint.

        The sinks receive nothing.
        """
        self._step, self.latest = step, latest

    def record(self, name: str, value: float | str, epoch: int, step: int, time_s: float) -> None:
        """Pass a statistic to every sink.

        Sinks without a method ``record`` receive it without ``time_s``.
        """
        self._keep(name, value, epoch, step)
        # A copy, because a sink that fails is removed while the loop runs.
        for sink in tuple(self):
            record = getattr(sink, "record", None)
            if record is None:
                self._try(sink, sink, name, value, epoch, step)
            else:
                self._try(sink, record, name, value, epoch, step, time_s)

    def number(self, name: str, value: float | str, epoch: int, step: int) -> None:
        """Call every sink with a number that is also in the events."""
        self._keep(name, value, epoch, step)
        self.call("__call__", name, value, epoch, step)

    def _keep(self, name: str, value: float | str, epoch: int, step: int) -> None:
        # A number may be read late and belong to an earlier step.
        if step > self._step:
            self._step, self.latest = step, {}
        if step == self._step:
            self.latest[name] = [value, epoch]

    def event(self, kind: str, content: Callable[[], Mapping[str, Any]]) -> None:
        """Pass an event of the run to every sink that has a method ``event``.

        Args:
            kind: ``"start"`` when the run starts, ``"epoch"`` at the end of an epoch, ``"goal"``
                when the goal is reached, or ``"end"`` when the tracker is closed. The content of
                ``"start"`` has ``resumed``, ``epoch``, ``step``, and in a resumed run
                :attr:`latest`. The content of ``"end"`` has ``state``: ``"finished"``, ``"failed"``
                or ``"stopped"``.
            content: Function that returns the content of the event as plain containers. It is
                called only if a sink has a method ``event``.
        """
        receivers = [sink for sink in self if hasattr(sink, "event")]
        if receivers:
            event = content()
            for sink in receivers:
                self._try(sink, sink.event, kind, event)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every sink that has it."""
        for sink in tuple(self):
            if hasattr(sink, method):
                self._try(sink, getattr(sink, method), *arguments)

    def _try(self, sink: Sink, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        # Catch all errors: a sink may be the user's code, and its failure must not end training.
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
            # A name may have characters that UTF-8 cannot write, such as half a surrogate pair.
            self._file = self.path.open(
                "a", encoding="utf-8", errors="backslashreplace", newline=""
            )
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
    """Write one JSON object per line: time, epoch, step, name and value.

    The last line is the summary of the run. JSON has no infinities, so a value that is not finite
    is written as null.

    Args:
        path: The file to append to; its folder is created.
        fields: Additional fields of every line, for example ``rank=0``.
    """

    def __init__(self, path: str | os.PathLike[str], **fields: str | int | float) -> None:
        super().__init__(path)
        self._fields = fields

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one line."""
        finite: float | str | None = value
        # An integer is finite, and may be too large for math.isfinite().
        if not isinstance(value, (str, int)) and not math.isfinite(value):
            finite = None
        self._write({"epoch": epoch, "step": step, "name": name, "value": finite})

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's summary as a line ``{"summary": {...}}``."""
        self._write({"summary": _strict(summary)})

    def _write(self, content: dict[str, Any]) -> None:
        line = {"time": datetime.now(timezone.utc).isoformat(), **self._fields, **content}
        self._open().write(json.dumps(line) + "\n")


class CSVSink(_FileSink):
    """Write rows of epoch, step, name and value to a file, below one header line.

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
    """Write scalars and texts for TensorBoard; the step is the number of finished batches.

    A resumed run repeats the batches after its checkpoint. TensorBoard then hides their first
    values (``purge_step``).

    Args:
        folder: Folder of the event files. It should belong to one run, because TensorBoard draws
            one curve for each folder.

    Raises:
        MissingDependencyError: TensorBoard or torch is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboard", "tensorboard")
        writers: Any = require("torch.utils.tensorboard", "torch")
        self._folder = os.fspath(folder)
        self._open = partial(writers.SummaryWriter, self._folder)
        self._writer = self._open()
        self._refused: set[str] = set()

    def __repr__(self) -> str:
        return f"TensorBoardSink({self._folder!r})"

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one scalar or text."""
        if name in self._refused:
            return
        try:
            if isinstance(value, str):
                self._writer.add_text(_utf8(name), _utf8(value), step)
            else:
                self._writer.add_scalar(_utf8(name), value, step)
        # Errors of the value, for example of an integer that is too large. A full disk raises
        # OSError, which ends the sink.
        except (TypeError, ValueError, OverflowError) as error:
            self._refused.add(name)
            _warn_of_refused(type(self).__name__, name, error)

    def event(self, kind: str, content: Mapping[str, Any]) -> None:
        """Hide the values of an earlier process after the step from which the run is resumed."""
        if kind != "start" or not content["resumed"]:
            return
        self._writer.close()
        self._writer = self._open(purge_step=content["step"])
        # TensorBoard also hides this step, and with it the validation before the checkpoint was
        # saved. So these numbers are written again.
        for name, (value, epoch) in content.get("latest", {}).items():
            self(name, value, epoch, content["step"])

    def flush(self) -> None:
        """Write the queued values."""
        self._writer.flush()

    def close(self) -> None:
        """Write the queued values and end the writer's thread."""
        self._writer.close()


class _ServiceSink:
    """A sink with a run on a service.

    The service is notified of the end of this process, even if nobody closes the sink.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()
        self._state = "finished"
        self._is_open = True
        call_at_end(self._end)

    def event(self, kind: str, content: Mapping[str, Any]) -> None:
        """Note how the run ended."""
        if kind == "end":
            self._state = content["state"]

    def close(self) -> None:
        """End the run on the service."""
        self._end(self._state)

    def _end(self, state: str) -> None:
        forget(self._end)
        if self._is_open:
            self._is_open = False
            self._finish(state)

    def _finish(self, state: str) -> None:
        raise NotImplementedError

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused.add(name)
        _warn_of_refused(type(self).__name__, name, error)


class WandbSink(_ServiceSink):
    """Write to a run of Weights & Biases.

    Numbers are rows of the run's history, by the number of finished batches. Texts and the summary
    of the tracker are entries of the run's summary. The run ends with the exit code 0, or 1 after
    an exception, or 255 if it was stopped.

    If training is resumed, the sink creates a new run, unless ``options`` or ``WANDB_RUN_ID`` and
    ``WANDB_RESUME=allow`` name the earlier one. Then it adds only the batches that the earlier run
    lacks.

    Args:
        project: Name of the project; None for the default of ``wandb``.
        options: Other arguments of ``wandb.init``, for example ``mode="offline"`` or ``name="run
            7"``.

    Raises:
        MissingDependencyError: The package ``wandb`` is not installed.
    """

    _EXIT_CODES = MappingProxyType({"finished": 0, "failed": 1, "stopped": 255})

    def __init__(self, project: str | None = None, **options: Any) -> None:
        wandb: Any = require("wandb", "wandb")
        self._run = wandb.init(project=project, **options)
        # The step of wandb must not decrease, but numbers that are read late belong to earlier
        # batches. So the axis is a separate metric.
        self._run.define_metric("*", step_metric="batch")
        resumed = getattr(self._run, "resumed", False) is True
        self._first_batch = 0
        if resumed:
            # A resumed run repeats the batches after its checkpoint, which wandb has already.
            self._first_batch = int(self._run.summary.get("batch", 0))
        super().__init__()

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Write one row of the history, or a text."""
        if name in self._refused or step < self._first_batch:
            return
        try:
            if isinstance(value, str):
                self._run.summary[_utf8(name)] = _utf8(value)
            else:
                self._run.log({_utf8(name): value, "epoch": epoch, "batch": step})
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(name, error)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Add the totals of the run to the run's summary."""
        self._run.summary.update(summary)

    def _finish(self, state: str) -> None:
        self._run.finish(exit_code=self._EXIT_CODES[state])


class MLflowSink(_ServiceSink):
    """Write to a run of MLflow.

    Numbers are metrics, by the number of finished batches. Texts are tags. The summary is the
    artifact ``summary.json``. ``MLFLOW_TRACKING_URI`` names the server, file or folder of the runs.
    The run ends as ``FINISHED``, as ``FAILED`` after an exception, or as ``KILLED`` if it was
    stopped.

    Characters and paths that MLflow does not allow in the name of a metric become ``_``, and a long
    name is cut. A metric that MLflow still refuses is left out with one warning.

    If training is resumed, the sink creates a new run, unless ``MLFLOW_RUN_ID`` names the earlier
    one. Then it adds only the steps that the earlier run lacks.

    Args:
        experiment: Name of the experiment, which is created if it does not exist.
        run_name: Name of the run; None for one that MLflow chooses.

    Raises:
        MissingDependencyError: The package ``mlflow`` is not installed.
    """

    # The largest number of metrics that a server accepts in one request.
    _MOST = 1000
    _LONGEST_NAME = 250
    # Errors of the server or of the connection to it. A separate request for each metric would only
    # wait as long as the first one.
    _NOT_OF_A_METRIC = (
        "INTERNAL_ERROR",
        "TEMPORARILY_UNAVAILABLE",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
    )
    _STATES = MappingProxyType({"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"})

    def __init__(self, experiment: str = "Default", run_name: str | None = None) -> None:
        mlflow: Any = require("mlflow", "mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        self._metrics: list[Any] = []
        self._names: dict[str, str] = {}
        # Last step of each metric of a run that is continued; None for a new run.
        self._last_steps: dict[str, int] | None = None
        earlier = os.environ.get("MLFLOW_RUN_ID")
        if earlier:
            self._run: str = earlier
            self._client.update_run(earlier, status="RUNNING")
            self._last_steps = {}
        else:
            experiment_id = self._experiment(experiment)
            self._run = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        super().__init__()

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except Exception:
            # Another run may have created it since.
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def __call__(self, name: str, value: float | str, epoch: int, step: int, /) -> None:
        """Queue one metric, or write a text."""
        name = self._names.get(name) or self._allowed_name(name)
        if name in self._refused:
            return
        try:
            if isinstance(value, str):
                self._client.set_tag(self._run, name, _utf8(value))
                return
            # MLflow keeps every number as a float.
            number = float(value)
        except Exception as error:
            self._refuse(name, error)
            return
        if self._last_steps is not None:
            if name not in self._last_steps:
                history = self._client.get_metric_history(self._run, name)
                self._last_steps[name] = max((metric.step for metric in history), default=-1)
            if step <= self._last_steps[name]:
                return
        self._metrics.append(self._metric(name, number, round(time.time() * 1000), step))
        # A request for each number would slow training down.
        if len(self._metrics) == self._MOST:
            self.flush()

    def _allowed_name(self, name: str) -> str:
        """Return the name that a metric gets in MLflow."""
        parts = []
        for part in re.sub(r"[^\w./ -]", "_", name).split("/"):
            # MLflow takes a name for a path, and refuses one that has a shorter form.
            if part in ("", ".", ".."):
                part = "_"
            parts.append(part)
        allowed = "/".join(parts)
        unique = posixpath.normpath(allowed[: self._LONGEST_NAME])
        # Different names stay different, so that no curve mixes two metrics.
        number = 2
        while unique in self._names.values():
            ending = f"_{number}"
            unique = posixpath.normpath(allowed[: self._LONGEST_NAME - len(ending)]) + ending
            number += 1
        self._names[name] = unique
        return unique

    def flush(self) -> None:
        """Write the queued metrics."""
        metrics, self._metrics = self._metrics, []
        if not metrics:
            return
        try:
            self._client.log_batch(self._run, metrics=metrics)
        except Exception as error:
            # MLflow refuses all metrics of a request if it refuses one of them.
            if getattr(error, "error_code", None) in self._NOT_OF_A_METRIC:
                raise
            self._send_by_name(metrics, error)

    def _send_by_name(self, metrics: list[Any], error: Exception) -> None:
        """Send each metric in a separate request, and leave out those that are refused."""
        by_name: dict[str, list[Any]] = {}
        for metric in metrics:
            by_name.setdefault(metric.key, []).append(metric)
        refused: dict[str, Exception] = {}
        for name, some in by_name.items():
            try:
                self._client.log_batch(self._run, metrics=some)
            except Exception as refusal:
                refused[name] = refusal
        if len(refused) == len(by_name) > 1:
            # The server refused every metric, so no single metric is the cause.
            raise error
        for name, reason in refused.items():
            self._refuse(name, reason)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary as an artifact."""
        self._client.log_dict(self._run, _strict(summary), "summary.json")

    def _finish(self, state: str) -> None:
        # A process that is stopped has not flushed.
        try:
            self.flush()
        finally:
            self._client.set_terminated(self._run, status=self._STATES[state])


def _warn_of_refused(sink: str, name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    logger.warning("sink %s leaves out the numbers of %.100r: %.300s", sink, name, reason)


def _strict(value: Any) -> Any:
    """Return plain containers with None in place of NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _utf8(text: str) -> str:
    """Return a text without half surrogate pairs, which UTF-8 cannot write."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_BUILT_IN: dict[str, Callable[..., Sink]] = {
    "csv": CSVSink,
    "jsonl": JSONLSink,
    "mlflow": MLflowSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}


def make_sink(text: str, run_id: str | None = None, resume: bool = False) -> Sink:
    """Create a sink from ``NAME`` or ``NAME:ARGUMENT``.

    With ``run_id``, several runs can use the same text: ``{run_id}`` in it is replaced by the id.
    Each run gets its own folder in ``FOLDER``. If the file ``PATH`` exists, the run writes to
    another file with the id in its name.

    Args:
        text: The name is one of

            * ``jsonl:PATH``, ``csv:PATH``, ``tensorboard:FOLDER``: see :class:`JSONLSink`,
              :class:`CSVSink` and :class:`TensorBoardSink`;
            * ``wandb`` or ``wandb:PROJECT``, ``mlflow`` or ``mlflow:EXPERIMENT``: see
              :class:`WandbSink` and :class:`MLflowSink`;
            * the name of an entry point of the group ``mlbench.sinks``.
        run_id: Id of the run; None to use paths exactly as they are.
        resume: True to continue the file or folder of this run.

    Returns:
        The sink, for the argument ``sinks`` of a tracker.

    Raises:
        ConfigurationError: The name is unknown, the argument is missing or not expected, its file
            cannot be created, or the code of an entry point cannot be imported.
        MissingDependencyError: The sink needs a package that is not installed.

    Example:
        >>> make_sink("jsonl:run.jsonl")
        JSONLSink('run.jsonl')
    """
    name, _, argument = text.partition(":")
    makers: dict[str, Callable[..., Sink] | EntryPoint] = {}
    for entry in entry_points(group="mlbench.sinks"):
        makers[entry.name] = entry
    # Added last, because a package must not replace a sink of this one.
    makers.update(_BUILT_IN)
    if name not in makers:
        raise ConfigurationError(
            f"sink must be NAME or NAME:ARGUMENT, not {text!r}: NAME is one of {sorted(makers)}"
        )
    maker = makers[name]
    if isinstance(maker, EntryPoint):
        entry_point = maker
        try:
            maker = entry_point.load()
        # All errors, because the code of another package may raise any while it is imported.
        except Exception as error:
            raise ConfigurationError(
                f"sink {name!r} ({entry_point.value}) cannot be imported: {error}"
            ) from error
    arguments = []
    if argument:
        arguments.append(argument)
    try:
        inspect.signature(maker).bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"sink must be {name!r} with the right argument, not {text!r}: {error}"
        ) from error
    if argument and run_id is not None:
        if maker in (CSVSink, JSONLSink, TensorBoardSink):
            arguments = [_own_path(argument, run_id, resume, is_folder=maker is TensorBoardSink)]
        else:
            arguments = [argument.replace("{run_id}", run_id)]
    return maker(*arguments)


def _own_path(argument: str, run_id: str, resume: bool, is_folder: bool) -> str:
    """Create the file or folder to which only this run writes, and return its path.

    The candidates are PATH, PATH with the id, and PATH with the id and a number. In a folder for
    several runs, they are the id, and the id with a number. A new run takes the first candidate
    that it can create. A resumed run takes the last one that exists.
    """
    path = Path(argument.replace("{run_id}", run_id))
    # A terminal or a pipe is used as it is.
    if not is_folder and path.exists() and not path.is_file():
        return str(path)
    if is_folder and "{run_id}" not in argument:
        # Several runs share the folder.
        first = path / run_id
        stem, suffix, candidates = first.name, "", [first]
    else:
        first = path
        stem, suffix = f"{path.stem}-{run_id}", path.suffix
        candidates = [first, first.with_name(stem + suffix)]
    others = (first.with_name(f"{stem}-{number}{suffix}") for number in itertools.count(2))
    last: Path | None = None
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        for candidate in itertools.chain(candidates, others):
            if resume and candidate.exists():
                last = candidate
                continue
            if last is not None:
                break
            # If several runs start at once, only one of them can create it.
            try:
                if is_folder:
                    candidate.mkdir()
                else:
                    candidate.touch(exist_ok=False)
            except FileExistsError:
                continue
            break
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"sink must have a path that can be written, not {argument!r}: {reason}"
        ) from error
    chosen = last or candidate
    if chosen != first:
        logger.warning("sink: %s exists, so run %s writes to %s", first, run_id, chosen)
    return str(chosen)
