"""Make the table of a sweep: one row for each algorithm, network and number of workers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import known_values
from mlbench_core.comparison.table import Column, csv_text
from mlbench_core.sweep.grouped_runs import Cell, Outcome, sent_per_worker, speed_ratio
from mlbench_core.sweep.tuning_search import Search
from mlbench_core.sweep.utilization import SHARES, Utilization, bandwidth_text

__all__ = [
    "COLUMNS",
    "TUNING_COLUMNS",
    "UTILIZATION_COLUMNS",
    "as_csv",
    "cell_row",
    "csv_columns",
    "known_columns",
    "known_median",
    "table_rows",
    "tuning_rows",
    "utilization_rows",
]

COLUMNS = (
    Column("network", "Network"),
    Column("algorithm", "Algorithm"),
    Column("workers", "Workers", 0),
    Column("planned", "Planned", 0),
    Column("runs", "Runs", 0),
    Column("reached", "Reached", 0),
    Column("missed", "Missed", 0),
    Column("failed", "Failed", 0),
    # Of a sweep whose seconds are modelled: "modelled", or why they are not.
    Column("modelled", "Seconds"),
    # A missed run counts as longer than all others.
    Column("median_s", "Median (s)", 2),
    # Missing if a run missed the goal.
    Column("interval_low_s", "95 % from (s)", 2),
    Column("interval_high_s", "to (s)", 2),
    # The range of the median by the error of the model, which is apart from that of the seeds.
    Column("model_low_s", "By the model from (s)", 2),
    Column("model_high_s", "to (s)", 2),
    # Known with misses, too: the training time of all runs for each success.
    Column("cost_per_success_s", "Cost per success (s)", 2),
    # The ratio of the medians; its interval is that of the ratio of the geometric means.
    Column("times_as_fast", "Times as fast", 2),
    Column("times_low", "95 % from", 2),
    Column("times_high", "to", 2),
    # Until the goal, on average over the workers.
    Column("sent_mb", "On the wire, by a worker (MB)", 3),
    Column("exchanges", "Exchanges", 0),
    Column("epochs_to_goal", "Epochs to goal", 1),
    # Of runs that count steps.
    Column("steps_to_goal", "Steps to goal", 0),
    Column("tokens_to_goal", "Tokens to goal", 0),
    # Known with misses, too.
    Column("best", "Best", 2),
    Column("price", "Price", 5),
)
"""The columns of the table, in the order of the CSV file."""

TUNING_COLUMNS = (
    Column("algorithm", "Algorithm"),
    Column("workers", "Workers", 0),
    Column("parameter", "Parameter"),
    Column("value", "Value"),
    Column("factor", "Times the default"),
    Column("steps_to_goal", "Steps to goal", 0),
    Column("best", "Best", 2),
    Column("trials", "Trials", 0),
    Column("place", "In the grid"),
)
"""The columns of the table of the tuning."""

UTILIZATION_COLUMNS = (
    Column("workers", "Workers", 0),
    Column("algorithm", "Algorithm"),
    *(Column(f"{share:.0%}", f"Bandwidth for {100 * share:.0f} %") for share in SHARES),
)
"""The columns of the table of the bandwidths that are needed for a compute utilization."""

_MEGA = 1e6
_ONLY_MODELLED = ("modelled", "model_low_s", "model_high_s")
# People see these in fewer columns, or below the table.
_ONLY_CSV = ("planned", "missed", "times_low", "times_high")


def table_rows(outcome: Outcome, pricing: Pricing) -> list[dict[str, Any]]:
    """Return one row for each cell, with an entry for each of :data:`COLUMNS`.

    An unknown value is None.

    Rows are in the order of the networks and the numbers of workers, least median first. One
    worker has no network. ``times_as_fast`` is relative to the sweep's first algorithm with the
    same network and number of workers.

    Args:
        outcome: The runs.
        pricing: Price of the machines.
    """
    cells: list[Cell] = []
    # One worker has no network.
    settings: list[tuple[str | None, int]] = [(None, 1)]
    settings += itertools.product(outcome.networks, outcome.several)
    for network, workers in settings:
        cells += outcome.row(network, workers)
        # Cells of which every run failed, or that are not modelled, have no rank.
        for cell in outcome.cells:
            if not cell.runs and (cell.network, cell.workers) == (network, workers):
                cells.append(cell)
    return [cell_row(outcome, cell, pricing) for cell in cells]


def cell_row(outcome: Outcome, cell: Cell, pricing: Pricing) -> dict[str, Any]:
    """Return the row of a cell, see :func:`table_rows`."""
    low, high = cell.interval_s or (None, None)
    model_low, model_high = cell.model_range_s or (None, None)
    modelled: str | None = None
    if cell.not_modelled:
        modelled = f"not modelled: {cell.not_modelled}"
    elif outcome.modelled is not None:
        modelled = "modelled"
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    baseline = outcome.cell(outcome.baseline, cell.network, cell.workers)
    if baseline is not None and baseline.complete and cell.complete:
        estimate = speed_ratio(baseline, cell)
        if estimate is not None:
            ratio = estimate.value
            # A ratio of a cell to itself has no interval.
            if baseline is not cell:
                ratio_low, ratio_high = estimate.low, estimate.high
    # Over the runs that reached the goal alone, a method would look better for its misses.
    whole: Sequence[RunRecord] = ()
    if cell.complete:
        whole = cell.group.records
    cost_s = cell.cost_per_success_s
    price: float | None = None
    if cost_s is not None:
        price = pricing.price(cost_s, cell.workers)
    sent_mb: float | None = None
    sent = known_median(map(sent_per_worker, whole))
    if sent is not None:
        sent_mb = sent / _MEGA
    # Runs that count epochs have their length in the column of the epochs.
    in_steps = [record for record in whole if record.unit == "steps"]
    return {
        "network": cell.network,
        "algorithm": cell.algorithm,
        "workers": cell.workers,
        "planned": cell.planned,
        "runs": cell.runs,
        "reached": len(cell.reached),
        "missed": cell.missed,
        "failed": cell.failed,
        "modelled": modelled,
        "median_s": cell.median_s,
        "interval_low_s": low,
        "interval_high_s": high,
        "model_low_s": model_low,
        "model_high_s": model_high,
        "cost_per_success_s": cost_s,
        "times_as_fast": ratio,
        "times_low": ratio_low,
        "times_high": ratio_high,
        "sent_mb": sent_mb,
        "exchanges": known_median(map(attrgetter("exchanges_to_goal"), whole)),
        "epochs_to_goal": known_median(map(attrgetter("epochs_to_goal"), whole)),
        "steps_to_goal": known_median(map(attrgetter("steps_to_goal"), in_steps)),
        "tokens_to_goal": known_median(map(attrgetter("tokens_to_goal"), in_steps)),
        "best": _best(cell),
        "price": price,
    }


def _best(cell: Cell) -> float | None:
    """Return the median best value, also of runs that missed their goal.

    A run without a value counts as worse than all others.
    """
    values = known_values(map(attrgetter("best"), cell.group.records))
    if not values:
        return None
    worst = -math.inf
    for record in cell.group.records:
        # Of a loss, the largest value is the worst.
        if (record.goal or {}).get("minimize"):
            worst = math.inf
    lost = cell.runs + cell.failed - len(values)
    median = statistics.median([*values, *[worst] * lost])
    if math.isinf(median):
        return None
    return median


def tuning_rows(searches: Iterable[Search]) -> list[dict[str, Any]]:
    """Return one row for each search, with an entry for each of :data:`TUNING_COLUMNS`.

    ``tried`` has all of its trials. An unknown value is None.

    Args:
        searches: The tuning of a sweep.
    """
    rows = []
    for search in searches:
        tried = []
        for point, score in zip(search.points, search.scores, strict=True):
            assert point.trial is not None, "the points of a search are trials"
            # A search that goes on has trials that have not ended.
            if score is not None:
                outcome = {"steps_to_goal": score.steps_to_goal, "best": score.best}
                value, factor = point.trial.value, point.trial.factor
                tried.append({"run": point.name, "value": value, "factor": factor, **outcome})
        place = "inside"
        if search.is_at_edge:
            place = "at the edge"
        rows.append(
            {
                "algorithm": search.algorithm,
                "workers": search.workers,
                "parameter": search.parameter,
                "value": search.chosen and search.chosen.value,
                "factor": search.chosen and search.chosen.factor,
                "steps_to_goal": search.chosen_score.steps_to_goal,
                "best": search.chosen_score.best,
                "trials": len(tried),
                "place": search.chosen and place,
                "tried": tried,
            }
        )
    return rows


def utilization_rows(found: Iterable[Utilization]) -> list[dict[str, Any]]:
    """Return one row for each number of workers and algorithm.

    It has an entry for each of :data:`UTILIZATION_COLUMNS`.

    Args:
        found: The predicted compute utilization, one for each number of workers.
    """
    rows = []
    for one in found:
        for name, bandwidths in one.needed.items():
            row: dict[str, Any] = {"workers": one.workers, "algorithm": name}
            for share, bandwidth in zip(SHARES, bandwidths, strict=True):
                row[f"{share:.0%}"] = bandwidth_text(bandwidth)
            rows.append(row)
    return rows


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
    numbers = known_values(values)
    if not numbers:
        return None
    return statistics.median(numbers)


def known_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that people see.

    They are those with a value, and ``failed`` only if a run failed.
    """
    columns = []
    for column in COLUMNS:
        absent: int | None = None
        if column.key == "failed":
            # The number of failed runs is always known.
            absent = 0
        values = [row[column.key] for row in rows]
        if values.count(absent) < len(values) and column.key not in _ONLY_CSV:
            columns.append(column)
    return columns


def csv_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns of the CSV file: without those of modelled sweeps in others."""
    columns = list(COLUMNS)
    if all(row["modelled"] is None for row in rows):
        columns = [column for column in COLUMNS if column.key not in _ONLY_MODELLED]
    return columns


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV; a value that is unknown is empty."""
    return csv_text(csv_columns(rows), rows)
