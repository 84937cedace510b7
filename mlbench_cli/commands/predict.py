"""``mlbench predict``: the time of measured runs with other networks and numbers of workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlbench_cli._networks import TypedNetwork, networks_option, workers_option
from mlbench_cli._output import clean, json_option, number, print_json, print_table, remark
from mlbench_cli._records import price_options
from mlbench_core.comparison.group_repeats import usable
from mlbench_core.comparison.prices import Pricing, price_of
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from mlbench_core.network.description import Network
    from mlbench_core.prediction.check import Check

__all__ = ["predict"]

_NUMBERS = ("step_s", "exposed_s", "steps", "time_to_goal_s", "bytes_sent")
_RANGES = ("step_range_s", "time_to_goal_range_s")
# The parts of a row that notes name.
_NAMES = ("run", "network", "workers")
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
_CHECKED = ("network", "workers", "measured_s", "model_s")
_CHECK_HEADERS = ("RUN", "NETWORK", "WORKERS", "MEASURED (MS)", "MODEL (MS)", "CHECK")


@click.command()
@click.argument("places", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True))
@networks_option
@workers_option
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
    networks: tuple[TypedNetwork, ...],
    workers: tuple[int, ...],
    critical_workers: int | None,
    pricing: Pricing,
    as_json: bool,
) -> None:
    """Predict the time of measured runs on other networks and with other numbers of workers.

    Each PATH is a result folder, or a folder with results at any depth. Runs of one configuration
    are one line for each network and number of workers. A prediction starts from the runs with the
    nearest number of workers, at least 2; a run of one worker with as many samples in a step gives
    the compute time. Measured figures are marked as measured. A predicted time has its range in
    brackets, from the error of predictions that were compared with measured times. A second table
    checks the model: it compares the measured steps from which predictions start with those that
    the model gives for them. If a measured step is not in the range of the model, a line says why,
    and the ranges of predictions are wider. A configuration that cannot be predicted has a line
    without figures, and the reason below the table. A run that cannot be used is left out, with one
    line that says why.
    """
    from mlbench_core.comparison.load_results import load

    def leave_out(reason: str) -> None:
        remark(clean(f"{reason} of the prediction"))

    loaded = load(map(Path, places), unreadable=lambda problem: leave_out(f"{problem}: left out"))
    kept, reasons = usable(loaded)
    for reason in reasons:
        leave_out(reason)
    if not kept:
        raise ConfigurationError("no run in PATH has ended and recorded its times: give others")
    rows = _rows(kept, networks, workers, critical_workers)
    errors = dict.fromkeys(row["error"] for row in rows)
    # A row without an error has the key None. With one prediction or more, the reasons of the
    # other rows are below the table.
    if all(errors):
        raise ConfigurationError("; ".join(errors))
    for row in rows:
        row["price"] = None
        seconds = row["time_to_goal_s"]
        if seconds is not None and pricing.machine is not None:
            row["price"] = price_of(seconds, row["workers"], pricing.machine, pricing.spot)
    if as_json:
        print_json(rows)
        return
    headers = list(_HEADERS)
    if pricing.machine is not None:
        headers.append(f"PRICE ({pricing.machine.currency})")
    print_table(headers, [_cells(row)[: len(headers)] for row in rows], right=(2, 4, 5, 6, 7, 8, 9))
    checks = _checks_of(rows)
    if checks:
        click.echo()
        print_table(_CHECK_HEADERS, list(map(_check_cells, checks)), right=(2, 3, 4))
    if pricing.per_hour is None:
        for text in pricing.remarks:
            remark(clean(text))
    _show_notes(rows, checks)


def _name(network: Network, typed: Sequence[TypedNetwork]) -> str:
    """Return the text that the user typed for a network, else its name, else its text."""
    from mlbench_core.network.named_networks import NETWORKS

    # A network may be in both, and the user knows the text that was typed.
    for text, other in typed:
        if other == network:
            return text
    for name, entry in NETWORKS.items():
        if entry.network == network:
            return name
    return str(network)


def _checks_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the checks of all rows, each once, with the name of its configuration."""
    checks: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        for check in row["checks"]:
            # Configurations with other options can have the same name, but not the same times.
            key = row["run"], *(check[name] for name in _CHECKED)
            checks.setdefault(key, {"run": row["run"], **check})
    return list(checks.values())


def _check_cells(check: Mapping[str, Any]) -> list[str]:
    low_s, high_s = check["model_range_s"]
    model = f"{number(1e3 * check['model_s'], 2)} ({number(1e3 * low_s, 2)} to "
    model += f"{number(1e3 * high_s, 2)})"
    verdict = "failed"
    if check["holds"]:
        verdict = "passed"
    where = [clean(check["run"]), check["network"] or "-", str(check["workers"])]
    return [*where, number(1e3 * check["measured_s"], 2), model, verdict]


