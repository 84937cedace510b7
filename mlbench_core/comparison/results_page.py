"""Make one page of many runs: tables, figures, machine, commands, and links to result folders."""

from __future__ import annotations

import csv
import io
import itertools
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlbench_core.comparison.group_repeats import Group
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.table import Comparison, escape, safe_cell
from mlbench_core.results.folder import read_environment

__all__ = ["collection_page", "machine_text", "recorded_commands", "runs_csv", "software_text"]

_RUN_COLUMNS = (
    *("name", "workers", "seed", "started_at", "state", "reached", "goal_text", "time_to_goal_s"),
    *("train_s", "validation_s", "wall_s", "epochs_to_goal", "epochs"),
    *("communication_exposed_s", "communication_hidden_s", "samples_per_s", "tokens_per_s"),
    *("best", "bytes_on_wire", "bytes_sent", "exchanges", "source"),
)


def collection_page(
    title: str,
    groups: Sequence[Group],
    comparison: Comparison,
    folder: Path,
    *,
    commands: Iterable[str] = (),
    captions: Mapping[str, str] | None = None,
) -> str:
    """Return the page of a collection of runs as Markdown.

    Args:
        title: Title of the page.
        groups: Groups of runs; see :func:`~mlbench_core.comparison.group_repeats.pool`.
        comparison: Comparison of these groups.
        folder: Folder of the page; links to result folders are relative to it.
        commands: Commands that reproduce the runs.
        captions: Caption of each figure, by the name of the figure without suffix.
    """
    sizes = []
    dates = []
    for group in groups:
        sizes.append(len(group.records))
        for record in group.records:
            if record.started_at:
                # The first ten characters of a date in ISO 8601 are the day.
                dates.append(str(record.started_at)[:10])
    lines = [
        f"# {escape(title)}",
        "",
        f"{sum(sizes)} runs, {_span(sizes)} of each configuration. The 95 % confidence intervals "
        "of times are those of the geometric mean (Student's t on the logarithms).",
        "",
        f"- Date: {_span(dates)}",
    ]
    for heading, text_of in (("Machine", machine_text), ("Software", software_text)):
        # Groups with the same machine or software share one line.
        for text in _distinct(map(text_of, groups)):
            lines.append(f"- {heading}: {escape(text)}")
    lines += [
        "",
        *_command_lines(commands),
        "## Tables",
        "",
        comparison.as_markdown(),
        "[table.csv](table.csv) and [results.json](results.json) have the same numbers, "
        "[runs.csv](runs.csv) those of each run.",
        "",
    ]
    if captions:
        lines += ["## Figures", ""]
        for name, caption in captions.items():
            lines += [
                f"![{name.replace('_', ' ')}]({name}.png)",
                "",
                f"{escape(caption)} ([SVG]({name}.svg))",
                "",
            ]
    return "\n".join([*lines, "## Runs", "", *_run_lines(groups, folder)]) + "\n"


def _span(values: Iterable[Any]) -> str:
    """Return the smallest and the largest value as text; one value if all are equal."""
    ordered = sorted(values)
    if not ordered:
        return "unknown"
    if ordered[0] == ordered[-1]:
        return str(ordered[0])
    return f"{ordered[0]} to {ordered[-1]}"


def _command_lines(commands: Iterable[str]) -> list[str]:
    """Return the lines of the section with the commands; none if there are no commands."""
    lines = list(itertools.chain.from_iterable(map(str.splitlines, commands)))
    if not lines:
        return []
    # A fence longer than all backticks in the commands, so that no command ends the block.
    longest = max(map(len, re.findall("`{3,}", "\n".join(lines))), default=0)
    fence = "```" + "`" * longest
    return ["Commands:", "", f"{fence}bash", *lines, fence, ""]


def _run_lines(groups: Sequence[Group], folder: Path) -> list[str]:
    lines = [
        "| CONFIGURATION | WORKERS | RUN | SEED | REACHED | TIME (s) |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for group in groups:
        for record in group.records:
            reached = {True: "yes", False: "no", None: "-"}[record.reached]
            total, seed = "-", "-"
            if record.total_s is not None:
                total = f"{record.total_s:.2f}"
            if record.seed is not None:
                seed = str(record.seed)
            link = escape(record.name)
            if record.folder is not None:
                target = Path(os.path.relpath(record.folder.resolve(), folder.resolve())).as_posix()
                # A space or a bracket would end the link.
                link = f"[{link}]({quote(target)}/result.json)"
            cells = (escape(group.label), group.workers, link, seed, reached, total)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def machine_text(group: Group) -> str:
    """Return the machine of a group in one line; an empty string if it is unknown."""
    machine = group.machine
    parts = []
    if machine.get("cpu"):
        parts.append(str(machine["cpu"]))
    if machine.get("cores"):
        parts.append(f"{machine['cores']} cores")
    if machine.get("memory_bytes"):
        parts.append(f"{machine['memory_bytes'] / 2**30:.0f} GiB")
    if machine.get("gpus"):
        parts.append(f"{machine['gpus']} x {machine.get('gpu')}")
    if (machine.get("hosts") or 1) > 1:
        parts.append(f"{machine['hosts']} hosts")
    return ", ".join(parts)


def software_text(group: Group) -> str:
    """Return the versions of the software of a group in one line."""
    software = dict(group.software)
    # Shortened below: all of their digits would hide the versions.
    commit, difference = software.pop("commit", None), software.pop("difference_sha256", None)
    parts = []
    for name, value in software.items():
        if value is not None:
            parts.append(f"{name} {value}")
    if commit and difference:
        parts.append(f"commit {str(commit)[:12]} with the difference {str(difference)[:12]}")
    elif commit:
        parts.append(f"commit {str(commit)[:12]}")
    return ", ".join(parts)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(filter(None, dict.fromkeys(texts)))


def recorded_commands(groups: Sequence[Group]) -> list[str]:
    """Return the command line of the first run of each group.

    Runs without an ``environment.json`` that has the command line are left out.
    """
    commands = []
    for group in groups:
        folder = group.records[0].folder
        if folder is None:
            continue
        words = read_environment(folder).get("command_line")
        if isinstance(words, list):
            commands.append(shlex.join(map(str, words)))
    return _distinct(commands)


def runs_csv(records: Sequence[RunRecord]) -> str:
    """Return a CSV text with one row per run; unknown values are empty."""
    text = io.StringIO()
    # The default of the module is the line end of Windows, on every system.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_RUN_COLUMNS)
    values_of = operator.attrgetter(*_RUN_COLUMNS)
    for record in records:
        writer.writerow(map(safe_cell, values_of(record)))
    return text.getvalue()
