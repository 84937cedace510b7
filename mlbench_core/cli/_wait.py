"""Watch runs until they end, for ``mlbench run --wait``."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_core.cli._client import FINAL_STATES, MasterClient
from mlbench_core.cli._output import clean, remark, seconds
from mlbench_core.errors import MasterRequestError

__all__ = ["Goal", "Progress", "wait_for"]

POLL_S = 1.0
_GLOBAL_METRIC = re.compile(r"val_global_(.*) @ 0")
LOST_MASTER_S = 120.0
"""Seconds for which requests to the master may fail (a restart, a network failure) before waiting ends."""


@dataclass(frozen=True)
class Goal:
    """The value that a run should reach, used only for the display: the training script decides."""

    metric: str
    threshold: float | None
    minimize: bool = False


@dataclass
class Progress:
    """The progress of a run while it runs."""

    name: str
    state: str = "initialized"
    epochs: int = 0
    metric: str | None = None
    value: float | None = None
    goal: Goal | None = None

    @property
    def fraction(self) -> float:
        """Return the progress of the metric toward the goal, from 0 to 1; 1 if the run has finished."""
        if self.state == "finished":
            return 1.0
        threshold = self.goal.threshold if self.goal else None
        if self.value is None or not threshold or self.value <= 0:
            return 0.0
        minimize = self.goal is not None and self.goal.minimize
        return min(threshold / self.value if minimize else self.value / threshold, 1.0)

    def describe(self) -> str:
        """Return state, number of epochs and metric in one line."""
        parts = [self.state]
        # A number of epochs and not "epoch N", because the logs of the workers count epochs from 0.
        if self.epochs:
            parts.append(f"{self.epochs} epoch{'' if self.epochs == 1 else 's'} done")
        if self.value is not None:
            target = f" of {self.goal.threshold:g}" if self.goal and self.goal.threshold else ""
            parts.append(f"{self.metric} {self.value:.4g}{target}")
        return clean(", ".join(parts))


def wait_for(client: MasterClient, runs: Sequence[Mapping[str, Any]], goal: Goal | None) -> list[dict[str, Any]]:
    """Watch runs until all have ended, and show their progress on standard error.

    On a terminal, one line per run is updated in place. Elsewhere, a line is written when something changes.

    Args:
        client: The master of the runs.
        runs: The runs, as the master described them at their start.
        goal: The value that they should reach, if known.

    Returns:
        The runs in the same order, as the master describes them at their end.

    Raises:
        MasterRequestError: The master was unreachable for too long.
    """
    watched = {run["id"]: Progress(name=str(run["name"]), goal=goal) for run in runs}
    latest = {run["id"]: dict(run) for run in runs}
    failing_since: float | None = None
    pause = threading.Event()
    with _bars() if sys.stderr.isatty() else contextlib.nullcontext(_lines()) as show:
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
            pause.wait(POLL_S)


def _update(client: MasterClient, progress: Progress, run: Mapping[str, Any]) -> None:
    if run.get("state") != "initialized":
        name = _metric_name(client, progress, run["id"])
        entries = client.metrics(run["id"], metric_filter=name).get(name, []) if name else []
        if entries:
            # A script records one value of a global validation metric per epoch.
            progress.epochs = len(entries)
            with contextlib.suppress(TypeError, ValueError):
                progress.value = float(entries[-1]["value"])
    progress.state = str(run.get("state"))


def _metric_name(client: MasterClient, progress: Progress, run_id: int | str) -> str | None:
    """Return the full name of the metric to show: the goal's, or else the first global validation metric."""
    if progress.metric is None and progress.goal is not None:
        progress.metric = progress.goal.metric
    if progress.metric is None:
        known = sorted(client.metrics(run_id, last_n=1))
        progress.metric = next((found[1] for name in known if (found := _GLOBAL_METRIC.fullmatch(name))), None)
    return None if progress.metric is None else f"val_global_{progress.metric} @ 0"


Show = Callable[[Sequence[Progress]], None]


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
def _bars() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    # markup=False, because rich would read a name with brackets as a style.
    columns = (
        TextColumn("{task.fields[run]}", style="bold", markup=False),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(runs: Sequence[Progress]) -> None:
            for run in runs:
                if run.name not in tasks:
                    tasks[run.name] = bars.add_task("", total=1.0, start=False, run=clean(run.name), text="")
                task = tasks[run.name]
                # A run that waits for free workers must not show elapsed time.
                if run.state == "started":
                    bars.start_task(task)
                if run.state in FINAL_STATES:
                    bars.stop_task(task)
                bars.update(task, completed=run.fraction, text=run.describe())

        yield show
