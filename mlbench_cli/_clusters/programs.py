"""Run the programs that manage clusters, step by step, or only show their calls."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from mlbench_cli._output import clean, remark
from mlbench_core.errors import ConfigurationError, MLBenchError

__all__ = ["ProgramFailed", "Step", "ask", "check_programs", "last_line", "perform", "show"]

SOURCES = {
    "kind": "https://kind.sigs.k8s.io",
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "helm": "https://helm.sh/docs/intro/install",
    "docker": "https://docs.docker.com/engine/install, or Podman: https://podman.io",
    "sky": "pipx install 'skypilot[gcp,aws,azure]'",
    "ssh": "the package openssh-client",
}
"""For each program, the address, command or package that installs it."""

_STDERR = 2


class ProgramFailed(MLBenchError):
    """A program ended with an error; its own message is on the screen or in this one."""


@dataclass(frozen=True)
class Step:
    """A program's call.

    Attributes:
        title: The work, for the screen: ``"create the cluster"``.
        command: The program and its arguments, which hold no secret: all users of a machine can see
            them.
        stdin: The text that the program reads, or None.
        shown: The text in place of ``stdin`` on the screen, if that holds a secret.
    """

    title: str
    command: Sequence[str]
    stdin: str | None = None
    shown: str | None = None

    def public(self) -> dict[str, Any]:
        """Return the step without secrets, for JSON."""
        return {
            "title": self.title,
            "command": list(self.command),
            "stdin": self.shown or self.stdin,
        }


def check_programs(names: Sequence[str]) -> None:
    """Raise an error that names all missing programs and where to get them.

    Raises:
        ConfigurationError: At least one program is missing.
    """
    missing = []
    for name in names:
        if shutil.which(name) is None:
            missing.append(f"{name} ({SOURCES[name]})")
    if missing:
        raise ConfigurationError(
            f"install these programs, which were not found: {'; '.join(missing)}"
        )


def show(steps: Sequence[Step]) -> None:
    """Print steps as commands of a shell."""
    for step in steps:
        text = step.shown or step.stdin
        click.echo(f"# {step.title}")
        command = shlex.join(step.command)
        if text is None:
            click.echo(command)
        else:
            click.echo(f"{command} <<'END'\n{text.rstrip()}\nEND")


def perform(step: Step) -> None:
    """Call a program and let it write to the screen.

    Raises:
        ProgramFailed: It could not be started, or it failed.
    """
    remark(f"{step.title}: {shlex.join(step.command)}")
    stdin: int | None = None
    # run() makes a pipe for an input itself, and refuses both.
    if not step.stdin:
        stdin = subprocess.DEVNULL
    try:
        # Standard output of the command holds only its result, so the output of programs goes to
        # standard error.
        done = subprocess.run(
            step.command,
            input=step.stdin,
            stdin=stdin,
            stdout=_STDERR,
            text=True,
        )
    except OSError as error:
        raise ProgramFailed(
            f"could not {step.title}: {step.command[0]}: {error.strerror}"
        ) from error
    if done.returncode != 0:
        raise ProgramFailed(
            f"could not {step.title}: '{shlex.join(step.command)}' ended with exit status "
            f"{done.returncode}, and its message is above"
        )


def ask(command: Sequence[str], timeout_s: float = 60.0) -> str:
    """Return the standard output of a program.

    Raises:
        ProgramFailed: It could not be started, failed, or did not end in time; with its last line.
    """
    try:
        done = subprocess.run(
            command,
            # Its output is not shown, so nobody could answer a question.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ProgramFailed(
            f"'{shlex.join(command)}' did not answer within {timeout_s:g} s"
        ) from None
    except OSError as error:
        raise ProgramFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        reason = last_line(clean(done.stderr)) or f"exit status {done.returncode}"
        raise ProgramFailed(f"'{shlex.join(command)}' failed: {reason.strip()}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line of the output of a program, which usually has the reason of its end."""
    lines = text.strip().splitlines()
    if not lines:
        return ""
    return lines[-1]
