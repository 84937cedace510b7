"""Write results as one HTML file without scripts, which loads no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mlbench_core.comparison.table import Column, cell

__all__ = ["bullets", "document", "elements", "grid"]

_STYLE = Path(__file__).with_name("page.css")


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: Title of the page, as text.
        parts: Its sections, as HTML.
    """
    style = _STYLE.read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page loads nothing and runs nothing, whatever the names in the runs are.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def elements(tag: str, contents: Iterable[str]) -> str:
    """Return one element for each content, which is HTML."""
    return "".join(f"<{tag}>{content}</{tag}>" for content in contents)


def bullets(sentences: Sequence[str]) -> str:
    """Return a list of sentences, which are text; empty without one."""
    if not sentences:
        return ""
    return f"<ul>{elements('li', map(escape, sentences))}</ul>"


def grid(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table that scrolls on a small screen."""

    def tag(column: Column, name: str, text: str) -> str:
        attribute = "" if column.digits is None else ' class="number"'
        return f"<{name}{attribute}>{escape(text)}</{name}>"

    head = ""
    for column in columns:
        head += tag(column, "th", column.header)
    body = ""
    for row in rows:
        body += "<tr>"
        for column in columns:
            body += tag(column, "td", cell(column, row))
        body += "</tr>"
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
