"""Print the report of Task 0 as a table on the terminal."""

from __future__ import annotations

import numpy as np
from latency_report import LatencyReport
from rich.console import Console
from rich.table import Table

# Rows of each type in the printed table; the files have all.
ROWS_SHOWN = 9


def show(report: LatencyReport) -> None:
    """Print a few sizes of each type, the fits, left-out and shortened measurements."""
    table = Table(title=report.title)
    table.add_column("type")
    for title in (
        "elements", "mean µs", "median µs", "p99 µs", "alg. GB/s", "bus GB/s", "repetitions",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for dtype in report.dtypes:
        measurements = report.of(dtype)
        # A few sizes, evenly spaced from the smallest to the largest, show the curve on one screen.
        rows = np.linspace(0, len(measurements) - 1, min(ROWS_SHOWN, len(measurements)))
        for i in np.unique(rows.astype(int)):
            m, times = measurements[i], measurements[i].statistics
            table.add_row(
                dtype, f"{m.elements:,}",
                f"{1e6 * times.mean_s:.1f}", f"{1e6 * times.p50_s:.1f}",
                f"{1e6 * times.p99_s:.1f}",
                f"{m.algorithm_bandwidth / 1e9:.4g}", f"{m.bus_bandwidth / 1e9:.4g}",
                str(m.repetitions),
            )  # fmt: skip
        table.add_section()
    console = Console(width=100, highlight=False)
    console.print(table)
    for dtype, fit in report.fits().items():
        console.print(f"{dtype}: {fit}; deviation {100 * fit.relative_error:.0f} %")
    for request, reason in report.left_out.items():
        console.print(f"left out: {request}: {reason}", markup=False)
    fewer = report.incomplete()
    if fewer:
        least = min(m.repetitions for m in fewer)
        console.print(
            f"{len(fewer)} of {len(report.measurements)} had fewer repetitions, {least} or "
            "more: --time-limit"
        )
