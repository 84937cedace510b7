"""Draw the timelines of the pages about measured time and about communication as SVG figures.

``python tools/draw_timelines.py`` writes ``measuring_time.svg`` and ``communication.svg`` to ``docs/explanation``. The
figures are schematic: the lengths of the bars are chosen, not measured. They have a white background, so they are
readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "explanation"
WIDTH = 736  # the text column of a page in pixels, so that text of 13 pixels is shown in this size
LEFT = 12
BAR, SMALL = 30, 22

# Okabe and Ito, Color Universal Design, mixed with white so that black text is readable on all of them.
COMPUTE, COMMUNICATION, DATA = "#8fc1e3", "#f0a97a", "#8fd3bd"
METRICS, VALIDATION, OUTSIDE = "#e6bcd2", "#f5dd8a", "#d9d9d9"
HIDDEN, TRAINING = "#fbe3d3", "#ffffff"
INK, FAINT = "#222222", "#666666"


@dataclass
class Figure:
    """The shapes of a figure, from the top to the bottom.

    Attributes:
        title: What the figure shows, for readers who cannot see it.
        height: Height in pixels.
        shapes: SVG elements.
    """

    title: str
    height: int
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False, fill: str = INK) -> None:
        """Add one line of text, with its baseline at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def bar(self, x: float, y: float, width: float, text: str, color: str, height: int = BAR) -> None:
        """Add a bar with a text in its middle."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" fill="{color}" stroke="{INK}" '
            'stroke-width="0.7"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Add a thin line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1"{dash}/>'
        )

    def span(self, x: float, y: float, width: float, text: str) -> None:
        """Add a bracket below a part of a timeline, with its name under it."""
        self.line(x, y, x + width, y)
        for end in (x, x + width):
            self.line(end, y - 5, end, y)
        self.text(x + width / 2, y + 16, text, "middle")

    def legend(self, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Add one row of colors with their names."""
        x = float(LEFT)
        for color, name in entries:
            self.bar(x, y, 14, "", color, 14)
            self.text(x + 20, y + 11.5, name)
            x += 44 + 7.4 * len(name)

    def svg(self) -> str:
        """Return the figure as the text of an SVG file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" font-family="sans-serif" font-size="13" role="img">'
        )
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self.shapes, "</svg>", ""])


def draw_measuring_time() -> str:
    """Return the figure of the clocks of a run, and of the steps of one batch."""
    figure = Figure("The parts of a run that training time includes, and the steps of one training batch", 330)
    figure.text(LEFT, 22, "A run: two epochs, the goal is reached at the second validation", bold=True)
    x = float(LEFT)
    y = 36
    batches: list[tuple[float, float]] = []
    others = [("validation", VALIDATION, 86), ("checkpoint", OUTSIDE, 84)]
    for _ in range(2):
        start = x
        for _ in range(4):
            figure.bar(x, y, 46, "batch", TRAINING)
            x += 46
        batches.append((start, x - start))
        for name, color, width in others:
            figure.bar(x, y, width, name, color)
            x += width
    for start, length in batches:
        figure.span(start, y + BAR + 12, length, "train_s")
        figure.span(start + length, y + BAR + 12, 86, "validation_s")
    figure.span(LEFT, y + BAR + 48, x - LEFT, "wall_s, from tracker.start()")
    figure.text(
        LEFT, y + BAR + 88, "time to goal = the train_s of both epochs; validation and checkpoints are not part of it"
    )

    figure.text(LEFT, 190, "One training batch, from batch_start() to batch_end()", bold=True)
    steps = [
        ("batch_load", DATA, 86), ("init", OUTSIDE, 34), ("fwd_pass", COMPUTE, 96), ("comp_loss", COMPUTE, 78),
        ("backprop", COMPUTE, 158), ("agg", COMMUNICATION, 86), ("opt_step", COMPUTE, 74),
        ("comp_metrics", METRICS, 98),
    ]  # fmt: skip
    x = float(LEFT)
    y = 204
    for name, color, width in steps:
        figure.bar(x, y, width, name, color)
        x += width
    figure.span(LEFT, y + BAR + 12, x - LEFT, "training time of this batch: every moment belongs to one step")
    entries = [(DATA, "data"), (COMPUTE, "compute"), (COMMUNICATION, "communication"), (METRICS, "metrics")]
    figure.legend(290, [*entries, (OUTSIDE, "other"), (VALIDATION, "validation")])
    return figure.svg()


def draw_communication() -> str:
    """Return the figure of one step without and with overlap."""
    figure = Figure(
        "One training step without overlap and with overlap, with its exposed and hidden communication", 330
    )
    start = 100.0
    figure.text(LEFT, 22, "Without overlap: one message after the backward pass", bold=True)
    forward, backward, wait, update = 100, 210, 230, 30
    figure.text(LEFT, 56, "processor")
    figure.text(LEFT, 92, "network")
    end = start + forward + backward
    figure.bar(start, 36, forward, "forward", COMPUTE)
    figure.bar(start + forward, 36, backward, "backward", COMPUTE)
    figure.bar(end, 36, wait, "waits", COMMUNICATION)
    figure.bar(end + wait, 36, update, "", COMPUTE)
    figure.text(end + wait + update + 4, 56, "update")
    figure.bar(end, 76, wait, "gradients", COMMUNICATION, SMALL)
    figure.span(end, 112, wait, "exposed")

    top = 168
    figure.text(LEFT, top - 6, "With overlap: a message for each bucket, during the backward pass", bold=True)
    figure.text(LEFT, top + 28, "processor")
    figure.text(LEFT, top + 64, "network")
    figure.bar(start, top + 8, forward, "forward", COMPUTE)
    figure.bar(start + forward, top + 8, backward, "backward", COMPUTE)
    rest = 88
    figure.bar(end, top + 8, rest, "waits", COMMUNICATION)
    figure.bar(end + rest, top + 8, update, "", COMPUTE)
    figure.text(end + rest + update + 4, top + 28, "update")
    first = start + forward + 68
    width = (end + rest - first) / 4
    for bucket in range(4):
        x = first + bucket * width
        hidden = x + width <= end
        figure.bar(
            x, top + 48, width, "" if bucket == 2 else f"{bucket + 1}", HIDDEN if hidden else COMMUNICATION, SMALL
        )
    _split_bucket(figure, first + 2 * width, end, top + 48, width)
    figure.span(first, top + 84, end - first, "hidden")
    figure.span(end, top + 84, rest, "exposed")
    figure.line(end, top + 38, end, top + 84, dashed=True)
    figure.legend(
        top + 124,
        [(COMPUTE, "computation"), (COMMUNICATION, "exposed communication"), (HIDDEN, "hidden communication")],
    )
    return figure.svg()


def _split_bucket(figure: Figure, x: float, end: float, y: float, width: float) -> None:
    """Draw the bucket that is on its way when the backward pass ends, with the hidden part in the lighter color."""
    if x < end < x + width:
        figure.bar(x, y, end - x, "", HIDDEN, SMALL)
        figure.bar(end, y, x + width - end, "", COMMUNICATION, SMALL)
        figure.text((x + end) / 2, y + SMALL / 2 + 4.5, "3", "middle")


FIGURES = {"measuring_time.svg": draw_measuring_time, "communication.svg": draw_communication}

if __name__ == "__main__":
    for file, draw in FIGURES.items():
        (FOLDER / file).write_text(draw(), encoding="utf-8")
