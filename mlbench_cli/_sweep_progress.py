"""Show the progress of a sweep: a bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence

from mlbench_cli._output import clean, remark, seconds
from mlbench_core.sweep.estimate import estimate
from mlbench_core.sweep.runner import Observer
from mlbench_core.sweep.sweep_folder import Done, Failure
from mlbench_core.sweep.toml_file import Point, Sweep

__all__ = ["open_display"]


@contextlib.contextmanager
def open_display(
    sweep: Sweep, points: Sequence[Point], done: dict[str, Done]
) -> Iterator[Observer]:
    """Return the display of a sweep.

    Args:
        sweep: The sweep.
        points: All of its runs.
        done: The runs that have ended; the display adds the others.
    """
    lines = _Lines(sweep, points, done)
    # A log or a terminal without control sequences cannot show a bar.
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(lines, bar, bar.add_task("", total=len(points), completed=len(done)))


class _Lines(Observer):
    """Lines on standard error."""

    def __init__(self, sweep: Sweep, points: Sequence[Point], done: dict[str, Done]) -> None:
        self._sweep = sweep
        self._points = points
        self._done = done
        self._ended = len(done)
        self.total = len(points)
        self._pending: Sequence[Point] = ()
        self._left_s: float | None = None
        self._told: set[str] = set()
        self._under_way: tuple[str, str] | None = None

    def begin(self, pending: Sequence[Point]) -> None:
        self._pending = pending
        # Runs can be left out as the sweep goes on.
        self.total = self._ended + len(pending)
        self._left_s = self._expected_s(pending)

    def left(self, elapsed_s: float) -> str:
        """Return the time that is left when the current run has taken some seconds."""
        if self._left_s is None:
            return ""
        return f", about {seconds(max(self._left_s - elapsed_s, 0))} left"

    def _expected_s(self, pending: Sequence[Point]) -> float | None:
        return estimate(pending, self._points, self._done, self._sweep.limit_s).expected_s

    def watch(self, point: Point, state: str, seconds: float, reason: str) -> None:
        before, self._under_way = self._under_way, (point.name, reason)
        if self._under_way == before:
            return
        if state == "started":
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
            number = f"[{self._ended + 1}/{self.total}]"
            remark(f"{number} {clean(point.name)}: started at {clock}{self.left(seconds)}")
        elif reason != state:
            self.note(f"{point.name}: {reason}")

    def end(self, point: Point, ended: Done | Failure) -> None:
        self._ended += 1
        if isinstance(ended, Failure):
            text = f"failed: {ended.reason}"
        else:
            self._done[point.name] = ended
            outcome = {"finished": "finished", "limit": "stopped at the limit"}[ended.outcome]
            text = f"{outcome} after {seconds(ended.seconds)}"
        # The estimate of the next runs now has the time of this one, too.
        self._left_s = self._expected_s(self._pending[1:])
        remark(f"[{self._ended}/{self.total}] {clean(point.name)}: {clean(text)}{self.left(0)}")
        # A line of its own, which the next run does not replace in a notebook. The other runs of a
        # script mostly lack the same.
        for reason in ended.not_measured if isinstance(ended, Done) else ():
            if reason not in self._told:
                self._told.add(reason)
                self.note(f"{point.name}: not measured: {reason}")

    def note(self, text: str) -> None:
        remark(clean(text))


class _Bar(Observer):
    """A bar below the lines."""

    def __init__(self, lines: _Lines, bar: object, task: int) -> None:
        from rich.progress import Progress, TaskID

        assert isinstance(bar, Progress)
        self._lines = lines
        self._bar = bar
        self._task = TaskID(task)

    def begin(self, pending: Sequence[Point]) -> None:
        self._lines.begin(pending)
        self._bar.update(self._task, total=self._lines.total)

    def watch(self, point: Point, state: str, seconds: float, reason: str) -> None:
        progress = f"{int(seconds)} s" if state == "started" else reason
        text = clean(f"{point.name} {progress}{self._lines.left(seconds)}")
        self._bar.update(self._task, description=text)

    def end(self, point: Point, ended: Done | Failure) -> None:
        self._lines.end(point, ended)
        self._bar.advance(self._task)

    def note(self, text: str) -> None:
        self._lines.note(text)
