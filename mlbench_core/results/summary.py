"""Compute the result of a run from its raw lines, to write ``result.json`` and to verify it later.

The times of a run are those of its slowest worker, phase by phase: the maximum over all workers of
the time of each phase. The times of rank 0 stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlbench_core.results.environment import machine_of, software_of
from mlbench_core.results.lines import SCHEMA_VERSION
from mlbench_core.run_terms import TRACKER_PHASES
from mlbench_core.statistics import QuantileSketch
from mlbench_core.wire_bytes import total_wire_bytes

__all__ = ["goal_message", "summarize"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class _Worker:
    """The lines of one worker that decide the result: its first goal, and the last line of every other kind."""

    start: dict[str, Any] | None = None
    first_start: dict[str, Any] | None = None
    resumed: int = 0
    goal: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    totals: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 0

    def add(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "start":
            self.start = line
            self.first_start = self.first_start or line
            self.resumed += bool(line.get("resumed"))
            # The end of an earlier part of the run is not the end of the run. A goal that was
            # reached after the checkpoint is reached again.
            self.end = None
            if self.goal is not None and (self.goal.get("step") or 0) > line.get("step", 0):
                self.goal = None
        elif kind == "goal":
            self.goal = self.goal or line
        elif kind == "end":
            self.end = line
            self.epochs = max(self.epochs, int(line.get("epochs") or 0))
        elif kind == "epoch":
            self.epochs = max(self.epochs, int(line.get("epoch") or 0) + 1)
        if "totals" in line and kind != "goal":
            self.totals = line["totals"]


def summarize(lines: Iterable[Mapping[str, Any]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the content of ``result.json``, except the checksums of the other files.

    Args:
        lines: The raw lines of all workers, see :mod:`mlbench_core.results.lines`. A run that has
            not ended has the state ``"unfinished"``, and the totals of its last finished epoch.
        environment: The content of ``environment.json``.

    Returns:
        The result, after the JSON schema ``result.schema.json`` in this package.

    Raises:
        ValueError: No worker has a line ``start``.
    """
    workers: dict[int, _Worker] = {}
    for line in lines:
        if line["kind"] != "stat":
            workers.setdefault(line["rank"], _Worker()).add(dict(line))
    starts = [workers[rank].start for rank in sorted(workers) if workers[rank].start is not None]
    if not starts:
        raise ValueError("metrics.jsonl has no start record: the run never began")
    start, first, ranks = (
        starts[0] or {},
        workers[min(workers)],
        [workers[rank] for rank in sorted(workers)],
    )
    configuration = dict(start.get("configuration") or {})
    number = configuration.get("workers") or len(ranks)
    is_measured = _is_communication_measured(ranks, number)
    times = _slowest_and_first([worker.totals for worker in ranks], is_measured)
    train_s = times["slowest"]["train_s"]
    samples, tokens = (
        sum(worker.totals.get(name, 0) for worker in ranks) for name in ("samples", "tokens")
    )
    ends = [worker.end or {} for worker in ranks]
    hosts = {worker.start.get("host") for worker in ranks if worker.start is not None}
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "id": start.get("run_id"),
            "name": (environment.get("variables") or {}).get("MLBENCH_RUN_NAME") or start.get("run_id"),
            **_state(ranks, number),
            "started_at": (first.first_start or start).get("time"),
            "ended_at": max((end["time"] for end in ends if "time" in end), default=None),
            "times_resumed": first.resumed,
        },
        "configuration": configuration,
        "machine": {**machine_of(environment), "hosts": len(hosts)},
        "software": software_of(environment),
        "goal": _goal(ranks, configuration, is_measured),
        "times": times,
        "steps_s": _steps(ranks),
        "epochs": max(worker.epochs for worker in ranks),
        "batches": max(worker.totals.get("batches", 0) for worker in ranks),
        "samples": samples,
        "tokens": tokens,
        # All workers wait for the slowest one.
        "samples_per_s": samples / train_s if samples and train_s else None,
        "tokens_per_s": tokens / train_s if tokens and train_s else None,
        "batch_s": _batch_quantiles(ends),
        "bytes_sent": _sums(
            [worker.totals.get("communication_size_bytes", 0) if is_measured else None for worker in ranks]
        ),
        "bytes_on_wire": _sums([_wire_bytes(worker) for worker in ranks] if is_measured else [None] * len(ranks)),
        "exchanges": ranks[0].totals.get("exchanges") if is_measured else None,
        **_collectives(ends, number),
        "best": _best(ends[0], configuration),
        "memory_peak_bytes": max(_known(ends, "memory_peak_bytes"), default=None),
        "energy_j": sum(_known(ends, "energy_j")) if _known(ends, "energy_j") else None,
    }  # fmt: skip


