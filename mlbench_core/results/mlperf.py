"""Write the log of a run with the keys of MLPerf, as the package ``mlperf-logging`` reads it.

The log is a view of the raw lines of rank 0. A value that the run does not know is left out, even
if MLPerf requires it. A submitter adds ``submission_org`` and ``submission_status``.

===============================  ==================================================================
key                              value
===============================  ==================================================================
``submission_benchmark``         ``mlbench_task1a`` and so on, with ``_digits`` if these replace its
                                 data set, ``_light`` with the light goal, ``_after_60s`` with the
                                 goal of a fixed training time; or ``mlbench_`` and the program's
                                 name
``submission_division``          ``closed`` or ``open``, by the rules of MLBench
``submission_platform``          Hosts, processor and GPUs
``cache_clear``                  False: MLBench clears no cache
``seed``, ``opt_name``           Seed and algorithm
``global_batch_size``, ...       Hyper-parameters, see :func:`mlperf_lines`
``init_start``                   The run begins to record
``init_stop``, ``run_start``     The wall clock of the run starts
``block_start``, ``block_stop``  Training between two validations
``epoch_start``, ``epoch_stop``  Training of an epoch, without its last validation; epochs count
                                 from 1
``eval_start``, ``eval_stop``    A validation
``eval_accuracy``                The metric of the goal, in its own unit: accuracies are in percent
``tracked_stats``                ``throughput``: samples per second of all workers, over the whole
                                 run
``run_stop``                     ``success``: the goal is reached or, without a goal, the run has
                                 finished; else ``aborted``. Nothing follows.
===============================  ==================================================================

The end of a validation is the time of its last record. It began earlier by the time of validation
that the run counted, or, if that is not known, with the last record of training.

The names of MLPerf's own benchmarks are not used, because its current suite has none of the tasks.
Tasks 1b, 4a and 4b have the model, the data and the target of its former ``resnet``, ``gnmt`` and
``transformer``, but not their rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from itertools import dropwhile, pairwise
from pathlib import PurePath
from typing import Any

from mlbench_core.results.environment import machine_of
from mlbench_core.tasks import get_task

__all__ = ["mlperf_lines"]

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Key of MLPerf, and the options that give its value; the first one that is known counts.
_OPTIONS = {
    "global_batch_size": ("global_batch_size", "global_batch"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "update_freq"),
    "opt_base_learning_rate": ("learning_rate", "lr"),
    "train_samples": ("train_samples",),
    "eval_samples": ("eval_samples",),
}
# In these tasks every batch of a worker has --batch-size samples, and every batch is an update. In
# others it is an upper bound, or several batches are one update.
_FIXED_BATCH_TASKS = ("1a", "1b", "3a")


def mlperf_lines(
    result: Mapping[str, Any], environment: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return the lines of ``mlperf.log``.

    The option ``--lr`` of a program gives ``opt_base_learning_rate``, ``--global-batch-size`` gives
    ``global_batch_size``, ``--gradient-accumulation-steps``, ``--train-samples`` and
    ``--eval-samples`` give the keys of their names. The result names only options that differ from
    their default, so other keys are left out.

    If the wall clock was set back during the run, an event has the time of the event before it.

    Args:
        result: The content of ``result.json``.
        environment: The content of ``environment.json``.
        lines: The raw lines, in the order of ``metrics.jsonl``. Those of other ranks than 0 are
            ignored.

    Returns:
        Lines without a line break, each ``:::MLLOG`` and a JSON object. Empty if rank 0 has written
        no line.

    Raises:
        KeyError: A line lacks a field that all lines of its kind have.
        ValueError: A line has no valid time.

    Example:
        >>> start = {"rank": 0, "kind": "start", "time": "2026-01-01T00:00:00+00:00"}
        >>> result = {"configuration": {"task": "1a", "seed": 42}, "run": {"state": "unfinished"}}
        >>> for line in mlperf_lines(result, {}, [start])[:2]:
        ...     print(line)  # doctest: +ELLIPSIS
        :::MLLOG {"namespace": "", "time_ms": 1767225600000, ... "value": "mlbench_task1a", ...}
        :::MLLOG {"namespace": "", "time_ms": 1767225600000, ... "cache_clear", "value": false, ...}
    """
    own = [line for line in lines if line["rank"] == 0]
    last_start = 0
    for index, line in enumerate(own):
        if _is_start(line):
            last_start = index
    kept = []
    for index, line in enumerate(own):
        # The end of a part of the run that was resumed later is not the end of the run.
        if line["kind"] != "end" or index > last_start:
            kept.append(line)
    if not kept:
        return []
    log = _Log(result)
    log.describe(_milliseconds(kept[0]), environment)
    log.start(kept)
    for before, line in pairwise(kept):
        if not log.is_stopped:
            log.add(line, _milliseconds(before))
    log.end_validation()
    return log.lines


