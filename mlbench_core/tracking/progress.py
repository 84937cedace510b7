"""One line on a terminal that shows how far an epoch is."""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ProgressBar", "wants_progress"]

_REFRESH_S = 0.1


def wants_progress(progress: bool | None, rank: int) -> bool:
    """Whether to show a bar.

    Args:
        progress: What the caller asked for; None means on rank 0 when standard error is a terminal.
        rank: The worker.
    """
    if progress is not None:
        return progress
    try:
        return rank == 0 and sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False


class ProgressBar:
    """A bar for the batches of an epoch, drawn at most ten times a second and without a thread.

    Args:
        console: Where to draw; None means standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=console or Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._drawn_at = -_REFRESH_S
        self._finalizer = weakref.finalize(self, self._bar.stop)  # a killed epoch must give the cursor back

    def due(self) -> bool:
        """Whether the line on the terminal is older than a tenth of a second."""
        return not 0 <= time.perf_counter() - self._drawn_at < _REFRESH_S

    def draw(self, epoch: int, batch: int, total: int | None, status: str) -> None:
        """Draw the line.

        Args:
            epoch: Epoch, from 0.
            batch: Batches finished in it.
            total: Batches it has, or None where that is not known.
            status: Text behind the bar.
        """
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total, epoch=epoch, status=status)
        self._bar.update(self._task, completed=batch, total=total, epoch=epoch, status=status)
        self._bar.refresh()
        self._drawn_at = time.perf_counter()

    def clear(self) -> None:
        """Remove the line and give the terminal back."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._bar.stop()
