"""Commands on existing runs: status, logs, stop, delete, download."""

from __future__ import annotations

import json
import re
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlbench_cli._client import FINAL_STATES, MasterClient, names_of, reason_of, state_of
from mlbench_cli._embedded import connect
from mlbench_cli._output import (
    clean,
    confirm_deletion,
    dashboard_option,
    json_option,
    local_time,
    log_line,
    print_field,
    print_json,
    print_table,
    remark,
)
from mlbench_cli._output_streams import stdout_is_closed
from mlbench_cli._unreachable_master import connect_or_read
from mlbench_cli.commands.completion import complete_runs
from mlbench_core.errors import MasterRequestError
from mlbench_core.files import replacing
from mlbench_core.run_terms import PaidSamples

__all__ = ["delete", "download", "logs", "status", "stop"]

FOLLOW_POLL_S = 0.5
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
# The parts of a name at the master: the phase, "global_" for a value of all workers, the name
# itself, and the rank of the worker that sent it.
_METRIC_NAME = re.compile(r"(?:train_|val_)?(?:global_)?(.*?)(?: @ \d+)?", re.DOTALL)
# The fields of a run that are shown, if they have a value.
_FIELDS = (
    "name",
    "id",
    "state",
    "num_workers",
    "backend",
    "image",
    "command",
    "created_at",
    "finished_at",
)


@click.command()
@click.argument("name", required=False, shell_complete=complete_runs)
@click.option(
    "--metric",
    "-m",
    metavar="M",
    help="Show every value of this metric, for example 'Prec@1' or 'val_loss @ 0'.",
)
@dashboard_option
@json_option
def status(name: str | None, metric: str | None, dashboard_url: str | None, as_json: bool) -> None:
    """Show all runs, or the run NAME with the latest value of each metric."""
    if metric and not name:
        raise click.UsageError("--metric needs the NAME of a run")
    with connect(dashboard_url) as client:
        if name is None:
            _show_runs(client.runs(), as_json)
            return
        run = client.find(name)
        if metric is None:
            _show_run(run, client.metrics(run["id"], last_n=1), as_json)
        else:
            _show_metric(client, run, metric, as_json)


