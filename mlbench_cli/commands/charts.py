"""``mlbench charts``: draw the figures of results, as PNG, SVG and CSV.

The command finds the results; :mod:`mlbench_core.comparison.figures` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from mlbench_cli._embedded import connect
from mlbench_cli._output import clean, dashboard_option, json_option, print_json, remark
from mlbench_cli._records import from_master, matches, print_records
from mlbench_core.comparison.group_repeats import Group, check_comparable, pool, usable
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError, MasterNotFoundError

__all__ = ["charts", "draw_overview"]


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--filter",
    "-f",
    "pattern",
    metavar="F",
    help="Only runs whose name contains F, or matches it as a shell pattern.",
)
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
@click.option(
    "--against",
    multiple=True,
    type=click.Choice(("epochs", "steps", "tokens", "time", "bytes")),
    help="Horizontal axis of the learning curves; may be given several times.",
)
@dashboard_option
@json_option
def charts(
    folder: Path,
    pattern: str | None,
    output: Path | None,
    price_per_hour: float | None,
    against: tuple[str, ...],
    dashboard_url: str | None,
    as_json: bool,
) -> None:
    """Draw figures of results and save them in FOLDER.

    If FOLDER holds files of 'mlbench run --wait' or 'mlbench download', these are drawn. If it is
    empty, and always with --dashboard-url, the finished runs of the master are drawn.

    Runs are averaged only if everything except the seed is the same: task or command, options,
    backend, workers, goal, machine and software. Each figure is a PNG and an SVG file, and its
    numbers are a CSV file.

    The figures are the time by phase, the speed-up with and without communication, the time of
    every step, the communication share and the price index. The price index is the price increase
    divided by the performance increase: below 1, more workers pay for themselves. With result
    folders, there are learning curves against epochs, training time and bytes. Runs that count
    steps have them against steps and tokens instead of epochs. With --price-per-hour, there is the
    time to the goal against the price. The first two figures are also drawn side by side in
    overview.png.
    """
    if not folder.is_dir() and not dashboard_url:
        raise ConfigurationError(
            f"{folder} does not exist: name a folder with results, or make it to draw the runs "
            "of the master into it"
        )
    loaded = [] if dashboard_url else load([folder], empty_is_error=False)
    if loaded:
        results = [result for result in loaded if matches(result.name, pattern)]
    else:
        results = _from_master(folder, dashboard_url, pattern)
    if not results:
        text = "no run"
        if pattern:
            text += f" that matches {pattern!r}"
        text += f" in {folder}" if loaded else " at the master has finished"
        raise ConfigurationError(f"{text}: nothing to draw")
    kept, left_out = usable(results)
    for reason in left_out:
        remark(f"{clean(reason)} of the charts")
    # A figure of runs with different goals would compare times that have nothing in common.
    check_comparable(kept)
    from mlbench_core.comparison.figures import draw_all

    if not as_json:
        print_records(results)
    groups, target = pool(kept), output or folder
    written = draw_all(groups, target, price_per_hour, lambda text: remark(clean(text)), against)
    if as_json:
        files = list(map(str, written))
        print_json({"results": [result.as_json() for result in results], "files": files})
        return
    for path in written:
        click.echo(path)


def _from_master(folder: Path, dashboard_url: str | None, pattern: str | None) -> list[RunRecord]:
    """Read the results of the master's finished runs."""
    try:
        client = connect(dashboard_url)
    except MasterNotFoundError as error:
        raise ConfigurationError(
            f"no result in {folder} "
            f"(files of 'mlbench run --wait' or 'mlbench download'), and {error}"
        ) from None
    with client:
        chosen = []
        for run in client.runs():
            if run.get("state") == "finished" and matches(str(run.get("name")), pattern):
                chosen.append(run)
        return from_master(client, chosen)


def draw_overview(groups: Sequence[Group], path: Path) -> Path:
    """Draw time by phase and speed-up side by side, as PNG and SVG.

    Args:
        groups: Runs to compare.
        path: The PNG file. The SVG file has the same name with its own suffix.

    Returns:
        ``path``.

    Raises:
        ConfigurationError: No run reported a time.
        MissingDependencyError: matplotlib is not installed.
    """
    from mlbench_core.comparison import figures

    with figures.style():
        drawing = figures.draw_overview(groups)
    figures.save(dataclasses.replace(drawing, name=path.stem), path.parent)
    return path
