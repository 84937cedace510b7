"""``mlbench recommend``: the method and the number of workers with the least time on a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from mlbench_cli._networks import TypedNetwork, networks_option, workers_option
from mlbench_cli._output import clean, json_option, number, print_json, print_table, remark
from mlbench_cli._probes import METHODS, WORKERS, probe
from mlbench_cli._records import price_options
from mlbench_cli._script import find_script
from mlbench_core.comparison.prices import Pricing
from mlbench_core.sweep.toml_file import parse_time

__all__ = ["recommend"]

_HEADERS = (
    "NETWORK",
    "METHOD",
    "WORKERS",
    "SECONDS",
    "STEP (MS)",
    "COMPUTE (%)",
)
_OF_GOAL = ("TO GOAL (S)", "WORKER SENDS (MB)")
_BUDGET_S = 600.0


class _Command(click.Command):
    """A command that keeps a script with all words after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        start = find_script(args, self)
        # ctx.obj carries the words to recommend(), because click does not parse them.
        ctx.obj = []
        if start is not None:
            ctx.obj = args[start:]
        try:
            return super().parse_args(ctx, args[:start])
        except click.MissingParameter as error:
            if not ctx.obj:
                raise
            # The user may have given the option, but after the script, which takes it then.
            text = f"{error.format_message()} Options of this command come before the script."
            raise click.UsageError(text, error.ctx) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "FOLDER | SCRIPT.py [ARGUMENTS...] | -m MODULE [ARGUMENTS...]"]


def _budget_s(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_time("--budget", text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@click.command(cls=_Command)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@networks_option
@workers_option
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="METHOD",
    help=f"With a script: a method to try; repeatable (default: {', '.join(METHODS)}).",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=REGEX",
    help="With a script: a metric that it prints, as for 'mlbench run'; repeatable.",
)
@click.option("--goal", metavar="GOAL", help="With a script: its goal, as for 'mlbench run'.")
@click.option(
    "--budget",
    "budget_s",
    metavar="TIME",
    callback=_budget_s,
    help="With a script: time for all runs (default: 10min).",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="With a script: folder for the runs; the same call completes it (default: a new folder in "
    "mlbench-results).",
)
@price_options
@json_option
@click.pass_context
def recommend(
    ctx: click.Context,
    folder: Path | None,
    networks: tuple[TypedNetwork, ...],
    workers: tuple[int, ...],
    methods: tuple[str, ...],
    metrics: tuple[str, ...],
    goal: str | None,
    budget_s: float | None,
    output: Path | None,
    pricing: Pricing,
    as_json: bool,
) -> None:
    """Recommend a method and a number of workers for a network.

    FOLDER is the folder of a sweep, or a folder with result folders at any depth. The table has a
    line for each network, method and number of workers, least time to the goal first. The seconds
    are those of the runs if they had this network, and otherwise modelled as by 'mlbench predict'.
    The brackets of a step are the range by the error of the model, those of the time to the goal
    the 95 % interval over the seeds. Runs without a goal are compared by their samples per second,
    most first.

    A training script in place of FOLDER, or a module with -m, runs for a short time with each
    method: with one worker, and with two on each network. --workers are the numbers to advise on,
    so give 2, too. ARGUMENTS after the script go to it; options of this command come before it.

    The advice is below the table. The time to the goal is not known for a number of workers that
    has no run, because the steps to the goal are not extrapolated.
    """
    # Imported here: the help needs none of it.
    from mlbench_core.sweep.recommend import read_runs
    from mlbench_core.sweep.recommend import recommend as advise

    script: list[str] = ctx.obj
    if script and folder is not None:
        raise click.UsageError(f"give a folder or a script, not {folder} and {script[0]}")
    if script:
        # For other numbers of workers, the step is predicted, but not how many steps are needed.
        if goal is not None and not set(workers) & set(WORKERS):
            raise click.UsageError(
                "--workers must have 1 or 2 with a goal: only these runs show the time to it"
            )
        budget_s = budget_s or _BUDGET_S
        # From here on, the runs of the script are a folder like any other.
        folder = probe(
            ctx.command, script, networks, methods or METHODS, metrics, goal, budget_s, output
        )
    elif folder is None:
        raise click.UsageError("Missing argument FOLDER or SCRIPT.py: give one of them")
    elif methods or metrics or goal or budget_s or output:
        raise click.UsageError(
            "--method, --metric, --goal, --budget and --output need a script: the runs of a folder "
            "have ended"
        )
    if not folder.exists():
        raise click.BadParameter(f"FOLDER must exist, unlike {folder}: give the folder of a sweep")
    if not folder.is_dir():
        raise click.BadParameter(
            f"FOLDER must be a folder, not the file {folder}: give the folder of a sweep"
        )
    runs = read_runs(folder)
    advice = advise(runs, [typed.network for typed in networks], workers, pricing)
    if as_json:
        print_json(
            {"tuned": runs.is_tuned, "rows": advice.rows, "sentences": advice.sentences},
        )
        return
    _print_rows(advice.rows, runs.has_goal, pricing)
    click.echo()
    for sentence in advice.sentences:
        click.echo(clean(sentence))
    notes = list(runs.remarks)
    if pricing.per_hour is None:
        notes += pricing.remarks
    for note in notes:
        remark(clean(note))


def _print_rows(rows: Iterable[Mapping[str, Any]], has_goal: bool, pricing: Pricing) -> None:
    headers = [*_HEADERS, "SAMPLES/S"]
    if has_goal:
        headers = [*_HEADERS, *_OF_GOAL]
        if pricing.machine is not None:
            headers.append(f"PRICE ({pricing.machine.currency})")
    cells = []
    for row in rows:
        further = [number(row["samples_per_s"])]
        if has_goal:
            further = _cells_of_goal(row)
        # The last cell of a goal is the price, which has no header without a machine.
        cells.append([*_cells(row), *further][: len(headers)])
    print_table(headers, cells, right=(2, 4, 5, 6, 7, 8))


def _scaled(row: Mapping[str, Any], name: str, factor: float, digits: int) -> str:
    value = row[name]
    if value is not None:
        value *= factor
    return number(value, digits)


def _cells(row: Mapping[str, Any]) -> list[str]:
    step = _scaled(row, "step_s", 1e3, 2)
    if row["step_range_s"]:
        low, high = row["step_range_s"]
        step += f" ({number(low * 1e3, 2)} to {number(high * 1e3, 2)})"
    return [
        row["network"],
        clean(row["algorithm"]),
        str(row["workers"]),
        row["seconds"],
        step,
        _scaled(row, "compute_share", 100, 0),
    ]


def _cells_of_goal(row: Mapping[str, Any]) -> list[str]:
    return [
        _to_goal(row),
        _scaled(row, "bytes_to_goal_of_worker", 1e-6, 2),
        _scaled(row, "price", 1, 5),
    ]


def _to_goal(row: Mapping[str, Any]) -> str:
    """Return the time to the goal with its interval or its misses."""
    if row["runs"] is None:
        return "not known"
    parts = []
    if row["time_to_goal_s"] is not None:
        text = number(row["time_to_goal_s"])
        if row["interval_s"]:
            low, high = row["interval_s"]
            text += f" ({number(low)} to {number(high)})"
        parts.append(text)
    if row["missed"]:
        parts.append(f"not reached in {row['missed']} of {row['runs']}")
    return ", ".join(parts)
