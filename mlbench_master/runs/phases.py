"""The time of a run by phase, in total and in each of its latest epochs."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_core.run_terms import STEPS
from mlbench_master.database.columns import epoch_of, number_of
from mlbench_master.database.store import Point, Store

__all__ = [
    "MOST_EPOCHS",
    "PHASE_TITLES",
    "PhaseBar",
    "epoch_phases",
    "is_measured",
    "longest_s",
    "total_phases",
]

PHASE_TITLES = {
    "compute": "Compute",
    "hidden": "Compute with hidden communication",
    "communication": "Exposed communication",
    "metrics": "Metrics",
    "data": "Data",
    "other": "Other",
    "validation": "Validation",
}
"""Phases and their titles in the order in which bars stack them.

Hidden communication runs while workers compute.
"""

MOST_EPOCHS = 100
"""Number of the latest epochs that are shown."""

_CUMULATIVE = re.compile(r"cum_(.+) @ (\d+)")
# Totals that are not steps of a batch.
_OTHER_TOTALS = {"validation": "validation", "hidden_communication": "hidden"}


@dataclass(frozen=True)
class PhaseBar:
    """A stacked bar.

    Attributes:
        label: Its title.
        seconds: Time of each phase that has any, in the order of :data:`PHASE_TITLES`.
    """

    label: str
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Return the sum of the phases."""
        return sum(self.seconds.values())

    def parts(self, length: float, longest_s: float) -> list[tuple[str, float, float]]:
        """Return phase, start and size of each part.

        Args:
            length: Size of the longest bar.
            longest_s: Time of the longest bar.
        """
        placed = []
        start = 0.0
        for phase, seconds in self.seconds.items():
            size = 0.0
            if longest_s:
                size = seconds / longest_s * length
            placed.append((phase, round(start, 2), round(size, 2)))
            start += size
        return placed


def total_phases(
    latest: Iterable[tuple[str, Point]], result: Mapping[str, Any], to_goal: Mapping[str, float]
) -> list[PhaseBar]:
    """Return the times of the slowest worker in each phase and those of worker 0.

    Args:
        latest: Name and latest entry of each metric of the run.
        result: The content of its ``result.json``, which takes precedence; empty without one.
        to_goal: The times of its goal, which are shown if nothing else is known.
    """
    times = result.get("times")
    if isinstance(times, dict):
        slowest = _of_result(times.get("slowest"))
        rank_0 = _of_result(times.get("rank_0"))
    else:
        by_rank = _by_rank(latest)
        rank_0 = by_rank.get(0, {})
        slowest = {}
        for phase in set[str]().union(*by_rank.values()):
            slowest[phase] = max(phases.get(phase, 0.0) for phases in by_rank.values())
    bars = {"Slowest worker in each phase": _stacked(slowest), "Worker 0": _stacked(rank_0)}
    if not any(bars.values()):
        bars = {"Until the goal": _stacked(to_goal)}
    elif bars["Slowest worker in each phase"] == bars["Worker 0"]:
        del bars["Worker 0"]
    return [PhaseBar(label, seconds) for label, seconds in bars.items() if seconds]


def _by_rank(latest: Iterable[tuple[str, Point]]) -> dict[int, dict[str, float]]:
    """Return the total time of each phase by rank."""
    by_rank: dict[int, dict[str, float]] = {}
    for name, point in latest:
        match = _CUMULATIVE.fullmatch(name)
        if match is None:
            continue
        seconds = number_of(point.value)
        if seconds is not None:
            phases = by_rank.setdefault(int(match[2]), {})
            # Several steps may belong to one phase.
            phase = _phase(match[1])
            phases[phase] = phases.get(phase, 0.0) + seconds
    return by_rank


def epoch_phases(
    store: Store, owner: str, latest: Iterable[tuple[str, Point]], unit: str = "epochs"
) -> list[PhaseBar]:
    """Return the times of worker 0 in each of the latest epochs, or intervals of steps.

    Args:
        store: The database.
        owner: Owner of the metrics.
        latest: Name and latest entry of each metric of the run.
        unit: ``"steps"`` if the run counts them; an entry then has the number of finished steps.
    """
    steps = {}
    for name, _ in latest:
        match = _CUMULATIVE.fullmatch(name)
        if match is not None and match[2] == "0":
            steps[name] = match[1]
    # One more entry than epochs, because the time of an epoch is the difference of two totals.
    wanted = MOST_EPOCHS + 1
    counts = dict.fromkeys(itertools.product([owner], steps), wanted)
    entries = {}
    for _, name, points in store.entries(counts, last_n=wanted):
        entries[name] = list(points)
    longest = max(entries.values(), key=len, default=[])
    epochs: list[dict[str, float]] = [{} for _ in longest]
    for name, points in entries.items():
        phase = _phase(steps[name])
        before = 0.0
        # A step that comes later in the run has fewer entries, and the last epoch has one of each.
        for index, point in enumerate(points, len(longest) - len(points)):
            total = number_of(point.value) or 0.0
            # A resumed run may continue with less than its first part had.
            epochs[index][phase] = epochs[index].get(phase, 0.0) + max(total - before, 0.0)
            before = total
    bars = []
    finished = 0
    for index, (seconds, point) in enumerate(zip(epochs, longest, strict=True)):
        label = f"Epoch {_epoch(point, index)}"
        if unit == "steps":
            before, finished = finished, _epoch(point, index) - 1
            label = f"Steps {before + 1} to {finished}"
        bars.append(PhaseBar(label, _stacked(seconds)))
    return bars[-MOST_EPOCHS:]


def is_measured(totals: Iterable[PhaseBar], result: Mapping[str, Any], workers: int) -> bool:
    """Return True if the time of communication is known.

    torch's own DistributedDataParallel reports none; it is then a part of the other phases.

    Args:
        totals: The total times of the run.
        result: The content of its ``result.json``; empty without one.
        workers: Number of workers; one needs no communication.
    """
    if workers == 1 or any({"communication", "hidden"} & bar.seconds.keys() for bar in totals):
        return True
    # Results of earlier versions have zeros also if nothing was measured. Counted collectives may
    # take no time.
    return bool(result.get("collectives")) or result.get("exchanges") is not None


def _phase(step: str) -> str:
    return _OTHER_TOTALS.get(step) or STEPS.get(step, "other")


def _of_result(times: Any) -> dict[str, float]:
    """Return the phases of the times in a result."""
    phases: dict[str, float] = {}
    # A worker wrote the result, so it may hold anything.
    if not isinstance(times, dict):
        return phases
    for phase in PHASE_TITLES:
        key = f"{phase}_s"
        if phase == "hidden":
            key = "communication_hidden_s"
        seconds = times.get(key)
        if isinstance(seconds, (int, float)) and 0 <= seconds < 1e12:
            phases[phase] = float(seconds)
    return phases


def _stacked(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the phases with any time in their order."""
    # Hidden communication is a part of the compute time.
    compute = seconds.get("compute", 0.0)
    hidden = min(seconds.get("hidden", 0.0), compute)
    stacked = {**seconds, "hidden": hidden, "compute": compute - hidden}
    return {phase: stacked[phase] for phase in PHASE_TITLES if stacked.get(phase, 0.0) > 0}


def _epoch(point: Point, index: int) -> int:
    """Return the number of the epoch of an entry, from 1."""
    epoch = epoch_of(point.extra)
    if epoch.is_integer():
        return int(epoch) + 1
    return index + 1


def longest_s(bars: Sequence[PhaseBar]) -> float:
    """Return the time of the longest bar."""
    return max(map(operator.attrgetter("total_s"), bars), default=0.0)
