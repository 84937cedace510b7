"""``mlbench predict``: the time of measured runs on other networks and with other numbers of workers."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlbench_cli._networks import NetworkType
from mlbench_cli._output import clean, json_option, number, print_json, print_table, remark
from mlbench_cli._records import price_options
from mlbench_core.comparison.pool import usable
from mlbench_core.comparison.prices import Pricing, price_of
from mlbench_core.comparison.record import RunRecord
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from mlbench_core.network.description import Network

__all__ = ["predict"]

_NUMBERS = ("step_s", "exposed_s", "steps", "time_to_goal_s", "bytes_sent")
_RANGES = ("step_range_s", "time_to_goal_range_s")
_HEADERS = (
    "RUN",
    "NETWORK",
    "WORKERS",
    "FIGURES",
    "STEP (MS)",
    "WAITING (MS)",
    "STEPS",
    "TO GOAL (S)",
    "TO GOAL (MB)",
)


@click.command()
@click.argument("places", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--network",
    "networks",
    multiple=True,
    required=True,
    type=NetworkType(),
    help="Network; repeatable.",
)
@click.option(
    "--workers",
    multiple=True,
    required=True,
    type=click.IntRange(1, 1024),
    help="Number of workers; repeatable.",
)
@click.option(
    "--critical-workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of workers above which more workers save no steps (default: there is none).",
)
@price_options
@json_option
def predict(
    places: tuple[str, ...],
    networks: tuple[Network, ...],
    workers: tuple[int, ...],
    critical_workers: int | None,
    pricing: Pricing,
    as_json: bool,
) -> None:
    """Predict the time of measured runs on other networks and with other numbers of workers.

    Each PATH is a result folder, or a folder with results at any depth. Runs of one configuration
    are one line for each network and number of workers. A prediction starts from the runs with the
    nearest number of workers, at least 2; runs of one worker give the compute time. Measured
    figures are marked as measured. A predicted time has its range in brackets, from the error of
    predictions that were compared with measured times. A configuration that cannot be predicted has
    a line without figures, and the reason below the table. A run that cannot be used is left out,
    with one line that says why.
    """
    from mlbench_core.comparison.load import load

    def leave_out(reason: str) -> None:
        remark(clean(f"{reason} of the prediction"))

    rows = []
    found = load(map(Path, places), unreadable=lambda problem: leave_out(f"{problem}: left out"))
    kept, reasons = usable(found)
    for reason in reasons:
        leave_out(reason)
    if not kept:
        raise ConfigurationError("no run in PATH has ended and recorded its times: give others")
    for records in _by_configuration(kept):
        for network in networks:
            rows += [_row(records, network, count, critical_workers) for count in workers]
    if all(row["error"] for row in rows):
        raise ConfigurationError("; ".join(dict.fromkeys(row["error"] for row in rows)))
    for row in rows:
        seconds = row["time_to_goal_s"]
        machine = None if seconds is None else pricing.machine
        row["price"] = (
            None if machine is None else price_of(seconds, row["workers"], machine, pricing.spot)
        )
    if as_json:
        print_json(rows)
        return
    headers = (
        [*_HEADERS, f"PRICE ({pricing.machine.currency})"] if pricing.machine else list(_HEADERS)
    )
    print_table(headers, [_cells(row)[: len(headers)] for row in rows], right=(2, 4, 5, 6, 7, 8, 9))
    if pricing.per_hour is None:
        for text in pricing.remarks:
            remark(clean(text))
    notes = [(row["run"], row["error"] or row["assumption"]) for row in rows]
    notes += [
        (row["run"], f"{row['network']}, {row['workers']} workers: {text}")
        for row in rows
        for text in row["caveats"]
    ]
    for run, text in dict.fromkeys(notes):
        if text:
            remark(clean(f"{run}: {text}"))


def _by_configuration(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group records that differ only in network, number of workers and seed."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        kept = {
            k: v for k, v in record.configuration.items() if k not in ("network", "workers", "seed")
        }
        found.setdefault(
            json.dumps([kept, record.machine.get("cpu")], sort_keys=True, default=str), []
        ).append(record)
    return list(found.values())


def _row(
    records: Sequence[RunRecord], network: Network, workers: int, critical_workers: int | None
) -> dict[str, Any]:
    """Return the measured figures of a network and a number of workers, else the predicted ones, else the reason."""
    from mlbench_core.network.named import get_network

    configuration = records[0].configuration
    row: dict[str, Any] = {
        "run": configuration.get("algorithm") or configuration.get("program") or records[0].name,
        "network": str(network),
        "workers": workers,
        "assumption": "",
        "caveats": [],
        "error": None,
    }
    same = [record for record in records if record.workers == workers and record.batches]

    def has_network(record: RunRecord) -> bool:
        text = record.configuration.get("network")
        return workers == 1 or (text is not None and get_network(text) == network)

    measured = [_figures(record) for record in same if has_network(record)]
    if measured:
        return {**row, "figures": "measured", **_medians(measured), **dict.fromkeys(_RANGES)}
    try:
        return {
            **row,
            "figures": "predicted",
            **_predicted(records, network, workers, critical_workers),
        }
    except ConfigurationError as error:
        return {
            **row,
            "figures": "none",
            **dict.fromkeys((*_NUMBERS, *_RANGES)),
            "error": str(error),
        }


def _predicted(
    records: Sequence[RunRecord], network: Network, workers: int, critical_workers: int | None
) -> dict[str, Any]:
    """Return the predicted figures and the assumption behind them."""
    from mlbench_core.prediction.model import predict as predict_run

    several = [
        record for record in records if (record.workers or 0) > 1 and record.collectives is not None
    ]
    nearest = min((abs((record.workers or 0) - workers) for record in several), default=0)
    bases = [record for record in several if abs((record.workers or 0) - workers) == nearest]
    alone = next((record for record in records if record.workers == 1 and record.batches), None)
    # Without a run of several workers, the prediction says what is missing.
    predictions, problems = [], []
    for base in bases or records[:1]:
        try:
            predictions.append(predict_run(base, network, workers, alone, critical_workers))
        # Another repeat may have what this one lacks.
        except ConfigurationError as error:
            problems.append(error)
    if not predictions:
        raise problems[0]
    figures: dict[str, Any] = {
        **_medians([dataclasses.asdict(prediction) for prediction in predictions])
    }
    for name in _RANGES:
        ranges = [getattr(prediction, name) for prediction in predictions]
        # All have the same error, so this is the range of the median.
        figures[name] = (
            None
            if None in ranges
            else [statistics.median(ends) for ends in zip(*ranges, strict=True)]
        )
    caveats = dict.fromkeys(text for prediction in predictions for text in prediction.caveats)
    return {**figures, "assumption": predictions[0].assumption, "caveats": list(caveats)}


def _figures(record: RunRecord) -> dict[str, float | None]:
    """Return the figures of a measured run."""
    to_goal = record.steps_to_goal if record.reached else None
    steps, sent = to_goal or record.batches or 1, record.bytes_sent
    waiting_s = 0.0 if record.workers == 1 else record.communication_exposed_s
    return {
        "step_s": None if record.total_s is None else record.total_s / steps,
        "exposed_s": None if waiting_s is None else waiting_s / steps,
        "steps": to_goal,
        "time_to_goal_s": record.time_to_goal_s,
        # A record has the bytes of the whole run, which may have gone on after the goal.
        "bytes_sent": None
        if to_goal is None or sent is None
        else sent * to_goal / (record.batches or to_goal),
    }


def _medians(figures: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the median of each number over repeats; None if one repeat lacks it."""
    found: dict[str, float | None] = {}
    for name in _NUMBERS:
        values = [each[name] for each in figures]
        found[name] = None if None in values else statistics.median(values)
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    def scaled(name: str, factor: float, digits: int) -> str:
        return "-" if row[name] is None else number(row[name] * factor, digits)

    def ranged(name: str, ends: str, factor: float, digits: int) -> str:
        text = scaled(name, factor, digits)
        if row[ends] is None:
            return text
        low, high = (number(end * factor, digits) for end in row[ends])
        return f"{text} ({low} to {high})"

    texts = [clean(row["run"]), row["network"], str(row["workers"]), row["figures"]]
    numbers = [
        ranged("step_s", "step_range_s", 1e3, 2),
        scaled("exposed_s", 1e3, 2),
        scaled("steps", 1, 0),
    ]
    to_goal = ranged("time_to_goal_s", "time_to_goal_range_s", 1, 1)
    return [*texts, *numbers, to_goal, scaled("bytes_sent", 1e-6, 1), scaled("price", 1, 3)]
