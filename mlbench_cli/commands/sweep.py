"""``mlbench sweep``: run all algorithms of a file on all of its networks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlbench_cli import _embedded
from mlbench_cli._client import MasterClient
from mlbench_cli._output import (
    clean,
    dashboard_option,
    fork_option,
    json_option,
    number,
    print_field,
    print_json,
    print_table,
    remark,
    seconds,
)
from mlbench_cli._script import check_script
from mlbench_core.calling_environment import FORK_VARIABLE, describe_call
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.errors import MLBenchError
from mlbench_core.observe.methods.names import parse_method
from mlbench_core.observe.methods.own_class import check_own_class
from mlbench_core.sweep.estimate import Estimate, estimate
from mlbench_core.sweep.sweep_folder import Done, Failure, SweepFolder
from mlbench_core.sweep.toml_file import Point, Sweep, in_words_of_file, load_sweep

if TYPE_CHECKING:
    from mlbench_core.comparison.result_record import RunRecord
    from mlbench_core.sweep.grouped_runs import Outcome

__all__ = ["sweep"]

# Fields of a record that --json shows.
_RESULTS = (
    "reached",
    "time_to_goal_s",
    "train_s",
    "best",
    "bytes_on_wire",
    "bytes_sent",
    "exchanges",
)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Folder for the results; the same command continues a sweep that was ended.",
)
@click.option(
    "--cwd",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder in which the workers start, and from which FILE names files (default: its own).",
)
@click.option("--dry-run", is_flag=True, help="Only show the runs and the estimate of their time.")
@click.option(
    "--oversubscribe",
    is_flag=True,
    help="Allow more than four workers on a core, which mostly wait for each other.",
)
@fork_option
@dashboard_option
@json_option
def sweep(
    file: Path,
    output: Path,
    cwd: Path | None,
    dry_run: bool,
    oversubscribe: bool,
    fork: bool,
    dashboard_url: str | None,
    as_json: bool,
) -> None:
    """Run the sweep of a TOML FILE: algorithms x workers x networks x seeds on one task or script.

    Runs that FOLDER already has are not repeated. More algorithms, networks and seeds in FILE only
    add runs. A run that failed is tried again once at the next start.

    A run that has trained for the limit of FILE ends, and counts as one that did not reach its goal
    within it. With repeat_stopped = false in FILE, it is not repeated with other seeds.

    The workers start in the folder of FILE, with the environment of this call.
    """
    start = cwd or file.parent
    described = load_sweep(file, start)
    if described.script:
        check_script(described.script, start)
        with in_words_of_file():
            for variant in described.variants:
                check_own_class(parse_method(variant.arguments[-1]), start)
    folder = SweepFolder(output)
    points = folder.planned(described)
    done, failures = folder.done(described, points), folder.failures(points)
    pending = _pending(folder, points, done, failures)
    expected = estimate(pending, points, done, described.limit_s)
    if dry_run:
        if as_json:
            print_json(_as_json(points, done, failures, folder, described))
        else:
            _show_plan(points, done, failures)
            _show_estimate(described, len(points), done, expected)
        return
    if not as_json:
        _show_estimate(described, len(points), done, expected)
    with folder.open(file, described.files):
        # Workers that share cores change no modelled time.
        oversubscribe = oversubscribe or described.is_modelled
        call = {"caller": describe_call(start), "oversubscribe": oversubscribe}
        # The runs of a sweep are one group in the dashboard. A tag has at most 64 characters.
        call["tags"] = [re.sub(r"[^\w.-]+", "-", output.absolute().name)[:64] or "sweep"]
        if fork:
            call["environment"] = {FORK_VARIABLE: "1"}
        is_whole = _run(described, folder, points, pending, done, dashboard_url, call)
    points = folder.planned(described)
    done, failures = folder.done(described, points), folder.failures(points)
    # Imported here, because --dry-run does not need it.
    from mlbench_core.sweep.page import read_outcome

    outcome = read_outcome(output, described)
    page: Path | None = None
    if outcome.has_results:
        page = _write_page(output, described)
    if as_json:
        print_json(_as_json(points, done, failures, folder, described))
    else:
        _show_results(outcome)
        click.echo(f"results: {output.absolute()}")
        if page is not None:
            click.echo(f"page: {page.absolute()}")
    if not is_whole:
        remark("the budget has ended; start the same command again to continue")
    _check_failures(points, done, failures, output / "failed")


def _run(
    described: Sweep,
    folder: SweepFolder,
    points: Sequence[Point],
    pending: Sequence[Point],
    done: Mapping[str, Done],
    dashboard_url: str | None,
    call: Mapping[str, Any],
) -> bool:
    """Run the pending points; return False if the budget ended first."""
    # Imported here: --dry-run needs neither.
    from mlbench_cli._sweep_progress import open_display
    from mlbench_core.sweep.runner import Runner

    def connect() -> MasterClient:
        location = _embedded.find_or_start(dashboard_url)
        return MasterClient(location.url, location.token)

    # Before the first run, so that a number of workers that will be refused starts none.
    if pending:
        with connect() as client:
            client.check_workers(max(point.workers for point in pending), call["oversubscribe"])
    # A copy, because the display adds the runs that end.
    with open_display(described, points, dict(done)) as display:
        try:
            return Runner(described, folder, connect, display, call).run(pending)
        except KeyboardInterrupt:
            pass
    raise MLBenchError("ended by Ctrl-C; start the same command again to continue")


def _check_failures(
    points: Sequence[Point],
    done: Mapping[str, Done],
    failures: Mapping[str, Failure],
    folder: Path,
) -> None:
    """Raise an error that names the runs that failed; trials of the tuning may fail."""
    failed = []
    trials = 0
    for point in points:
        if point.name in done or point.name not in failures:
            continue
        # A value that is too large can end a trial, which is an outcome of the tuning.
        if point.trial is not None:
            trials += 1
        else:
            failed.append(f"{point.name} ({clean(failures[point.name].reason)})")
    if trials:
        remark(f"{plural(trials, 'trial')} of the tuning failed, the worst outcome (see {folder})")
    if failed:
        raise MLBenchError(
            f"{len(failed)} of {len(points)} runs failed (see {folder}): {'; '.join(failed)}"
        )


def _show_plan(
    points: Sequence[Point], done: Mapping[str, Done], failures: Mapping[str, Failure]
) -> None:
    rows = []
    for point in points:
        row = (point.name, point.algorithm, point.workers, point.network or "-", point.seed)
        rows.append((*row, _state(point, done, failures)))
    print_table(("RUN", "ALGORITHM", "WORKERS", "NETWORK", "SEED", "STATE"), rows, right=(2, 4))


def _show_estimate(
    described: Sweep, runs: int, done: Mapping[str, Done], expected: Estimate
) -> None:
    print_field("runs", f"{runs}, of which {len(done)} are done and {expected.runs} are to run")
    if described.tuning is not None:
        trials = len(described.tuning.factors) * len(described.tuning.parameters)
        text = f"{trials} trials of each algorithm and number of workers are among them, and come"
        print_field("tuning", f"{text} first; more follow if the best value is at the edge")
    if expected.runs and expected.expected_s is not None:
        text = f"{seconds(expected.expected_s)} (h:min:s) by the runs that are done"
        print_field("expected", text)
    if expected.runs and expected.longest_s is not None:
        longest = seconds(expected.longest_s)
        text = f"{longest} if every run reaches the limit, and its validations and last epochs"
        print_field("at limit", text)
    if described.budget_s is not None:
        print_field("budget", f"{seconds(described.budget_s)}, after which no run starts")


def _show_results(outcome: Outcome) -> None:
    """Print one row for each algorithm, number of workers and network."""
    # Imported here, because --dry-run does not need it.
    from mlbench_core.sweep.sentences import notes

    rows = []
    for cell in outcome.cells:
        row = (cell.algorithm, cell.workers, cell.network or "-", cell.runs, len(cell.reached))
        rows.append((*row, "not modelled" if cell.not_modelled else number(cell.median_s)))
    median = "MEDIAN S" if outcome.modelled is None else "MODELLED MEDIAN S"
    header = ("ALGORITHM", "WORKERS", "NETWORK", "RUNS", "REACHED", median)
    print_table(header, rows, right=(1, 3, 4, 5))
    for reason in dict.fromkeys(cell.not_modelled for cell in outcome.cells):
        if reason:
            remark(f"not modelled: {reason}")
    for sentence in notes(outcome):
        remark(clean(sentence))


def _records(
    folder: SweepFolder, points: Sequence[Point], done: Mapping[str, Done]
) -> dict[str, RunRecord]:
    """Return the results of the runs that have ended, by name."""
    from mlbench_core.comparison.load_results import load

    records = {}
    for point in points:
        if point.name not in done:
            continue
        loaded = load([folder.run_folder(point)], empty_is_error=False)
        # A run that was stopped before its workers wrote a line has no record.
        if loaded:
            records[point.name] = loaded[0]
    return records


def _write_page(path: Path, described: Sweep) -> Path:
    # Imported here, because --dry-run does not need it.
    from mlbench_core.sweep.page import write_page

    write_page(path, sweep=described, report=remark)
    return path / "index.html"


def _state(point: Point, done: Mapping[str, Done], failures: Mapping[str, Failure]) -> str:
    if point.name in done:
        return done[point.name].outcome
    if point.name in failures:
        failure = failures[point.name]
        return f"failed {failure.tries}x: {failure.reason}"
    return "to run"


def _pending(
    folder: SweepFolder,
    points: Sequence[Point],
    done: Mapping[str, Done],
    failures: Mapping[str, Failure],
) -> list[Point]:
    pending = []
    for point in points:
        if point.name not in done and folder.may_try(failures.get(point.name)):
            pending.append(point)
    return pending


def _as_json(
    points: Sequence[Point],
    done: Mapping[str, Done],
    failures: Mapping[str, Failure],
    folder: SweepFolder,
    described: Sweep,
) -> dict[str, Any]:
    expected = estimate(_pending(folder, points, done, failures), points, done, described.limit_s)
    records = _records(folder, points, done)
    rows = []
    for point in points:
        row: dict[str, Any] = {"name": point.name, "algorithm": point.algorithm}
        row.update(workers=point.workers, network=point.network, seed=point.seed)
        row.update(trial=point.trial and dataclasses.asdict(point.trial))
        row.update(outcome=None, seconds=None, reason=None)
        if point.name in done:
            row.update(outcome=done[point.name].outcome, seconds=done[point.name].seconds)
        elif point.name in failures:
            row.update(outcome="failed", reason=failures[point.name].reason)
        record = records.get(point.name)
        for name in _RESULTS:
            row[name] = getattr(record, name, None)
        if described.is_modelled:
            # The modelled times are on the page. The measured ones are of workers that share cores.
            row.update(time_to_goal_s=None, train_s=None)
        rows.append(row)
    time_left = dataclasses.asdict(expected)
    return {"title": described.title, "points": rows, "left": time_left}
