"""Show the progress of an epoch in one line on a terminal."""

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
    """Return True if a bar is to be shown.

    Args:
        progress: The caller's choice. None shows a bar on rank 0 if standard error is a terminal.
        rank: Rank of the worker.
    """
    if progress is not None:
        return progress
    try:
        return rank == 0 and sys.stderr.isatty()
    # A process may run without standard error (None) or may have closed it.
    except (AttributeError, ValueError):
        return False


class ProgressBar:
    """A bar for the batches of an epoch, drawn at most ten times a second and without a thread.

    Args:
        console: The console to draw on; None for standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._bar: Progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=console or Console(stderr=True),
            # A refresh thread would take time from training.
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._drawn_at = -_REFRESH_S
        # rich hides the cursor, and an epoch that ends with an exception never reaches clear(). The
        # finalizer shows the cursor again.
        self._finalizer = weakref.finalize(self, self._bar.stop)

    def due(self) -> bool:
        """Return True if the line on the terminal is older than a tenth of a second."""
        # A test that freezes time can move the clock backward. With a negative age, the line is
        # due, too.
        return not 0 <= time.perf_counter() - self._drawn_at < _REFRESH_S

    def draw(self, epoch: int, batch: int, total: int | None, status: str) -> None:
        """Draw the line.

        Args:
            epoch: Epoch, from 0.
            batch: Number of finished batches of the epoch.
            total: Number of batches of the epoch, or None if it is not known.
            status: Text after the bar.
        """
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total, epoch=epoch, status=status)
        self._bar.update(self._task, completed=batch, total=total, epoch=epoch, status=status)
        self._bar.refresh()
        self._drawn_at = time.perf_counter()

    def clear(self) -> None:
        """Remove the line and release the terminal."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._bar.stop()
