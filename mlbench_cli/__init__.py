"""The ``mlbench`` command.

``cli_group`` is a :class:`click.Group`. A subcommand is imported when it is used, so ``mlbench
--help`` imports only click. Each file in ``commands`` holds one group of commands.

Example:
    >>> from mlbench_cli import cli_group
    >>> cli_group.name
    'mlbench'
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from mlbench_core._optional.lazy import lazy_subpackages

if TYPE_CHECKING:
    from mlbench_cli import cli
    from mlbench_cli.cli import cli_group

__all__ = ["cli", "cli_group", "main"]

_subpackage = lazy_subpackages(__name__, "cli")


# Not imported here: Python must look for click only after main() has removed the user's folder from
# sys.path.
def __getattr__(name: str) -> Any:
    if name == "cli_group":
        return _subpackage("cli").cli_group
    return _subpackage(name)


def main() -> None:
    """Run the ``mlbench`` command and end the process with its exit status."""
    _leave_out_current_folder()
    from mlbench_cli._output_streams import open_streams
    from mlbench_cli.cli import cli_group

    open_streams()
    cli_group.main(prog_name="mlbench")


def _leave_out_current_folder() -> None:
    """Import nothing from the current folder, in which a user may have a ``click.py``."""
    try:
        current = os.getcwd()
    # The folder was deleted.
    except OSError:
        current = ""
    # A checkout that is not installed is found only there.
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def stays(folder: str) -> bool:
        return bool(folder) and (folder == own or os.path.realpath(folder) != current)

    sys.path[:] = filter(stays, sys.path)
