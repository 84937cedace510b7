"""Predict the method with the least time for each bandwidth and round trip, and compare runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from mlbench_core.comparison.group_repeats import Group, plural
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import MLBenchError
from mlbench_core.network.description import Link, Network
from mlbench_core.sweep.grouped_runs import CLOSE, Cell, Outcome, differ
from mlbench_core.sweep.modelled import measured_run

__all__ = [
    "BANDWIDTHS",
    "ROUND_TRIPS_S",
    "Map",
    "MapCell",
    "MapPoint",
    "Predict",
    "predict_map",
    "shared_cores",
    "sharing_text",
    "some_workers",
    "steps_between",
    "widest_cell",
]

Predict = Callable[[RunRecord, Network, int], float]
"""Function that predicts the time to the goal of a run, in seconds, on another network."""

BANDWIDTHS = (1e6, 1e10)
"""Range of the bandwidths in bits per second."""

ROUND_TRIPS_S = (1e-4, 0.3)
"""Range of the round trips; that of emulated hosts on one machine is the lowest."""

_PER_DECADE = 6
# The numbers of workers with a map in a sweep of many.
_USUAL_WORKERS = (4, 16, 64)


@dataclass(frozen=True)
class MapCell:
    """One cell of a map.

    Attributes:
        bandwidth: Bits per second.
        round_trip_s: Round trip in seconds.
        first: Algorithm with the least predicted time to the goal.
        seconds: That time.
        second: Algorithm with the second least time; None with a single algorithm.
        ratio: Time of the second, divided by that of the first.
    """

    bandwidth: float
    round_trip_s: float
    first: str
    seconds: float
    second: str | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class MapPoint:
    """A measured network on a map.

    Attributes:
        network: Its name.
        bandwidth: Bits per second, within the range of the map.
        round_trip_s: Round trip in seconds, within the range of the map.
        measured: The algorithm with the least median; None if none reached the goal.
        second: The second, if it is within 10 %, or if all its runs reached the goal and no
            difference between the two is shown; else None.
        predicted: The algorithm with the least predicted time.
        error: Predicted time of the measured algorithm, divided by its measured time; None if it is
            not predicted.
    """

    network: str
    bandwidth: float
    round_trip_s: float
    measured: str | None
    second: str | None
    predicted: str
    error: float | None = None

    @property
    def agrees(self) -> bool:
        """Return True if the predicted algorithm is the measured one."""
        return self.predicted == self.measured


@dataclass(frozen=True)
class Map:
    """A map of bandwidth and round trip for one number of workers.

    Attributes:
        workers: Number of workers.
        bandwidths: The columns, ascending.
        round_trips_s: The rows, ascending.
        cells: One for each row and column, row by row.
        points: The measured networks.
        left_out: Sentences on the algorithms that have no prediction.
        is_modelled: True if the points are modelled, too.
    """

    workers: int
    bandwidths: tuple[float, ...]
    round_trips_s: tuple[float, ...]
    cells: tuple[MapCell, ...]
    points: tuple[MapPoint, ...]
    left_out: tuple[str, ...] = ()
    is_modelled: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the map of each first algorithm, largest first."""
        counted = Counter(map(attrgetter("first"), self.cells))
        return {name: count / len(self.cells) for name, count in counted.most_common()}

    @property
    def range_text(self) -> str:
        """Return the range of the map as a text."""
        return "1 Mbit/s to 10 Gbit/s and 0.1 to 300 ms"


def shared_cores(groups: Iterable[Group]) -> int:
    """Return the number of cores that the workers of a group shared; 0 if each had its own.

    Args:
        groups: The groups; the largest number counts.
    """
    shared = 0
    for group in groups:
        cores = (group.machine.get("cores") or 0) * (group.machine.get("hosts") or 1)
        threads = group.workers * (group.configuration.get("threads") or 1)
        if cores < threads:
            shared = max(shared, cores)
    return shared


def sharing_text(groups: Iterable[Group]) -> str:
    """Return the words that workers shared cores; empty if each had its own.

    Args:
        groups: See :func:`shared_cores`.
    """
    groups = list(groups)
    cores = shared_cores(groups)
    if not cores:
        return ""
    who = f"More than {plural(cores, 'worker')}"
    # Fewer workers than cores share them if each has several threads.
    if any((group.configuration.get("threads") or 1) > 1 for group in groups):
        who = f"Workers with more than {plural(cores, 'thread')} in all"
    return f"{who} shared {plural(cores, 'core')}"


