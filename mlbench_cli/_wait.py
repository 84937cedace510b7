"""Watch runs until they end, for ``mlbench run --wait``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from mlbench_cli._client import FINAL_STATES, RunSource, reason_of, state_of
from mlbench_cli._output import clean, remark, seconds
from mlbench_cli._progress import Goal, Progress
from mlbench_core.errors import MasterRequestError

__all__ = ["Goal", "Progress", "wait_for"]

POLL_S = 1.0
_GLOBAL_METRIC = re.compile(r"val_global_(.*) @ 0")
_PLAN = "plan @ 0"
LOST_MASTER_S = 120.0
"""Seconds for which requests to the master may fail (a restart, a network failure) before waiting ends."""


def wait_for(client: RunSource, runs: Sequence[Mapping[str, Any]], goal: Goal | None) -> list[dict[str, Any]]:
    """Watch runs until all have ended, and show their progress on standard error.

    On a terminal, a table with one line per run is updated in place. Elsewhere, a line is written when something
    changes.

    Args:
        client: The master of the runs, or their engine.
        runs: The runs, as it described them at their start.
        goal: The value that they should reach, if known.

    Returns:
        The runs in the same order, as the client describes them at their end.

    Raises:
        MasterRequestError: The master was unreachable for too long.
    """
    watched = {run["id"]: Progress(name=str(run["name"]), goal=goal) for run in runs}
    latest = {run["id"]: dict(run) for run in runs}
    failing_since: float | None = None
    with _display() as show:
        while True:
            try:
                for run_id, progress in watched.items():
                    # The second condition repeats a request for metrics that failed after the run had ended.
                    if latest[run_id].get("state") not in FINAL_STATES or progress.state not in FINAL_STATES:
                        latest[run_id] = client.run(run_id)
                        _update(client, progress, latest[run_id])
                failing_since = None
            except MasterRequestError as error:
                # Waiting does not help if the master refuses the request (a status below 500). Other failures may end,
                # and the workers train without the master in the meantime.
                if error.status is not None and error.status < 500:
                    raise
                if failing_since is None:
                    failing_since = time.monotonic()
                    remark(f"{error}; trying again for {LOST_MASTER_S:g} s")
                if time.monotonic() - failing_since >= LOST_MASTER_S:
                    raise
            show(list(watched.values()))
            if all(progress.state in FINAL_STATES for progress in watched.values()):
                return [latest[run["id"]] for run in runs]
            # Not the wait of an Event, which Ctrl-C at a bad moment breaks with a RuntimeError about its lock.
            time.sleep(POLL_S)


def _update(client: RunSource, progress: Progress, run: Mapping[str, Any]) -> None:
    if run.get("state") != "initialized":
        name = _metric_name(client, progress, run["id"])
        entries = client.metrics(run["id"], metric_filter=name).get(name, []) if name else []
        if entries:
            # A script records one value of a global validation metric per epoch.
            progress.epochs = len(entries)
            with contextlib.suppress(TypeError, ValueError):
                progress.value = float(entries[-1]["value"])
            progress.epoch_s = _epoch_s(entries)
        if progress.started_at is None:
            progress.started_at = time.monotonic()
    progress.state, progress.reason = state_of(run), reason_of(run)
    if progress.state in FINAL_STATES and progress.ended_at is None:
        progress.ended_at = time.monotonic()


def _epoch_s(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean seconds from one entry to the next, or None if there are too few."""
    if len(entries) < 2:
        return None
    try:
        # Before version 3.11, Python did not know the letter for UTC.
        first, last = (datetime.fromisoformat(str(entries[i]["date"]).replace("Z", "+00:00")) for i in (0, -1))
        return (last - first).total_seconds() / (len(entries) - 1)
    except (KeyError, TypeError, ValueError):
        return None


def _metric_name(client: RunSource, progress: Progress, run_id: int | str) -> str | None:
    """Return the full name of the metric to show: the goal's, or else the first global validation metric."""
    if progress.goal is None:
        progress.goal = _planned_goal(client, run_id)
    if progress.goal is not None:
        progress.metric = progress.goal.metric
    if progress.metric is None:
        known = sorted(client.metrics(run_id, last_n=1))
        progress.metric = next((found[1] for name in known if (found := _GLOBAL_METRIC.fullmatch(name))), None)
    return None if progress.metric is None else f"val_global_{progress.metric} @ 0"


def _planned_goal(client: RunSource, run_id: int | str) -> Goal | None:
    """Return the goal that a script sends after its first epoch; None before, or if it watches another metric."""
    try:
        (entry,) = client.metrics(run_id, metric_filter=_PLAN, last_n=1)[_PLAN]
        plan = json.loads(entry["value"])
        metric = _GLOBAL_METRIC.fullmatch(f"{plan['metric']} @ 0")
        if metric is None:
            return None
        threshold, most = plan["threshold"], plan["max_epochs"]
        return Goal(
            metric[1],
            None if threshold is None else float(threshold),
            bool(plan["minimize"]),
            None if most is None else int(most),
        )
    # Scripts can send anything under this name, or nothing.
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


Show = Callable[[Sequence[Progress]], None]


def _display() -> contextlib.AbstractContextManager[Show]:
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return contextlib.nullcontext(_lines())
    from mlbench_cli._live import live_table

    return live_table()


def _lines() -> Show:
    """Return a display that writes a plain line for each run that has changed."""
    shown: dict[str, str] = {}
    start = time.monotonic()

    def show(runs: Sequence[Progress]) -> None:
        for run in runs:
            text = run.describe()
            if shown.get(run.name) != text:
                shown[run.name] = text
                remark(f"[{seconds(time.monotonic() - start)}] {clean(run.name)}: {text}")

    return show