def _state(ranks: list[_Worker], number: int) -> dict[str, Any]:
    """Return ``state`` and ``reason``: finished only if every worker has finished."""
    ends = [worker.end for worker in ranks if worker.end is not None]
    failed = next((end for end in ends if end.get("state") != "finished"), None)
    if failed is not None:
        return {"state": "failed", "reason": failed.get("reason")}
    if len(ends) < number:
        missing = number - len(ends)
        return {
            "state": "unfinished",
            "reason": f"{missing} of {number} workers did not write the end of the run",
        }
    return {"state": "finished", "reason": None}


def _is_communication_measured(ranks: list[_Worker], number: int) -> bool:
    """Return True if the numbers of communication are known: of one worker they are 0, of several somebody counts.

    torch's own DistributedDataParallel reports nothing. Its time is then a part of the backward
    pass.
    """
    if number == 1:
        return True
    names = (
        "communication_measured",
        "communication_size_bytes",
        "communication_total_s",
        "communication_s",
    )
    counted = any((worker.end or {}).get("collectives") for worker in ranks)
    return counted or any(worker.totals.get(name) for worker in ranks for name in names)


def _wire_bytes(worker: _Worker) -> float | None:
    """Return the bytes that a worker put on the wire; lines of earlier versions have only its collectives."""
    if "communication_wire_bytes" in worker.totals:
        found: float | None = worker.totals["communication_wire_bytes"]
        return found
    entries = (worker.end or {}).get("collectives")
    return None if entries is None else total_wire_bytes(entries)


def _sums(values: list[float | None]) -> dict[str, Any]:
    """Return the sum over all workers, None if one of them is unknown, and the value of the first worker."""
    known = [value for value in values if value is not None]
    return {"all_workers": sum(known) if len(known) == len(values) else None, "rank_0": values[0]}


def _times(totals: Mapping[str, Any], is_measured: bool) -> dict[str, Any]:
    """Return the times of one worker by phase, in seconds; those of communication are None if nobody measured it."""
    train_s = totals.get("train_s", 0.0)
    phases: dict[str, Any] = {
        f"{phase}_s": totals.get(f"{tracked}_s", 0.0) for phase, tracked in TRACKER_PHASES.items()
    }
    other_s = max(0.0, train_s - sum(phases.values()))
    if not is_measured:
        phases["communication_s"] = None
    total_s, exposed_s = (
        totals.get("communication_total_s", 0.0),
        totals.get("communication_exposed_s", 0.0),
    )
    return {
        "wall_s": totals.get("wall_s", 0.0),
        "train_s": train_s,
        "validation_s": totals.get("validation_s", 0.0),
        **phases,
        "other_s": other_s,
        "communication_total_s": total_s if is_measured else None,
        "communication_exposed_s": exposed_s if is_measured else None,
        "communication_hidden_s": max(0.0, total_s - exposed_s) if is_measured else None,
        # Lines of earlier versions lack it, and then so does the result that verification computes
        # again.
        **(
            {"communication_cpu_s": totals["communication_cpu_s"]}
            if "communication_cpu_s" in totals
            else {}
        ),
    }


def _slowest_and_first(
    totals: list[Mapping[str, Any]], is_measured: bool
) -> dict[str, dict[str, Any]]:
    """Return the times of the slowest worker in each phase, and those of the first worker."""
    times = [_times(of_worker, is_measured) for of_worker in totals]
    names = dict.fromkeys(name for of_worker in times for name in of_worker)
    slowest = {
        name: max((t[name] for t in times if t.get(name) is not None), default=None)
        for name in names
    }
    return {"slowest": slowest, "rank_0": times[0]}


