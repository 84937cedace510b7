"""Gather the runs of a sweep by algorithm, network and number of workers.

The rule for runs that missed their goal is that of :mod:`mlbench_core.comparison.goal_times`. All
runs with the same network and the same number of workers are judged up to the same training time:
the least one at which one of them was stopped. A run that reached its goal later missed it by this
rule, as the stopped run might have reached it then, too.

In a sweep whose seconds are modelled, each run is in the cells of all networks, see
:mod:`mlbench_core.sweep.modelled`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures.numbers import Estimate
from mlbench_core.comparison.goal_times import (
    TimesTest,
    compare_times,
    cost_per_success_s,
    median_s,
)
from mlbench_core.comparison.group_repeats import Group, check_comparable
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import holm, log_interval
from mlbench_core.sweep.modelled import ModelledRecord, SweepPlace, on_networks

if TYPE_CHECKING:
    from mlbench_core.network.description import Network

__all__ = [
    "CLOSE",
    "Cell",
    "Outcome",
    "differ",
    "duration",
    "gather",
    "order",
    "sent_per_worker",
    "speed_ratio",
]

CLOSE = 1.1
"""Two times within this factor of each other are not called different."""


@dataclass(frozen=True)
class Cell:
    """The runs of one algorithm on one network with one number of workers.

    Attributes:
        network: Name of the network; None for one worker.
        group: The runs that ended; at least one.
        failed: Number of runs that ended with an error. They are not in the group, and count as
            misses.
        planned: Number of runs that the sweep has for this cell.
        not_modelled: The reason why the seconds of its runs cannot be modelled; the group is then
            empty. Empty if they can, or are measured.
        unjudged: The runs of the group, in its order, as they were before they were judged at a
            limit. A run that went on after the limit has the steps of its whole training, so the
            seconds of a step are those of these runs.
    """

    network: str | None
    group: Group
    failed: int = 0
    planned: int = 0
    not_modelled: str = ""
    unjudged: tuple[RunRecord, ...] = ()

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
        return self.group.reached

    @property
    def missed(self) -> int:
        """Return the number of runs that did not reach their goal."""
        return self.group.missed

    @property
    def unmeasured(self) -> int:
        """Return the number of runs that missed their goal because its metric was not measured."""
        return sum(record.lacks_goal_metric for record in self.group.records)

    @property
    def complete(self) -> bool:
        """Return True if no run missed its goal or ended with an error, so that means are known."""
        return not (self.missed or self.failed or self.not_modelled)

    @property
    def times_s(self) -> list[float]:
        """Return the times to the goal of the runs that reached it."""
        return list(filter(None, map(attrgetter("time_to_goal_s"), self.reached)))

    @property
    def median_s(self) -> float | None:
        """Return the median time to the goal, or None if half of the runs or more missed it."""
        return median_s(self.group.records, self.failed)

    @property
    def cost_per_success_s(self) -> float | None:
        """Return the training time of all runs, divided by the number that reached their goal.

        None if a run failed or none reached its goal.
        """
        return cost_per_success_s(self.group.records, self.failed)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the geometric mean.

        None for a single run, or if a run missed its goal: the interval of the other runs would be
        too narrow and too low.
        """
        if not self.complete:
            return None
        return log_interval(self.times_s)

    @property
    def model_range_s(self) -> tuple[float, float] | None:
        """Return the range of the median by the mean error of the model.

        It is apart from :attr:`interval_s`, which is that of the seeds. None for measured times,
        one worker, and without a median.
        """
        for record in self.reached:
            if isinstance(record, ModelledRecord) and record.step_range_s and self.median_s:
                # The ratio is the same for all runs of a network and a number of workers.
                step_s = (record.time_to_goal_s or 0.0) / (record.steps_to_goal or 1)
                low_s, high_s = record.step_range_s
                return self.median_s * low_s / step_s, self.median_s * high_s / step_s
        return None


