"""``mlbench results``: verify result folders, check them against the rules, and collect them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mlbench_cli._output import clean, json_option, print_json, remark
from mlbench_cli._records import compare_records, price_options, write_texts
from mlbench_core.comparison.load import load
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
    from mlbench_core.sweep.folder import stopped_at_limit

    places = result_folders(folders)
    stopped = {
        str(place) for place in places if not (place / RESULT).exists() and stopped_at_limit(place)
    }
    problems = {
        str(place): [] if str(place) in stopped else verify_folder(place) for place in places
    }
    if as_json:
        print_json(problems)
    else:
        for name, found in problems.items():
            fine = "stopped at the limit, has no result" if name in stopped else _ok(Path(name))
            for problem in found or [fine]:
                click.echo(f"{clean(name)}: {clean(problem)}")
    wrong = sum(bool(found) for found in problems.values())
    if wrong:
        raise MLBenchError(f"{wrong} of {len(problems)} result folders cannot be verified")


def _ok(folder: Path) -> str:
    """Return the line for a folder without problems, which names the numbers that an earlier version did not write."""
    names = lacking(read_result(folder))
    return f"ok, written by an earlier version without {' and '.join(names)}" if names else "ok"


def result_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the result folders at or below some folders.

    Raises:
        ConfigurationError: None exists at or below one of them.
    """
    found = []
    for folder in folders:
        inside = list(find_folders(folder)) if folder.is_dir() else []
        if not inside:
            raise ConfigurationError(
                f"{folder} is not a result folder and has none below it: give the folder of a run"
            )
        found += inside
    return list(dict.fromkeys(found))


@results.command()
@_FOLDERS
@json_option
def check(folders: Sequence[Path], as_json: bool) -> None:
    """Check the runs in FOLDER... against the rules of a submission.

    Each line begins with 'ok', 'fail' or 'cannot be checked'. Exit status 1 if a rule fails. The
    rules are in the documentation, on the page "Rules".
    """
    from mlbench_core.comparison.rules import check_rules

    findings = check_rules(load(result_folders(folders)))
    if as_json:
        print_json(
            [
                {"status": each.status, "subject": each.subject, "reason": each.reason}
                for each in findings
            ]
        )
    else:
        for each in findings:
            click.echo(clean(each))
    failed = sum(each.status == "fail" for each in findings)
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
        "Command that made the runs, for the page; may be given several times (default: as "
        "recorded by the runs)."
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
    from mlbench_core.comparison.collection import collection_page, recorded_commands, runs_csv
    from mlbench_core.comparison.figures import drawings, save

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
        print_json({"files": [str(path) for path in paths]})
        return
    for path in paths:
        click.echo(path)
