"""The time of a run by phase, in total and in each of its latest epochs."""

from __future__ import annotations

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
"""Phases and their titles in the order in which bars stack them. Hidden communication runs while workers compute."""

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
            size = seconds / longest_s * length if longest_s else 0.0
            placed.append((phase, round(start, 2), round(size, 2)))
            start += size
        return placed


def total_phases(
    latest: Iterable[tuple[str, Point]], result: Mapping[str, Any], to_goal: Mapping[str, float]
) -> list[PhaseBar]:
    """Return the total times of a run: those of the slowest worker in each phase, and those of worker 0.

    Args:
        latest: Name and latest entry of each metric of the run.
        result: The content of its ``result.json``, which takes precedence; empty without one.
        to_goal: The times of its goal, which are shown if nothing else is known.
    """
    times = result.get("times")
    if isinstance(times, dict):
        workers = {name: _of_result(times.get(name)) for name in ("slowest", "rank_0")}
    else:
        by_rank: dict[int, dict[str, float]] = {}
        for name, point in latest:
            found = _CUMULATIVE.fullmatch(name)
            seconds = number_of(point.value) if found else None
            if found and seconds is not None:
                phases = by_rank.setdefault(int(found[2]), {})
                phases[_phase(found[1])] = phases.get(_phase(found[1]), 0.0) + seconds
        names = {phase for phases in by_rank.values() for phase in phases}
        slowest = {
            phase: max(phases.get(phase, 0.0) for phases in by_rank.values()) for phase in names
        }
        workers = {"slowest": slowest, "rank_0": by_rank.get(0, {})}
    bars = [
        PhaseBar("Slowest worker in each phase", _stacked(workers["slowest"])),
        PhaseBar("Worker 0", _stacked(workers["rank_0"])),
    ]
    shown = [bar for bar in bars if bar.seconds] or [PhaseBar("Until the goal", _stacked(to_goal))]
    if len(shown) == 2 and shown[0].seconds == shown[1].seconds:
        shown.pop()
    return [bar for bar in shown if bar.seconds]


def epoch_phases(store: Store, owner: str, latest: Iterable[tuple[str, Point]]) -> list[PhaseBar]:
    """Return the times of worker 0 in each of the latest epochs.

    Args:
        store: The database.
        owner: Owner of the metrics.
        latest: Name and latest entry of each metric of the run.
    """
    steps = {
        name: found[1]
        for name, _ in latest
        if (found := _CUMULATIVE.fullmatch(name)) and found[2] == "0"
    }
    # One more entry than epochs, because the time of an epoch is the difference of two totals.
    wanted = MOST_EPOCHS + 1
    entries = {
        name: list(points)
        for _, name, points in store.entries(
            {(owner, name): wanted for name in steps}, last_n=wanted
        )
    }
    most = max(map(len, entries.values()), default=0)
    longest = next((points for points in entries.values() if len(points) == most), [])
    epochs: list[dict[str, float]] = [{} for _ in range(most)]
    for name, points in entries.items():
        phase = _phase(steps[name])
        before = 0.0
        # A step that comes later in the run has fewer entries, and the last epoch has one of each.
        for index, point in enumerate(points, most - len(points)):
            total = number_of(point.value) or 0.0
            # A resumed run may continue with less than its first part had.
            epochs[index][phase] = epochs[index].get(phase, 0.0) + max(total - before, 0.0)
            before = total
    bars = [
        PhaseBar(f"Epoch {_epoch(point, index)}", _stacked(seconds))
        for index, (seconds, point) in enumerate(zip(epochs, longest, strict=True))
    ]
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
    # Results of earlier versions have zeros where nothing was measured. Counted collectives may
    # take no time.
    return bool(result.get("collectives")) or result.get("exchanges") is not None


def _phase(step: str) -> str:
    return _OTHER_TOTALS.get(step) or STEPS.get(step, "other")


def _of_result(times: Any) -> dict[str, float]:
    """Return phases of the times in a result, which a worker wrote, so they may be anything."""
    found = times if isinstance(times, dict) else {}
    sources = {
        **{phase: f"{phase}_s" for phase in PHASE_TITLES},
        "hidden": "communication_hidden_s",
    }
    return {
        phase: float(seconds)
        for phase, source in sources.items()
        if isinstance(seconds := found.get(source), (int, float)) and 0 <= seconds < 1e12
    }


def _stacked(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the phases with any time in their order, with hidden communication as a part of the compute time."""
    hidden = min(seconds.get("hidden", 0.0), seconds.get("compute", 0.0))
    stacked = {**seconds, "hidden": hidden, "compute": seconds.get("compute", 0.0) - hidden}
    return {phase: stacked[phase] for phase in PHASE_TITLES if stacked.get(phase, 0.0) > 0}


def _epoch(point: Point, index: int) -> int:
    """Return the number of the epoch of an entry, from 1."""
    epoch = epoch_of(point.extra)
    return (int(epoch) if epoch.is_integer() else index) + 1


def longest_s(bars: Sequence[PhaseBar]) -> float:
    """Return the time of the longest bar."""
    return max((bar.total_s for bar in bars), default=0.0)
