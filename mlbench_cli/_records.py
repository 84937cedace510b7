"""Find, compare and show results for the commands."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from mlbench_cli._client import FINAL_STATES, MasterClient
from mlbench_cli._embedded import connect
from mlbench_cli._output import clean, number, print_json, print_table, remark
from mlbench_core.comparison.load import load
from mlbench_core.comparison.pool import Group
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.record import UNKNOWN, RunRecord
from mlbench_core.comparison.table import Comparison, cell, compare_runs
from mlbench_core.errors import MasterRequestError
from mlbench_core.files import replacing
from mlbench_core.run_terms import PHASES

__all__ = [
    "FORMATS",
    "compare_records",
    "find_records",
    "from_master",
    "matches",
    "price_options",
    "print_comparison",
    "print_records",
    "write_comparison",
    "write_texts",
]

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("table", "csv", "json", "markdown")


def price_options(command: Command) -> Command:
    """Give a command the options ``--prices``, ``--machine`` and ``--spot`` (argument ``pricing``)."""

    @functools.wraps(command)
    def with_pricing(
        *arguments: Any, prices: Path | None, machine: str | None, spot: bool, **options: Any
    ) -> Any:
        if machine is None and (prices or spot):
            raise click.UsageError(
                "--prices and --spot need --machine: the machine on which each worker runs"
            )
        found = None
        if machine is not None:
            known = load_prices(prices)
            if machine not in known:
                raise click.BadParameter(
                    f"the machine must be one of {', '.join(known)}, not {machine!r}: add it "
                    "to a copy of the "
                    "table and give the copy as --prices",
                    param_hint="--machine",
                )
            found = known[machine]
        return command(*arguments, pricing=Pricing(found, spot), **options)

    for option in (
        click.option("--spot", is_flag=True, help="Use the price of interruptible machines."),
        click.option(
            "--machine",
            metavar="NAME",
            help="Machine on which each worker runs, to show what a run costs.",
        ),
        click.option(
            "--prices",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Prices of machines as a TOML file (default: the table of MLBench).",
        ),
    ):
        with_pricing = option(with_pricing)
    return cast(Command, with_pricing)


def find_records(places: Sequence[str], dashboard_url: str | None) -> list[RunRecord]:
    """Read results from paths and from the master.

    Args:
        places: Each is a path if it exists, and else a name or a shell pattern of runs at the
            master.
        dashboard_url: Address of the master, if the user gave one.

    Raises:
        ConfigurationError: A path has no result.
        MasterNotFoundError: A place is not a path, and no master is found.
        MasterRequestError: The master has no such run.
    """
    paths = [place for place in places if Path(place).exists()]
    names = [place for place in places if place not in paths]
    records = load(paths)
    if names:
        with connect(dashboard_url) as client:
            runs = client.runs()
            chosen: dict[Any, dict[str, Any]] = {}
            for name in names:
                # Without a match, find() raises an error that lists the latest runs.
                matching = [run for run in runs if fnmatch.fnmatchcase(str(run["name"]), name)] or [
                    client.find(name)
                ]
                chosen.update({run["id"]: run for run in matching})
            known = {(record.name, record.started_at) for record in records}
            # A run whose result folder is among the paths is the same run.
            found = from_master(client, list(chosen.values()))
            records += [record for record in found if (record.name, record.started_at) not in known]
    return records


def from_master(client: MasterClient, runs: Sequence[dict[str, Any]]) -> list[RunRecord]:
    """Read the results of runs that have ended, and write a remark for each that has not."""
    records = []
    for run in runs:
        if run.get("state") in FINAL_STATES:
            records.append(RunRecord.from_metrics(client.metrics(run["id"], last_n=1), run))
        else:
            remark(f"{clean(run['name'])} has not ended: left out")
    return sorted(records, key=lambda record: (record.workers or 0, record.name))


def matches(name: str, pattern: str | None) -> bool:
    """Return True if a name matches a shell pattern or contains a text; without a pattern every name matches."""
    if not pattern:
        return True
    return (
        fnmatch.fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name
    )


def compare_records(
    records: Sequence[RunRecord], pricing: Pricing | None = None, baseline: str | None = None
) -> tuple[list[Group], Comparison]:
    """Pool the records that can be compared, and compare the groups.

    Raises:
        ConfigurationError: Runs had different goals.
        MasterRequestError: No run can be compared.
    """
    groups, comparison = compare_runs(records, pricing=pricing, baseline=baseline)
    if not groups:
        for reason in comparison.remarks:
            remark(clean(reason))
        raise MasterRequestError("none of these runs has finished: nothing to compare")
    return groups, comparison


def print_comparison(comparison: Comparison, form: str) -> None:
    """Write a comparison to standard output, and the notes on a table or on CSV to standard error.

    Args:
        comparison: The comparison.
        form: One of :data:`FORMATS`.
    """
    # JSON has the remarks, and Markdown all notes.
    if form == "json":
        print_json(comparison.as_json())
        return
    if form == "markdown":
        click.echo(comparison.as_markdown(), nl=False)
        return
    if form == "csv":
        click.echo(comparison.as_csv(), nl=False)
    else:
        for place, (columns, rows) in enumerate(comparison.tables()):
            if place:
                click.echo()
            cells = [[cell(column, row) for column in columns] for row in rows]
            right = [index for index, column in enumerate(columns) if column.digits is not None]
            print_table([column.header for column in columns], cells, right)
    for note in comparison.notes():
        remark(clean(note))


def write_comparison(
    groups: Sequence[Group], comparison: Comparison, folder: Path, pricing: Pricing | None = None
) -> list[Path]:
    """Write the comparison as table.csv, table.md and results.json, and draw its figures as PNG and SVG.

    Returns:
        The files.
    """
    from mlbench_core.comparison.figures import draw_all

    contents = {"table.csv": comparison.as_csv(), "table.md": comparison.as_markdown()}
    written = write_texts(folder, {**contents, "results.json": comparison.as_json()})
    per_hour = (pricing or Pricing()).per_hour
    return [*written, *draw_all(groups, folder, per_hour, lambda text: remark(clean(text)))]


def write_texts(folder: Path, contents: Mapping[str, Any]) -> list[Path]:
    """Write files of text, or of JSON if the content is not a text, and return their paths."""
    for name, content in contents.items():
        with replacing(folder / name) as temporary:
            text = (
                content
                if isinstance(content, str)
                else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            )
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def print_records(records: Sequence[RunRecord]) -> None:
    """Write a table with one row for each run, ``-`` for a value that it did not report."""
    known = [
        phase
        for phase in PHASES
        if phase != "other" or any(record.phases_s.get(phase) for record in records)
    ]
    rows = []
    for record in records:
        outcome = {True: "yes", False: "no", None: "-"}[record.reached]
        # If the run's record is missing, only the goal can show how the run ended.
        if record.state != "finished" and not (
            record.state == UNKNOWN and record.reached is not None
        ):
            outcome = record.state
        phases = (number(record.phases_s.get(phase)) for phase in known)
        workers = "-" if record.workers is None else record.workers
        rows.append(
            (
                record.name,
                workers,
                outcome,
                number(record.total_s),
                *phases,
                number(record.samples_per_s, 0),
            )
        )
    header = (
        "RUN",
        "WORKERS",
        "REACHED",
        "SECONDS",
        *(phase.upper() for phase in known),
        "SAMPLES/S",
    )
    print_table(header, rows, right=(1, *range(3, len(header))))
