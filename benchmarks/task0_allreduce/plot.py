"""Draw time against size from result files of Task 0.

    python benchmarks/task0_allreduce/plot.py RESULT.json [RESULT.json ...] --output times.png

There is a line for each backend, device, type and number of workers. Points are medians, and the
band reaches from the fastest repetition to the 99th percentile. The dashed line is the fit t(n) =
alpha + n / beta; the legend has its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from latency_report import LatencyReport

from mlbench_core.comparison.figures.canvas import load_matplotlib
from mlbench_core.errors import ConfigurationError, MLBenchError


def draw(reports: Sequence[LatencyReport], path: Path, dtypes: Sequence[str] | None = None) -> Path:
    """Draw reports into one chart with logarithmic axes.

    Args:
        reports: The reports to compare.
        path: Path of the chart; its suffix selects the format.
        dtypes: Types to draw; None draws all.

    Returns:
        ``path``.

    Raises:
        ConfigurationError: There is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, no display is needed and no global state of matplotlib changes.
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for report in reports:
        fits = report.fits()
        for dtype in report.dtypes:
            if dtypes is not None and dtype not in dtypes:
                continue
            measurements = report.of(dtype)
            sizes = list(map(attrgetter("size_bytes"), measurements))
            statistics = list(map(attrgetter("statistics"), measurements))
            label = f"{report.title}, {dtype}"
            if dtype in fits:
                label += f": {fits[dtype]}"
            # The line, its band and its fit have one color.
            points = [(s.p50_s, s.min_s, s.p99_s) for s in statistics]
            median, lowest, highest = zip(*points, strict=True)
            (line,) = axes.plot(sizes, median, marker=".", linewidth=1, label=label)
            color = line.get_color()
            axes.fill_between(sizes, lowest, highest, color=color, alpha=0.12, linewidth=0)
            if dtype in fits:
                times = list(map(fits[dtype].seconds, sizes))
                axes.plot(sizes, times, color=color, linestyle="--", linewidth=0.8)
    if not axes.lines:
        raise ConfigurationError(
            "there is nothing to draw: the results have no measurement of the types in --dtypes"
        )
    axes.set(xscale="log", yscale="log", xlabel="size in bytes", ylabel="seconds of one operation")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize="small", title="medians; band: fastest to 99th percentile; dashed: fit")
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULT.json", help="files that main.py wrote")
    add("--output", type=Path, default=Path("task0.png"), help="the chart (default: task0.png)")
    add("--dtypes", nargs="+", help="only these types")
    args = parser.parse_args()
    try:
        print(draw(list(map(LatencyReport.load, args.results)), args.output, args.dtypes))
    except MLBenchError as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    main()
