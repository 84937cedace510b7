"""Import path of the command in version 3.0; see :mod:`mlbench_core.cli`."""

from __future__ import annotations

from mlbench_core.cli._group import cli_group

__all__ = ["cli_group"]
