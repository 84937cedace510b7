"""Search the best values of a sweep's parameters by one rule that is the same for all algorithms.

The rule, for each algorithm with each number of workers::

    1. the grid is default x factors, and each value is one run: a trial
    2. the best trial has the fewest steps to the goal; if none reached it, the best value of the
       goal's metric, as with the goal of a fixed training time; a trial that failed or diverged
       is the worst
    3. of equal trials, the one nearest to the default counts, then the smaller value
    4. if the best is at an end of the grid, the grid grows by one value there, at most twice
    5. of several parameters, each is tuned with the best values of those before it

The choice is a pure function of the trials, so it is computed from the folder of the sweep whenever
it is needed, and a sweep that was killed continues with the same choice. A rule with equal numbers
of trials is needed, because a method that was tuned longer than another one looks better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.sweep.toml_file import Point, Sweep, Variant
from mlbench_core.sweep.tuning_options import Trial

__all__ = ["MOST_GROWTHS", "Score", "Search", "score", "search_all", "tuned_arguments"]

MOST_GROWTHS = 2
"""Largest number of values by which a grid grows."""


@dataclass(frozen=True)
class Score:
    """The outcome of a trial.

    Attributes:
        steps_to_goal: Training steps to the goal; None if the trial did not reach it.
        best: Best value of the goal's metric; None if the trial failed or diverged.
        minimize: True if a smaller value is better.
    """

    steps_to_goal: int | None = None
    best: float | None = None
    minimize: bool = False

    @property
    def rank(self) -> tuple[int, float]:
        """Return the key by which trials are sorted, best first."""
        if self.steps_to_goal is not None:
            return 0, self.steps_to_goal
        if self.best is None:
            return 2, 0.0
        if self.minimize:
            return 1, self.best
        return 1, -self.best


@dataclass(frozen=True)
class Search:
    """The tuning of one parameter of an algorithm with one number of workers.

    Attributes:
        algorithm: Name of the algorithm.
        workers: Number of workers.
        parameter: The parameter.
        points: The trials, ascending by value. More can follow until ``chosen`` is known.
        scores: Their outcomes, as far as they have ended.
        chosen: The best trial; None until all trials have ended.
    """

    algorithm: str
    workers: int
    parameter: str
    points: tuple[Point, ...]
    scores: tuple[Score | None, ...]
    chosen: Trial | None = None

    @property
    def chosen_score(self) -> Score:
        """Return the outcome of the best trial; an empty one until it is known."""
        for point, found in zip(self.points, self.scores, strict=True):
            if point.trial is self.chosen and found is not None:
                return found
        return Score()

    @property
    def is_at_edge(self) -> bool:
        """Return True if the best value is at an end of the grid, beyond which others may be."""
        ends = (self.points[0].trial, self.points[-1].trial)
        return self.chosen is not None and self.chosen in ends


def search_all(sweep: Sweep, judge: Callable[[Point], Score | None]) -> list[Search]:
    """Return the tuning of a sweep as far as its trials have ended.

    Args:
        sweep: The sweep.
        judge: Function that returns the outcome of a trial; None if it has not ended.

    Returns:
        The searches in the order in which their trials run: the first parameter of all algorithms
        and numbers of workers, then the second, and so on. The list is empty without tuning.
    """
    found: list[Search] = []
    if sweep.tuning is None:
        return found
    for parameter in sweep.tuning.parameters:
        # A parameter is tuned with the best values of those before it.
        before = tuned_arguments(found)
        for workers, variant in itertools.product(sweep.workers, sweep.variants):
            words: tuple[str, ...] | None = ()
            if parameter != sweep.tuning.parameters[0]:
                words = before.get((variant.name, workers))
            found.append(_search(sweep, parameter, variant, workers, words, judge))
    return found


def _search(
    sweep: Sweep,
    parameter: str,
    variant: Variant,
    workers: int,
    words: tuple[str, ...] | None,
    judge: Callable[[Point], Score | None],
) -> Search:
    """Repeat the search of a parameter from the outcomes of its trials.

    The words are the arguments of the parameters before it; None if they are not known yet.
    """
    assert sweep.tuning is not None, "only a sweep with tuning has searches"
    default = sweep.tuning.defaults[parameter][variant.name]
    factors = list(sweep.tuning.factors)
    for growths in itertools.count():
        trials: list[Trial] = []
        points: list[Point] = []
        scores: list[Score | None] = []
        for factor in factors:
            # Six digits are enough for a grid, and a short text is the same on every machine.
            trials.append(Trial(parameter, factor, float(f"{default * factor:.6g}")))
            points.append(sweep.trial(variant, workers, trials[-1], words))
            # A trial whose arguments are not known yet has not run, whatever its folder says.
            judged: Score | None = None
            if words is not None:
                judged = judge(points[-1])
            scores.append(judged)
        search = Search(variant.name, workers, parameter, tuple(points), tuple(scores))
        if None in scores:
            return search
        best = min(zip(trials, scores, strict=True), key=_order)[0]
        search = replace(search, chosen=best)
        if not search.is_at_edge or growths == MOST_GROWTHS:
            break
        # In the ratio of the two values at this end, so that the grid stays a geometric one.
        if best is trials[0]:
            factors.insert(0, factors[0] * factors[0] / factors[1])
        else:
            factors.append(factors[-1] * factors[-1] / factors[-2])
    return search


def _order(tried: tuple[Trial, Score | None]) -> tuple[tuple[int, float], float, float]:
    """Return the key of a trial: its outcome, the distance from the default, and the value."""
    trial, found = tried
    assert found is not None, "all trials have ended"
    # Without the rounding, 0.1 and 10 would differ in distance.
    return found.rank, round(abs(math.log(trial.factor)), 9), trial.value


def tuned_arguments(searches: Iterable[Search]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the tuned arguments by algorithm and number of workers.

    Args:
        searches: The searches.

    Returns:
        The arguments of those of which all searches have ended.
    """
    arguments: dict[tuple[str, int], tuple[str, ...]] = {}
    unknown = set()
    for search in searches:
        key = (search.algorithm, search.workers)
        if search.chosen is None:
            unknown.add(key)
            continue
        chosen = (search.parameter, repr(search.chosen.value))
        arguments[key] = (*arguments.get(key, ()), *chosen)
    return {key: words for key, words in arguments.items() if key not in unknown}


