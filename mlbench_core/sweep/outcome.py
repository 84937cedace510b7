"""Gather the runs of a sweep by algorithm, network and number of workers.

A run that missed its goal has no time to the goal. Its time is only known to be longer than its training time, so it
counts as longer than any other run in a median, and is never part of a mean or an interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mlbench_core.results.figures.numbers import Estimate, ratio
from mlbench_core.results.pool import Group, check_comparable
from mlbench_core.results.record import RunRecord
from mlbench_core.results.stats import confidence_interval, welch_test

if TYPE_CHECKING:
    from mlbench_core.network.description import Network

__all__ = [
    "CLOSE",
    "Cell",
    "Outcome",
    "Place",
    "differ",
    "duration",
    "gather",
    "order",
    "sent_per_worker",
    "speed_ratio",
]

CLOSE = 1.1
"""Two times within this factor of each other are not called different."""


class Place(Protocol):
    """The place of a run in a sweep."""

    @property
    def name(self) -> str:
        """Name of its result folder."""

    @property
    def algorithm(self) -> str:
        """Name of its algorithm or variant."""

    @property
    def network(self) -> str | None:
        """Name of its network; None for one worker, which has no network."""

    @property
    def workers(self) -> int:
        """Number of its workers."""


@dataclass(frozen=True)
class Cell:
    """The runs of one algorithm on one network with one number of workers.

    Attributes:
        network: Name of the network; None for one worker.
        group: The runs that ended; at least one.
        failed: Number of runs that ended with an error. They are not in the group.
        planned: Number of runs that the sweep has for this cell.
    """

    network: str | None
    group: Group
    failed: int = 0
    planned: int = 0

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm."""
        return self.group.label

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.group.workers

    @property
    def runs(self) -> int:
        """Return the number of runs that reached their goal or missed it."""
        return len(self.group.records)

    @property
    def reached(self) -> tuple[RunRecord, ...]:
        """Return the runs that reached their goal."""
        return tuple(record for record in self.group.records if record.reached and record.time_to_goal_s)

    @property
    def missed(self) -> int:
        """Return the number of runs that did not reach their goal."""
        return self.runs - len(self.reached)

    @property
    def times_s(self) -> list[float]:
        """Return the times to the goal of the runs that reached it."""
        return [record.time_to_goal_s for record in self.reached if record.time_to_goal_s]

    @property
    def median_s(self) -> float | None:
        """Return the median time to the goal, or None if half of the runs or more missed it."""
        times = [*self.times_s, *[math.inf] * self.missed]
        found = statistics.median(times) if times else math.inf
        return found if math.isfinite(found) else None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean time, or None for a single run, or if a run missed its goal.

        The interval of the other runs would be too narrow and too low.
        """
        return None if self.missed else confidence_interval(self.times_s)


@dataclass(frozen=True)
class Outcome:
    """All runs of a sweep.

    Attributes:
        title: Title of the sweep.
        algorithms: Names of the algorithms, in the order of the sweep.
        networks: The networks by name, in the order of the sweep.
        workers: The numbers of workers, ascending.
        cells: The cells with at least one ended run.
        limit_s: Seconds after which a run was stopped; None without a limit.
        planned: Number of runs of the sweep.
    """

    title: str
    algorithms: tuple[str, ...]
    networks: Mapping[str, Network]
    workers: tuple[int, ...]
    cells: tuple[Cell, ...]
    limit_s: float | None = None
    planned: int = 0
    _index: dict[tuple[str, str | None, int], Cell] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = {(cell.algorithm, cell.network, cell.workers): cell for cell in self.cells}
        object.__setattr__(self, "_index", found)

    @property
    def several(self) -> tuple[int, ...]:
        """Return the numbers of workers above 1."""
        return tuple(workers for workers in self.workers if workers > 1)

    @property
    def baseline(self) -> str:
        """Return the name of the algorithm with which the others are compared: the first one of the sweep."""
        return self.algorithms[0]

    @property
    def groups(self) -> list[Group]:
        """Return the groups of all cells with a run."""
        return [cell.group for cell in self.cells if cell.runs]

    @property
    def ended(self) -> int:
        """Return the number of runs that ended, with or without an error."""
        return sum(cell.runs + cell.failed for cell in self.cells)

    def cell(self, algorithm: str, network: str | None, workers: int) -> Cell | None:
        """Return a cell; one worker belongs to every network. None if none of its runs reached or missed its goal."""
        found = self._index.get((algorithm, network if workers > 1 else None, workers))
        return found if found and found.runs else None

    def row(self, network: str | None, workers: int) -> list[Cell]:
        """Return the cells of all algorithms on a network, fastest first; those without a median are the last."""
        cells = [cell for name in self.algorithms if (cell := self.cell(name, network, workers))]
        return sorted(cells, key=order)

    def not_within(self) -> str:
        """Return the text for a run that missed its goal.

        Example:
            >>> Outcome("", (), {}, (), (), limit_s=120).not_within()
            'not within 2 min'
        """
        return "goal not reached" if self.limit_s is None else f"not within {duration(self.limit_s)}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit in which it is a short number.

    Example:
        >>> duration(120), duration(90), duration(5400)
        ('2 min', '90 s', '1.5 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size and seconds * 2 % size == 0 and (seconds % size == 0 or unit == "h"):
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def order(cell: Cell) -> tuple[float, int]:
    """Return the key by which cells are sorted: the median time, then the number of runs that missed the goal."""
    return (math.inf if cell.median_s is None else cell.median_s, cell.missed)


def differ(a: Cell, b: Cell) -> bool | None:
    """Return True if Welch's test shows that the mean times of two cells differ, at the level of 95 %.

    Returns:
        None if a cell has a single run, or one that missed its goal, so that its mean is unknown.
    """
    if a.interval_s is None or b.interval_s is None:
        return None
    return welch_test(a.times_s, b.times_s).p < 0.05


def speed_ratio(slower: Cell, faster: Cell) -> Estimate | None:
    """Return how many times as fast one cell is as another, with the interval of the ratio of the means.

    Args:
        slower: The cell in the numerator.
        faster: The cell in the denominator.

    Returns:
        The ratio of the medians; its interval is missing if a run missed its goal. None without both medians.
    """
    if slower.median_s is None or faster.median_s is None:
        return None
    both = ratio(slower.times_s, faster.times_s)
    known = both is not None and not slower.missed and not faster.missed
    low, high = (both.low, both.high) if known and both is not None else (None, None)
    return Estimate(slower.median_s / faster.median_s, low, high, min(slower.runs, faster.runs))


def sent_per_worker(record: RunRecord) -> float | None:
    """Return the bytes that a worker put on the wire until the goal, on average over the workers.

    Returns:
        The bytes, or None if the run missed its goal or did not count them.
    """
    if not record.reached or record.bytes_on_wire is None or not record.workers:
        return None
    sent: float | None = record.bytes_on_wire
    if record.epochs_to_goal is not None and record.epochs is not None and record.epochs_to_goal < record.epochs:
        # The run went on after its goal, so only its raw lines have the number.
        metric, step = str((record.goal or {}).get("metric")), record.steps_to_goal or 0
        sent = next((point.bytes for point in record.curve(metric) if point.step >= step), None)
    return None if sent is None else sent / record.workers


def gather(
    places: Iterable[Place],
    records: Mapping[str, RunRecord],
    networks: Mapping[str, Network],
    *,
    failed: Collection[str] = (),
    title: str = "Sweep",
    limit_s: float | None = None,
) -> Outcome:
    """Gather the runs of a sweep.

    Args:
        places: The planned runs.
        records: The results of those that ended, by the name of their folder.
        networks: The networks by name, in the order of the sweep.
        failed: Names of the runs that ended with an error.
        title: Title of the sweep.
        limit_s: Seconds after which a run was stopped; None without a limit.

    Raises:
        ConfigurationError: Runs had different goals.
    """
    places = list(places)
    check_comparable([records[place.name] for place in places if place.name in records])
    found: dict[tuple[str, str | None, int], list[Place]] = {}
    for place in places:
        key = (place.algorithm, place.network if place.workers > 1 else None, place.workers)
        found.setdefault(key, []).append(place)
    cells = []
    for (algorithm, network, workers), of_cell in found.items():
        ended = tuple(records[place.name] for place in of_cell if place.name in records)
        lost = sum(place.name in failed for place in of_cell)
        # The settings of a run are those of the first one that has them: a run that was stopped may have none.
        settings = next((record.configuration for record in ended if record.configuration.get("goal")), {})
        configuration = {name: value for name, value in settings.items() if name != "seed"}
        if ended or lost:
            cells.append(Cell(network, Group(algorithm, workers, configuration, ended), lost, len(of_cell)))
    return Outcome(
        title=title,
        algorithms=tuple(dict.fromkeys(place.algorithm for place in places)),
        networks=dict(networks),
        workers=tuple(sorted({place.workers for place in places})),
        cells=tuple(cells),
        limit_s=limit_s,
        planned=len(places),
    )
