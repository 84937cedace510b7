"""The ``mlbench`` command.

``cli_group`` is a :class:`click.Group`. A subcommand is imported when it is used, so ``mlbench --help`` imports only
click. Each file in this folder holds one group of commands.

Example:
    >>> from mlbench_core.cli import cli_group
    >>> cli_group.name
    'mlbench'
"""

from __future__ import annotations

from mlbench_core.cli import cli
from mlbench_core.cli.cli import cli_group

__all__ = ["cli", "cli_group", "main"]


def main() -> None:
    """Run the ``mlbench`` command and end the process with its exit status."""
    cli_group.main(prog_name="mlbench")
