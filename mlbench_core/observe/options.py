"""Read the command line of ``python -m mlbench_core.observe``.

This module does not import torch, so that the command can check the words before a run starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.names import (
    MethodChoice,
    check_together,
    parse_method,
    parse_optimizer,
)
from mlbench_core.observe.output import Metric, parse_goal, parse_metric
from mlbench_core.run_terms import GoalAim

__all__ = ["USAGE", "Options", "parse_options"]

USAGE = """\
[--method NAME[:key=value,...]] [--optimizer NAME[:key=value,...]]
  [--metric NAME=REGEX]... [--goal NAME<=VALUE|NAME>=VALUE] [--output DIR] [--run-id ID]
  SCRIPT ARGS... | -m MODULE ARGS..."""


@dataclass(frozen=True)
class Options:
    """The command line of an observed script.

    Attributes:
        script: Path of the script as typed, or name of the module.
        arguments: The arguments of the script.
        is_module: True for ``-m MODULE``.
        method: The way in which the workers exchange gradients or weights.
        optimizer: The optimizer that replaces the script's own; None to keep it.
        metrics: The metrics to read in the output of the script.
        goal: The goal on a metric.
        output: Folder for results; None for ``MLBENCH_OUTPUT`` or the user's data folder.
        run_id: Id of the run; None for ``MLBENCH_RUN_ID``, or 1.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    method: MethodChoice
    optimizer: MethodChoice | None
    metrics: tuple[Metric, ...]
    goal: GoalAim | None
    output: Path | None
    run_id: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}: write {self.prog} {USAGE}")


def parse_options(words: Sequence[str]) -> Options:
    """Read the words after ``python -m mlbench_core.observe``.

    All words after the script belong to the script.

    Args:
        words: Options, then the script or ``-m MODULE``, then the script's arguments.

    Raises:
        ConfigurationError: An option is unknown or has a wrong value, or the script is missing.

    Example:
        >>> options = parse_options(["--method", "bf16", "train.py", "--lr", "1"])
        >>> options.script, options.arguments, str(options.method)
        ('train.py', ('--lr', '1'), 'bf16')
    """
    count = _number_of_options(words)
    parser = _Parser("python -m mlbench_core.observe", add_help=False, allow_abbrev=False)
    parser.add_argument("--method", type=parse_method, default="as-is")
    parser.add_argument("--optimizer", type=parse_optimizer)
    parser.add_argument("--metric", type=parse_metric, action="append", default=[])
    parser.add_argument("--goal")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run-id", "--run_id")
    parsed = parser.parse_args(words[:count])
    rest = list(words[count:])
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest:
        parser.error("a script is missing")
    if parsed.optimizer is not None:
        check_together(parsed.method, parsed.optimizer)
    goal = None
    if parsed.goal is not None:
        # After all options, because a goal names a metric that may come later.
        goal = parse_goal(parsed.goal, parsed.metric)
    return Options(
        script=rest[0],
        arguments=tuple(rest[1:]),
        is_module=is_module,
        method=parsed.method,
        optimizer=parsed.optimizer,
        metrics=tuple(parsed.metric),
        goal=goal,
        output=parsed.output,
        run_id=parsed.run_id,
    )


def _number_of_options(words: Sequence[str]) -> int:
    """Return the number of words before the script; each option has a value."""
    count = 0
    while count < len(words) and words[count].startswith("--"):
        # --name=value is one word, and --name value are two.
        if "=" in words[count].split(" ")[0]:
            count += 1
        else:
            count += 2
    return min(count, len(words))