def _show_runs(runs: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(runs)
        return
    rows = []
    for run in runs:
        row = [run["name"], run["id"], state_of(run)]
        for key in ("num_workers", "backend", "created_at", "finished_at"):
            row.append(_cell(run.get(key)))
        rows.append(row)
    header = ("RUN", "ID", "STATE", "WORKERS", "BACKEND", "CREATED", "FINISHED")
    print_table(header, rows, right=(1, 3))


def _show_run(
    run: Mapping[str, Any], metrics: Mapping[str, Sequence[Mapping[str, Any]]], as_json: bool
) -> None:
    latest = {name: entries[-1] for name, entries in sorted(metrics.items()) if entries}
    if as_json:
        print_json({"run": dict(run), "metrics": latest})
        return
    shown = {**run, "state": state_of(run)}
    for key in _FIELDS:
        if shown.get(key) is not None:
            print_field(key, _cell(shown[key]))
    if reason_of(run):
        print_field("reason", reason_of(run))
    for change in (run.get("job_metadata") or {}).get("changes") or ():
        print_field("change", clean(str(change)))
    if samples := (run.get("job_metadata") or {}).get("samples"):
        print_field("goodput", PaidSamples(**samples))
    if latest:
        click.echo()
        rows = []
        for name, entry in latest.items():
            # The value comes last, because a text such as the summary may be longer than a line.
            rows.append((name, _cell(entry.get("date")), entry.get("value")))
        print_table(("METRIC", "DATE", "LATEST"), rows)


def _show_metric(client: MasterClient, run: Mapping[str, Any], metric: str, as_json: bool) -> None:
    name = _full_name(metric, sorted(client.metrics(run["id"], last_n=1)), str(run["name"]))
    entries = client.metrics(run["id"], metric_filter=name).get(name, [])
    if as_json:
        print_json({name: entries})
    else:
        if name != metric:
            remark(f"{clean(metric)} is {clean(name)}")
        rows = [(_cell(entry.get("date")), entry.get("value")) for entry in entries]
        print_table(("DATE", "VALUE"), rows)


def _full_name(metric: str, names: Sequence[str], run: str) -> str:
    """Find the full name of a metric at the master, if the user left out its prefix or its rank.

    The validation metric over all workers takes precedence over others of the same name, because
    the goal refers to it.
    """
    for name in (metric, f"{metric} @ 0", f"val_global_{metric} @ 0"):
        if name in names:
            return name
    matching = []
    for name in names:
        match = _METRIC_NAME.fullmatch(name)
        if match is not None and match[1] == metric:
            matching.append(name)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise MasterRequestError(
            f"run {run} has several metrics {metric!r}: give one of {', '.join(matching)}"
        )
    raise MasterRequestError(
        f"run {run} has no metric {metric!r}; it has: {', '.join(names) or 'none yet'}"
    )


def _cell(value: object) -> str:
    """Format a value for a table.

    A date of the master is written in local time, with its offset from UTC.
    """
    text = "-" if value is None else str(value)
    return local_time(text) if _DATE.fullmatch(text) else text


@click.command()
@click.argument("name", shell_complete=complete_runs)
@click.option("--follow", "-f", is_flag=True, help="Continue until the run has ended.")
@click.option(
    "--rank",
    metavar="RANK",
    help="Only the worker with this rank; 'master' for lines of no worker.",
)
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "system"]), help="Only this stream."
)
@click.option("--search", metavar="TEXT", help="Only lines with this text, in upper or lower case.")
@dashboard_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per line.")
def logs(
    name: str, follow: bool, dashboard_url: str | None, as_json: bool, **filters: str | None
) -> None:
    """Show the output of the workers of the run NAME."""
    with connect_or_read(dashboard_url) as client:
        run_id = client.find(name)["id"]
        pause = threading.Event()
        position = 0
        while True:
            # The state is read before the log. If the run has ended by then, the log is complete.
            ended = client.run(run_id).get("state") in FINAL_STATES
            lines, position = client.logs(run_id, position, filters)
            for line in lines:
                text = json.dumps(line, ensure_ascii=False) if as_json else log_line(line)
                click.echo(text)
                # As in "mlbench logs NAME --follow | head".
                if stdout_is_closed():
                    return
            if ended or not follow:
                return
            pause.wait(FOLLOW_POLL_S)


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_runs)
@dashboard_option
@json_option
def stop(names: tuple[str, ...], dashboard_url: str | None, as_json: bool) -> None:
    """Stop the runs NAME... and keep their metrics."""
    with connect_or_read(dashboard_url) as client:
        # All names are looked up first, so that a wrong one stops nothing.
        runs = list(map(client.find, names))
        for run in runs:
            name = clean(run["name"])
            if run.get("state") in FINAL_STATES:
                outcome = f"{name} has ended already ({state_of(run)})"
            else:
                client.stop(run["id"])
                outcome = f"stopped {name}"
            if not as_json:
                click.echo(outcome)
        if as_json:
            print_json([client.run(run["id"]) for run in runs])


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_runs)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@dashboard_option
@json_option
def delete(names: tuple[str, ...], yes: bool, dashboard_url: str | None, as_json: bool) -> None:
    """Delete the runs NAME... with their metrics and logs, and stop those that are running."""
    with connect(dashboard_url) as client:
        # All names are looked up first, so that a wrong one deletes nothing.
        runs = list(map(client.find, names))
        names_text = clean(", ".join(names_of(runs)))
        if not yes and not confirm_deletion(f"Delete {names_text} with all metrics?"):
            remark("nothing deleted")
            if as_json:
                print_json([])
            return
        for run in runs:
            client.delete(run["id"])
            if not as_json:
                click.echo(f"deleted {clean(run['name'])}")
        if as_json:
            print_json([{"id": run["id"], "name": run["name"]} for run in runs])


@click.command()
@click.argument("name", shell_complete=complete_runs)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to write (default: NAME.zip).",
)
@dashboard_option
@json_option
def download(name: str, output: Path | None, dashboard_url: str | None, as_json: bool) -> None:
    """Download the metrics of the run NAME as a zip file.

    An older file of the same name is replaced when the download is complete.
    """
    with connect(dashboard_url) as client:
        run = client.find(name)
        path = output or Path(f"{run['name']}.zip")
        with replacing(path) as temporary:
            size_bytes = client.download_metrics(run["id"], temporary)
            # A zip archive has its directory at the end, so a truncated download fails this check.
            if not zipfile.is_zipfile(temporary):
                raise MasterRequestError(
                    f"{client.url} sent an incomplete zip file for run {run['name']}: "
                    "download it again"
                )
    if as_json:
        print_json({"run": run["name"], "file": str(path.absolute()), "size_bytes": size_bytes})
    else:
        click.echo(f"{path} ({size_bytes / 1024:,.0f} KiB)")
