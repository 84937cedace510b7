"""Recommend a method and a number of workers for a network, from the runs of a folder.

The time to the goal is known for the numbers of workers of the runs only: it is the steps that the
runs needed, times the seconds of a step on the network. The seconds are measured if the runs had
this network, and otherwise modelled, see :mod:`mlbench_core.sweep.modelled`. For other numbers of
workers only the seconds of a step are predicted.

Runs without a goal are compared by their samples per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from mlbench_core.arguments import check_int
from mlbench_core.comparison.group_repeats import differences, plural, pool, usable
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Network
from mlbench_core.network.named_networks import NETWORKS, get_network
from mlbench_core.prediction import predict_repeats
from mlbench_core.prediction.check import check_repeats, widened
from mlbench_core.prediction.time_model import samples_of_step, share_of_core
from mlbench_core.sweep.grouped_runs import Cell, Outcome, differ, gather, order
from mlbench_core.sweep.modelled import (
    ModelledRecord,
    Place,
    SweepPlace,
    shared_caveats,
    step_numbers,
)
from mlbench_core.sweep.result_table import cell_row, known_median
from mlbench_core.sweep.sentences import (
    NOT_TUNED,
    TESTS,
    leads,
    listed,
    places_text,
    seconds,
    unfinished,
)
from mlbench_core.sweep.sweep_folder import COPY, SweepFolder
from mlbench_core.sweep.toml_file import load_sweep

__all__ = ["Advice", "Runs", "read_runs", "recommend"]

_CROWDED = (
    "measured with more {} than cores, so these times compare methods, and are too long for a "
    "comparison with fewer workers"
)
_NUMBERS = (
    "step_s",
    "step_range_s",
    "compute_share",
    "samples_per_s",
    "time_to_goal_s",
    "interval_s",
    "model_range_s",
    "runs",
    "missed",
    "bytes_to_goal_of_worker",
    "price",
)
# Those of runs without a goal are unknown.
_OF_GOAL = _NUMBERS[_NUMBERS.index("time_to_goal_s") :]
_NO_GOAL = (
    "The runs have no goal to reach, so it is not known if a method needs more samples than "
    "another. To compare times to a goal, run them with one; a script has the options --metric and "
    "--goal."
)


@dataclass(frozen=True)
class Runs:
    """The runs of a folder.

    Attributes:
        places: The planned runs.
        records: The results of those that ended, by the name of their place.
        networks: The networks by name.
        failed: Names of the runs that ended with an error.
        limit_s: Seconds after which a run was stopped; None without a limit.
        is_modelled: True if the runs had no network, and several workers shared a machine.
        is_tuned: True if all methods were tuned by one rule.
        remarks: Notes for people, for example which runs are left out.
    """

    places: Sequence[SweepPlace]
    records: Mapping[str, RunRecord]
    networks: Mapping[str, Network]
    failed: Collection[str] = ()
    limit_s: float | None = None
    is_modelled: bool = False
    is_tuned: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def workers(self) -> list[int]:
        """Return the numbers of workers of the runs that ended, ascending."""
        return sorted({record.workers or 1 for record in self.records.values()})

    @property
    def has_goal(self) -> bool:
        """Return True if the runs had a goal to reach."""
        return any(record.goal and not record.has_fixed_time for record in self.records.values())


@dataclass(frozen=True)
class Advice:
    """The table of a recommendation, and its sentences.

    Attributes:
        rows: One for each network, method and number of workers, least time to the goal first in
            each network. An unknown value is None.
        sentences: The advice, one network after the other, and its limits.
    """

    rows: tuple[dict[str, Any], ...]
    sentences: tuple[str, ...]


def read_runs(folder: Path) -> Runs:
    """Read the folder of a sweep, or a folder with result folders at any depth.

    Raises:
        ConfigurationError: The folder has no run that has ended, or two configurations of one
            method.
    """
    if (folder / COPY).exists():
        sweep = load_sweep(folder / COPY)
        points, records, failed = SweepFolder(folder).results(sweep)
        is_tuned = sweep.tuning is not None
        runs = Runs(
            points, records, sweep.networks, failed, sweep.limit_s, sweep.is_modelled, is_tuned
        )
    else:
        runs = _read_results(folder)
    if not runs.records:
        raise ConfigurationError(
            f"FOLDER must have runs that have ended, unlike {folder}: run the sweep first"
        )
    return runs


def _read_results(folder: Path) -> Runs:
    kept, remarks = usable(load([folder]))
    ended: list[RunRecord] = []
    for group in pool(kept):
        # A seed counts once.
        ended += group.records
        remarks += group.remarks
    names: dict[str, list[RunRecord]] = {}
    networks = {}
    places = []
    for record in ended:
        configuration = record.configuration
        # A user's script may have no algorithm, and then its program tells the methods apart.
        name = str(configuration.get("algorithm") or configuration.get("program") or record.name)
        names.setdefault(name, []).append(record)
        network: str | None = None
        if configuration.get("network") and (record.workers or 1) > 1:
            network = str(configuration["network"])
            networks[network] = get_network(network)
        places.append(Place(record.source, name, network, record.workers or 1))
    for name, records in names.items():
        others = []
        for key in differences(pool(records)):
            section = key.partition(".")[0]
            # Network and workers are what the advice chooses from, not another configuration.
            is_place = key in ("network", "workers") or section in ("machine", "software")
            if not is_place or key == "machine.cpu":
                others.append(key)
        if others:
            raise ConfigurationError(
                f"FOLDER must have one configuration of {name}, not several that differ in "
                f"{listed(others)}: give a folder with one of them"
            )
    # Runs of several series may have the same name, but each has a path of its own.
    by_source = {record.source: record for record in ended}
    return Runs(places, by_source, networks, remarks=tuple(remarks))


def recommend(
    runs: Runs, networks: Iterable[Network], workers: Iterable[int], pricing: Pricing
) -> Advice:
    """Recommend a method and a number of workers for each network.

    Args:
        runs: The runs, see :func:`read_runs`.
        networks: The networks.
        workers: The numbers of workers to choose from. One worker is compared in any case if the
            folder has its runs.
        pricing: Price of the machines.

    Raises:
        ValueError: A number of workers is not a positive integer.
    """
    counts = sorted(set(workers))
    for count in counts:
        check_int("workers", count)
    rows: list[dict[str, Any]] = []
    sentences: list[str] = []
    # Samples per second do not depend on how well the settings suit the goal.
    if runs.has_goal and not runs.is_tuned:
        sentences.append(NOT_TUNED)
    names = {place.name for place in runs.places}
    sentences += unfinished(len(names & {*runs.records, *runs.failed}), len(names))
    for network in networks:
        name = _name(network, runs)
        # Runs of different goals, or of none and one, are refused here.
        outcome = _outcome(runs, name, network)
        cells = []
        for cell in outcome.cells:
            # One machine is the alternative to every number of workers that the user asks for.
            if cell.workers == 1 or cell.workers in counts:
                cells.append(cell)
        chosen = replace(outcome, cells=tuple(cells))
        found = []
        for count in counts:
            for algorithm in chosen.algorithms:
                found.append(_row(runs, chosen, algorithm, (name, network), count, pricing))
        if runs.has_goal:
            rows += sorted(found, key=_rank)
            sentences += _advice(chosen, name, counts, pricing)
            continue
        rows += sorted(found, key=_samples_per_s, reverse=True)
        # One worker need not be among the counts, and then it has no row of the table.
        alone = []
        for cell in chosen.cells:
            if cell.workers == 1:
                alone.append(_row(runs, chosen, cell.algorithm, (name, network), 1, pricing))
        sentences.append(_advice_on_samples(name, rows[-len(found) :], alone))
    if runs.has_goal:
        sentences += _not_run(runs, counts)
    else:
        # Samples per second need no steps to a goal, so no number of workers is missing.
        sentences += [*_not_run(runs, ()), _NO_GOAL]
    return Advice(tuple(rows), (*sentences, *_limits(rows)))


def _name(network: Network, runs: Runs) -> str:
    """Return the name of a network in MLBench or in the folder, else its text."""
    named = {name: entry.network for name, entry in NETWORKS.items()}
    for name, other in {**named, **runs.networks}.items():
        if other == network:
            return name
    return str(network)


def _outcome(runs: Runs, name: str, network: Network) -> Outcome:
    """Gather the runs that count for a network: measured if they had it, else modelled."""
    is_measured = not runs.is_modelled and network in runs.networks.values()
    # A limit on measured seconds says nothing about modelled ones.
    source: Network | None = None
    limit_s: float | None = None
    if is_measured:
        source, limit_s = network, runs.limit_s
    names = set()
    places = []
    for place in _places(runs, source):
        names.add(place.name)
        if place.workers > 1:
            # The runs had another network, or the folder calls it by another name.
            place = replace(place, network=name)
        else:
            place = replace(place, network=None)
        places.append(place)
    return gather(
        places,
        {key: record for key, record in runs.records.items() if key in names},
        {name: network},
        failed=names.intersection(runs.failed),
        limit_s=limit_s,
        is_modelled=not is_measured,
        is_tuned=runs.is_tuned,
        # The seconds of workers that shared a machine in a modelled sweep say nothing.
        needs_cpu_time=runs.is_modelled,
    )


def _places(runs: Runs, network: Network | None) -> list[Place]:
    """Return the runs on a measured network, or those from which to model another one.

    The latter are those on the network with the highest bandwidth, for each method and number of
    workers: there, the fewest runs were stopped at a limit before their goal.
    """
    cases: dict[tuple[str, int], dict[str | None, list[Place]]] = {}
    for place in runs.places:
        if place.name in runs.records or place.name in runs.failed:
            case = cases.setdefault((place.algorithm, place.workers), {})
            own = Place(place.name, place.algorithm, place.network, place.workers)
            case.setdefault(place.network, []).append(own)

    def bandwidth(name: str | None) -> float:
        # None is the network of one worker, and a link without a limit has no bandwidth.
        path = name and runs.networks[name].path(0, 1)
        return (path and path.bandwidth) or math.inf

    chosen = []
    for (_, workers), case in cases.items():
        if network is None:
            # Of equal bandwidths, the network whose runs were planned last.
            chosen += case[max(reversed(case), key=bandwidth)]
            continue
        for name, places in case.items():
            # One worker has no network, so its runs count for all of them.
            if workers == 1 or (name and runs.networks[name] == network):
                chosen += places
    return chosen


def _row(
    runs: Runs,
    outcome: Outcome,
    algorithm: str,
    on: tuple[str, Network],
    workers: int,
    pricing: Pricing,
) -> dict[str, Any]:
    """Return the row of a method and a number of workers; it is predicted if they did not run."""
    row = _row_of_times(runs, outcome, algorithm, on, workers, pricing)
    same: list[float | None] = []
    similar: list[float | None] = []
    has_same = False
    for place in runs.places:
        if place.algorithm != algorithm or (place.workers > 1) != (workers > 1):
            continue
        has_same = has_same or place.workers == workers
        if place.name in runs.records:
            samples = samples_of_step(runs.records[place.name])
            similar.append(samples)
            if place.workers == workers:
                same.append(samples)
    # As for the prediction of a step, a worker has as many samples with any number of workers.
    each = known_median(similar)
    # Runs of this number of workers that all failed have none, whatever others had.
    if has_same:
        each = known_median(same)
    if each is not None and row["step_s"]:
        row["samples_per_s"] = workers * each / row["step_s"]
    if not runs.has_goal:
        if row["step_s"] is None and row["error"] is None:
            row["error"] = "its runs failed, or have no step"
        row.update(dict.fromkeys(_OF_GOAL))
    return row


def _row_of_times(
    runs: Runs,
    outcome: Outcome,
    algorithm: str,
    on: tuple[str, Network],
    workers: int,
    pricing: Pricing,
) -> dict[str, Any]:
    """Return the row without its samples per second."""
    row: dict[str, Any] = {
        "network": on[0],
        "algorithm": algorithm,
        "workers": workers,
        "seconds": "none",
        **dict.fromkeys(_NUMBERS),
        "caveats": [],
        "error": None,
    }
    for cell in outcome.cells:
        if (cell.algorithm, cell.workers) == (algorithm, workers):
            return {**row, **_known(outcome, cell, pricing)}
    # Those of one worker would give their compute time, unlike the runs that are modelled.
    records = []
    for place in runs.places:
        if place.algorithm == algorithm and place.workers > 1 and place.name in runs.records:
            records.append(runs.records[place.name])
    if not records:
        return {**row, "error": "there is no run of several workers to predict from"}
    try:
        predictions = predict_repeats(records, on[1], workers)
    except ConfigurationError as error:
        return {**row, "error": str(error)}
    # Communication that runs at the same time as computation takes no share of the step.
    shares = [1 - each.exposed_s / each.step_s for each in predictions]
    caveats: list[str] = []
    for prediction in predictions:
        caveats += shared_caveats(prediction.caveats)
    step_s = statistics.median(map(attrgetter("step_s"), predictions))
    failed = [check for check in check_repeats(records, workers) if not check.holds]
    for check in failed:
        caveats.append(
            f"a measured step of {algorithm} with {plural(check.workers, 'worker')} took "
            f"{1e3 * check.measured_s:.2f} ms, and by the model {1e3 * check.model_s:.2f} ms: "
            + check.problem.rstrip(".")
        )
    step_range_s = _range(map(attrgetter("step_range_s"), predictions))
    return {
        **row,
        "seconds": "predicted",
        "step_s": step_s,
        "step_range_s": widened(step_s, step_range_s, failed),
        "compute_share": statistics.median(shares),
        "caveats": list(dict.fromkeys(caveats)),
    }


def _known(outcome: Outcome, cell: Cell, pricing: Pricing) -> dict[str, Any]:
    """Return the entries of a row whose runs ended."""
    if cell.not_modelled:
        return {"error": cell.not_modelled}
    records = cell.unjudged
    steps = list(map(step_numbers, records))
    caveats: list[str] = []
    ranges = []
    for record in records:
        # A modelled time counts processor time, which a shared core does not make longer.
        if outcome.modelled is None and share_of_core(record) < 1:
            noun = "workers"
            if (record.configuration.get("threads") or 1) > 1:
                noun = "threads"
            caveats.append(_CROWDED.format(noun))
        if isinstance(record, ModelledRecord):
            caveats += record.caveats
            ranges.append(record.step_range_s)
    row = cell_row(outcome, cell, pricing)
    sent_bytes: float | None = None
    if row["sent_mb"] is not None:
        sent_bytes = row["sent_mb"] * 1e6
    origin = "modelled"
    if outcome.modelled is None:
        origin = "measured"
    return {
        "seconds": origin,
        "step_s": known_median(numbers["step_s"] for numbers in steps),
        "step_range_s": _range(ranges),
        "compute_share": known_median(numbers["compute_share"] for numbers in steps),
        "time_to_goal_s": cell.median_s,
        "interval_s": cell.interval_s,
        "model_range_s": cell.model_range_s,
        # A run that ended with an error counts as a miss, as in the median.
        "runs": cell.runs + cell.failed,
        "missed": cell.missed + cell.failed,
        "bytes_to_goal_of_worker": sent_bytes,
        "price": row["price"],
        "caveats": list(dict.fromkeys(caveats)),
    }


def _range(ranges: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the range of the median; all runs of a row have the same error of the model."""
    known = list(filter(None, ranges))
    if not known:
        return None
    low, high = map(statistics.median, zip(*known, strict=True))
    return low, high


