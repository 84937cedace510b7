"""Watch runs until they end, and show their progress, for ``mlbench run --wait``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mlbench_cli._client import FINAL_STATES, RunSource, reason_of, state_of
from mlbench_cli._output import clean, number, remark, seconds
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.errors import MasterRequestError
from mlbench_core.run_terms import GoalAim

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Goal", "Progress", "live_table", "wait_for"]

POLL_S = 1.0
# The value over all workers, which the worker of rank 0 sends.
_GLOBAL_METRIC = re.compile(r"val_global_(.*) @ 0")
# The metric in which a script sends its goal and its number of epochs.
_PLAN = "plan @ 0"
LOST_MASTER_S = 120.0
"""Seconds for which requests to the master may fail, as at a restart, before waiting ends."""

# A narrower terminal has no room for the time, and for less of the bar.
_WIDE = 100
_COLORS = {
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "lost": "red",
    "started": "cyan",
}


@dataclass(frozen=True)
class Goal:
    """The value that a run should reach, used only for the display: the training script decides.

    Attributes:
        aim: The aim, with the name of its metric as the script records it.
        max_epochs: Number of epochs after which a run ends without it, if known.
        has_epochs: False if the run counts steps instead.
    """

    aim: GoalAim
    max_epochs: int | None = None
    has_epochs: bool = True


@dataclass
class Progress:
    """The progress of a run while it runs."""

    name: str
    state: str = "initialized"
    epochs: int = 0
    metric: str | None = None
    value: float | None = None
    goal: Goal | None = None
    epoch_s: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run was first seen running, 0 before."""
        if self.started_at is None:
            return 0.0
        end = time.monotonic() if self.ended_at is None else self.ended_at
        return end - self.started_at

    @property
    def has_epochs(self) -> bool:
        """Return False if the run counts steps instead."""
        return self.goal is None or self.goal.has_epochs

    @property
    def most_epochs(self) -> int | None:
        """Return the number of epochs after which the run ends without its goal, if known."""
        if self.goal is None:
            return None
        return self.goal.max_epochs

    @property
    def most_left_s(self) -> float | None:
        """Return the seconds until the run ends without its goal, or None if they are unknown."""
        if self.state != "started" or self.epoch_s is None or self.most_epochs is None:
            return None
        return max(self.most_epochs - self.epochs, 0) * self.epoch_s

    @property
    def metric_text(self) -> str:
        """Return the name and the value of the metric, with the goal if it is known."""
        if self.value is None:
            return "-"
        text = f"{self.metric} {self.value:.4g}"
        if self.goal and self.goal.aim.threshold:
            text += f" of {self.goal.aim.threshold:g}"
        return text

    @property
    def epoch_text(self) -> str:
        """Return the number of epochs that are done, with the largest number if it is known."""
        if not self.has_epochs:
            return "-"
        text = str(self.epochs)
        if self.most_epochs:
            text += f"/{self.most_epochs}"
        return text

    @property
    def fraction(self) -> float:
        """Return the progress of the metric toward the goal, from 0 to 1."""
        # A run can finish without its goal, after its last epoch.
        if self.state == "finished":
            return 1.0
        if self.goal is None:
            return 0.0
        return self.goal.aim.fraction(self.value)

    @property
    def waits_for(self) -> str:
        """Return the reason why the run has not started, or an empty text."""
        return self.reason if self.state == "initialized" else ""

    def describe(self) -> str:
        """Return state, number of epochs and metric in one line."""
        parts = [self.state]
        if self.waits_for:
            parts.append(self.waits_for)
        # A number of epochs and not "epoch N", because the logs of the workers count epochs from 0.
        if self.epochs:
            parts.append(f"{plural(self.epochs, 'epoch')} done")
        if self.value is not None:
            parts.append(self.metric_text)
        return clean(", ".join(parts))


def wait_for(
    client: RunSource, runs: Sequence[Mapping[str, Any]], goal: Goal | None
) -> list[dict[str, Any]]:
    """Watch runs until all have ended, and show their progress on standard error.

    On a terminal, a table with one line per run is updated in place. Elsewhere, a line is written
    when something changes.

    Args:
        client: The master of the runs, or their engine.
        runs: The runs, as it described them at their start.
        goal: The value that they should reach, if known.

    Returns:
        The runs in the same order, as the client describes them at their end.

    Raises:
        MasterRequestError: The master was unreachable for too long.
    """
    watched: dict[Any, Progress] = {}
    latest: dict[Any, dict[str, Any]] = {}
    for run in runs:
        watched[run["id"]] = Progress(name=str(run["name"]), goal=goal)
        latest[run["id"]] = dict(run)
    failing_since: float | None = None
    with _display() as show:
        while True:
            try:
                for run_id, progress in watched.items():
                    # The progress is behind if a request for metrics failed after the run had
                    # ended, and is then made again.
                    states = {latest[run_id].get("state"), progress.state}
                    if not states <= FINAL_STATES:
                        latest[run_id] = client.run(run_id)
                        _update(client, progress, latest[run_id])
                failing_since = None
            except MasterRequestError as error:
                # Waiting does not help if the master refuses the request (a status below 500).
                # Other failures may end, and the workers train without the master in the meantime.
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
            # Not the wait of an Event, which Ctrl-C at a bad moment breaks with a RuntimeError
            # about its lock.
            time.sleep(POLL_S)


