"""Draw the timeline of a training step, without and with overlap, as an SVG figure.

``python docs/figures/step_timeline.py`` writes ``docs/explanation/step_timeline.svg``. The lengths
are chosen for the eye: they were not measured. The background is white, so the figure is readable
on a light and on a dark page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "explanation" / "step_timeline.svg"

COLORS = {
    "data loading": "#f0c04c",
    "compute": "#7fb2e5",
    "communication": "#e2725b",
    "metrics": "#8fc98f",
    "other": "#cccccc",
    "network": "#b9a3d3",
}
WORKER, NETWORK, HEIGHT = 1.0, 0.0, 0.56
TEXT_SIZE = 8.2


@dataclass(frozen=True)
class Bar:
    """A period on one row of the timeline.

    Attributes:
        start: Its start, in units of the figure.
        length: Its length.
        phase: Key of :data:`COLORS`.
        text: Text in the bar.
        row: ``WORKER`` or ``NETWORK``.
    """

    start: float
    length: float
    phase: str
    text: str = ""
    row: float = WORKER


STEPS_BEFORE = (
    Bar(0.0, 1.2, "data loading", "batch_load"),
    Bar(1.2, 0.4, "other", "init"),
    Bar(1.6, 2.2, "compute", "fwd_pass"),
    Bar(3.8, 1.2, "compute", "comp_loss"),
)
PLAIN = (
    *STEPS_BEFORE,
    Bar(5.0, 4.2, "compute", "backprop"),
    Bar(9.2, 3.6, "communication", "agg"),
    Bar(12.8, 1.3, "compute", "opt_step"),
    Bar(14.1, 1.7, "metrics", "comp_metrics"),
    Bar(9.3, 1.1, "network", "bucket 1", NETWORK),
    Bar(10.4, 1.1, "network", "bucket 2", NETWORK),
    Bar(11.5, 1.1, "network", "bucket 3", NETWORK),
)
# During the backward pass, a bucket is packed as soon as it is full. The last one waits for the end
# of the pass.
OVERLAPPED = (
    *STEPS_BEFORE,
    Bar(5.0, 1.5, "compute"),
    Bar(6.5, 0.15, "communication"),
    Bar(6.65, 1.5, "compute", "backprop"),
    Bar(8.15, 0.15, "communication"),
    Bar(8.3, 1.2, "compute"),
    Bar(9.5, 1.4, "communication", "agg"),
    Bar(10.9, 1.3, "compute", "opt_step"),
    Bar(12.2, 1.7, "metrics", "comp_metrics"),
    Bar(6.55, 1.1, "network", "bucket 1", NETWORK),
    Bar(8.2, 1.1, "network", "bucket 2", NETWORK),
    Bar(9.6, 1.1, "network", "bucket 3", NETWORK),
)


def draw_bars(axes: Axes, bars: tuple[Bar, ...], title: str) -> None:
    """Draw one timeline with its rows."""
    for bar in bars:
        axes.barh(
            bar.row,
            bar.length,
            HEIGHT,
            left=bar.start,
            color=COLORS[bar.phase],
            edgecolor="#333333",
            linewidth=0.7,
        )
        if bar.text:
            # A step that is too short for its name has the name above it.
            fits = bar.length > 0.09 * len(bar.text) + 0.15
            y = bar.row if fits else bar.row + HEIGHT / 2 + 0.14
            axes.text(
                bar.start + bar.length / 2,
                y,
                bar.text,
                ha="center",
                va="center",
                fontsize=TEXT_SIZE,
            )
    axes.set_yticks((WORKER, NETWORK), ("worker", "network"), fontsize=TEXT_SIZE + 1.5)
    axes.set_title(title, loc="left", fontsize=TEXT_SIZE + 2.5)
    axes.set_ylim(-1.25, 1.75)
    axes.set_xlim(-0.1, 16)
    axes.set_xticks(())
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def draw_span(axes: Axes, start: float, end: float, y: float, text: str) -> None:
    """Draw a period with its name below the rows."""
    arrow = {"arrowstyle": "<->", "linewidth": 1, "color": "#333333", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (start, y), (end, y), arrowprops=arrow)
    axes.text((start + end) / 2, y - 0.2, text, ha="center", va="center", fontsize=TEXT_SIZE)


def draw_figure() -> None:
    """Draw both timelines and write the file."""
    # Fixed ids and no date: the same script makes the same file.
    pyplot.rcParams.update(
        {"svg.hashsalt": "step_timeline", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    )
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9.6, 5.0), facecolor="white")
    draw_bars(above, PLAIN, "without overlap: all communication is exposed")
    draw_span(above, 9.2, 12.8, -0.5, "exposed")
    draw_span(above, 0.0, 15.8, -1.0, "training time of the step")
    draw_bars(below, OVERLAPPED, "overlap=True: messages travel during the backward pass")
    draw_span(below, 9.5, 10.9, -0.5, "exposed")
    draw_span(below, 6.65, 7.65, -0.5, "hidden")
    draw_span(below, 8.3, 9.3, -0.5, "hidden")
    draw_span(below, 0.0, 13.9, -1.0, "training time of the step")
    names = [name for name in COLORS if name != "network"]
    patches = [
        pyplot.Rectangle((0, 0), 1, 1, facecolor=COLORS[name], edgecolor="#333333")
        for name in names
    ]
    patches.append(pyplot.Rectangle((0, 0), 1, 1, facecolor=COLORS["network"], edgecolor="#333333"))
    figure.legend(
        patches,
        [*names, "message in transit"],
        ncols=6,
        loc="lower center",
        frameon=False,
        fontsize=9,
    )
    figure.subplots_adjust(left=0.075, right=0.99, top=0.94, bottom=0.08, hspace=0.25)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    draw_figure()