@dataclass(frozen=True)
class Outcome:
    """All runs of a sweep.

    Attributes:
        title: Title of the sweep.
        algorithms: Names of the algorithms, in the order of the sweep.
        networks: The networks by name, in the order of the sweep.
        workers: The numbers of workers, ascending.
        cells: The cells with at least one ended run.
        limit_s: Seconds of training after which a run ended; None without a limit.
        planned: Number of runs of the sweep.
        modelled: Number of runs that ended, if the seconds on networks are modelled from them; None
            if they are measured.
        judged_s: Training time up to which all runs of a network and a number of workers are
            judged, see :func:`gather`. Places where no run was stopped are missing.
        is_tuned: True if all algorithms were tuned by the same rule. Otherwise the one with the
            least time may only have the better default, and is not called the fastest.
    """

    title: str
    algorithms: tuple[str, ...]
    networks: Mapping[str, Network]
    workers: tuple[int, ...]
    cells: tuple[Cell, ...]
    limit_s: float | None = None
    planned: int = 0
    modelled: int | None = None
    judged_s: Mapping[tuple[str | None, int], float] = field(default_factory=dict)
    is_tuned: bool = False
    _index: dict[tuple[str, str | None, int], Cell] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {}
        for cell in self.cells:
            index[cell.algorithm, cell.network, cell.workers] = cell
        # The class is frozen.
        object.__setattr__(self, "_index", index)

    @property
    def several(self) -> tuple[int, ...]:
        """Return the numbers of workers above 1."""
        return tuple(workers for workers in self.workers if workers > 1)

    @property
    def baseline(self) -> str:
        """Return the name of the sweep's first algorithm, with which the others are compared."""
        return self.algorithms[0]

    @property
    def groups(self) -> list[Group]:
        """Return the groups of all cells with a run."""
        return [cell.group for cell in self.cells if cell.runs]

    @property
    def has_results(self) -> bool:
        """Return True if a run ended without an error, also if its seconds are not modelled."""
        return any(cell.runs or cell.not_modelled for cell in self.cells)

    @property
    def ended(self) -> int:
        """Return the number of runs that ended, with or without an error."""
        if self.modelled is not None:
            return self.modelled
        return sum(cell.runs + cell.failed for cell in self.cells)

    def cell(self, algorithm: str, network: str | None, workers: int) -> Cell | None:
        """Return a cell, or None if none of its runs reached or missed its goal.

        One worker belongs to every network.
        """
        cell = self._index.get((algorithm, *_setting(network, workers)))
        if cell is None or not cell.runs:
            return None
        return cell

    def row(self, network: str | None, workers: int) -> list[Cell]:
        """Return the cells of all algorithms on a network, least median first.

        Those without a median are the last.
        """
        cells = (self.cell(name, network, workers) for name in self.algorithms)
        return sorted(filter(None, cells), key=order)

    def not_within(self, network: str | None, workers: int) -> str:
        """Return the text for a run that missed its goal.

        It has the training time up to which the runs of the network and number of workers are
        judged.

        Args:
            network: Name of the network; None for one worker.
            workers: Number of workers.

        Example:
            >>> Outcome("", (), {}, (), (), limit_s=120).not_within(None, 1)
            'not within 2 min'
        """
        limit_s = self.judged_s.get(_setting(network, workers), self.limit_s)
        if limit_s is None:
            return "goal not reached"
        return f"not within {duration(limit_s)}"

    def missed_text(self, *cells: Cell) -> str:
        """Return the text for the runs of cells of one place that missed their goal.

        A goal whose metric was never measured may have been reached.
        """
        unmeasured = sum(cell.unmeasured for cell in cells)
        if not unmeasured:
            return self.not_within(cells[0].network, cells[0].workers)
        if unmeasured == sum(cell.missed for cell in cells):
            return "goal not measured"
        return f"{self.not_within(cells[0].network, cells[0].workers)} or not measured"