def _is_start(line: Mapping[str, Any]) -> bool:
    return bool(line["kind"] == "start")


class _Log:
    """The log of a run, written while its raw lines are read one after the other.

    A block begins with the first line that has more batches than the line before, and ends with the
    next validation. A validation consists of all records named ``val_...`` before the next batch or
    the end of the epoch. They are kept until then, because only the line after them shows if the
    epoch ends with this validation.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self.is_stopped = False
        self._result = result
        self._configuration: Mapping[str, Any] = result["configuration"]
        self._goal = self._configuration.get("goal") or result.get("goal") or {}
        self._goal_ms: int | None = None
        self._latest_ms = 0
        self._step = 0
        self._epoch: int | None = None
        self._block: int | None = None
        self._validation: list[Mapping[str, Any]] = []
        self._trained_ms = 0
        self._validation_s: float | None = 0.0

    def describe(self, time_ms: int, environment: Mapping[str, Any]) -> None:
        """Write the events that are known before the run begins."""
        configuration = self._configuration
        values = {
            "submission_benchmark": self._benchmark(),
            "submission_division": configuration.get("division"),
            "submission_platform": self._platform(environment),
            "cache_clear": False,
            "seed": configuration.get("seed"),
            "opt_name": configuration.get("algorithm"),
            **self._hyper_parameters(),
        }
        for key, value in values.items():
            if value is not None:
                self._write(time_ms, _POINT, key, value)
        self._write(time_ms, _START, "init_start")

    def _benchmark(self) -> str | None:
        key, program = self._configuration.get("task"), self._configuration.get("program")
        if key is None:
            if not program:
                return None
            return f"mlbench_{PurePath(program).stem}"
        name, dataset = f"mlbench_task{key}", self._configuration.get("dataset")
        # A stand-in for the task's data set or another goal does not count as a result of the task.
        if dataset not in (None, get_task(key).dataset):
            name += f"_{dataset}"
        budget_s = self._goal.get("budget_s")
        if self._configuration.get("light"):
            name += "_light"
        elif budget_s is not None:
            name += f"_after_{budget_s:g}s"
        return name

    def _platform(self, environment: Mapping[str, Any]) -> str | None:
        machine = {**machine_of(environment), **(self._result.get("machine") or {})}
        parts = []
        if machine.get("hosts"):
            parts.append(f"{machine['hosts']} x")
        if machine["cpu"]:
            parts.append(str(machine["cpu"]))
        if machine["cores"]:
            parts.append(f"({machine['cores']} cores)")
        if machine["gpus"]:
            parts.append(f"with {machine['gpus']} x {machine['gpu']}")
        return " ".join(parts) or None

    def _hyper_parameters(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name, value in (self._configuration.get("options") or {}).items():
            options[str(name).lstrip("-").replace("-", "_")] = value
        batch, workers = options.get("batch_size"), self._configuration.get("workers")
        is_fixed = self._configuration.get("task") in _FIXED_BATCH_TASKS
        if is_fixed and isinstance(batch, int) and workers:
            options.setdefault("global_batch_size", batch * workers)
        parameters = {}
        for key, names in _OPTIONS.items():
            # Tasks name the same parameter differently; the first name that was given counts.
            named = list(filter(options.__contains__, names))
            if named and isinstance(options[named[0]], (int, float)):
                parameters[key] = options[named[0]]
        return parameters

    def start(self, lines: list[Mapping[str, Any]]) -> None:
        """Write the start of the run's wall clock, if a line shows when it was."""
        times_ms = []
        # A part of the run that failed before its clock started may have left nothing but its
        # start.
        for line in dropwhile(_is_start, lines):
            if _is_start(line):
                break
            # The line "end" after a failure has no time on the clock.
            if "time_s" in line:
                times_ms.append(_milliseconds(line) - line["time_s"] * 1e3)
        # A line may be written later than at its own time on the clock, but never earlier.
        start_ms = min(times_ms, default=None)
        self.is_stopped = start_ms is None
        if start_ms is not None:
            self._write(round(start_ms), _END, "init_stop")
            self._write(round(start_ms), _START, "run_start")

    def add(self, line: Mapping[str, Any], before_ms: int) -> None:
        """Write the events that a line shows.

        Args:
            line: The line.
            before_ms: Time of the line before it, ms since 1970.
        """
        kind, time_ms, step = line["kind"], _milliseconds(line), line.get("step", 0)
        has_trained = kind != "start" and step > self._step
        if has_trained or kind in ("start", "epoch", "end"):
            self.end_validation(line)
            if self.is_stopped:
                return
        if has_trained:
            self._step = step
            self._start_block(line["epoch"], before_ms)
        if kind == "stat" and line["name"].startswith("val_"):
            if not self._validation:
                self._trained_ms = before_ms
            self._validation.append(line)
        elif kind == "goal":
            self._goal_ms = time_ms
            # A goal that watches the training is reached without a validation.
            if not self._validation:
                self._stop(time_ms, "success")
        elif kind == "epoch":
            self._end_block(time_ms, ends_epoch=True)
            self._validation_s = line["totals"]["validation_s"]
        elif kind == "start":
            # The run was interrupted, and continues from the batch of a checkpoint, or begins
            # again.
            self._end_block(before_ms, ends_epoch=True, metadata={"status": "aborted"})
            self._step = step
            self._validation_s = 0.0
            if step:
                # The time of validation in the checkpoint is not known.
                self._validation_s = None
        elif kind == "end":
            status = "aborted"
            # With a goal, only the line of the goal is a success, and that has stopped the log.
            if line["state"] == "finished" and not self._goal:
                status = "success"
            self._stop(time_ms, status)

    def end_validation(self, line: Mapping[str, Any] | None = None) -> None:
        """Write the validation whose records were kept, and the end of a run with its goal.

        Args:
            line: The line after them; None if there is none.
        """
        if not self._validation:
            return
        last, stop_ms = self._validation[-1], _milliseconds(self._validation[-1])
        start_ms = self._trained_ms
        if line is not None and "totals" in line and self._validation_s is not None:
            # With several validations in an epoch, this is the time of all of them. So the last
            # batch is a limit, too.
            validation_ms = (line["totals"]["validation_s"] - self._validation_s) * 1e3
            start_ms = max(start_ms, round(stop_ms - validation_ms))
        continues = line is not None and line["kind"] == "stat" and line["epoch"] == self._epoch
        self._end_block(start_ms, ends_epoch=not continues)
        metadata = {"epoch_num": last["epoch"] + 1, "step_num": last["step"]}
        self._write(start_ms, _START, "eval_start", metadata=metadata)
        self._write(stop_ms, _END, "eval_stop", metadata=metadata)
        metric = self._metric()
        accuracy = None
        for record in self._validation:
            if record["name"] == metric and record["value"] is not None:
                accuracy = record["value"]
        if accuracy is not None:
            with_metric = {**metadata, "metric": metric}
            self._write(stop_ms, _POINT, "eval_accuracy", accuracy, with_metric)
        self._validation = []
        if self._goal_ms is not None:
            self._stop(self._goal_ms, "success")

    def _metric(self) -> str | None:
        """Return the statistic that is the accuracy: that of the goal, or the primary metric."""
        if self._goal.get("metric"):
            return str(self._goal["metric"])
        best = (self._result.get("best") or {}).get("metric")
        if not best:
            return None
        return f"val_global_{best}"

    def _start_block(self, epoch: int, time_ms: int) -> None:
        if self._epoch is not None and self._epoch != epoch:
            # The script does not report the end of its epochs.
            self._end_block(time_ms, ends_epoch=True)
        if self._block is None:
            self._block = epoch
            metadata = {"first_epoch_num": epoch + 1, "epoch_count": 1}
            self._write(time_ms, _START, "block_start", metadata=metadata)
        if self._epoch is None:
            self._epoch = epoch
            self._write(time_ms, _START, "epoch_start", metadata={"epoch_num": epoch + 1})

    def _end_block(
        self, time_ms: int, *, ends_epoch: bool, metadata: Mapping[str, Any] | None = None
    ) -> None:
        metadata = metadata or {}
        if ends_epoch and self._epoch is not None:
            epoch = {"epoch_num": self._epoch + 1, **metadata}
            self._write(time_ms, _END, "epoch_stop", metadata=epoch)
            self._epoch = None
        if self._block is not None:
            block = {"first_epoch_num": self._block + 1, **metadata}
            self._write(time_ms, _END, "block_stop", metadata=block)
            self._block = None

    def _stop(self, time_ms: int, status: str) -> None:
        self._end_block(time_ms, ends_epoch=True)
        throughput = self._result.get("samples_per_s")
        if throughput is not None:
            self._write(time_ms, _POINT, "tracked_stats", {"throughput": throughput})
        self._write(time_ms, _END, "run_stop", metadata={"status": status})
        self.is_stopped = True

    def _write(
        self,
        time_ms: int,
        event: str,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        # The wall clock may be set back during a run.
        self._latest_ms = max(self._latest_ms, time_ms)
        content = {
            "namespace": "",
            "time_ms": self._latest_ms,
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": dict(metadata or {}),
        }
        self.lines.append(f":::MLLOG {json.dumps(content, allow_nan=False)}")


def _milliseconds(line: Mapping[str, Any]) -> int:
    """Return the time of a line in ms since 1970."""
    # Python 3.10 does not know the letter for UTC.
    time = datetime.fromisoformat(line["time"].replace("Z", "+00:00"))
    return (time - _EPOCH) // timedelta(milliseconds=1)
