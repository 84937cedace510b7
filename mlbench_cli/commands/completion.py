"""``mlbench completion``, and the completion of the names of runs."""

from __future__ import annotations

import contextlib
import threading

import click
from click.shell_completion import CompletionItem, get_completion_class

from mlbench_cli._embedded import connect
from mlbench_cli.cli import cli_group
from mlbench_core.errors import MLBenchError
from mlbench_core.tasks import is_run_name

__all__ = ["complete_runs", "complete_runs_and_files", "completion"]

SHELLS = ("bash", "zsh", "fish")
# The user waits at the Tab key for the master's answer.
ANSWER_S = 1.0


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and names of runs in SHELL.

    \b
        bash:  echo 'eval "$(mlbench completion bash)"' >> ~/.bashrc
        zsh:   echo 'eval "$(mlbench completion zsh)"' >> ~/.zshrc
        fish:  mlbench completion fish > ~/.config/fish/completions/mlbench.fish

    It works in a new shell. In zsh, compinit must run before.
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click has a class for each of SHELLS"
    click.echo(completion_class(cli_group, {}, "mlbench", "_MLBENCH_COMPLETE").source())


def complete_runs(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of the master's runs that begin with ``incomplete``.

    There are none if the master does not answer in time.
    """
    names: list[str] = []

    def ask() -> None:
        with (
            contextlib.suppress(MLBenchError, OSError),
            connect(ctx.params.get("dashboard_url")) as client,
        ):
            for run in client.runs():
                names.append(str(run.get("name")))

    # Timeouts of a request hold for each of its steps, and only a thread can be left after a given
    # time.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    # The shell gets one line per name, so a name with a line break must not reach it.
    return [
        CompletionItem(name) for name in names if name.startswith(incomplete) and is_run_name(name)
    ]


def complete_runs_and_files(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of runs as :func:`complete_runs`, and let the shell complete files."""
    return [*complete_runs(ctx, parameter, incomplete), CompletionItem(incomplete, type="file")]
