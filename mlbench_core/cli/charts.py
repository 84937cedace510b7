"""``mlbench charts``: PNG and CSV from downloaded results."""

from __future__ import annotations

from pathlib import Path

import click

from mlbench_core.cli import _results
from mlbench_core.cli._output import json_option, print_json

__all__ = ["charts"]


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
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
@json_option
def charts(folder: Path, pattern: str | None, output: Path | None, price_per_hour: float | None, as_json: bool) -> None:
    """Draw the charts of the results in FOLDER.

    FOLDER holds files of 'mlbench run --wait' or 'mlbench download'. Written are, each as PNG and CSV: the total time
    by phase, the speed-up with and without communication, the time of every step, and the price index (price increase
    over performance increase; below 1 more workers pay for themselves).
    """
    results = _results.load_folder(folder, pattern)
    from mlbench_core.cli import _plots

    written = _plots.draw_all(results, output or folder, price_per_hour)
    if as_json:
        print_json({"results": [result.as_json() for result in results], "files": [str(path) for path in written]})
        return
    _results.print_results(results)
    for path in written:
        click.echo(path)
