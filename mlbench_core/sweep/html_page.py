"""Write the page of a sweep as one HTML file without scripts, which loads no other file."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.html_page import bullets, document, elements, grid
from mlbench_core.comparison.table import Column
from mlbench_core.sweep.result_table import TUNING_COLUMNS

if TYPE_CHECKING:
    from mlbench_core.comparison.figures import Drawing

__all__ = ["Section", "html_page", "inline_svg"]

# Colors of the figures' style, and the names of the page's colors, which are others in the dark.
_COLORS = {
    "#ffffff": "card", "#eeeeee": "card", "#000000": "ink", "#222222": "ink", "#dddddd": "grid",
    "#444444": "axis", "#555555": "faint",
    "#0072b2": "c1", "#d55e00": "c2", "#009e73": "c3", "#cc79a7": "c4", "#e69f00": "c5",
    "#56b4e9": "c6",
}  # fmt: skip


@dataclass
class Section:
    """A section of the page with figures.

    Attributes:
        name: Name in the address of the section.
        title: Its title.
        figures: Inline figures.
        notes: Captions; equal ones are shown once.
        table: Columns and rows of a table below the figures; None without one.
    """

    name: str
    title: str
    figures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    table: tuple[Sequence[Column], Sequence[Mapping[str, Any]]] | None = None


def inline_svg(drawing: Drawing, label: str) -> str:
    """Return a figure as SVG for a page: without its caption, and in the colors of the page.

    Args:
        drawing: The figure, drawn in the style of MLBench.
        label: Text for readers who do not see it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = drawing.figure
    # The caption is the last text of a finished figure, at its bottom. The page has it as text.
    note = figure.texts[-1]
    top_pt = note.get_window_extent(FigureCanvasAgg(figure).get_renderer()).y1 / figure.dpi * 72
    note.set_visible(False)
    text = io.StringIO()
    # Without date, so that the same runs give the same page.
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    width, height = 72 * figure.get_size_inches()
    # The sizes are those of print; on the page, the figure is as wide as its place, and ends above
    # the caption.
    view = (
        f'<svg viewBox="0 0 {width:g} {height - top_pt:g}" role="img" aria-label="{escape(label)}"'
    )
    svg = re.sub(r"<svg[^>]*?(?=\sversion=)", view, svg, count=1, flags=re.DOTALL)
    # Two figures must not have the same identifiers on one page.
    prefix = re.sub(r"[^A-Za-z0-9]", "-", drawing.name)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return re.sub("#[0-9a-f]{6}", _color, svg)


def _color(match: re.Match[str]) -> str:
    name = _COLORS.get(match[0])
    if name is None:
        return match[0]
    return f"var(--{name})"


def html_page(
    title: str,
    facts: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    sections: Sequence[Section],
    table: tuple[Sequence[Column], Sequence[Mapping[str, Any]]],
    source: str,
    tuning: tuple[str, Sequence[Mapping[str, Any]]] | None = None,
) -> str:
    """Return the page.

    Args:
        title: Title of the sweep.
        facts: Name and value of each property of all runs, for the head of the page.
        words: Sentences by network; those with the empty name are on the whole sweep.
        sections: The figures.
        table: Columns and rows of the table.
        source: The file of the sweep.
        tuning: The rule of the tuning and the rows of its table; None without tuning.
    """
    tuned = ""
    targets = [("words", "Which method when")]
    if tuning is not None:
        rule, tuning_rows = tuning
        targets.append(("tuning", "Tuning"))
        tuned = _table("tuning", "Tuning", TUNING_COLUMNS, tuning_rows, rule)
    targets += [(section.name, section.title) for section in sections]
    targets += [("table", "Table"), ("file", "File")]
    links = ""
    for name, text in targets:
        links += f'<a href="#{escape(name)}">{escape(text)}</a>'
    pairs = ""
    for name, value in facts.items():
        pairs += f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    parts = [
        f"<header><h1>{escape(title)}</h1><dl>{pairs}</dl><nav>{links}</nav></header>",
        _words(words),
        tuned,
        *map(_section, sections),
        _table("table", "Table", *table),
        '<section id="file"><h2>The file of the sweep</h2>'
        f'<pre tabindex="0">{escape(source)}</pre></section>',
    ]
    return document(title, parts)


def _words(words: Mapping[str, Sequence[str]]) -> str:
    networks = ""
    for name, sentences in words.items():
        if name and sentences:
            networks += f"<div><h3>{escape(name)}</h3>{bullets(sentences)}</div>"
    if networks:
        networks = f'<div class="words">{networks}</div>'
    whole = bullets(words.get("", ()))
    return f'<section id="words"><h2>Which method when</h2>{whole}{networks}</section>'


def _section(section: Section) -> str:
    figures = elements("figure", section.figures)
    notes = ""
    # The figures of a section can have the same caption.
    for note in dict.fromkeys(section.notes):
        notes += f'<p class="note">{escape(note)}</p>'
    if section.table is not None:
        notes += grid(*section.table)
    return (
        f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>'
        f'<div class="figures">{figures}</div>{notes}</section>'
    )


def _table(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    note: str = "",
) -> str:
    if note:
        note = f"<p>{escape(note)}</p>"
    return f'<section id="{name}"><h2>{title}</h2>{note}{grid(columns, rows)}</section>'
