"""Compute the result of a run from its raw lines, to write ``result.json`` and to verify it later.

The times of a run are those of its slowest worker, phase by phase: the maximum over all workers of
the time of each phase. The result also has the times of rank 0.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlbench_core.results.environment import machine_of, software_of
from mlbench_core.results.raw_lines import SCHEMA_VERSION
from mlbench_core.run_terms import TRACKER_PHASES
from mlbench_core.running_statistics import QuantileSketch
from mlbench_core.wire_bytes import total_wire_bytes

__all__ = ["goal_message", "summarize"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class _Worker:
    """The lines of one worker that decide the result: its first goal, and the last other ones."""

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
            # The last start has the settings with which the run ended.
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
            # Epochs count from 0. A run without a line "end" still has those that it finished.
            self.epochs = max(self.epochs, int(line.get("epoch") or 0) + 1)
        # Those of a goal are the totals until then, and a run may go on after its goal.
        if "totals" in line and kind != "goal":
            self.totals = line["totals"]


def summarize(lines: Iterable[Mapping[str, Any]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the content of ``result.json``, except the checksums of the other files.

    Args:
        lines: The raw lines of all workers, see :mod:`mlbench_core.results.raw_lines`. A run that
            has not ended has the state ``"unfinished"``, and the totals of its last finished epoch.
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
    ranks = [workers[rank] for rank in sorted(workers)]
    starts: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for worker in ranks:
        if worker.start is not None:
            starts.append(worker.start)
        ends.append(worker.end or {})
    if not starts:
        raise ValueError("metrics.jsonl has no start record: the run never began")
    start, first = starts[0], ranks[0]
    configuration = dict(start.get("configuration") or {})
    number = configuration.get("workers") or len(ranks)
    totals = list(map(operator.attrgetter("totals"), ranks))
    is_measured = _is_communication_measured(ranks, number)
    unmeasured = _unmeasured_phases(configuration, first.totals, is_measured)
    times = _slowest_and_first(totals, unmeasured)
    train_s = times["slowest"]["train_s"]
    samples, tokens = sum(_each(totals, "samples")), sum(_each(totals, "tokens"))
    # Unknown, not 0, if several workers trained and nothing measured their communication.
    sent_bytes: list[float | None] = [None] * len(ranks)
    wire_bytes: list[float | None] = [None] * len(ranks)
    exchanges = None
    if is_measured:
        sent_bytes = _each(totals, "communication_size_bytes")
        wire_bytes = list(map(_wire_bytes, ranks))
        exchanges = first.totals.get("exchanges")
    # A set, because all workers of a host write its name.
    hosts = {line.get("host") for line in starts}
    variables = environment.get("variables") or {}
    energy_j: float | None = None
    counted_j = _known(ends, "energy_j")
    # The sum of some workers would look like that of all.
    if len(counted_j) == len(ends) >= number:
        energy_j = sum(counted_j)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "id": start.get("run_id"),
            "name": variables.get("MLBENCH_RUN_NAME") or start.get("run_id"),
            **_state(ranks, number),
            # A resumed run keeps the moment at which its first part began.
            "started_at": (first.first_start or start).get("time"),
            "ended_at": max(_known(ends, "time"), default=None),
            "times_resumed": first.resumed,
        },
        "configuration": configuration,
        "machine": {**machine_of(environment), "hosts": len(hosts)},
        "software": software_of(environment),
        "goal": _goal(ranks, configuration, unmeasured),
        "times": times,
        "steps_s": _steps(totals),
        "epochs": max(map(operator.attrgetter("epochs"), ranks)),
        "batches": max(_each(totals, "batches")),
        "samples": samples,
        "tokens": tokens,
        # All workers wait for the slowest one.
        "samples_per_s": _rate(samples, train_s),
        "tokens_per_s": _rate(tokens, train_s),
        "batch_s": _batch_quantiles(ends),
        "bytes_sent": _sums(sent_bytes),
        "bytes_on_wire": _sums(wire_bytes),
        "exchanges": exchanges,
        **_collectives(ends, number),
        **_not_measured(ends[0]),
        "best": _best(ends[0], configuration),
        "memory_peak_bytes": max(_known(ends, "memory_peak_bytes"), default=None),
        "energy_j": energy_j,
    }


def _each(totals: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return a total of each worker, 0 if it has none."""
    return [of_worker.get(name, 0) for of_worker in totals]


def _rate(count: float, seconds: float) -> float | None:
    # Nothing was counted, or the run ended before its first batch.
    if not count or not seconds:
        return None
    return count / seconds


def _state(ranks: list[_Worker], number: int) -> dict[str, Any]:
    """Return ``state`` and ``reason``: finished only if every worker has finished."""
    ends = [worker.end for worker in ranks if worker.end is not None]
    # A failure counts before a missing end, which may be its consequence.
    for end in ends:
        if end.get("state") != "finished":
            return {"state": "failed", "reason": end.get("reason")}
    if len(ends) < number:
        missing = number - len(ends)
        return {
            "state": "unfinished",
            "reason": f"{missing} of {number} workers did not write the end of the run",
        }
    return {"state": "finished", "reason": None}