def _rank(row: Mapping[str, Any]) -> tuple[float, bool, int, float]:
    """Return the key by which rows are sorted: the time, then misses, and unknown times last."""
    time_s, step_s = row["time_to_goal_s"], row["step_s"]
    # None cannot be compared with a number.
    if time_s is None:
        time_s = math.inf
    if step_s is None:
        step_s = math.inf
    # A predicted row has no misses: it was not tried, so it comes after those that were.
    return time_s, row["missed"] is None, row["missed"] or 0, step_s


def _samples_per_s(row: Mapping[str, Any]) -> float:
    return row["samples_per_s"] or 0.0


def _advice_on_samples(
    network: str, rows: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> str:
    """Return the sentences on the most samples per second on a network.

    Args:
        network: Its name.
        rows: Those of the table, most samples per second first.
        alone: Those of one worker.
    """
    several = [row for row in rows if row["workers"] > 1 and row["samples_per_s"]]
    one = max(filter(_samples_per_s, alone), key=_samples_per_s, default=None)
    if not several:
        text = f"On {network}, no samples per second of several workers are known, so no advice."
        if one is not None:
            text += f" One machine trains {_rate(one)} with {one['algorithm']}."
        return text
    known = [*several, *filter(None, [one])]
    first = max(known, key=_samples_per_s)
    text = f"On {network}: {_trainer(first)} trains the most samples, {_rate(first)}."
    if first is one:
        text = (
            f"On {network}, more workers are not worth it: one machine trains the most samples, "
            f"{_rate(one)} with {one['algorithm']}."
        )
    second = next((row for row in several if row is not first), None)
    if second is not None:
        text += f" The next is {_trainer(second)}, {_rate(second)}{_within(first, second)}."
    if one is not None and first is not one:
        text += f" One machine trains {_rate(one)} with {one['algorithm']}{_within(first, one)}."
    return text


def _trainer(row: Mapping[str, Any]) -> str:
    return f"{row['algorithm']} with {plural(row['workers'], 'worker')}"


def _rate(row: Mapping[str, Any]) -> str:
    rate = _samples_per_s(row)
    # With three digits, 12345 would be written as 1.23e+04.
    if rate >= 100:
        return f"{rate:,.0f} a second"
    return f"{rate:.3g} a second"


def _within(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a remark if the ranges by the error of the model overlap."""
    if first["step_range_s"] is None and other["step_range_s"] is None:
        # Both are measured.
        return ""
    # A step that takes longer than predicted gives fewer samples, so the end of each range at
    # which the two come closest is the longest step of the first and the shortest of the other.
    _, longest_s = first["step_range_s"] or (first["step_s"], first["step_s"])
    shortest_s, _ = other["step_range_s"] or (other["step_s"], other["step_s"])
    least = _samples_per_s(first) * first["step_s"] / longest_s
    most = _samples_per_s(other) * other["step_s"] / shortest_s
    if least > most:
        return ""
    return "; this is within the error of the model"


def _advice(outcome: Outcome, network: str, counts: Sequence[int], pricing: Pricing) -> list[str]:
    """Return the sentences on the least time and the least price on a network."""
    known = [cell for cell in outcome.cells if cell.median_s is not None]
    known.sort(key=order)
    alone: Cell | None = None
    several = []
    for cell in known:
        if cell.workers > 1:
            several.append(cell)
        elif alone is None:
            # The cells are sorted, so this is the best method of one machine.
            alone = cell
    if not several and (alone is None or 1 not in counts):
        text = _no_advice(outcome, network, counts)
        if alone is not None:
            text += f" One machine needs {_median_text(alone)} with {alone.algorithm}."
        return [text]
    if not several or known[0] is alone:
        assert alone is not None, "one of them has a time"
        text = f"On {network}: {_named(alone)} {leads(outcome, alone)}, {_median_text(alone)}."
        if several:
            text = _not_worth_it(network, alone, several[0], known)
        return [text, *_cheapest(outcome, network, known, alone, pricing)]
    # Cells of several workers, sorted by their median, so the second is the next best advice.
    first, *others = several
    text = f"On {network}: {_named(first)} {leads(outcome, first)}, {_median_text(first)}."
    if others:
        second = others[0]
        text += f" Second: {_named(second)}, {_ratio_text(first, second)}; "
        text += f"{_verdict(first, second, known)}."
    if alone is not None:
        text += f" One machine needs {_median_text(alone)} with {alone.algorithm}, "
        text += f"{_ratio_text(first, alone)}; {_verdict(first, alone, known)}."
    elif any(cell.workers == 1 and cell.runs for cell in outcome.cells):
        text += " No method reached the goal with one worker in more than half of its runs."
    return [text, *_cheapest(outcome, network, known, first, pricing)]


def _not_worth_it(network: str, alone: Cell, first: Cell, known: Sequence[Cell]) -> str:
    verdict = _verdict(alone, first, known)
    verb = "has the least median"
    # "Faster" is a claim on all seeds, which only the test can make.
    if verdict == TESTS[True]:
        verb = "is faster"
    return (
        f"On {network}, more workers are not worth it: one machine {verb}, {_median_text(alone)} "
        f"with {alone.algorithm}. The next, {_named(first)}, takes {_ratio_text(alone, first)}; "
        f"{verdict}."
    )


def _no_advice(outcome: Outcome, network: str, counts: Sequence[int]) -> str:
    missed = sum(cell.missed + cell.failed for cell in outcome.cells if cell.workers in counts)
    if missed:
        return f"On {network}, no method reached the goal in more than half of its runs."
    numbers = listed(map(str, counts))
    return f"On {network}, no time to the goal is known with {numbers} workers, so no advice."


def _named(cell: Cell) -> str:
    return f"{cell.algorithm} with {plural(cell.workers, 'worker')}"


def _median_text(cell: Cell) -> str:
    assert cell.median_s is not None, "only cells with a median are compared"
    text = f"median of {plural(cell.runs + cell.failed, 'run')}"
    if cell.missed or cell.failed:
        text += f", {cell.missed + cell.failed} without the goal"
    return f"{seconds(cell.median_s)} to the goal ({text})"


def _ratio_text(first: Cell, other: Cell) -> str:
    assert first.median_s and other.median_s, "only cells with a median are compared"
    return f"{other.median_s / first.median_s:.2f} times as long"


def _verdict(first: Cell, other: Cell, known: Sequence[Cell]) -> str:
    """Return how sure it is that another cell takes longer than the one with the least time.

    The ranges by the error of the model count first: if they overlap, no test of the seeds can
    decide.
    """
    assert first.median_s and other.median_s, "only cells with a median are compared"
    _, high_s = first.model_range_s or (first.median_s, first.median_s)
    low_s, _ = other.model_range_s or (other.median_s, other.median_s)
    is_measured = first.model_range_s is None and other.model_range_s is None
    if not is_measured and low_s <= high_s:
        return "this is within the error of the model"
    return TESTS[differ(first, other, known)]


def _cheapest(
    outcome: Outcome, network: str, known: Sequence[Cell], first: Cell, pricing: Pricing
) -> list[str]:
    prices = []
    for cell in known:
        price = cell_row(outcome, cell, pricing)["price"]
        if price is not None:
            prices.append((price, cell))
    if not prices or pricing.machine is None:
        return []
    price, cheapest = min(prices, key=lambda pair: pair[0])
    text = f"Cheapest on {network}: {_named(cheapest)}, {price:.3g} {pricing.machine.currency}"
    if cheapest is first:
        text += ", which also has the least time"
    return [f"{text}."]


def _not_run(runs: Runs, counts: Sequence[int]) -> list[str]:
    """Return sentences on the numbers of workers that the folder has no run of."""
    run = runs.workers
    sentences = []
    missing = []
    for count in counts:
        if count not in run:
            missing.append(str(count))
    if missing:
        sentences.append(
            f"The folder has runs of {listed(map(str, run))} workers. The time to the goal with "
            f"{listed(missing)} is not known: the number of steps is not extrapolated."
        )
    if 1 not in run:
        sentences.append(
            "The folder has no run of one worker, so it is not known if one machine is faster."
        )
    return sentences


def _limits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the reasons why numbers are less certain or missing."""
    less_certain: dict[str, list[Place]] = {}
    missing: dict[str, list[Place]] = {}
    # The rows are in the order of their times, but a text lists its workers ascending.
    for row in sorted(rows, key=itemgetter("workers")):
        place = Place("", row["algorithm"], row["network"], row["workers"])
        for caveat in row["caveats"]:
            less_certain.setdefault(caveat, []).append(place)
        if row["error"]:
            missing.setdefault(row["error"], []).append(place)
    sentences = []
    for caveat, places in less_certain.items():
        sentences.append(f"Less certain: {places_text(places)}: {caveat}.")
    for error, places in missing.items():
        names = listed(dict.fromkeys(map(attrgetter("algorithm"), places)))
        sentences.append(f"No seconds: {names} on {places_text(places)}: {error}.")
    return sentences
