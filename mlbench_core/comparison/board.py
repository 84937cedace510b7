"""Make a board: the results of many people in one folder, verified and ranked by task.

The folder is that of a git repository, to which people add result folders, or archives
``runs.tar.xz`` of them. Whatever cannot be verified is refused, and the board says why.
"""

from __future__ import annotations

import dataclasses
import lzma
import os
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from mlbench_core.calling_environment import OBSERVER
from mlbench_core.comparison.goal_times import compare_times
from mlbench_core.comparison.group_repeats import Group, plural, pool, usable
from mlbench_core.comparison.html_page import bullets, document, elements, grid
from mlbench_core.comparison.load_results import MOST_UNPACKED_BYTES, identity, load
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.results_page import machine_text
from mlbench_core.comparison.significance import holm
from mlbench_core.comparison.table import Column, Price, compare_groups, escape, markdown_lines
from mlbench_core.errors import ConfigurationError
from mlbench_core.results.folder import (
    RESULT,
    find_folders,
    is_searched,
    read_environment,
    verify_folder,
)

__all__ = [
    "ARCHIVE",
    "Board",
    "Heading",
    "board_html",
    "board_markdown",
    "read_board",
    "repeat_command",
]

ARCHIVE = "runs.tar.xz"
"""Name of an archive of result folders."""

# Errors of an archive that is damaged or no archive at all.
_BAD_ARCHIVE = (tarfile.TarError, lzma.LZMAError, zlib.error, ValueError, OSError, EOFError)
_COLUMNS = (
    Column("rank", "RANK"),
    Column("label", "CONFIGURATION"),
    Column("workers", "WORKERS", 0),
    Column("runs", "RUNS", 0),
    Column("reached", "REACHED", 0),
    Column("median_s", "MEDIAN (s)", 2),
    Column("cost_per_success_s", "COST PER SUCCESS (s)", 2),
    Column("bytes_on_wire_mb", "ON THE WIRE (MB)", 2),
    Column("price", "PRICE", 4),
    Column("against", "AGAINST THE FIRST"),
)
_RULES = (
    "Each run is recomputed from its raw lines. One that was stopped at its limit has no result to "
    "recompute, and counts as a run that missed the goal.",
    "The rank is that of the median training time to the goal, in which a missed run is longer "
    "than every time. A row whose runs missed in half of the cases or more has no rank.",
    "The test against the first row is the t test on the logarithms of the times, two-sided at "
    "5 % after Holm's correction for all rows below the heading: paired by seed if both have the "
    "same seeds. Its number is the ratio of the geometric means. Where it shows no difference, the "
    "ranks may be in another order by chance.",
    "The cost per success is the training time of all runs, divided by the number of those that "
    "reached the goal. Prices are those of this cost.",
)