def score(record: RunRecord) -> Score:
    """Return the outcome of a trial that has a result.

    Args:
        record: The trial.

    Raises:
        ConfigurationError: The trial has no goal.
    """
    if record.goal is None:
        # A run that was stopped before its workers wrote a line has no goal either.
        if record.state != "finished":
            return Score()
        raise ConfigurationError(
            f"the trial {record.name} must have a goal, by which values are compared: "
            "give the script one, or remove [tuning]"
        )
    minimize = bool(record.goal.get("minimize"))
    # The steps until a fixed training time only say how fast the machine was.
    if record.reached and not record.has_fixed_time:
        if record.steps_to_goal is None:
            raise ConfigurationError(
                f"the trial {record.name} must record the step of its goal, by which values are "
                "compared: let its script write a result folder, or remove [tuning]"
            )
        return Score(record.steps_to_goal, record.best, minimize)
    if _has_diverged(record):
        return Score(minimize=minimize)
    value = record.best
    if record.reached:
        # The run may have gone on after the time.
        value = record.goal_value
    return Score(None, value, minimize)


def _has_diverged(record: RunRecord) -> bool:
    """Return True if the last value of a statistic of rank 0 is not finite."""
    if record.folder is None:
        return False
    last: dict[str, Any] = {}
    for line in read_lines(record.folder):
        if line["kind"] == "stat" and line["rank"] == 0:
            # A value that is not finite is null in the raw lines.
            last[line["name"]] = line.get("value")
    return None in last.values()
