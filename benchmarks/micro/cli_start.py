"""Time the start of ``mlbench --help`` against the start of an empty Python.

python benchmarks/micro/cli_start.py [--save]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from _bench import Subject, finish, make_parser, measure, parse

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import click": ["-c", "import click"],
    "mlbench --help": ["-m", "mlbench_cli", "--help"],
    "mlbench --version": ["-m", "mlbench_cli", "--version"],
}
SUBJECT = Subject(
    "cli_start",
    "Start of the command (`cli_start.py`)",
    "ms",
    ("python -c pass",),
    ("`mlbench --help` starts in less than 3 times the time of an empty Python; "
     "`import click` is most of it.",
     "Limit: at most 5 times."),
)  # fmt: skip


def start(options: list[str]) -> None:
    """Start Python and wait for its end."""
    subprocess.run([sys.executable, *options], check=True, stdout=subprocess.DEVNULL)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = parse(make_parser(__doc__, blocks=31), argv)
    variants = {name: partial(start, options) for name, options in COMMANDS.items()}
    rows = measure(SUBJECT, "start", variants, arguments.blocks)
    finish(SUBJECT, rows, arguments, f"{arguments.blocks} starts of each command.")


if __name__ == "__main__":
    main()
