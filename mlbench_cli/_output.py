"""Write the output of commands: tables and JSON to standard output, remarks to standard error."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click

__all__ = [
    "clean",
    "confirm_deletion",
    "dashboard_option",
    "fork_option",
    "json_option",
    "local_time",
    "log_line",
    "number",
    "print_field",
    "print_json",
    "print_table",
    "remark",
    "seconds",
    "terminal_width",
]

Command = TypeVar("Command", bound=Callable[..., Any])

# A column of a table is not cut below this width.
_NARROWEST = 8
# Escape sequences of a terminal, then single control characters except tab and newline, marks that
# turn the direction of text, and characters without width except the joiners of emoji and some
# scripts.
_UNSEEN = r"\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
_CONTROL = re.compile(rf"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f\x80-\x9f{_UNSEEN}]")


def json_option(command: Command) -> Command:
    """Give a command the flag ``--json`` (argument ``as_json``)."""
    help_text = "Write JSON instead of text."
    return click.option("--json", "as_json", is_flag=True, help=help_text)(command)


def dashboard_option(command: Command) -> Command:
    """Give a command the option ``--dashboard-url``, the master's address."""
    help_text = (
        "Address of the master (default: MLBENCH_MASTER_URL, or else the master on this machine)."
    )
    return click.option("--dashboard-url", "-u", metavar="URL", help=help_text)(command)


def fork_option(command: Command) -> Command:
    """Give a command the flag ``--fork``: workers are forks."""
    help_text = (
        "With the local engine: let the workers of a script be forks of a process that has "
        "imported torch, which saves seconds at the start of each run."
    )
    return click.option("--fork", is_flag=True, help=help_text)(command)


def print_json(value: object) -> None:
    """Write a value as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def remark(text: str) -> None:
    """Write a line for people to standard error, so that standard output holds only results."""
    click.echo(text, err=True)


def confirm_deletion(question: str) -> bool:
    """Ask if something may be deleted; it may without a terminal, where nobody can answer.

    Raises:
        click.Abort: The user cancelled with Ctrl-C or Ctrl-D.
    """
    try:
        return click.confirm(question, err=True)
    except click.Abort as abort:
        # Scripts for version 3.0, which did not ask, go on. On a terminal, Ctrl-C and Ctrl-D
        # cancel.
        if sys.stdin.isatty() or not isinstance(abort.__context__, EOFError):
            raise
        click.echo(err=True)
        return True


def clean(text: object) -> str:
    """Remove control characters from a text such as a log line or a name.

    Otherwise a worker's output could move the cursor or change the colors of the user's terminal.

    Example:
        >>> clean("a\\x1b[31mred\\x1b[0m\\r")
        'ared'
    """
    return _CONTROL.sub("", str(text))


def log_line(line: Mapping[str, Any]) -> str:
    """Format a line of a run's log: the rank of the worker that wrote it, then the text.

    Example:
        >>> log_line({"rank": 1, "text": "epoch 2"}), log_line({"rank": None, "text": "started"})
        ('[1] epoch 2', 'started')
    """
    rank = line.get("rank")
    text = clean(line.get("text", ""))
    # The lines of the engine have no rank.
    if rank is None:
        return text
    return f"[{rank}] {text}"


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a table; None becomes ``-``.

    Example:
        >>> number(12.345), number(None), number(0.5, 2)
        ('12.3', '-', '0.50')
    """
    return "-" if value is None else f"{value:,.{digits}f}"


def seconds(value: float) -> str:
    """Format a duration in seconds as ``M:SS`` or ``H:MM:SS``.

    Example:
        >>> seconds(5), seconds(75), seconds(3700)
        ('0:05', '1:15', '1:01:40')
    """
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}"


def local_time(date: str) -> str:
    """Format a date of the master, ISO 8601 in UTC, as local time with its offset.

    Fractions of a second are left out.

    Example:
        >>> local_time("2026-01-31T12:00:00.500000Z")  # doctest: +SKIP
        '2026-01-31 13:00:00 +01:00'
    """
    # Before version 3.11, Python did not know the letter for UTC.
    local = datetime.fromisoformat(date.replace("Z", "+00:00")).astimezone()
    text = local.isoformat(" ", "seconds")
    return f"{text[:19]} {text[19:]}"


def terminal_width() -> int | None:
    """Return the width of the terminal, or None if standard output is not one."""
    # A file or a pipe gets everything.
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def print_field(name: str, value: object, indent: int = 14) -> None:
    """Write a name and its value, wrapped below itself on a terminal that is too narrow."""
    line = f"{name + ':':{indent}}{clean(value)}"
    width = terminal_width()
    if width is not None:
        line = textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    click.echo(line)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()
) -> None:
    """Write a table with aligned columns.

    The widest columns are cut to the width of a terminal.

    Args:
        header: Titles of the columns.
        rows: Cells, written with ``str``; control characters are dropped.
        right: Columns to align on the right.
    """
    lines = [list(map(_one_line, row)) for row in [header, *rows]]
    widths = _widths(lines, terminal_width())
    for index, row in enumerate(lines):
        parts = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if len(cell) > width:
                cell = f"{cell[: width - 3]}..."
            parts.append(cell.rjust(width) if column in right else cell.ljust(width))
        line = "  ".join(parts).rstrip()
        if index == 0:
            click.secho(line, bold=True)
        else:
            click.echo(line)


def _one_line(cell: object) -> str:
    # A line break in a cell would break the table.
    return clean(cell).replace("\n", " ")


def _widths(rows: Sequence[Sequence[str]], most: int | None) -> list[int]:
    """Return the widths of the columns, of which the widest are cut so that a row fits."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while most is not None and sum(widths) + 2 * (len(widths) - 1) > most:
        widest = max(widths)
        if widest <= _NARROWEST:
            break
        widths[widths.index(widest)] -= 1
    return widths
