"""Show the progress of runs on a terminal, as a table that is updated in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlbench_cli._output import clean, number, seconds
from mlbench_cli._progress import Progress

__all__ = ["live_table"]

# A narrower terminal has no room for the time, and for less of the bar.
_WIDE = 100
_COLORS = {"finished": "green", "failed": "red", "stopped": "yellow", "lost": "red", "started": "cyan"}


@contextlib.contextmanager
def live_table() -> Iterator[Callable[[Sequence[Progress]], None]]:
    """Show a table on standard error; the function that it yields sets its rows, one for each run."""
    rows: Sequence[Progress] = ()
    told: dict[str, str] = {}
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
                if run.waits_for and told.get(run.name) != run.waits_for:
                    told[run.name] = run.waits_for
                    console.print(Text(clean(f"{run.name} {run.waits_for}")))
            live.refresh()

        yield show


def _table(runs: Sequence[Progress], is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "GOAL", "METRIC"):
        table.add_column(title, no_wrap=True)
    for title in ("EPOCH", "S/EPOCH", *(["TIME"] if is_wide else [])):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("STATE", no_wrap=True)
    for run in runs:
        bar = ProgressBar(total=1.0, completed=run.fraction, width=20 if is_wide else 8)
        cells = [run.metric_text, run.epoch_text, number(run.epoch_s), *([seconds(run.elapsed_s)] if is_wide else [])]
        # Text and not str, because rich would read a name with brackets as a style.
        state = Text(_state(run), style=_COLORS.get(run.state, "dim"))
        table.add_row(Text(clean(run.name), style="bold"), bar, *(Text(clean(cell)) for cell in cells), state)
    return table


def _state(run: Progress) -> str:
    # A bound: a run ends before its last epoch if it reaches the goal, and nobody knows when.
    return clean(run.state) if run.most_left_s is None else f"<= {seconds(run.most_left_s)} left"
