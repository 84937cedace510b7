"""Make one page of many runs: tables, figures, machine, commands, and links to the result folders."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from mlbench_core.comparison.pool import Group
from mlbench_core.comparison.record import RunRecord
from mlbench_core.comparison.table import Comparison, escape, safe_cell
from mlbench_core.results.folder import read_environment

__all__ = ["collection_page", "machine_text", "recorded_commands", "runs_csv", "software_text"]

_RUN_COLUMNS = (
    *(
        "name",
        "workers",
        "seed",
        "started_at",
        "state",
        "reached",
        "goal_text",
        "time_to_goal_s",
        "train_s",
    ),
    *(
        "validation_s",
        "wall_s",
        "epochs_to_goal",
        "epochs",
        "communication_exposed_s",
        "communication_hidden_s",
    ),
    *(
        "samples_per_s",
        "tokens_per_s",
        "best",
        "bytes_on_wire",
        "bytes_sent",
        "exchanges",
        "source",
    ),
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
        groups: The groups of runs, see :func:`~mlbench_core.comparison.pool.pool`.
        comparison: Their comparison.
        folder: The folder of the page, from which the links lead to the result folders.
        commands: Commands that reproduce the runs.
        captions: Name of each figure, without suffix, to its caption.
    """
    records = [record for group in groups for record in group.records]
    dates = sorted(str(record.started_at)[:10] for record in records if record.started_at)
    date = (
        "unknown"
        if not dates
        else dates[0]
        if dates[0] == dates[-1]
        else f"{dates[0]} to {dates[-1]}"
    )
    sizes = sorted({len(group.records) for group in groups})
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    shown = [line for command in commands for line in command.splitlines()]
    # A command with such a fence must not end the block.
    fence = "```" + "`" * max(
        (len(ticks) for line in shown for ticks in re.findall("`{3,}", line)), default=0
    )
    lines = [
        f"# {escape(title)}",
        "",
        f"{len(records)} runs, {each} of each configuration. The 95 % confidence intervals of "
        "times are those of the geometric mean (Student's t on the logarithms).",
        "",
        f"- Date: {date}",
        *(f"- Machine: {escape(text)}" for text in _distinct(map(machine_text, groups))),
        *(f"- Software: {escape(text)}" for text in _distinct(map(software_text, groups))),
        "",
        *(["Commands:", "", f"{fence}bash", *shown, fence, ""] if shown else []),
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


def _run_lines(groups: Sequence[Group], folder: Path) -> list[str]:
    lines = [
        "| CONFIGURATION | WORKERS | RUN | SEED | REACHED | TIME (s) |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for group in groups:
        for record in group.records:
            reached = {True: "yes", False: "no", None: "-"}[record.reached]
            total = "-" if record.total_s is None else f"{record.total_s:.2f}"
            seed = "-" if record.seed is None else record.seed
            link = escape(record.name)
            if record.folder is not None:
                target = Path(os.path.relpath(record.folder.resolve(), folder.resolve())).as_posix()
                # A space or a bracket would end the link.
                link = f"[{link}]({quote(target)}/result.json)"
            cells = (escape(group.label), group.workers, link, seed, reached, total)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def machine_text(group: Group) -> str:
    """Return the machine of a group in one line; an empty text if it is unknown."""
    machine = group.machine
    gpus = machine.get("gpus") or 0
    memory = machine.get("memory_bytes")
    parts = (
        machine.get("cpu"),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        f"{memory / 2**30:.0f} GiB" if memory else None,
        f"{gpus} x {machine.get('gpu')}" if gpus else None,
        f"{machine['hosts']} hosts" if (machine.get("hosts") or 1) > 1 else None,
    )
    return ", ".join(str(part) for part in parts if part)


def software_text(group: Group) -> str:
    """Return the versions of the software of a group in one line."""
    software = {name: value for name, value in group.software.items() if value is not None}
    commit, difference = software.pop("commit", None), software.pop("difference_sha256", None)
    parts = [f"{name} {value}" for name, value in software.items()]
    if commit:
        parts.append(
            f"commit {str(commit)[:12]}"
            + (f" with the difference {str(difference)[:12]}" if difference else "")
        )
    return ", ".join(parts)


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def recorded_commands(groups: Sequence[Group]) -> list[str]:
    """Return the command line of the first run of each group, as far as its ``environment.json`` has it."""
    found = []
    for group in groups:
        folder = group.records[0].folder
        words = None if folder is None else read_environment(folder).get("command_line")
        if isinstance(words, list):
            found.append(shlex.join(map(str, words)))
    return _distinct(found)


def runs_csv(records: Sequence[RunRecord]) -> str:
    """Return one row for each run as CSV; a value that is unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_RUN_COLUMNS)
    writer.writerows(
        [safe_cell(getattr(record, name)) for name in _RUN_COLUMNS] for record in records
    )
    return text.getvalue()
