"""A training script in the words of ``mlbench run``: find it, and check it and its options."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from mlbench_cli import _wait
from mlbench_cli._output import remark
from mlbench_core.calling_environment import observe_command
from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.own_class import check_own_class
from mlbench_core.observe.options import parse_options
from mlbench_core.run_terms import GoalAim
from mlbench_core.tasks import Task

__all__ = [
    "Script",
    "check_script",
    "find_script",
    "missing_script",
    "refuse_options",
    "script_options",
]

Command = TypeVar("Command", bound=Callable[..., Any])


def script_options(command: Command) -> Command:
    """Give a command the options of a script (argument ``observer``: their words)."""

    @functools.wraps(command)
    def with_words(
        *arguments: Any,
        method: str | None,
        optimizer: str | None,
        metrics: Sequence[str],
        goal: str | None,
        **options: Any,
    ) -> Any:
        given = [("--method", method), ("--optimizer", optimizer)]
        for metric in metrics:
            given.append(("--metric", metric))
        given.append(("--goal", goal))
        # As words, because the observer in each worker reads them from its command line.
        words = []
        for option, value in given:
            if value is not None:
                words += [option, value]
        return command(*arguments, observer=words, **options)

    for option in (
        click.option(
            "--goal",
            metavar="GOAL",
            help="With a script: the goal, for example 'val_loss<=1.5'; NAME is that of a metric.",
        ),
        click.option(
            "--metric",
            "metrics",
            multiple=True,
            metavar="NAME=REGEX",
            help=(
                "With a script: read a metric from the lines that it prints, by a regular "
                "expression with one group, for example 'val_loss=val loss ([0-9.]+)'; can be "
                "given several times."
            ),
        ),
        click.option(
            "--optimizer",
            metavar="NAME",
            help="With a script: replace its optimizer, for example by muon.",
        ),
        click.option(
            "--method",
            metavar="METHOD",
            help=(
                "With a script: how workers exchange gradients or weights, "
                "for example bf16, power_sgd:rank=4, or an aggregation of yours as FILE.py:CLASS "
                "(default: as-is)."
            ),
        ),
    ):
        with_words = option(with_words)
    return cast(Command, with_words)


def find_script(words: Sequence[str], command: click.Command) -> int | None:
    """Return the position at which a script begins, or None without one.

    Args:
        words: The words of a call, without those after ``--``.
        command: The command, whose options may have values that end with ``.py``, too.
    """
    with_value = set()
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            with_value.update(parameter.opts)
    position = 0
    while position < len(words):
        word = words[position]
        # The value of an option may end with .py, too, and is not the script.
        if word in with_value:
            position += 1
        elif word == "-m" or (word.endswith(".py") and not word.startswith("-")):
            return position
        position += 1
    return None


def refuse_options(observer: Sequence[str], task: Task | None) -> None:
    """Refuse the options of a script in a call without one.

    Raises:
        click.UsageError: There is one.
    """
    if not observer:
        return
    if task is not None:
        raise click.UsageError(
            f"{observer[0]} is for a script of your own: options of a task's script come after '--'"
        )
    raise click.UsageError(
        f"{observer[0]} needs a script, not a command: "
        f"write for example 'mlbench run NAME 2 {observer[0]} ... train.py'"
    )


def check_script(words: Sequence[str], folder: Path) -> None:
    """Refuse a script that does not exist.

    Args:
        words: The script and its arguments, or ``-m`` with a module and its arguments.
        folder: The folder in which the workers start. If it does not exist here, it is one of
            another machine.

    Raises:
        click.UsageError: It does not exist.
    """
    name, *_ = words
    if name != "-m" and folder.is_dir() and not (folder / name).is_file():
        raise missing_script(folder / name)


def missing_script(path: Path) -> click.UsageError:
    """Return the error for a script that does not exist."""
    return click.UsageError(f"the script {path} does not exist: give its path from this folder")


@dataclass(frozen=True)
class Script:
    """A training script that a run measures unchanged.

    Attributes:
        words: The script and its arguments, or ``-m`` with a module and its arguments.
        options: Options of the observer, each followed by its value.
    """

    words: Sequence[str]
    options: Sequence[str] = ()

    @property
    def command(self) -> str:
        """Return the command of a worker."""
        return observe_command(self.options, self.words)

    @property
    def plain_command(self) -> str:
        """Return the command of a worker that is not measured."""
        return shlex.join(["python", *self.words])

    def refuse(self, others: Mapping[str, object]) -> None:
        """Refuse options that a script cannot have.

        Args:
            others: Their values; an empty one was not given.

        Raises:
            click.UsageError: One was given.
        """
        for option, value in others.items():
            if value:
                raise click.UsageError(
                    f"{option} cannot be given with the script {self.words[0]}: "
                    "leave out one of them"
                )

    def check(self, folder: Path) -> None:
        """Refuse a script that does not exist, and a wrong method, metric or goal.

        Args:
            folder: The folder in which the workers start.

        Raises:
            click.UsageError: One of them is wrong.
        """
        check_script(self.words, folder)
        try:
            check_own_class(parse_options([*self.options, *self.words]).method, folder)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from None

    def show_own_options(self, folder: Path, command: click.Command) -> None:
        """Write a remark for each argument of the script that is an option of ``mlbench run``.

        The user may have meant it for the command. An option that stands in the script is the
        script's, and one of the name of a variable, which the script may set from its arguments.
        """
        own: set[str] = set()
        for parameter in command.params:
            own.update(parameter.opts, parameter.secondary_opts)
        text = ""
        path = folder / self.words[0]
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
        for word in self.words[1:]:
            option = word.partition("=")[0]
            # Short options such as -c are those of many programs.
            if not option.startswith("--") or option not in own or option in text:
                continue
            variable = re.escape(option[2:].replace("-", "_"))
            if not re.search(rf"\b{variable}\s*[:=]", text):
                remark(f"{option} goes to the script: put options of mlbench before it")

    @property
    def goal(self) -> _wait.Goal:
        """Return the goal for the display of the progress."""
        aim = parse_options([*self.options, *self.words]).goal
        if aim is None:
            aim = GoalAim()
        return _wait.Goal(aim, has_epochs=False)
