"""``mlbench results``: verify result folders, check them against the rules, and collect them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mlbench_cli._output import clean, json_option, print_json, remark
from mlbench_cli._records import compare_records, price_options, write_texts
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.prices import Pricing
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.results.folder import RESULT, find_folders, lacking, read_result, verify_folder

__all__ = ["result_folders", "results"]

_FOLDERS = click.argument(
    "folders",
    metavar="FOLDER...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
)


@click.group()
def results() -> None:
    """Verify result folders, check them against the rules, and collect them."""


@results.command()
@_FOLDERS
@json_option
def verify(folders: Sequence[Path], as_json: bool) -> None:
    """Recompute the result of each run in FOLDER... from its raw lines.

    A FOLDER is a result folder, or has result folders at any depth. The schema and the checksums of
    the files are checked, too. Exit status 1 if something does not match. A run that a sweep
    stopped at its limit has no result.
    """
    from mlbench_core.sweep.sweep_folder import stopped_at_limit

    problems: dict[str, list[str]] = {}
    for folder in result_folders(folders):
        problems[str(folder)] = []
        if (folder / RESULT).exists() or not stopped_at_limit(folder):
            problems[str(folder)] = verify_folder(folder)
    if as_json:
        print_json(problems)
    else:
        for name, of_folder in problems.items():
            for problem in of_folder or [_without_problems(Path(name))]:
                click.echo(f"{clean(name)}: {clean(problem)}")
    # Last, so that the lines of all folders are shown before the command fails.
    wrong = len(list(filter(None, problems.values())))
    if wrong:
        raise MLBenchError(f"{wrong} of {len(problems)} result folders cannot be verified")


def _without_problems(folder: Path) -> str:
    """Return the line for a folder without problems."""
    # Without a result, a folder has a problem unless a sweep stopped its run.
    if not (folder / RESULT).exists():
        return "stopped at the limit, has no result"
    # Numbers that an earlier version did not write.
    names = lacking(read_result(folder))
    if names:
        return f"ok, written by an earlier version without {' and '.join(names)}"
    return "ok"


def result_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the result folders at or below some folders.

    Raises:
        ConfigurationError: None exists at or below one of them.
    """
    # Each folder must have a run, because a mistyped one would otherwise be left out in silence.
    inside: list[Path] = []
    for folder in folders:
        of_folder: list[Path] = []
        if folder.is_dir():
            of_folder += find_folders(folder)
        if not of_folder:
            raise ConfigurationError(
                f"{folder} is not a result folder and has none below it: give the folder of a run"
            )
        inside += of_folder
    # A folder can be given twice, or together with one above it.
    return list(dict.fromkeys(inside))


@results.command()
@_FOLDERS
@json_option
def check(folders: Sequence[Path], as_json: bool) -> None:
    """Check the runs in FOLDER... against the rules of a submission.

    Each line begins with 'ok', 'fail' or 'cannot be checked'. Exit status 1 if a rule fails. The
    rules are in the documentation, on the page "Rules".
    """
    from mlbench_core.comparison.submission_rules import check_rules

    findings = check_rules(load(result_folders(folders)))
    rows = []
    failed = 0
    for each in findings:
        rows.append({"status": each.status, "subject": each.subject, "reason": each.reason})
        if each.status == "fail":
            failed += 1
        if not as_json:
            click.echo(clean(each))
    if as_json:
        print_json(rows)
    if failed:
        raise MLBenchError(f"{failed} of {len(findings)} checks failed")


@results.command()
@_FOLDERS
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the page (index.md), the tables and the figures.",
)
@click.option("--title", default="Results", show_default=True, help="Title of the page.")
@click.option(
    "--command",
    "commands",
    multiple=True,
    metavar="COMMAND",
    help=(
        "Command that made the runs, for the page; "
        "may be given several times (default: as recorded by the runs)."
    ),
)
@price_options
@json_option
def collect(
    folders: Sequence[Path],
    output: Path,
    title: str,
    commands: Sequence[str],
    pricing: Pricing,
    as_json: bool,
) -> None:
    """Make one page of all runs in FOLDER...: tables, figures, and links to the result folders."""
    from mlbench_core.comparison.figures import drawings, save
    from mlbench_core.comparison.results_page import collection_page, recorded_commands, runs_csv

    groups, comparison = compare_records(load(folders), pricing)
    captions, written = {}, []
    for drawing in drawings(groups, pricing.per_hour, lambda text: remark(clean(text))):
        captions[drawing.name] = drawing.caption
        written += save(drawing, output)
    page = collection_page(
        title,
        groups,
        comparison,
        output,
        commands=commands or recorded_commands(groups),
        captions=captions,
    )
    records = [record for group in groups for record in group.records]
    texts = {"index.md": page, "table.csv": comparison.as_csv(), "runs.csv": runs_csv(records)}
    paths = [*write_texts(output, {**texts, "results.json": comparison.as_json()}), *written]
    if as_json:
        print_json({"files": list(map(str, paths))})
        return
    for path in paths:
        click.echo(path)


@results.command()
@click.argument(
    "folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the board: index.html and index.md.",
)
@click.option("--title", default="Board of results", show_default=True, help="Title of the board.")
@price_options
@json_option
def board(folder: Path, output: Path, title: str, pricing: Pricing, as_json: bool) -> None:
    """Verify all results below FOLDER, and rank them by task on one page.

    FOLDER has result folders or archives runs.tar.xz of them, for example those that people add to
    a git repository. A result that cannot be verified is refused, and the page says why. Exit
    status 1 if one is refused.
    """
    from mlbench_core.comparison.board import board_html, board_markdown, read_board
    from mlbench_core.sweep.sweep_folder import TUNING, stopped_at_limit

    found = read_board(
        folder, pricing, is_stopped=stopped_at_limit, is_trial=lambda path: TUNING in path.parts
    )
    texts = {
        "index.html": board_html(title, found, folder, output),
        "index.md": board_markdown(title, found, folder, output),
    }
    paths = write_texts(output, texts)
    if as_json:
        print_json({"files": list(map(str, paths)), "refused": found.refused})
    else:
        for path in paths:
            click.echo(path)
        for source, problems in found.refused.items():
            click.echo(f"refused: {clean(source)}: {clean('; '.join(problems))}")
    if found.refused:
        raise MLBenchError(f"{len(found.refused)} results were refused, see the page")
