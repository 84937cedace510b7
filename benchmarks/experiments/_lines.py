"""Make a page from the file ``runs.jsonl`` of an experiment, which has one run in each line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.comparison.figures.canvas import Drawing, save, style
from mlbench_core.files import replacing

Lines = Sequence[Mapping[str, Any]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_page(
    description: str,
    draw: Callable[[Lines], Drawing],
    tables: Sequence[Callable[[Lines], str]],
    argv: Sequence[str] | None,
) -> None:
    """Draw the figure and copy the lines into the folder of a page, and print the tables.

    Args:
        description: Of the command, for its help.
        draw: Draws the figure of the lines.
        tables: Each returns a table of the lines in Markdown.
        argv: The command line: the file, and ``-o`` with the folder.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    text = arguments.runs.read_text(encoding="utf-8")
    lines = read_lines(arguments.runs)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with style():
        save(draw(lines), arguments.output)
    with replacing(arguments.output / "runs.jsonl") as part:
        part.write_text(text, encoding="utf-8")
    print("\n".join(table(lines) for table in tables), end="")
