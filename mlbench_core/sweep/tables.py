"""Make the table of a sweep: one row for each algorithm, network and number of workers."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.table import Column, safe_cell
from mlbench_core.sweep.outcome import Cell, Outcome, sent_per_worker, speed_ratio

__all__ = ["COLUMNS", "as_csv", "known_columns", "table_rows"]

COLUMNS = (
    Column("network", "Network"),
    Column("algorithm", "Algorithm"),
    Column("workers", "Workers", 0),
    Column("planned", "Planned", 0),
    Column("runs", "Runs", 0),
    Column("reached", "Reached", 0),
    Column("missed", "Missed", 0),
    Column("failed", "Failed", 0),
    Column("median_s", "Median (s)", 2),
    Column("interval_low_s", "95 % from (s)", 2),
    Column("interval_high_s", "to (s)", 2),
    Column("cost_per_success_s", "Cost per success (s)", 2),
    Column("times_as_fast", "Times as fast", 2),
    Column("times_low", "95 % from", 2),
    Column("times_high", "to", 2),
    Column("sent_mb", "On the wire, by a worker (MB)", 3),
    Column("exchanges", "Exchanges", 0),
    Column("epochs_to_goal", "Epochs to goal", 1),
    Column("best", "Best", 2),
    Column("price", "Price", 5),
)
"""The columns of the table, in the order of the CSV file."""

_MEGA = 1e6
# People see these in fewer columns, or below the table.
_ONLY_CSV = ("planned", "missed", "times_low", "times_high")


def table_rows(outcome: Outcome, pricing: Pricing) -> list[dict[str, Any]]:
    """Return one row for each cell, with an entry for each of :data:`COLUMNS`; None if a value is unknown.

    Rows are in the order of the networks and the numbers of workers, fastest algorithm first. One
    worker has no network. ``times_as_fast`` is relative to the sweep's first algorithm with the
    same network and number of workers.

    Args:
        outcome: The runs.
        pricing: Price of the machines.
    """
    cells: list[Cell] = []
    for network, workers in [
        (None, 1),
        *((name, each) for name in outcome.networks for each in outcome.several),
    ]:
        ranked = outcome.row(network, workers)
        # Cells of which every run failed have no rank.
        lost = [
            c for c in outcome.cells if not c.runs and (c.network, c.workers) == (network, workers)
        ]
        cells += [*ranked, *lost]
    return [_row(outcome, cell, pricing) for cell in cells]


def _row(outcome: Outcome, cell: Cell, pricing: Pricing) -> dict[str, Any]:
    low, high = cell.interval_s or (None, None)
    baseline = outcome.cell(outcome.baseline, cell.network, cell.workers)
    both = baseline is not None and baseline.complete and cell.complete
    ratio = speed_ratio(baseline, cell) if baseline is not None and both else None
    # A ratio of a cell to itself has no interval.
    own = baseline is cell
    # Over the runs that reached the goal alone, a method would look better for its misses.
    whole = cell.group.records if cell.complete else ()
    cost_s = cell.cost_per_success_s
    sent = _median(sent_per_worker(record) for record in whole)
    return {
        "network": cell.network,
        "algorithm": cell.algorithm,
        "workers": cell.workers,
        "planned": cell.planned,
        "runs": cell.runs,
        "reached": len(cell.reached),
        "missed": cell.missed,
        "failed": cell.failed,
        "median_s": cell.median_s,
        "interval_low_s": low,
        "interval_high_s": high,
        "cost_per_success_s": cost_s,
        "times_as_fast": ratio.value if ratio else None,
        "times_low": ratio.low if ratio and not own else None,
        "times_high": ratio.high if ratio and not own else None,
        "sent_mb": None if sent is None else sent / _MEGA,
        "exchanges": _median(record.exchanges for record in whole),
        "epochs_to_goal": _median(record.epochs_to_goal for record in whole),
        "best": _median(record.best for record in whole),
        "price": None if cost_s is None else pricing.price(cost_s, cell.workers),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def known_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that people see: those with a value, and ``failed`` only if a run failed."""
    shown = [column for column in COLUMNS if column.key not in _ONLY_CSV]
    return [
        column
        for column in shown
        if any(
            row[column.key] if column.key == "failed" else row[column.key] is not None
            for row in rows
        )
    ]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return all columns as CSV; a value that is unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.key for column in COLUMNS)
    writer.writerows([safe_cell(row[column.key]) for column in COLUMNS] for row in rows)
    return text.getvalue()