def _update(client: RunSource, progress: Progress, run: Mapping[str, Any]) -> None:
    if run.get("state") != "initialized":
        name = _metric_name(client, progress, run["id"])
        entries: Sequence[Mapping[str, Any]] = []
        if name:
            entries = client.metrics(run["id"], metric_filter=name).get(name, [])
        if entries:
            # A script records one value of a global validation metric per epoch, if it has epochs.
            if progress.has_epochs:
                progress.epochs, progress.epoch_s = len(entries), _epoch_s(entries)
            with contextlib.suppress(TypeError, ValueError):
                progress.value = float(entries[-1]["value"])
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
        total = _date(entries[-1]) - _date(entries[0])
    except (KeyError, TypeError, ValueError):
        return None
    return total.total_seconds() / (len(entries) - 1)


def _date(entry: Mapping[str, Any]) -> datetime:
    # Before version 3.11, Python did not know the letter for UTC.
    return datetime.fromisoformat(str(entry["date"]).replace("Z", "+00:00"))


def _metric_name(client: RunSource, progress: Progress, run_id: int | str) -> str | None:
    """Return the full name of the metric to show.

    It is the metric of the goal, or else the first global validation metric.
    """
    if progress.goal is None:
        progress.goal = _planned_goal(client, run_id)
    if progress.goal is not None:
        name = progress.goal.aim.metric
        progress.metric = (name or "").removeprefix("val_global_")
        # An observed script has metrics such as val_loss.
        return None if name is None else f"{name} @ 0"
    if progress.metric is None:
        for name in sorted(client.metrics(run_id, last_n=1)):
            match = _GLOBAL_METRIC.fullmatch(name)
            if match is not None:
                progress.metric = match[1]
                break
    if progress.metric is None:
        return None
    return f"val_global_{progress.metric} @ 0"


def _planned_goal(client: RunSource, run_id: int | str) -> Goal | None:
    """Return the goal that a script sends after its first epoch.

    None before, or if the goal has another metric than a global validation metric.
    """
    try:
        (entry,) = client.metrics(run_id, metric_filter=_PLAN, last_n=1)[_PLAN]
        plan = json.loads(entry["value"])
        aim, most = GoalAim.from_dict(plan), plan["max_epochs"]
        if _GLOBAL_METRIC.fullmatch(f"{aim.metric} @ 0") is None:
            return None
        return Goal(aim, None if most is None else int(most), plan.get("unit") != "steps")
    # Scripts can send anything under this name, or nothing.
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


Show = Callable[[Sequence[Progress]], None]


def _display() -> contextlib.AbstractContextManager[Show]:
    # A log or a terminal without control sequences cannot update a table in place.
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return contextlib.nullcontext(_lines())
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


@contextlib.contextmanager
def live_table() -> Iterator[Callable[[Sequence[Progress]], None]]:
    """Show a table on standard error that is updated in place.

    The function that it yields sets a row for each run.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    rows: Sequence[Progress] = ()
    shown: dict[str, str] = {}
    # get_renderable draws the table again between two calls, so that the elapsed time goes on.
    console = Console(stderr=True)

    def table() -> Table:
        return _table(rows, console.width >= _WIDE)

    with Live(console=console, get_renderable=table, refresh_per_second=2) as live:

        def show(runs: Sequence[Progress]) -> None:
            nonlocal rows
            rows = runs
            # Above the table, whose cells are too narrow for a sentence.
            for run in runs:
                if run.waits_for and shown.get(run.name) != run.waits_for:
                    shown[run.name] = run.waits_for
                    console.print(Text(clean(f"{run.name} {run.waits_for}")))
            live.refresh()

        yield show


def _table(runs: Sequence[Progress], is_wide: bool) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "GOAL", "METRIC"):
        table.add_column(title, no_wrap=True)
    for title in ("EPOCH", "S/EPOCH", "TIME"):
        if title != "TIME" or is_wide:
            table.add_column(title, no_wrap=True, justify="right")
    table.add_column("STATE", no_wrap=True)
    for run in runs:
        bar = ProgressBar(total=1.0, completed=run.fraction, width=20 if is_wide else 8)
        texts = [run.metric_text, run.epoch_text, number(run.epoch_s)]
        if is_wide:
            texts.append(seconds(run.elapsed_s))
        # Text and not str, because rich would read a name with brackets as a style.
        name = Text(clean(run.name), style="bold")
        state = Text(_state(run), style=_COLORS.get(run.state, "dim"))
        table.add_row(name, bar, *map(Text, map(clean, texts)), state)
    return table


def _state(run: Progress) -> str:
    if run.most_left_s is None:
        return clean(run.state)
    # A bound: a run ends before its last epoch if it reaches the goal, and nobody knows when.
    return f"<= {seconds(run.most_left_s)} left"