def _is_communication_measured(ranks: list[_Worker], number: int) -> bool:
    """Return True if the numbers of communication are known.

    Those of one worker are 0. Of several workers, one must count, which torch's own
    DistributedDataParallel does not. Its time is then a part of the backward pass.
    """
    if number == 1:
        return True
    for worker in ranks:
        totals = worker.totals
        if totals.get("communication_measured") or totals.get("communication_size_bytes"):
            return True
        if totals.get("communication_total_s") or totals.get("communication_s"):
            return True
        if (worker.end or {}).get("collectives"):
            return True
    return False


def _wire_bytes(worker: _Worker) -> float | None:
    """Return the bytes that a worker put on the wire."""
    if "communication_wire_bytes" in worker.totals:
        counted: float | None = worker.totals["communication_wire_bytes"]
        return counted
    # Lines of earlier versions have only the collectives.
    entries = (worker.end or {}).get("collectives")
    if entries is None:
        return None
    return total_wire_bytes(entries)


def _sums(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the sum over all workers, None if one is unknown, and the first worker's value."""
    total: float | None = None
    counted = [value for value in values if value is not None]
    # The sum of some workers would look like that of all.
    if len(counted) == len(values):
        total = sum(counted)
    return {"all_workers": total, "rank_0": values[0]}


def _unmeasured_phases(
    configuration: Mapping[str, Any], totals: Mapping[str, Any], is_communication_measured: bool
) -> set[str]:
    """Return the phases whose times are unknown, not 0."""
    phases = set()
    if not is_communication_measured:
        phases.add("communication")
    # Only scripts that are observed, or that have no epochs, count steps.
    if configuration.get("unit") == "steps":
        if not totals.get("batches"):
            phases.update(TRACKER_PHASES)
        # Without these steps, the time is a part of the others, as if a script loads its data by
        # itself.
        for step, phase in (("batch_load", "data"), ("comp_metrics", "metrics")):
            if step not in totals.get("steps_s", {}):
                phases.add(phase)
    return phases


def _times(totals: Mapping[str, Any], unmeasured: Collection[str]) -> dict[str, Any]:
    """Return the times of one worker by phase, in seconds, None for those that are unknown."""
    # Validation, checkpoints and the preparation of data are outside of it.
    train_s = totals.get("train_s", 0.0)
    phases: dict[str, Any] = {}
    for phase, tracked in TRACKER_PHASES.items():
        phases[f"{phase}_s"] = totals.get(f"{tracked}_s", 0.0)
    # Rounding alone could make it a little negative.
    other_s: float | None = max(0.0, train_s - sum(phases.values()))
    communication = dict.fromkeys(
        ("communication_total_s", "communication_exposed_s", "communication_hidden_s")
    )
    if "communication" not in unmeasured:
        total_s = totals.get("communication_total_s", 0.0)
        exposed_s = totals.get("communication_exposed_s", 0.0)
        communication["communication_total_s"] = total_s
        communication["communication_exposed_s"] = exposed_s
        # It ran at the same time as computation, so it adds nothing to the training time.
        communication["communication_hidden_s"] = max(0.0, total_s - exposed_s)
    for phase in unmeasured:
        phases[f"{phase}_s"] = None
    # Otherwise all of the training time would be in it.
    if "compute" in unmeasured:
        other_s = None
    # Lines of earlier versions lack them, and then so does the result that verification computes
    # again.
    for name in ("communication_cpu_s", "compute_cpu_s"):
        if name in totals:
            communication[name] = totals[name]
    return {
        # From before the first epoch, with validation and checkpoints.
        "wall_s": totals.get("wall_s", 0.0),
        "train_s": train_s,
        "validation_s": totals.get("validation_s", 0.0),
        **phases,
        "other_s": other_s,
        **communication,
    }


def _slowest_and_first(
    totals: Sequence[Mapping[str, Any]], unmeasured: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the times of the slowest worker in each phase, and those of the first worker."""
    times = [_times(of_worker, unmeasured) for of_worker in totals]
    names = dict.fromkeys(itertools.chain.from_iterable(times))
    slowest = {}
    for name in names:
        slowest[name] = max(_known(times, name), default=None)
    return {"slowest": slowest, "rank_0": times[0]}


def _steps(totals: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    steps = [dict(of_worker.get("steps_s", {})) for of_worker in totals]
    slowest: dict[str, float] = {}
    for name in itertools.chain.from_iterable(steps):
        slowest[name] = max(of_worker.get(name, 0.0) for of_worker in steps)
    return {"slowest": slowest, "rank_0": steps[0]}


def _goal(
    ranks: list[_Worker], configuration: Mapping[str, Any], unmeasured: Collection[str]
) -> dict[str, Any] | None:
    """Return the goal with its moment and the times until then, or as missed, or None."""
    wanted = configuration.get("goal")
    reached = [worker.goal for worker in ranks if worker.goal is not None]
    if wanted is None and not reached:
        return None
    if not reached:
        return {
            **dict.fromkeys(("metric", "threshold", "minimize")),
            **(wanted or {}),
            "reached": False,
            **dict.fromkeys(("value", "text", "epochs", "step", "time_to_goal_s", "times")),
        }
    first = reached[0]
    seconds = list(map(operator.itemgetter("time_to_goal_s"), reached))
    totals = [line.get("totals", {}) for line in reached]
    return {
        "metric": first.get("metric"),
        "threshold": first.get("threshold"),
        "minimize": first.get("minimize"),
        **_budget(first),
        **(wanted or {}),
        "reached": True,
        "value": first.get("value"),
        "text": first.get("text"),
        # The goal is reached inside its epoch, so this epoch counts.
        "epochs": int(first.get("epoch") or 0) + 1,
        "step": first.get("step"),
        # The result of a run is the training time of its slowest worker.
        "time_to_goal_s": {"slowest": max(seconds), "rank_0": seconds[0]},
        "times": _slowest_and_first(totals, unmeasured),
        **_collectives(reached, configuration.get("workers") or len(ranks)),
    }


def _budget(goal: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``budget_s``, which only the goal of a fixed training time has."""
    if "budget_s" not in goal:
        return {}
    return {"budget_s": goal["budget_s"]}


def _batch_quantiles(ends: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return quantiles of the seconds of a batch, over the batches of all workers."""
    # The sketches of all workers are added, so the quantiles are those over all their batches.
    merged: dict[int, int] = {}
    zeros = 0
    for end in ends:
        # The first bin has the batches without a measurable time, which have no logarithm.
        (_, none), *bins = end.get("batch_times") or [[0, 0]]
        zeros += none
        for index, count in bins:
            merged[index] = merged.get(index, 0) + count
    sketch = QuantileSketch()
    sketch.load([[0, zeros], *map(list, sorted(merged.items()))])
    return {name: sketch.quantile(share) for name, share in _QUANTILES.items()}


def _collectives(ends: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the collectives of the worker that sent the most in them, if they were counted.

    torch's own DistributedDataParallel reports nothing, so a run of several workers without a
    collective is unknown.
    """
    counted = _known(ends, "collectives")
    if len(counted) < len(ends) or not (workers == 1 or any(counted)):
        return {}
    return {"collectives": max(counted, key=_bytes_of)}


def _not_measured(end: Mapping[str, Any]) -> dict[str, Any]:
    """Return the list of what was not measured, which only an observed script has."""
    if "not_measured" not in end:
        return {}
    return {"not_measured": list(map(str, end["not_measured"]))}


def _bytes_of(collectives: Iterable[Mapping[str, Any]]) -> int:
    return sum(map(operator.itemgetter("bytes"), collectives))


def _best(end: Mapping[str, Any], configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    if end.get("best_metric_value") is None:
        return None
    metric = end.get("metric") or (configuration.get("goal") or {}).get("metric")
    epoch = end.get("best_epoch")
    if configuration.get("unit") == "steps":
        # A run that counts steps has intervals of them, whose number tells a reader nothing.
        epoch = None
    return {"metric": metric, "value": end["best_metric_value"], "epoch": epoch}


def _known(mappings: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the values of an entry that are known."""
    return [mapping[name] for mapping in mappings if mapping.get(name) is not None]


def goal_message(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the goal of a result as the metric ``goal`` carries it.

    It has the times of the slowest worker, and those of rank 0.

    Args:
        result: The content of a ``result.json`` whose ``goal`` is not None.
    """
    goal = result["goal"]

    def times_of(worker: str) -> dict[str, Any]:
        times = (goal["times"] or result["times"])[worker]
        phases_s = {}
        for phase in TRACKER_PHASES:
            # The master takes numbers only.
            if times[f"{phase}_s"] is not None:
                phases_s[phase] = times[f"{phase}_s"]
        reached_s = goal["time_to_goal_s"]
        if reached_s is not None:
            reached_s = reached_s[worker]
        return {"time_to_goal_s": reached_s, "phases_s": phases_s}

    in_steps = {}
    if result["configuration"].get("unit") == "steps":
        in_steps = {"unit": "steps", "steps": goal["step"]}
    return {
        "metric": goal["metric"],
        "threshold": goal["threshold"],
        "minimize": goal["minimize"],
        "reached": goal["reached"],
        "value": goal["value"],
        "epochs": goal["epochs"],
        **in_steps,
        **_budget(goal),
        **times_of("slowest"),
        "rank_0": times_of("rank_0"),
    }
