"""Set up, finish and save a figure with one style, a legend and a caption below the axes.

Figures are made without pyplot, so they need no display and leave no global state. The style is
``mlbench_core/comparison/mlbench.mplstyle``. Settings of the user do not change a figure. With the
same version of matplotlib, the same input therefore gives the same bytes.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures.captions import subtitle
from mlbench_core.comparison.figures.styles import DASHES, MARKERS
from mlbench_core.comparison.table import safe_cell
from mlbench_core.errors import require
from mlbench_core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlbench_core.comparison.group_repeats import Group

__all__ = [
    "COLUMN_IN",
    "GRAY",
    "PAGE_IN",
    "Drawing",
    "Look",
    "finish",
    "load_matplotlib",
    "new_figure",
    "number",
    "save",
    "series_looks",
    "style",
    "title",
    "wrap",
]

Look = dict[str, Any]
"""Keyword arguments of matplotlib for the look of something."""

COLUMN_IN = 3.15
"""Width in inches of a figure for one column, 8 cm."""

PAGE_IN = 6.6
"""Width in inches of a figure for two columns."""

GRAY = "#555555"
"""Color of lines and texts that are not a measurement, such as the line of the ideal speed-up."""

_STYLE = Path(__file__).resolve().parents[1] / "mlbench.mplstyle"
_NOTE_PT = 5.5
_MARGIN_IN = 0.05


@dataclass(frozen=True)
class Drawing:
    """A finished figure.

    Attributes:
        name: Name of its files without suffix.
        figure: The figure, with its caption in small print.
        caption: The caption, as text for a page that shows the figure.
        rows: The numbers in the figure, a header first; empty if other figures have them.
    """

    name: str
    figure: Figure
    caption: str
    rows: Sequence[Sequence[Any]] = field(default_factory=list)


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Apply the style of MLBench to everything that is drawn or saved in the block.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    load_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        # Settings of the user, for example a dark background or LaTeX, would change the figure.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            matplotlib.rc_params_from_file(_STYLE, use_default_template=False)
        )
        yield


def load_matplotlib() -> None:
    """Import matplotlib also with an unknown ``MPLBACKEND``, such as that of a notebook.

    Figures are drawn without pyplot, so they need no such backend. It stays the choice of the
    process for pyplot.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    backend: str | None = None
    # An import reads the variable, and raises an error for an unknown backend.
    if "matplotlib" not in sys.modules:
        backend = os.environ.pop("MPLBACKEND", None)
    try:
        require("matplotlib", "charts")
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend is not None:
        import matplotlib

        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure without pyplot.

    Args:
        width: Width in inches.
        height: Height in inches of the axes with their title and labels, without legend and
            caption.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def series_looks(count: int) -> list[Look]:
    """Return a color, a marker and a dash for each of several series.

    Any two series differ in at least two of them.
    """
    import matplotlib

    colors = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    looks = []
    # Seven colors, six markers and five dashes: the first repetition of a combination is far beyond
    # any legend.
    for index in range(count):
        color = colors[index % len(colors)].removeprefix("#")
        marker, dash = MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)]
        looks.append({"color": f"#{color}", "marker": marker, "linestyle": dash})
    return looks


def wrap(text: str, width_in: float, size_pt: float) -> str:
    """Break text into lines of at most a number of inches; a word that is too long is broken."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    measure, font = TextToPath(), FontProperties(size=size_pt)

    def fits(line: str) -> bool:
        # Text is measured in points. Agg rounds letters to pixels, which adds up to about 3 %.
        return bool(
            measure.get_text_width_height_descent(line, font, ismath=False)[0] * 1.03
            <= width_in * 72
        )

    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            if line and fits(f"{line} {word}"):
                line += f" {word}"
                continue
            if line:
                lines.append(line)
            while len(word) > 1 and not fits(word):
                end = len(word) - 1
                while end > 1 and not fits(word[:end]):
                    end -= 1
                lines.append(word[:end])
                word = word[end:]
            line = word
        lines.append(line)
    return "\n".join(lines)


def title(axes: Axes, text: str, groups: Sequence[Group]) -> None:
    """Write a title above the axes, and task and goal in small print below it."""
    axes.set_title(text, pad=11)
    # The labels of the vertical axis take the rest of a column.
    width, size = COLUMN_IN - 0.45, _NOTE_PT + 0.5
    lines = wrap(subtitle(groups), width, size).split("\n")
    if len(lines) > 1:
        lines = wrap(subtitle(groups, short=True), width, size).split("\n")
    line = lines[0]
    # The caption has the whole text.
    if len(lines) > 1:
        line += " ..."
    look: Look = {"size": size, "color": GRAY, "va": "bottom"}
    axes.annotate(line, (0, 1), (0, 3), "axes fraction", "offset points", **look)


def number(value: float) -> str:
    """Return a number with three digits or more, for the place next to a bar or point.

    Example:
        >>> number(1234.5), number(12.345), number(0.012345)
        ('1,234', '12.3', '0.0123')
    """
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"


def finish(figure: Figure, caption: str, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend and the caption below the axes; the figure grows, and the axes do not shrink.

    Args:
        figure: A figure of :func:`new_figure`.
        caption: The caption.
        handles: The lines and areas that the legend explains, as ``Figure.legend`` takes them.
        labels: The texts of the legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    width, height = figure.get_size_inches()
    note = wrap(caption, width - 2 * _MARGIN_IN, _NOTE_PT)
    note_in = (note.count("\n") + 1) * _NOTE_PT * 1.25 / 72 + _MARGIN_IN
    # As many columns as fit: matplotlib does not know the width of its texts before it draws them.
    legend, legend_in = None, 0.0
    for columns in range(min(4, len(labels)), 0, -1):
        texts = labels
        if columns == 1:
            # With a single column, a long text is broken.
            texts = [wrap(label, width - 2 * _MARGIN_IN - 0.35, 6) for label in labels]
        legend = figure.legend(
            handles, texts, ncols=columns, loc="lower left", bbox_to_anchor=(0, 0)
        )
        legend.set_in_layout(False)
        size = legend.get_window_extent(FigureCanvasAgg(figure).get_renderer())
        legend_in = size.height / figure.dpi + 0.07
        if size.width / figure.dpi <= width - 2 * _MARGIN_IN or columns == 1:
            break
        legend.remove()
    total = height + note_in + legend_in
    figure.set_size_inches(width, total)
    left = _MARGIN_IN / width
    text = figure.text(
        left, _MARGIN_IN / total, note, size=_NOTE_PT, color=GRAY, va="bottom", linespacing=1.15
    )
    text.set_in_layout(False)
    if legend is not None:
        legend.set_bbox_to_anchor((left, (note_in + 0.04) / total))
    engine = figure.get_layout_engine()
    assert engine is not None, "new_figure sets one"
    engine.set(rect=(0, (note_in + legend_in) / total, 1, height / total))  # type: ignore[call-arg]


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write a figure as PNG and SVG and its numbers as CSV.

    Args:
        drawing: The figure.
        folder: The folder, which is created.

    Returns:
        The files written.
    """
    # Without these values, the files would hold the date and the version of matplotlib.
    formats: dict[str, Look] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    written = []
    with style():
        for suffix, metadata in formats.items():
            path = folder / f"{drawing.name}.{suffix}"
            with replacing(path) as temporary:
                drawing.figure.savefig(temporary, format=suffix, metadata=metadata)
            written.append(path)
    if drawing.rows:
        path = folder / f"{drawing.name}.csv"
        with (
            replacing(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            for row in drawing.rows:
                writer.writerow(map(safe_cell, row))
        written.append(path)
    return written
