"""The ``mlbench`` command.

``cli_group`` is a :class:`click.Group` whose subcommands load when they are used, so ``mlbench --help`` imports
click and nothing else. One file below this folder holds one group of commands.

Example:
    >>> from mlbench_core.cli import cli_group
    >>> cli_group.name
    'mlbench'
"""

from __future__ import annotations

from mlbench_core.cli import cli
from mlbench_core.cli._group import cli_group

__all__ = ["cli", "cli_group", "main"]


def main() -> None:
    """Entry point of the ``mlbench`` command; ends the process with the command's exit status."""
    cli_group.main(prog_name="mlbench")