def _show_notes(rows: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]]) -> None:
    """Write errors and assumptions, then caveats and checks, each once with its rows."""
    # What holds for several rows is printed once, with their names.
    notes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        text = row["error"] or row["assumption"]
        if text:
            notes.setdefault(text, []).append(row)
    for row in rows:
        for caveat in row["caveats"]:
            notes.setdefault(caveat, []).append(row)
    for text, of_text in notes.items():
        remark(clean(f"{_rows_text(of_text, rows)}: {text}"))
    # Both tables may be on the screen, and would seem to contradict each other.
    if checks or any(row["figures"] == "measured" for row in rows):
        remark(
            "measured times are means over all steps, of the slowest worker in each part; the "
            "table of a run has the first worker, without the first step"
        )
    failed = [check for check in checks if not check["holds"]]
    for check in failed:
        where = f"{check['workers']} workers"
        if check["network"]:
            where += f" on {check['network']}"
        text = f"the measured step of {where} is not in the range of the model"
        remark(clean(f"{check['run']}: {text}: {check['problem']}"))
    if failed:
        remark(
            "the ranges of predictions from these runs are wider, by the factor between the "
            "measured step and the model"
        )


def _rows_text(some: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the words for some of the rows of the table, in as few columns as tell them apart."""
    everything = "all rows"
    if all(row["figures"] == "predicted" for row in some):
        predicted = [row for row in rows if row["figures"] == "predicted"]
        if len(predicted) < len(rows):
            rows, everything = predicted, "all predicted rows"
    values: dict[str, list[Any]] = {}
    for name in _NAMES:
        values[name] = list(dict.fromkeys(row[name] for row in some))

    def are_some(names: Sequence[str]) -> bool:
        alike = 0
        for row in rows:
            if all(row[name] in values[name] for name in names):
                alike += 1
        # `some` are always among the rows that are alike, so equal counts mean equal rows.
        return alike == len(some)

    names = list(_NAMES)
    if not are_some(names):
        # The values of all columns together also fit other rows, so each row is named alone.
        places = []
        for row in some:
            places.append(_place_text([row["run"]], [row["network"]], [row["workers"]]))
        return "; ".join(places)
    for name in reversed(_NAMES):
        others = [other for other in names if other != name]
        if are_some(others):
            names = others
    for name in _NAMES:
        if name not in names:
            values[name] = []
    return _place_text(values["run"], values["network"], values["workers"]) or everything


def _place_text(runs: Sequence[str], networks: Sequence[str], workers: Sequence[int]) -> str:
    texts = ["; ".join(runs)]
    if networks:
        texts.append(f"on {' and '.join(networks)}")
    if workers:
        counts = " and ".join(map(str, workers))
        noun = "workers"
        if counts == "1":
            noun = "worker"
        texts.append(f"with {counts} {noun}")
    return " ".join(filter(None, texts))


def _by_configuration(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group records that differ only in network, number of workers and seed."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        settings = dict(record.configuration)
        for name in ("network", "workers", "seed"):
            settings.pop(name, None)
        # As JSON, because settings such as the goal are dictionaries, which cannot be keys.
        key = json.dumps([settings, record.machine.get("cpu")], sort_keys=True, default=str)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _rows(
    records: Sequence[RunRecord],
    networks: Sequence[TypedNetwork],
    workers: Sequence[int],
    critical_workers: int | None,
) -> list[dict[str, Any]]:
    from mlbench_core.prediction.time_model import ONE_MACHINE

    rows = []
    for alike in _by_configuration(records):
        for typed, count in itertools.product(networks, workers):
            row = _row(alike, typed, count, critical_workers)
            for check in row["checks"]:
                there = check["network"]
                if there == ONE_MACHINE:
                    # Runs without an emulated network, whose table cell is empty.
                    check["network"] = None
                else:
                    check["network"] = _name(there, networks)
            rows.append(row)
    return rows


def _row(
    records: Sequence[RunRecord], typed: TypedNetwork, workers: int, critical_workers: int | None
) -> dict[str, Any]:
    """Return the figures of a network and a number of workers.

    They are the measured ones, or else the predicted ones, or else the reason why there are none.
    """
    from mlbench_core.network.named_networks import get_network

    configuration = records[0].configuration
    optimizer = (configuration.get("options") or {}).get("optimizer")
    names = [configuration.get("program"), configuration.get("algorithm"), optimizer]
    if configuration.get("task") is not None:
        # The program of a task is always main.py.
        del names[0]
    row: dict[str, Any] = {
        "run": ", ".join(filter(None, names)) or records[0].name,
        "network": typed.text,
        "workers": workers,
        "assumption": "",
        "caveats": [],
        "checks": [],
        "error": None,
    }
    measured = []
    for record in records:
        if record.workers != workers or not record.batches:
            continue
        text = record.configuration.get("network")
        if workers == 1 or (text is not None and get_network(text) == typed.network):
            measured.append(_figures(record))
    if measured:
        return {**row, "figures": "measured", **_medians(measured), **dict.fromkeys(_RANGES)}
    try:
        figures = _predicted(records, typed.network, workers, critical_workers)
    except ConfigurationError as error:
        nothing = dict.fromkeys((*_NUMBERS, *_RANGES))
        return {**row, "figures": "none", **nothing, "error": str(error)}
    return {**row, "figures": "predicted", **figures}


def _predicted(
    records: Sequence[RunRecord], network: Network, workers: int, critical_workers: int | None
) -> dict[str, Any]:
    """Return the predicted figures, with their assumption, caveats and checks."""
    from mlbench_core.prediction.check import check_repeats, why_unchecked, widened
    from mlbench_core.prediction.repeats import predict_repeats
    from mlbench_core.prediction.time_model import NOT_ADDED

    predictions = predict_repeats(records, network, workers, critical_workers)
    figures: dict[str, Any] = {**_medians(list(map(dataclasses.asdict, predictions)))}
    checks = check_repeats(records, workers)
    for name in ("step", "time_to_goal"):
        ranges = list(map(operator.attrgetter(f"{name}_range_s"), predictions))
        ends: tuple[float, float] | None = None
        if None not in ranges:
            # All have the same error, so this is the range of the median.
            low_s, high_s = map(statistics.median, zip(*ranges, strict=True))
            ends = low_s, high_s
        seconds = figures[f"{name}_s"]
        figures[f"{name}_range_s"] = None
        if seconds is not None:
            figures[f"{name}_range_s"] = widened(seconds, ends, checks)
    failed = any(not check.holds for check in checks)
    caveats = []
    for caveat in itertools.chain.from_iterable(each.caveats for each in predictions):
        # The reason of a failed check has this waiting, and the rest of the step.
        if not (failed and NOT_ADDED in caveat):
            caveats.append(caveat)
    if workers > 1 and not checks:
        reason = why_unchecked(records, workers)
        caveats.append(f"the model is not checked with the measured runs: {reason}")
    figures["assumption"] = predictions[0].assumption
    figures["caveats"] = list(dict.fromkeys(caveats))
    figures["checks"] = list(map(_check_entry, checks))
    return figures


def _check_entry(check: Check) -> dict[str, Any]:
    return {**vars(check), "holds": check.holds}


def _figures(record: RunRecord) -> dict[str, float | None]:
    """Return the figures of a measured run."""
    to_goal: int | None = None
    if record.reached:
        to_goal = record.steps_to_goal
    # The times of a record go to its goal if it was reached, so they belong to these steps.
    steps = to_goal or record.batches or 1
    waiting_s = record.communication_exposed_s
    if record.workers == 1:
        # One worker waits for nobody.
        waiting_s = 0.0
    step_s: float | None = None
    if record.total_s is not None:
        step_s = record.total_s / steps
    exposed_s: float | None = None
    if waiting_s is not None:
        exposed_s = waiting_s / steps
    sent: float | None = None
    if to_goal is not None and record.bytes_sent is not None:
        # A record has the bytes of the whole run, which may have gone on after the goal.
        sent = record.bytes_sent * to_goal / (record.batches or to_goal)
    return {
        "step_s": step_s,
        "exposed_s": exposed_s,
        "steps": to_goal,
        "time_to_goal_s": record.time_to_goal_s,
        "bytes_sent": sent,
    }


def _medians(figures: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the median of each number over repeats; None if one repeat lacks it."""
    medians: dict[str, float | None] = {}
    for name in _NUMBERS:
        values = [each[name] for each in figures]
        medians[name] = None
        # A median of the others would hide a repeat that missed its goal or lacks this figure.
        if None not in values:
            medians[name] = statistics.median(values)
    return medians


def _cells(row: dict[str, Any]) -> list[str]:
    def scaled(name: str, factor: float, digits: int) -> str:
        value = row[name]
        # None is a figure that is not known, for example the price without a machine.
        if value is not None:
            value *= factor
        return number(value, digits)

    def ranged(name: str, ends: str, factor: float, digits: int) -> str:
        text = scaled(name, factor, digits)
        if row[ends] is None:
            return text
        low, high = row[ends]
        return f"{text} ({number(low * factor, digits)} to {number(high * factor, digits)})"

    return [
        clean(row["run"]),
        row["network"],
        str(row["workers"]),
        row["figures"],
        ranged("step_s", "step_range_s", 1e3, 2),
        scaled("exposed_s", 1e3, 2),
        scaled("steps", 1, 0),
        ranged("time_to_goal_s", "time_to_goal_range_s", 1, 1),
        scaled("bytes_sent", 1e-6, 1),
        scaled("price", 1, 3),
    ]
