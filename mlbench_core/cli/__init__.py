"""The import path of version 3.0 for :mod:`mlbench_cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlbench_core._optional.lazy import lazy_subpackages

if TYPE_CHECKING:
    from mlbench_cli.cli import cli_group
    from mlbench_core.cli import cli

__all__ = ["cli", "cli_group"]

_subpackage = lazy_subpackages(__name__, "cli")


# Not imported here, because click is an import of half a second on a slow disk, and scripts import
# all of mlbench_core.
def __getattr__(name: str) -> Any:
    if name == "cli_group":
        return _subpackage("cli").cli_group
    return _subpackage(name)
