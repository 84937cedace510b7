"""Show where the time of a step of measured scripts went, from their result folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mlbench_cli._output import clean, print_table, remark
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.observe.table import NOT_MEASURED, run_rows
from mlbench_core.results.raw_lines import read_lines

__all__ = ["print_steps", "show_unmeasured"]


def print_steps(records: Sequence[RunRecord]) -> None:
    """Write a table with one column for each run that has raw lines, and one row for each number.

    The numbers are those of the worker of rank 0, so that the parts of a step add up to it.
    """
    columns: dict[str, dict[str, str | None]] = {}
    for record in records:
        rows = _rows(record)
        if rows:
            columns[record.name] = rows
    names: dict[str, None] = {}
    # The longest column has the order of all rows: one worker sends nothing.
    for rows in sorted(columns.values(), key=len, reverse=True):
        names.update(dict.fromkeys(rows))
    cells = []
    for name in names:
        row = [name]
        for rows in columns.values():
            text = rows.get(name, "-")
            row.append(NOT_MEASURED if text is None else text)
        cells.append(row)
    if cells:
        print_table(["A STEP", *columns], cells, right=range(1, len(columns) + 1))
        click.echo()


def _rows(record: RunRecord) -> dict[str, str | None]:
    """Return the rows of a run; none without raw lines of a step."""
    if record.folder is None:
        return {}
    moments: list[Mapping[str, Any]] = []
    for line in read_lines(record.folder):
        totals = line.get("totals")
        if line["rank"] == 0 and totals and totals["batches"]:
            moments.append(totals)
    if not moments:
        return {}
    losses = [point.value for point in record.curve("train_loss")]
    rows = run_rows(moments[-1], moments[0], record.workers or 1, losses)
    if "batch_load" not in moments[-1]["steps_s"]:
        # Without a DataLoader, the time of loading data is a part of the others.
        rows["  data"] = None
    if "opt_step" not in moments[-1]["steps_s"]:
        rows["  optimizer"] = None
    return rows


def show_unmeasured(record: RunRecord) -> None:
    """Write a line that says what was not measured in a run, and why."""
    if record.folder is None:
        return
    for line in read_lines(record.folder):
        if line["rank"] == 0 and line["kind"] == "end" and line.get("not_measured"):
            reasons = "; ".join(map(str, line["not_measured"]))
            remark(clean(f"{record.name}: {NOT_MEASURED}: {reasons}"))
