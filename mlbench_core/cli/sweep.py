"""``mlbench sweep``: run all algorithms of a file on all of its networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlbench_core.cli import _embedded
from mlbench_core.cli._client import MasterClient
from mlbench_core.cli._output import clean, dashboard_option, json_option, print_field, print_json, print_table, remark
from mlbench_core.cli._output import seconds as time_text
from mlbench_core.errors import MLBenchError
from mlbench_core.sweep.estimate import Estimate, estimate
from mlbench_core.sweep.file import Point, Sweep, load_sweep
from mlbench_core.sweep.folder import Done, Failure, SweepFolder

__all__ = ["sweep"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Folder for the results; the same command continues a sweep that was ended.",
)
@click.option("--dry-run", is_flag=True, help="Only show the runs and the estimate of their time.")
@dashboard_option
@json_option
def sweep(file: Path, output: Path, dry_run: bool, dashboard_url: str | None, as_json: bool) -> None:
    """Run the sweep of a TOML FILE: algorithms x workers x networks x seeds on one task.

    Runs that FOLDER already has are not repeated. More algorithms, networks and seeds in FILE only add runs. A run that
    failed is tried again once at the next start.

    A run that exceeds the limit of FILE is stopped, and counts as one that did not reach its goal within it.
    """
    described = load_sweep(file)
    points = described.points()
    folder = SweepFolder(output)
    done, failures = folder.done(described, points), folder.failures(points)
    pending = [p for p in points if p.name not in done and folder.may_try(failures.get(p.name))]
    expected = estimate(pending, points, done, described.limit_s)
    if dry_run:
        if as_json:
            print_json(_as_json(described, points, done, failures, expected))
        else:
            _show_plan(points, done, failures)
            _show_estimate(described, len(points), done, expected)
        return
    _show_estimate(described, len(points), done, expected)
    with folder.open(file):
        is_whole = _run(described, folder, points, pending, done, dashboard_url)
    done, failures = folder.done(described, points), folder.failures(points)
    if as_json:
        left = [p for p in points if p.name not in done and p.name not in failures]
        print_json(_as_json(described, points, done, failures, estimate(left, points, done, described.limit_s)))
    else:
        _show_results(folder, points, done)
        click.echo(f"results: {output.absolute()}")
    if not is_whole:
        remark("the budget has ended; start the same command again to continue")
    failed = [f"{name} ({clean(failure.reason)})" for name, failure in failures.items() if name not in done]
    if failed:
        raise MLBenchError(f"{len(failed)} runs failed; start the same command to try them again: {'; '.join(failed)}")


def _run(
    described: Sweep,
    folder: SweepFolder,
    points: Sequence[Point],
    pending: Sequence[Point],
    done: Mapping[str, Done],
    dashboard_url: str | None,
) -> bool:
    """Run the pending points; return False if the budget ended first."""
    # Imported here: --dry-run needs neither.
    from mlbench_core.cli._sweep_progress import open_display
    from mlbench_core.sweep.runner import Runner

    def connect() -> MasterClient:
        location = _embedded.find_or_start(dashboard_url)
        return MasterClient(location.url, location.token)

    with open_display(described, points, dict(done)) as display:
        try:
            return Runner(described, folder, connect, display).run(pending)
        except KeyboardInterrupt:
            pass
    raise MLBenchError("ended by Ctrl-C; start the same command again to continue")


def _show_plan(points: Sequence[Point], done: Mapping[str, Done], failures: Mapping[str, Failure]) -> None:
    rows = [
        (point.name, point.algorithm, point.workers, point.network or "-", point.seed, _state(point, done, failures))
        for point in points
    ]
    print_table(("RUN", "ALGORITHM", "WORKERS", "NETWORK", "SEED", "STATE"), rows, right=(2, 4))


def _show_estimate(described: Sweep, runs: int, done: Mapping[str, Done], expected: Estimate) -> None:
    print_field("runs", f"{runs}, of which {len(done)} are done and {expected.runs} are to run")
    if expected.runs and expected.expected_s is not None:
        print_field("expected", f"{time_text(expected.expected_s)} (h:min:s) by the runs that are done")
    if expected.runs and expected.longest_s is not None:
        print_field("at most", f"{time_text(expected.longest_s)} if every run reaches the limit")
    if described.budget_s is not None:
        print_field("budget", f"{time_text(described.budget_s)}, after which no run starts")


def _show_results(folder: SweepFolder, points: Sequence[Point], done: Mapping[str, Done]) -> None:
    from mlbench_core.cli._output import number
    from mlbench_core.results.load import load

    rows = []
    for point in points:
        if point.name not in done:
            continue
        found = load([folder.run_folder(point)], empty_is_error=False)
        record = found[0] if found else None
        reached = record is not None and bool(record.reached)
        time_s = number(record.time_to_goal_s) if record is not None and reached else "-"
        rows.append(
            (point.algorithm, point.workers, point.network or "-", point.seed, time_s, done[point.name].outcome)
        )
    print_table(("ALGORITHM", "WORKERS", "NETWORK", "SEED", "TO GOAL S", "OUTCOME"), rows, right=(1, 3, 4))


def _state(point: Point, done: Mapping[str, Done], failures: Mapping[str, Failure]) -> str:
    if point.name in done:
        return done[point.name].outcome
    failure = failures.get(point.name)
    return "to run" if failure is None else f"failed {failure.tries}x: {failure.reason}"


def _as_json(
    described: Sweep,
    points: Sequence[Point],
    done: Mapping[str, Done],
    failures: Mapping[str, Failure],
    expected: Estimate,
) -> dict[str, Any]:
    rows = []
    for point in points:
        row: dict[str, Any] = {"name": point.name, "algorithm": point.algorithm, "workers": point.workers}
        row.update(network=point.network, seed=point.seed, outcome=None, seconds=None, reason=None)
        if point.name in done:
            row.update(outcome=done[point.name].outcome, seconds=done[point.name].seconds)
        elif point.name in failures:
            row.update(outcome="failed", reason=failures[point.name].reason)
        rows.append(row)
    left = {"runs": expected.runs, "expected_s": expected.expected_s, "longest_s": expected.longest_s}
    return {"title": described.title, "points": rows, "left": left}