def duration(seconds: float) -> str:
    """Return a time in the largest unit in which it is a short number.

    Example:
        >>> duration(120), duration(90), duration(5400)
        ('2 min', '90 s', '1.5 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        # 5400 s is 1.5 h, but 90 s is not 1.5 min.
        if seconds >= size and seconds * 2 % size == 0 and (seconds % size == 0 or unit == "h"):
            return f"{seconds / size:g} {unit}"
    return f"{seconds:.4g} s"


def order(cell: Cell) -> tuple[float, int]:
    """Return the key by which cells are sorted: the median time, then the number of misses."""
    median = cell.median_s
    # A median of misses is longer than every time, and None cannot be compared.
    if median is None:
        median = math.inf
    return median, cell.missed + cell.failed


def differ(a: Cell, b: Cell, row: Sequence[Cell] | None = None) -> bool | None:
    """Return True if the test of two cells shows that they differ.

    The test is that of :func:`~mlbench_core.comparison.goal_times.compare_times`. The level is 5 %,
    after Holm's correction for all tests of ``a`` against a cell of its row: ``a`` was selected
    from them because it has the least time.

    Args:
        a: The cell with the least time.
        b: Another cell.
        row: The cells of all algorithms in the same place; by default, these two.

    Returns:
        None if a cell has a single run, or one that missed its goal, so that its mean is unknown.
    """
    # All tests of the row count for the correction, not only that of b.
    p_values: dict[int, float] = {}
    for cell in row or (a, b):
        if cell is a:
            continue
        test = _test(a, cell)
        if test is not None:
            # A cell holds dictionaries, so it cannot be a key itself.
            p_values[id(cell)] = test.p
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    p_value = adjusted.get(id(b))
    if p_value is None:
        return None
    return p_value < 0.05


def _test(a: Cell, b: Cell) -> TimesTest | None:
    """Return the test of the times of two cells; None if a run of one of them missed its goal."""
    if not (a.complete and b.complete):
        return None
    return compare_times(a.group.records, b.group.records)


def speed_ratio(slower: Cell, faster: Cell) -> Estimate | None:
    """Return how many times as fast one cell is as another.

    The interval is that of the ratio of the geometric means.

    Args:
        slower: The cell in the numerator.
        faster: The cell in the denominator.

    Returns:
        The ratio of the medians; its interval is missing if a run missed its goal. None without
        both medians.
    """
    if slower.median_s is None or faster.median_s is None:
        return None
    low: float | None = None
    high: float | None = None
    test = _test(slower, faster)
    if test is not None:
        # The ratio is that of the medians, and its interval that of the geometric means.
        low, high = test.interval
    return Estimate(slower.median_s / faster.median_s, low, high, min(slower.runs, faster.runs))


def sent_per_worker(record: RunRecord) -> float | None:
    """Return the bytes that a worker put on the wire until the goal, on average over the workers.

    Returns:
        The bytes, or None if the run missed its goal or did not count them.
    """
    if not record.reached or record.bytes_on_wire is None or not record.workers:
        return None
    sent: float | None = record.bytes_on_wire
    to_goal, whole = record.epochs_to_goal, record.epochs
    if record.unit == "steps":
        to_goal, whole = record.steps_to_goal, record.batches
    if to_goal is not None and whole is not None and to_goal < whole:
        # The run went on after its goal, so only its raw lines have the number.
        metric = str((record.goal or {}).get("metric"))
        step = record.steps_to_goal or 0
        sent = None
        for point in record.curve(metric):
            if point.step >= step:
                sent = point.bytes
                break
    if sent is None:
        return None
    return sent / record.workers


def gather(
    places: Iterable[SweepPlace],
    records: Mapping[str, RunRecord],
    networks: Mapping[str, Network],
    *,
    failed: Collection[str] = (),
    title: str = "Sweep",
    limit_s: float | None = None,
    is_modelled: bool = False,
    is_tuned: bool = False,
    needs_cpu_time: bool = True,
) -> Outcome:
    """Gather the runs of a sweep.

    A run that reached its goal after the limit missed it. If an earlier version stopped a run, all
    runs of its network and number of workers are judged by their progress at the least training
    time at which one of them was stopped. So no method is stopped earlier than another.

    The time of a run without a goal is that of its whole training.

    Args:
        places: The planned runs.
        records: The results of those that ended, by the name of their folder.
        networks: The networks by name, in the order of the sweep.
        failed: Names of the runs that ended with an error.
        title: Title of the sweep.
        limit_s: Seconds after which a run was stopped; None without a limit.
        is_modelled: True to model the seconds of each run on each network.
        is_tuned: True if the sweep tunes its algorithms.
        needs_cpu_time: False to model runs without processor time, too, see
            :func:`~mlbench_core.sweep.modelled.model_run`.

    Raises:
        ConfigurationError: Runs had different goals.
    """
    places = list(places)
    planned, modelled, reasons = len(places), None, {}
    if is_modelled:
        modelled = len({*records, *failed})
        found = on_networks(places, records, networks, failed, needs_cpu_time=needs_cpu_time)
        places, records, failed, reasons = (
            list(found.places),
            found.records,
            found.failed,
            found.reasons,
        )
    # One training time for all runs of a setting, so that no method is stopped before another. A
    # limit on the measured seconds says nothing about modelled ones.
    judged_s: dict[tuple[str | None, int], float] = {}
    if not is_modelled:
        judged_s = _least_stopped_s(places, records)
    judged: dict[str, RunRecord] = {}
    unjudged: dict[str, RunRecord] = {}
    names_of_cells: dict[tuple[str, str | None, int], list[str]] = {}
    for run in places:
        setting = _setting(run.network, run.workers)
        names_of_cells.setdefault((run.algorithm, *setting), []).append(run.name)
        if run.name in records:
            record = unjudged[run.name] = _at_its_end(records[run.name])
            judged[run.name] = _judged(record, judged_s.get(setting, limit_s))
    check_comparable(list(judged.values()))
    cells = []
    for (algorithm, network, workers), names in names_of_cells.items():
        ended = []
        before = []
        lost = 0
        for name in names:
            if name in judged:
                ended.append(judged[name])
                before.append(unjudged[name])
            if name in failed:
                # It counts as a miss, but there is no record of it.
                lost += 1
        # The settings of a run are those of the first one that has them: a run that was stopped may
        # have none.
        configuration: dict[str, Any] = {}
        for record in ended:
            if record.configuration.get("goal"):
                configuration = dict(record.configuration)
                break
        configuration.pop("seed", None)
        reason = next(filter(None, map(reasons.get, names)), "")
        if reason:
            # A median over the other seeds would say less than it seems to.
            ended, before, lost = [], [], 0
        if ended or lost or reason:
            group = Group(algorithm, workers, configuration, tuple(ended))
            cells.append(Cell(network, group, lost, len(names), reason, tuple(before)))
    return Outcome(
        title=title,
        algorithms=tuple(dict.fromkeys(map(attrgetter("algorithm"), places))),
        networks=dict(networks),
        workers=tuple(sorted(set(map(attrgetter("workers"), places)))),
        cells=tuple(cells),
        limit_s=limit_s,
        planned=planned,
        modelled=modelled,
        judged_s=judged_s,
        is_tuned=is_tuned,
    )


def _setting(network: str | None, workers: int) -> tuple[str | None, int]:
    """Return the network and the number of workers of a run; one worker has no network."""
    if workers == 1:
        # Runs of a sweep on several networks share those of one worker.
        network = None
    return network, workers


def _least_stopped_s(
    places: Iterable[SweepPlace], records: Mapping[str, RunRecord]
) -> dict[tuple[str | None, int], float]:
    """Return the least training time at which a run was stopped, by network and workers."""
    least_s: dict[tuple[str | None, int], float] = {}
    for run in places:
        record = records.get(run.name)
        # Only earlier versions left an unfinished run at the limit; now the script ends it.
        if record is None or record.state != "unfinished" or record.train_s is None:
            continue
        if _is_late(record, None):
            setting = _setting(run.network, run.workers)
            least_s[setting] = min(record.train_s, least_s.get(setting, math.inf))
    return least_s


def _at_its_end(record: RunRecord) -> RunRecord:
    """Return a finished run without a goal as one that reached its goal at its end."""
    if record.goal or record.reached is not None or record.state != "finished":
        return record
    return dataclasses.replace(
        record, reached=True, time_to_goal_s=record.train_s, steps_to_goal=record.batches
    )


def _is_late(record: RunRecord, limit_s: float | None) -> bool:
    """Return True if a run did not reach its goal, or only after a training time."""
    # A run that reached its goal without a recorded time counts as late: its time is not known.
    time_s = record.time_to_goal_s
    if not record.reached or not time_s:
        return True
    return limit_s is not None and time_s > limit_s


def _judged(record: RunRecord, limit_s: float | None) -> RunRecord:
    """Return a run as if it had been stopped at a training time."""
    if not _is_late(record, limit_s):
        return record
    # A goal that was reached later counts as missed, with the training up to the limit. The steps
    # stay those of the whole training, see Cell.unjudged.
    train_s = record.train_s
    if limit_s is not None and train_s is not None:
        train_s = min(train_s, limit_s)
    return dataclasses.replace(
        record,
        reached=False,
        time_to_goal_s=None,
        epochs_to_goal=None,
        steps_to_goal=None,
        train_s=train_s,
    )
