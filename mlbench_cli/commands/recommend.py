"""``mlbench recommend``: the method and the number of workers with the least time on a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mlbench_cli._networks import TypedNetwork, networks_option, workers_option
from mlbench_cli._output import clean, json_option, number, print_json, print_table, remark
from mlbench_cli._records import price_options
from mlbench_core.comparison.prices import Pricing

__all__ = ["recommend"]

_HEADERS = (
    "NETWORK",
    "METHOD",
    "WORKERS",
    "SECONDS",
    "STEP (MS)",
    "COMPUTE (%)",
    "TO GOAL (S)",
    "WORKER SENDS (MB)",
)


@click.command()
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, path_type=Path))
@networks_option
@workers_option
@price_options
@json_option
def recommend(
    folder: Path,
    networks: tuple[TypedNetwork, ...],
    workers: tuple[int, ...],
    pricing: Pricing,
    as_json: bool,
) -> None:
    """Recommend a method and a number of workers for a network.

    FOLDER is the folder of a sweep, or a folder with result folders at any depth. The table has a
    line for each network, method and number of workers, least time to the goal first. The seconds
    are those of the runs if they had this network, and otherwise modelled as by 'mlbench predict'.
    The brackets of a step are the range by the error of the model, those of the time to the goal
    the 95 % interval over the seeds.

    The advice is below the table. The time to the goal is not known for a number of workers that
    FOLDER has no run of, because the steps to the goal are not extrapolated.
    """
    # Imported here: the help needs none of it.
    from mlbench_core.sweep.recommend import read_runs
    from mlbench_core.sweep.recommend import recommend as advise

    if folder.suffix == ".py":
        raise click.BadParameter(
            f"FOLDER must be a folder with runs, not the script {folder}: make one with 'mlbench "
            f"sweep' and script = \"{folder.name}\" in its file, or use 'mlbench run' and "
            "'mlbench predict'"
        )
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
    headers = list(_HEADERS)
    if pricing.machine is not None:
        headers.append(f"PRICE ({pricing.machine.currency})")
    cells = [_cells(row)[: len(headers)] for row in advice.rows]
    print_table(headers, cells, right=(2, 4, 5, 6, 7, 8))
    click.echo()
    for sentence in advice.sentences:
        click.echo(clean(sentence))
    notes = list(runs.remarks)
    if pricing.per_hour is None:
        notes += pricing.remarks
    for note in notes:
        remark(clean(note))


def _cells(row: Mapping[str, Any]) -> list[str]:
    def scaled(name: str, factor: float, digits: int) -> str:
        value = row[name]
        return number(None if value is None else value * factor, digits)

    step = scaled("step_s", 1e3, 2)
    if row["step_range_s"]:
        low, high = row["step_range_s"]
        step += f" ({number(low * 1e3, 2)} to {number(high * 1e3, 2)})"
    return [
        row["network"],
        clean(row["algorithm"]),
        str(row["workers"]),
        row["seconds"],
        step,
        scaled("compute_share", 100, 0),
        _to_goal(row),
        scaled("bytes_to_goal_of_worker", 1e-6, 2),
        scaled("price", 1, 5),
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
