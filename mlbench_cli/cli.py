"""The command group.

It loads subcommands on first use, and reports errors as one line and an exit status.

Import only click here: this module determines how fast ``mlbench --help`` is.
"""

from __future__ import annotations

import importlib
import keyword
from typing import IO, TYPE_CHECKING, Any

import click

from mlbench_cli._output_streams import lost_output
from mlbench_core.errors import MLBenchError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["COMMANDS", "LazyGroup", "cli_group"]


COMMANDS: dict[str, tuple[str, str]] = {
    "charts": ("charts", "Draw charts of downloaded results, or of a master's runs."),
    "compare": ("compare", "Compare runs: mean, spread, confidence interval, tests, prices."),
    "completion": ("completion", "Print the completion script of bash, zsh or fish."),
    "create-cluster": (
        "clusters",
        "Create a cluster with a master, which the other commands then use.",
    ),
    "data": ("data", "List, download, prepare and verify the data sets of the tasks."),
    "delete": ("runs", "Delete runs and their metrics."),
    "delete-cluster": ("clusters", "Delete a cluster with all runs that are only there."),
    "download": ("runs", "Download the metrics of a run as a zip file."),
    "env": ("env", "Describe this machine, as a bug report needs it."),
    "get-dashboard-url": ("master", "Print the address of the dashboard."),
    "import": ("imports", "Add result folders to the master."),
    "list-clusters": ("clusters", "List the clusters that mlbench created, with their states."),
    "logs": ("runs", "Show the output of the workers of a run."),
    "master": ("master", "Start the master in the foreground, or stop it."),
    "network": ("network", "Describe, test and remove networks emulated on this machine."),
    "predict": (
        "predict",
        "Predict the time of measured runs on other networks with other numbers of workers.",
    ),
    "recommend": (
        "recommend",
        "Recommend a method and a number of workers for a network, from the runs of a folder.",
    ),
    "results": ("results", "Verify result folders, check them against the rules, collect them."),
    "run": ("run", "Start runs of a task or of a command of your own."),
    "set-cluster": ("clusters", "Choose the cluster that run, status and the other commands use."),
    "status": ("runs", "Show all runs, or one with its latest metrics."),
    "stop": ("runs", "Stop runs and keep their metrics."),
    "sweep": ("sweep", "Compare algorithms on networks: run a whole file of runs, resumable."),
    "tasks": ("tasks", "List the benchmark tasks with their goals."),
}
"""Subcommands: name to (module in this package, line in ``mlbench --help``)."""

# Commands that do something besides writing their output.
_DOING = (
    "create-cluster",
    "delete",
    "delete-cluster",
    "download",
    "import",
    "master",
    "run",
    "set-cluster",
    "stop",
    "sweep",
)


class CommandFailed(click.ClickException):
    """A failure that the user can act on: one line on standard error, exit status 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Write ``mlbench: MESSAGE`` to standard error (or to ``file``)."""
        click.echo(f"mlbench: {self.format_message()}", file=file, err=file is None)


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is used.

    Expected errors (:class:`~mlbench_core.errors.MLBenchError`, :class:`OSError`) end as one line
    on standard error and exit status 1, never as a traceback. Wrong use ends with exit status 2, as
    in click.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, sorted."""
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the subcommand ``cmd_name``; return ``None`` if it does not exist."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"mlbench_cli.commands.{COMMANDS[cmd_name][0]}")
        name = cmd_name.replace("-", "_")
        # "import" is a word of Python, so its function is called import_.
        if keyword.iskeyword(name):
            name += "_"
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; the error for an unknown one names a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # Imported here: only an error needs it.
            import difflib

            similar = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if not similar:
                raise
            text = f"{error.format_message().rstrip('.')}. Did you mean {similar[0]!r}?"
            raise click.UsageError(text, error.ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands from the static help lines, loading none of them."""
        # click's own list would import the module of every command.
        rows = []
        for name, (_, line) in COMMANDS.items():
            rows.append((name, line))
        for name, command in self.commands.items():
            rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the subcommands that begin with ``incomplete``, and the group's options."""
        from click.shell_completion import CompletionItem

        items = []
        for name, (_, line) in COMMANDS.items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=line))
        # Not the group's own method, which would import the module of every command.
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments.

        ``--help`` and ``--version`` end here, and fail if their text is lost.
        """
        try:
            return super().make_context(*args, **kwargs)
        except click.exceptions.Exit:
            _check_output()
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand and turn expected errors into one line and exit status 1."""
        try:
            result = super().invoke(ctx)
            # These commands have done something, even if their output is lost.
            if ctx.invoked_subcommand not in _DOING:
                _check_output()
            return result
        except click.exceptions.Exit:  # the help of a subcommand
            _check_output()
            raise
        except MLBenchError as error:
            raise CommandFailed(" ".join(str(error).split())) from error
        # In "mlbench logs NAME | head", head may end first. click then ends the command without a
        # message.
        except BrokenPipeError:
            raise
        except OSError as error:
            message = str(error.strerror or error)
            if error.filename:
                message += f": {error.filename}"
            raise CommandFailed(message) from error


def _check_output() -> None:
    lost = lost_output()
    if lost is not None:
        raise CommandFailed(f"the output cannot be written: {lost.strerror}")


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from mlbench_core import __version__

    click.echo(f"mlbench, version {__version__}")
    ctx.exit()


@click.group(
    name="mlbench",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit status: 0 done, 1 failed, 2 used wrongly. "
        "MLBENCH_MASTER_URL and MLBENCH_TOKEN name the master."
    ),
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version.",
)
def cli_group() -> None:
    """Benchmark distributed machine learning: start runs, watch them, compare them."""
