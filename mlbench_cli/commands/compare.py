"""``mlbench compare``: compare runs, with the spread and the confidence interval of repeats."""

from __future__ import annotations

from pathlib import Path

import click

from mlbench_cli._output import dashboard_option, remark
from mlbench_cli._records import (
    FORMATS,
    compare_records,
    find_records,
    price_options,
    print_comparison,
    write_comparison,
)
from mlbench_cli.commands.completion import complete_runs_and_files
from mlbench_core.comparison.prices import Pricing

__all__ = ["compare"]


@click.command()
@click.argument(
    "places",
    metavar="PATH|NAME...",
    nargs=-1,
    required=True,
    shell_complete=complete_runs_and_files,
)
@click.option(
    "--baseline",
    metavar="LABEL",
    help="Test and divide each configuration by this one (default: test every pair).",
)
@price_options
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="Format of the output.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write table.csv, table.md, results.json and the figures to this folder.",
)
@dashboard_option
def compare(
    places: tuple[str, ...],
    baseline: str | None,
    pricing: Pricing,
    form: str,
    as_json: bool,
    output: Path | None,
    dashboard_url: str | None,
) -> None:
    """Compare runs.

    Each PATH is a result folder, a folder with results at any depth, a zip file of 'mlbench
    download', or a file of 'mlbench run --wait'. Everything else is the NAME of a run at the
    master, or a shell pattern of names.

    Runs are repeats of each other if everything is the same except the seed: task or command,
    options, backend, workers, goal, machine and software. The table has one row for them. A row
    with a run that missed the goal has a median and a cost per success, and no mean. Runs of one
    task with different goals are refused.
    """
    groups, comparison = compare_records(find_records(places, dashboard_url), pricing, baseline)
    print_comparison(comparison, "json" if as_json else form)
    if output is not None:
        # Standard output holds only the comparison.
        for path in write_comparison(groups, comparison, output, pricing):
            remark(str(path))