def some_workers(several: Sequence[int]) -> Sequence[int]:
    """Return the numbers of workers of which each has a figure: at most three.

    Args:
        several: The numbers of workers above 1, ascending.

    Example:
        >>> some_workers((2, 4, 8, 16, 32)), some_workers((2, 4, 8, 16, 32, 64))
        ((2, 8, 32), (4, 16, 64))
    """
    if len(several) <= len(_USUAL_WORKERS):
        return several
    if set(_USUAL_WORKERS) <= set(several):
        return _USUAL_WORKERS
    return (several[0], several[len(several) // 2], several[-1])


def predict_map(outcome: Outcome, workers: int, predict: Predict) -> Map | None:
    """Predict the time to the goal of every algorithm over the map.

    The prediction starts from the algorithm's runs on the measured network with the highest
    bandwidth. Their median counts. If half of them or more missed the goal, the algorithm is not on
    the map: from the runs on another network, its prediction could be a shorter time.

    Args:
        outcome: The runs.
        workers: Number of workers.
        predict: The prediction.

    Returns:
        The map, or None if no algorithm can be predicted.
    """
    sources: dict[str, Cell] = {}
    left_out = []
    for name in outcome.algorithms:
        source = widest_cell(outcome, name, workers)
        if source is None:
            continue
        # From its runs on another network, the prediction could be a shorter time.
        if source.median_s is None:
            text = f"half of its runs or more missed the goal on {source.network}"
            if source.unmeasured and source.unmeasured == source.missed:
                text = f"the goal was not measured on {source.network}"
            if source.not_modelled:
                text = f"its time is not modelled: {source.not_modelled}"
            left_out.append(f"{name} is not on the map: {text}.")
            continue
        try:
            for network in outcome.networks.values():
                _median(source, network, predict)
        except (MLBenchError, ValueError) as error:
            left_out.append(f"{name} is not on the map: {error}")
        else:
            sources[name] = source
    if not sources:
        return None
    bandwidths, round_trips = steps_between(*BANDWIDTHS), steps_between(*ROUND_TRIPS_S)
    cells = []
    for round_trip_s, bandwidth in itertools.product(round_trips, bandwidths):
        network = Network(Link(round(bandwidth), round_trip_s))
        times = _predicted_s(sources, network, predict)
        # Of methods with the same time, the first name counts.
        first, *others = sorted(times, key=lambda name: (times[name], name))
        second: str | None = None
        ratio: float | None = None
        if others:
            second, ratio = others[0], times[others[0]] / times[first]
        cells.append(MapCell(bandwidth, round_trip_s, first, times[first], second, ratio))
    points = []
    for name in outcome.networks:
        point = _point(outcome, name, workers, sources, predict)
        if point is not None:
            points.append(point)
    return Map(
        workers,
        bandwidths,
        round_trips,
        tuple(cells),
        tuple(points),
        tuple(left_out),
        outcome.modelled is not None,
    )


def _predicted_s(
    sources: Mapping[str, Cell], network: Network, predict: Predict
) -> dict[str, float]:
    """Return the predicted median of each algorithm on a network."""
    return {name: _median(source, network, predict) for name, source in sources.items()}


def steps_between(low: float, high: float) -> tuple[float, ...]:
    """Return numbers from low to high, each the same factor above the one before it.

    Args:
        low: The first number, above 0.
        high: The last one.
    """
    count = round(math.log10(high / low) * _PER_DECADE)
    return tuple(low * (high / low) ** (step / count) for step in range(count + 1))


def widest_cell(outcome: Outcome, algorithm: str, workers: int) -> Cell | None:
    """Return the cell of the network with the highest bandwidth, from which predictions start.

    Args:
        outcome: The runs.
        algorithm: Name of the algorithm.
        workers: Number of workers.

    Returns:
        The cell, also if every run of it failed; None if the algorithm has none.
    """

    def bandwidth(name: str) -> float:
        return outcome.networks[name].path(0, workers - 1).bandwidth or math.inf

    cells = {}
    # Unlike Outcome.cell(), with the cells of which every run failed.
    for cell in outcome.cells:
        if (cell.algorithm, cell.workers) == (algorithm, workers):
            cells[cell.network] = cell
    # In the order of the sweep: of equal bandwidths, the first network counts.
    names = filter(cells.__contains__, outcome.networks)
    widest = max(names, key=bandwidth, default=None)
    if widest is None:
        return None
    return cells[widest]


def _median(cell: Cell, network: Network, predict: Predict) -> float:
    times = []
    for record in cell.reached:
        times.append(predict(measured_run(record), network, cell.workers))
    # As in the measured median, a missed run is longer than all others.
    return statistics.median([*times, *[math.inf] * (cell.missed + cell.failed)])


def _point(
    outcome: Outcome, name: str, workers: int, sources: Mapping[str, Cell], predict: Predict
) -> MapPoint | None:
    row = outcome.row(name, workers)
    if not row:
        return None
    network = outcome.networks[name]
    first, *others = row
    measured: str | None = None
    if first.median_s is not None:
        measured = first.algorithm
    close: str | None = None
    if others and first.median_s:
        second, second_s = others[0], others[0].median_s
        is_close = second_s is not None and second_s < CLOSE * first.median_s
        # A method with a miss has no test, which must not make it look as fast as the first.
        has_test = second_s is not None and second.complete
        if is_close or (has_test and not differ(first, second, row)):
            close = second.algorithm
    # Two hosts of different racks, if the network has racks: their link is the slowest.
    path = network.path(0, workers - 1)
    times = _predicted_s(sources, network, predict)
    error: float | None = None
    if measured in times and first.median_s:
        error = times[measured] / first.median_s
    return MapPoint(
        network=name,
        # A network beyond the range is drawn at its edge; one without a limit has no bandwidth.
        bandwidth=min(max(path.bandwidth or math.inf, BANDWIDTHS[0]), BANDWIDTHS[1]),
        round_trip_s=min(max(path.round_trip_s, ROUND_TRIPS_S[0]), ROUND_TRIPS_S[1]),
        measured=measured,
        second=close,
        predicted=min(times, key=times.__getitem__),
        error=error,
    )
