"""Wait for runs, save their results and show them, for ``mlbench run --wait``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlbench_cli import _wait
from mlbench_cli._client import RunSource, names_of, reason_of, state_of
from mlbench_cli._output import clean, log_line, print_json, remark
from mlbench_cli._records import compare_records, print_comparison, print_records
from mlbench_cli._step_table import print_steps, show_unmeasured
from mlbench_core.comparison.group_repeats import pool, usable
from mlbench_core.comparison.load_results import load, save
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError, MasterRequestError, MLBenchError

__all__ = ["LOG_LINES_SHOWN", "follow"]

# Of a failed run, enough for a traceback.
LOG_LINES_SHOWN = 20


def follow(
    client: RunSource,
    started: Sequence[dict[str, Any]],
    goal: _wait.Goal | None,
    folder: Path,
    as_json: bool,
    pooled: bool,
    is_script: bool = False,
) -> None:
    """Wait for the runs, save and show their results, and fail if one of them failed.

    Args:
        client: The master of the runs, or their engine.
        started: The runs, as it described them at their start.
        goal: The value that they should reach, for the display of the progress.
        folder: The folder for the results.
        as_json: Show JSON instead of tables.
        pooled: Show one row for the repeats of a configuration, instead of one for each run.
        is_script: The runs measure an unchanged script: show the parts of a step, too, and what was
            not measured.

    Raises:
        MLBenchError: A run failed, its metrics or its output are incomplete, its result folder
            could not be fetched, or Ctrl-C ended the waiting.
    """
    try:
        ended = _wait.wait_for(client, started, goal)
    except KeyboardInterrupt:
        raise MLBenchError(_interrupted(client, started)) from None
    # A failed run is saved, too, because its metrics show how far it came.
    problems: list[str] = []
    records = [_save(client, item, folder, problems) for item in ended]
    chart = _draw(folder, records)
    if as_json:
        answer: dict[str, Any] = {"results": [record.as_json() for record in records]}
        if pooled:
            answer["comparison"] = compare_records(records)[1].as_json()
        answer["folder"] = str(folder.absolute())
        answer["chart"] = None if chart is None else str(chart.absolute())
        print_json(answer)
    else:
        repeats = usable(records)[0] if pooled else []
        if is_script:
            # A column for each repeat would be too wide: the first one of each configuration.
            print_steps([group.records[0] for group in pool(repeats)] or records)
        if repeats:
            print_comparison(compare_records(records)[1], "table")
        else:
            print_records(records)
        for record in records if is_script else ():
            show_unmeasured(record)
        click.echo(f"results: {folder.absolute()}")
        if chart:
            click.echo(f"chart: {chart.absolute()}")
    for item in ended:
        # A comparison must not mistake a run without some of its metrics for a complete one.
        missing = (item.get("job_metadata") or {}).get("missing_metrics")
        if item.get("state") != "finished":
            _show_log(client, item)
            problems.append(f"run {item['name']} {state_of(item)}")
        if missing:
            problems.append(f"results of run {item['name']} are incomplete: {clean(str(missing))}")
        elif item.get("state") == "finished" and reason_of(item):
            # A finished run has a reason only if a part of it was lost, such as output lines.
            problems.append(f"run {item['name']} finished, but {clean(reason_of(item))}")
    if problems:
        raise MLBenchError("; ".join(problems))


def _interrupted(client: RunSource, started: Sequence[Mapping[str, Any]]) -> str:
    """Ask on a terminal if Ctrl-C should also stop the runs, and return their state as a text."""
    names = " ".join(map(clean, names_of(started)))
    stop_command = clean(client.stop_command(started))
    continues = f"stopped waiting; the runs continue ('{stop_command}' stops them)"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return continues
    try:
        # The terminal shows ^C at the end of its last line.
        remark("")
        if not click.confirm(
            "Stop the runs, too? Otherwise only the watching stops, and they continue.", err=True
        ):
            return continues
    # A second Ctrl-C leaves at once, and so does the end of the input.
    except click.Abort:
        remark("")
        return continues
    # The last one first: it may still wait, and would start when an earlier one frees its cores.
    for item in reversed(started):
        remark(f"stopping {clean(item['name'])}")
        client.stop(item["id"])
    return f"stopped the runs {names}; their metrics are kept"


def _save(
    client: RunSource, item: Mapping[str, Any], folder: Path, problems: list[str]
) -> RunRecord:
    """Save the metrics of a run as ``NAME.json``, and its result folder next to it, if any.

    A result folder that exists and cannot be fetched is added to the problems.
    """
    metrics = client.metrics(item["id"])
    name = str(item["name"])
    save(folder / f"{name}.json", item, metrics)
    try:
        if client.fetch_result(item["id"], folder / name):
            return load([folder / name])[0]
    # The metrics are saved already, and shown. But a result is lost, which the exit status must
    # say.
    except (ConfigurationError, MasterRequestError, OSError) as error:
        problems.append(f"no result folder of {clean(name)}: {clean(error)}")
    return RunRecord.from_metrics(metrics, item, str(folder / f"{name}.json"))


def _draw(folder: Path, records: Sequence[RunRecord]) -> Path | None:
    """Draw the overview of the runs that have results, or write why they cannot be drawn."""
    drawable = [record for record in usable(records)[0] if record.phases_s]
    if not drawable:
        return None
    try:
        from mlbench_cli.commands.charts import draw_overview

        return draw_overview(pool(drawable), folder / "overview.png")
    # The runs themselves are done, so a chart that cannot be drawn must not make the command fail.
    except Exception as error:
        text = " ".join(str(error).split())
        # The message of another package's error may be a word only, such as the key of a KeyError.
        if not isinstance(error, MLBenchError):
            text = f"{type(error).__name__}: {text}"
        remark(f"no chart: {clean(text)}")
        return None


def _show_log(client: RunSource, item: Mapping[str, Any]) -> None:
    """Write the last lines of the workers, and the final message of the engine."""
    lines, _ = client.logs(item["id"])
    workers: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    verdict: list[Mapping[str, Any]] = []
    for line in lines:
        if line.get("rank") is not None:
            workers.append(line)
            continue
        others.append(line)
        if line.get("stream") == "system":
            verdict = [line]
    name, log = clean(item["name"]), clean(client.log_place(item))
    remark(f"--- the last lines of {name} (all lines: {log})")
    # The lines of the workers usually show the cause.
    shown = (workers or others)[-LOG_LINES_SHOWN:]
    for shown_line in [*shown, *verdict]:
        remark(log_line(shown_line))