def _steps(ranks: list[_Worker]) -> dict[str, dict[str, float]]:
    steps = [dict(worker.totals.get("steps_s", {})) for worker in ranks]
    names = dict.fromkeys(name for of_worker in steps for name in of_worker)
    return {
        "slowest": {name: max(s.get(name, 0.0) for s in steps) for name in names},
        "rank_0": steps[0],
    }


def _goal(
    ranks: list[_Worker], configuration: Mapping[str, Any], is_measured: bool
) -> dict[str, Any] | None:
    """Return the goal with its moment and the times until then, or as missed; None without a goal."""
    wanted = configuration.get("goal")
    reached = [worker.goal for worker in ranks if worker.goal is not None]
    if wanted is None and not reached:
        return None
    names = ("metric", "threshold", "minimize")
    if not reached:
        empty: dict[str, Any] = {"value": None, "text": None, "epochs": None, "step": None}
        return {
            **dict.fromkeys(names),
            **(wanted or {}),
            "reached": False,
            **empty,
            "time_to_goal_s": None,
            "times": None,
        }
    first = reached[0]
    seconds = [line["time_to_goal_s"] for line in reached]
    return {
        **{name: first.get(name) for name in names},
        **_budget(first),
        **(wanted or {}),
        "reached": True,
        "value": first.get("value"),
        "text": first.get("text"),
        # The goal is reached inside its epoch, so this epoch counts.
        "epochs": int(first.get("epoch") or 0) + 1,
        "step": first.get("step"),
        "time_to_goal_s": {"slowest": max(seconds), "rank_0": seconds[0]},
        "times": _slowest_and_first([line.get("totals", {}) for line in reached], is_measured),
    }  # fmt: skip


def _budget(goal: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``budget_s``, which only the goal of a fixed training time has."""
    return {"budget_s": goal["budget_s"]} if "budget_s" in goal else {}


def _batch_quantiles(ends: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return quantiles of the seconds of a batch, over the batches of all workers."""
    merged: dict[int, int] = {}
    zeros = 0
    for end in ends:
        (_, none), *bins = end.get("batch_times") or [[0, 0]]
        zeros += none
        for index, count in bins:
            merged[index] = merged.get(index, 0) + count
    sketch = QuantileSketch()
    sketch.load([[0, zeros], *([index, count] for index, count in sorted(merged.items()))])
    return {name: sketch.quantile(share) for name, share in _QUANTILES.items()}


def _collectives(ends: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the collectives of the worker that sent the most in them; nothing if they were not counted.

    torch's own DistributedDataParallel reports nothing, so a run of several workers without a
    collective is unknown.
    """
    counted = [end["collectives"] for end in ends if end.get("collectives") is not None]
    if len(counted) < len(ends) or not (workers == 1 or any(counted)):
        return {}
    return {"collectives": max(counted, key=lambda found: sum(entry["bytes"] for entry in found))}


def _best(end: Mapping[str, Any], configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    if end.get("best_metric_value") is None:
        return None
    metric = end.get("metric") or (configuration.get("goal") or {}).get("metric")
    return {"metric": metric, "value": end["best_metric_value"], "epoch": end.get("best_epoch")}


def _known(ends: list[dict[str, Any]], name: str) -> list[Any]:
    return [end[name] for end in ends if end.get(name) is not None]


def goal_message(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the goal of a result as the metric ``goal`` carries it: times of the slowest worker, and of rank 0.

    Args:
        result: The content of a ``result.json`` whose ``goal`` is not None.
    """
    goal = result["goal"]

    def times_of(worker: str) -> dict[str, Any]:
        times = (goal["times"] or result["times"])[worker]
        phases = {phase: times[f"{phase}_s"] for phase in TRACKER_PHASES}
        reached_s = goal["time_to_goal_s"]
        return {
            "time_to_goal_s": None if reached_s is None else reached_s[worker],
            "phases_s": phases,
        }

    names = ("metric", "threshold", "minimize", "reached", "value", "epochs")
    own = {name: goal[name] for name in names}
    return {**own, **_budget(goal), **times_of("slowest"), "rank_0": times_of("rank_0")}
