"""``mlbench compare``: compare runs, with the mean and the standard deviation of repeats."""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from mlbench_core.cli._client import FINAL_STATES, MasterClient
from mlbench_core.cli._embedded import connect
from mlbench_core.cli._output import dashboard_option, json_option, number, print_json, print_table, remark
from mlbench_core.cli._results import RunResult, Setup
from mlbench_core.errors import MasterRequestError

__all__ = ["compare", "confidence_95"]

# 97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

MEASURES: dict[str, Callable[[RunResult], float | None]] = {
    "seconds": lambda result: result.total_s,
    "compute": lambda result: result.phases_s.get("compute"),
    "communication": lambda result: result.phases_s.get("communication"),
    "samples/s": lambda result: result.samples_per_s,
    "best": lambda result: result.best,
}


def confidence_95(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, by Student's t distribution.

    Args:
        values: Independent measurements.

    Returns:
        Lower and upper end, or ``None`` for fewer than two measurements.

    Example:
        >>> [round(end, 2) for end in confidence_95([9.0, 10.0, 11.0])]
        [7.52, 12.48]
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    # Above 30 degrees of freedom, the normal quantile 1.96 plus 2.5 / freedom is close (for 31: 2.041, exact 2.040).
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.5 / freedom
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@dashboard_option
@json_option
def compare(names: tuple[str, ...], dashboard_url: str | None, as_json: bool) -> None:
    """Compare the runs NAME..., which may be shell patterns.

    Runs of the same task or command with the same arguments (except the seed), workers, backend, resources and goal
    are repeats. The table has one row for them, with the mean, the standard deviation (SPREAD) and the 95 % confidence
    interval of the mean.
    """
    with connect(dashboard_url) as client:
        runs = _select(client, names)
        groups: dict[tuple[Setup, int | None], list[RunResult]] = {}
        for run in runs:
            if run.get("state") not in FINAL_STATES:
                remark(f"{run['name']} has not ended: left out")
            elif run.get("state") != "finished":
                remark(f"{run['name']} is {run.get('state')} and not finished: left out")
            else:
                result = RunResult.from_metrics(client.metrics(run["id"]), run)
                groups.setdefault((result.setup, result.workers), []).append(result)
    if not groups:
        raise MasterRequestError("none of these runs has finished: nothing to compare")
    kinds = sorted(groups, key=lambda kind: (kind[1] or 0, str(kind[0])))
    rows = [_row(groups[kind]) for kind in kinds]
    if as_json:
        print_json(rows)
    else:
        _print(rows)


def _select(client: MasterClient, names: Sequence[str]) -> list[dict[str, Any]]:
    known = client.runs()
    chosen: dict[Any, dict[str, Any]] = {}
    for name in names:
        # Without a match, find() raises an error that lists the latest runs.
        found = [run for run in known if fnmatch.fnmatchcase(str(run["name"]), name)] or [client.find(name)]
        chosen.update({run["id"]: run for run in found})
    return list(chosen.values())


def _row(results: Sequence[RunResult]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "runs": [result.name for result in results],
        "workers": results[0].workers,
        "setup": str(results[0].setup),
        "reached": sum(result.goal_reached is True for result in results),
    }
    for measure, get in MEASURES.items():
        values = [value for result in results if (value := get(result)) is not None]
        interval = confidence_95(values)
        row[measure] = {
            "n": len(values),
            "mean": statistics.fmean(values) if values else None,
            "spread": statistics.stdev(values) if len(values) > 1 else None,
            "confidence_95": list(interval) if interval else None,
        }
    return row


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    table = []
    for row in rows:
        names, interval = row["runs"], row["seconds"]["confidence_95"]
        table.append(
            (
                ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... ({len(names)} runs)",
                "-" if row["workers"] is None else row["workers"],
                f"{row['reached']}/{len(row['runs'])}",
                number(row["seconds"]["mean"]),
                number(row["seconds"]["spread"], 2),
                f"{interval[0]:,.1f} .. {interval[1]:,.1f}" if interval else "-",
                number(row["compute"]["mean"]),
                number(row["communication"]["mean"]),
                number(row["samples/s"]["mean"], 0),
                number(row["best"]["mean"], 2),
            )
        )
    header = ("RUNS", "WORKERS", "REACHED", "SECONDS", "SPREAD", "95 % INTERVAL", "COMPUTE", "COMMUNICATION")
    print_table((*header, "SAMPLES/S", "BEST"), table, right=(1, 2, 3, 4, 5, 6, 7, 8, 9))
