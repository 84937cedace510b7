"""``mlbench charts``: draw PNG and CSV charts of downloaded results or of the runs of a master."""

from __future__ import annotations

from pathlib import Path

import click

from mlbench_core.cli import _results
from mlbench_core.cli._embedded import connect
from mlbench_core.cli._output import dashboard_option, json_option, print_json
from mlbench_core.errors import ConfigurationError, MasterNotFoundError

__all__ = ["charts"]


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--filter", "-f", "pattern", metavar="F", help="Only runs whose name has F in it, or matches it as *?[].")
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the charts (default: FOLDER).",
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PRICE",
    help="Price of one worker for an hour, to show what each run cost.",
)
@dashboard_option
@json_option
def charts(
    folder: Path,
    pattern: str | None,
    output: Path | None,
    price_per_hour: float | None,
    dashboard_url: str | None,
    as_json: bool,
) -> None:
    """Draw charts of results and save them in FOLDER.

    If FOLDER holds files of 'mlbench run --wait' or 'mlbench download', these are drawn. Otherwise, and always with
    --dashboard-url, the finished runs of the master are drawn, and FOLDER is created.

    Runs are averaged only if task or command, arguments, backend, resources and number of workers are the same. The
    charts, each as PNG and CSV, are: the total time by phase, the speed-up with and without communication, the time of
    every step, and the price index (price increase over performance increase; below 1 more workers pay for themselves).
    """
    found = [] if dashboard_url else _results.load_folder(folder)
    if found:
        results = [result for result in found if _results.matches(result.name, pattern)]
    else:
        results = _from_master(folder, dashboard_url, pattern)
    if not results:
        which = f" that matches {pattern!r}" if pattern else ""
        where = f"in {folder}" if found else "at the master has finished"
        raise ConfigurationError(f"no run{which} {where}: nothing to draw")
    from mlbench_core.cli import _plots

    written = _plots.draw_all(_results.comparable(results), output or folder, price_per_hour)
    if as_json:
        print_json({"results": [result.as_json() for result in results], "files": [str(path) for path in written]})
        return
    _results.print_results(results)
    for path in written:
        click.echo(path)


def _from_master(folder: Path, dashboard_url: str | None, pattern: str | None) -> list[_results.RunResult]:
    """Read the results of the master's finished runs."""
    try:
        client = connect(dashboard_url)
    except MasterNotFoundError as error:
        raise ConfigurationError(
            f"no result in {folder} (files of 'mlbench run --wait' or 'mlbench download'), and {error}"
        ) from None
    with client:
        runs = [run for run in client.runs() if _results.matches(str(run.get("name")), pattern)]
        finished = [run for run in runs if run.get("state") == "finished"]
        results = [_results.RunResult.from_metrics(client.metrics(run["id"], last_n=1), run) for run in finished]
    return sorted(results, key=lambda result: (result.workers or 0, result.name))