@dataclass(frozen=True)
class Heading:
    """The rows of one task, one goal and one network.

    Attributes:
        title: These three in words.
        rows: A row for each group of repeats, the first one first.
        remarks: Sentences on runs that are left out or count twice.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    remarks: Sequence[str] = ()


@dataclass
class Board:
    """The ranked results of a folder.

    Attributes:
        headings: The ranked rows.
        refused: The problems of each result folder or archive that cannot be verified.
        accepted: Number of the runs that are not refused; copies of a run count once.
        remarks: Sentences on all runs.
    """

    headings: list[Heading] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    accepted: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Source:
    """The place of a run: a path below the folder, and the path in this archive, if it is one."""

    path: str
    member: str = ""

    def __str__(self) -> str:
        if not self.member:
            return self.path
        return f"{self.path}: {self.member}"


def read_board(
    folder: Path,
    pricing: Pricing | None = None,
    *,
    is_stopped: Callable[[Path], bool],
    is_trial: Callable[[Path], bool],
) -> Board:
    """Verify and rank all results below a folder.

    Args:
        folder: The folder. Archives with the name :data:`ARCHIVE` are read, too.
        pricing: Price of the machines; None if it is unknown.
        is_stopped: Returns True for the folder of a run that was stopped at its limit, which has
            no result. It is a run that missed its goal.
        is_trial: Returns True for a path of a run that only chose a learning rate, which is no
            result.

    Raises:
        ConfigurationError: The folder has no results.
    """
    pricing = pricing or Pricing()
    board = Board(remarks=list(pricing.remarks))
    records: list[RunRecord] = []
    first_places: dict[str, _Source] = {}
    with tempfile.TemporaryDirectory(prefix="mlbench-board-") as scratch:
        for found, source in _find(folder, Path(scratch), board):
            if is_trial(Path(source.member or source.path)):
                continue
            stopped = not (found / RESULT).exists() and is_stopped(found)
            problems: list[str] = []
            if not stopped:
                problems = verify_folder(found)
            of_run: list[RunRecord] = []
            if not problems:
                # Raw lines of a stopped run, which nothing has verified, may be damaged.
                of_run = load([found], unreadable=problems.append)
            if problems:
                board.refused[str(source)] = problems
                continue
            for record in of_run:
                # load() finds copies at its paths, but each of them is loaded apart.
                first = first_places.setdefault(identity(record), source)
                if first is not source:
                    board.remarks.append(f"{source} is a copy of {first}: it counts once")
                    continue
                board.accepted += 1
                if stopped:
                    record = dataclasses.replace(record, state="failed", reached=False)
                command = repeat_command(record, found)
                records.append(_ShownRecord.of(record, source, command))
    if not records and not board.refused:
        raise ConfigurationError(
            f"{folder} has no results: give a folder with result folders, or with archives "
            f"{ARCHIVE} of them"
        )
    headings: dict[str, list[RunRecord]] = {}
    for record in records:
        headings.setdefault(_title(record), []).append(record)
    for title in sorted(headings):
        heading = _ranked(title, headings[title], pricing)
        if heading.rows:
            board.headings.append(heading)
        else:
            board.remarks += heading.remarks
    return board


@dataclass(frozen=True)
class _ShownRecord(RunRecord):
    """A run with the place where a reader finds it, and the command that repeats it."""

    place: _Source = field(default_factory=lambda: _Source(""))
    command: str = ""

    @classmethod
    def of(cls, record: RunRecord, place: _Source, command: str) -> _ShownRecord:
        known = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
        return cls(**known, place=place, command=command)


def _find(folder: Path, scratch: Path, board: Board) -> Iterator[tuple[Path, _Source]]:
    """Yield each result folder, and where it came from."""
    for found in find_folders(folder):
        yield found, _Source(found.relative_to(folder).as_posix())
    # Unpacked into numbered folders, because all archives have the same name.
    for number, archive in enumerate(sorted(folder.rglob(ARCHIVE))):
        if not is_searched(archive.parent, folder):
            continue
        source = archive.relative_to(folder).as_posix()
        target = scratch / str(number)
        try:
            _unpack(archive, target)
        except _BAD_ARCHIVE as error:
            board.refused[source] = [f"it cannot be unpacked: {error}"]
            continue
        for found in find_folders(target):
            yield found, _Source(source, found.relative_to(target).as_posix())


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive that a stranger made: without links, and only below the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigurationError(
            "this Python cannot unpack archives safely: use Python 3.10.12, 3.11.4 or newer"
        )
    folder.mkdir()
    total = 0
    with tarfile.open(archive) as tar:
        # One after the other, so that no more than the limit is ever unpacked.
        for member in tar:
            total += member.size
            if total > MOST_UNPACKED_BYTES:
                raise ValueError(
                    f"it has more than {MOST_UNPACKED_BYTES:,} bytes when unpacked, which are the "
                    "most that are allowed"
                )
            tar.extract(member, folder, filter="data")


def repeat_command(record: RunRecord, folder: Path) -> str:
    """Return the command that repeats a run on another machine.

    Args:
        record: The run.
        folder: Its result folder, whose environment has the command line of its workers. Of the
            folders in it, only the last part is kept.
    """
    words = read_environment(folder).get("command_line")
    if not isinstance(words, list) or not words:
        return ""
    command = ["mlbench", "run", "repeat", str(record.workers)]
    if record.configuration.get("network"):
        command += ["--network", str(record.configuration["network"])]
    rest = []
    values = iter(map(str, words[1:]))
    for word in values:
        # The number of the run and its backend come from the new call.
        if word in ("--run_id", "--run-id", "--backend"):
            next(values, None)
        elif "/benchmarks/" in word:
            rest.append(f"benchmarks/{word.rpartition('/benchmarks/')[2]}")
        elif PurePath(word).is_absolute():
            rest.append(f".../{PurePath(word).name}")
        else:
            rest.append(word)
    if record.configuration.get("task"):
        command += ["--task", str(record.configuration["task"]), "--", *rest[1:]]
    elif rest[:2] == ["-m", OBSERVER]:
        command += rest[2:]
    else:
        command += ["--command", shlex.join(["python", *rest])]
    return shlex.join(command)


def _title(record: RunRecord) -> str:
    """Return the task, the goal and the network: only times of equal ones are ranked."""
    configuration = record.configuration
    task, program = configuration.get("task"), configuration.get("program")
    # A run whose command is not known has only its series.
    name = str(program or configuration.get("series"))
    if task:
        name = f"Task {task}"
    # Times on a stand-in data set are not those of the task's own one.
    if configuration.get("dataset"):
        name += f" on {configuration['dataset']}"
    network = configuration.get("network")
    place = "no emulated network"
    if network:
        place = f"network {network}"
    return f"{name}, {record.goal_text}, {place}"


def _ranked(title: str, records: Iterable[RunRecord], pricing: Pricing) -> Heading:
    kept, remarks = usable(records)
    if not kept:
        return Heading(title, (), remarks)
    groups = pool(kept)
    price: Price | None = None
    # Without the price of a machine, the board has no column of prices.
    if pricing.machine:
        price = pricing.price
    comparison = compare_groups(groups, price=price)
    pairs = sorted(zip(comparison.rows, groups, strict=True), key=_order)
    rows = []
    verdicts = _verdicts([group for _, group in pairs])
    for number, ((row, group), verdict) in enumerate(zip(pairs, verdicts, strict=True), 1):
        rank = str(number)
        if row["median_s"] is None:
            rank = "-"
        shown = {**row, "rank": rank, "against": verdict, "machine": machine_text(group)}
        # A configuration without other ones has no difference to name.
        shown["label"] = row["label"] or str(group.configuration.get("algorithm") or "-")
        rows.append({**shown, "records": group.records})
    return Heading(title, rows, [*comparison.remarks, *remarks])


def _order(pair: tuple[Mapping[str, Any], Group]) -> tuple[bool, float, str, int]:
    row = pair[0]
    median = row["median_s"]
    return median is None, median or 0.0, row["label"], row["workers"]


def _verdicts(groups: Sequence[Group]) -> list[str]:
    """Return for each group what its test against the first one says."""
    first = groups[0].records
    tests = [compare_times(group.records, first) for group in groups[1:]]
    # The correction takes the tests that exist, and the loop takes their p-values in this order.
    adjusted = iter(holm([test.p for test in tests if test is not None]))
    verdicts = [""]
    for test in tests:
        if test is None:
            verdicts.append("not tested")
        elif next(adjusted) >= 0.05:
            verdicts.append(f"{test.ratio:.2f} times, no difference shown")
        elif test.ratio > 1:
            verdicts.append(f"{test.ratio:.2f} times, slower")
        else:
            # The first has the least median, but the test compares geometric means.
            verdicts.append(f"{test.ratio:.2f} times, faster")
    return verdicts


def _shown_columns(heading: Heading) -> list[Column]:
    """Return the columns that have a value."""
    columns = []
    for column in _COLUMNS:
        if any(row[column.key] not in (None, "") for row in heading.rows):
            columns.append(column)
    return columns


def _links(row: Mapping[str, Any], folder: Path, page: Path) -> Iterator[tuple[str, str]]:
    """Yield a text and the address of each file that has runs of a row."""
    members: dict[str, list[str]] = {}
    for record in row["records"]:
        path = record.place.path
        if record.place.member:
            members.setdefault(path, []).append(record.place.member)
        else:
            members.setdefault(f"{path}/{RESULT}", []).append(record.name)
    for path, names in members.items():
        target = Path(os.path.relpath((folder / path).resolve(), page.resolve())).as_posix()
        # A space or a bracket would end a link of Markdown.
        yield ", ".join(names), quote(target)


def _facts(board: Board) -> str:
    return f"{board.accepted} runs in {len(board.headings)} rankings; {len(board.refused)} refused."


def board_markdown(title: str, board: Board, folder: Path, page: Path) -> str:
    """Return the board as Markdown.

    Args:
        title: Its title.
        board: The results.
        folder: The folder of the results.
        page: The folder of the page; links are relative to it.
    """
    lines = [f"# {escape(title)}", "", _facts(board), ""]
    lines += [f"- {escape(text)}" for text in (*_RULES, *board.remarks)]
    for heading in board.headings:
        lines += ["", f"## {escape(heading.title)}", ""]
        lines += markdown_lines(_shown_columns(heading), heading.rows)
        lines += ["", *(f"- {escape(text)}" for text in heading.remarks)]
        for row in heading.rows:
            runs = []
            for names, target in _links(row, folder, page):
                runs.append(f"[{escape(names)}]({target})")
            lines += ["", f"**{row['rank']}: {_name(row, escape)}**: {', '.join(runs)}", ""]
            # Four spaces make a block of code that no text can end.
            lines.append(f"    {row['records'][0].command}")
    if board.refused:
        lines += ["", "## Refused", ""]
        for source, problems in board.refused.items():
            lines.append(f"- {escape(source)}: {escape('; '.join(problems))}")
    return "\n".join(lines) + "\n"


def _name(row: Mapping[str, Any], quoted: Callable[[str], str]) -> str:
    text = f"{row['label']}, {plural(row['workers'], 'worker')}"
    if row["machine"]:
        text += f", {row['machine']}"
    return quoted(text)


def board_html(title: str, board: Board, folder: Path, page: Path) -> str:
    """Return the board as one HTML file without scripts; see :func:`board_markdown`."""
    links = ""
    sections = []
    for number, heading in enumerate(board.headings, 1):
        links += f'<a href="#task-{number}">{escape_html(heading.title)}</a>'
        details = "".join([_details(row, folder, page) for row in heading.rows])
        sections.append(
            f'<section id="task-{number}"><h2>{escape_html(heading.title)}</h2>'
            f"{grid(_shown_columns(heading), heading.rows)}{bullets(heading.remarks)}"
            f"{details}</section>"
        )
    if board.refused:
        links += '<a href="#refused">Refused</a>'
        texts = [f"{source}: {'; '.join(each)}" for source, each in board.refused.items()]
        sections.append(f'<section id="refused"><h2>Refused</h2>{bullets(texts)}</section>')
    header = (
        f"<header><h1>{escape_html(title)}</h1><p>{escape_html(_facts(board))}</p>"
        f"{bullets([*_RULES, *board.remarks])}<nav>{links}</nav></header>"
    )
    return document(title, [header, *sections])


def _details(row: Mapping[str, Any], folder: Path, page: Path) -> str:
    runs = []
    for names, target in _links(row, folder, page):
        runs.append(f'<a href="{target}">{escape_html(names)}</a>')
    return (
        f"<details><summary>{row['rank']}: {_name(row, escape_html)}</summary>"
        f"<ul>{elements('li', runs)}</ul><pre>{escape_html(row['records'][0].command)}</pre>"
        "</details>"
    )
