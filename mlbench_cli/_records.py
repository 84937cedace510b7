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
from mlbench_core.comparison.group_repeats import Group
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.result_record import UNKNOWN, RunRecord
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
    """Give a command ``--prices``, ``--machine`` and ``--spot`` (argument ``pricing``)."""

    @functools.wraps(command)
    def with_pricing(
        *arguments: Any, prices: Path | None, machine: str | None, spot: bool, **options: Any
    ) -> Any:
        if machine is None and (prices or spot):
            raise click.UsageError(
                "--prices and --spot need --machine: the machine on which each worker runs"
            )
        if machine is None:
            return command(*arguments, pricing=Pricing(None, spot), **options)
        machines = load_prices(prices)
        if machine not in machines:
            raise click.BadParameter(
                f"the machine must be one of {', '.join(machines)}, not {machine!r}: add it to a "
                "copy of the table and give the copy as --prices",
                param_hint="--machine",
            )
        return command(*arguments, pricing=Pricing(machines[machine], spot), **options)

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
    paths: list[str] = []
    names: list[str] = []
    for path_or_name in places:
        if Path(path_or_name).exists():
            paths.append(path_or_name)
        else:
            names.append(path_or_name)
    records = load(paths)
    if not names:
        return records
    with connect(dashboard_url) as client:
        runs = client.runs()
        # By id, because several names and patterns may match one run.
        chosen: dict[Any, dict[str, Any]] = {}
        for name in names:
            matching = []
            for run in runs:
                # Not fnmatch(), which follows the system's rules for names of files.
                if fnmatch.fnmatchcase(str(run["name"]), name):
                    matching.append(run)
            # Without a match, find() raises an error that lists the latest runs.
            for run in matching or [client.find(name)]:
                chosen[run["id"]] = run
        # A run whose result folder is among the paths is the same run.
        loaded = {(record.name, record.started_at) for record in records}
        for record in from_master(client, list(chosen.values())):
            if (record.name, record.started_at) not in loaded:
                records.append(record)
    return records


def from_master(client: MasterClient, runs: Sequence[dict[str, Any]]) -> list[RunRecord]:
    """Read the results of runs that have ended, and write a remark for each that has not."""
    records = []
    for run in runs:
        if run.get("state") in FINAL_STATES:
            # Of each metric, the record needs the latest value only.
            records.append(RunRecord.from_metrics(client.metrics(run["id"], last_n=1), run))
        else:
            remark(f"{clean(run['name'])} has not ended: left out")
    return sorted(records, key=lambda record: (record.workers or 0, record.name))


def matches(name: str, pattern: str | None) -> bool:
    """Return True if a name matches a shell pattern or contains a text.

    Without a pattern, every name matches.
    """
    if not pattern:
        return True
    if set(pattern) & set("*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


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
        for number_of_table, (columns, rows) in enumerate(comparison.tables()):
            if number_of_table > 0:
                click.echo()
            headers = []
            right = []
            for index, column in enumerate(columns):
                headers.append(column.header)
                if column.digits is not None:
                    right.append(index)
            cells = []
            for row in rows:
                cells.append([cell(column, row) for column in columns])
            print_table(headers, cells, right)
    for note in comparison.notes():
        remark(clean(note))


def write_comparison(
    groups: Sequence[Group], comparison: Comparison, folder: Path, pricing: Pricing | None = None
) -> list[Path]:
    """Write the comparison as table.csv, table.md and results.json, and draw its figures.

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
        text = content
        if not isinstance(content, str):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return list(map(folder.joinpath, contents))


def print_records(records: Sequence[RunRecord]) -> None:
    """Write a table with one row for each run, ``-`` for a value that it did not report."""
    phases = list(PHASES)
    if not any(record.phases_s.get("other") for record in records):
        phases.remove("other")
    rows = []
    for record in records:
        workers = "-"
        if record.workers is not None:
            workers = str(record.workers)
        times = [number(record.phases_s.get(phase)) for phase in phases]
        row = (record.name, workers, _outcome(record), number(record.total_s), *times)
        rows.append((*row, number(record.samples_per_s, 0)))
    header = ("RUN", "WORKERS", "REACHED", "SECONDS", *map(str.upper, phases), "SAMPLES/S")
    print_table(header, rows, right=(1, *range(3, len(header))))


def _outcome(record: RunRecord) -> str:
    # If the run's record is missing, only the goal can show how the run ended.
    is_missing = record.state == UNKNOWN and record.reached is not None
    if record.state != "finished" and not is_missing:
        return record.state
    return {True: "yes", False: "no", None: "-"}[record.reached]
