"""Render the templates, which escape all text, and write numbers and dates as people read them."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from mlbench_master.access.proxies import root_path
from mlbench_master.dates import format_date, now_us, us_of

__all__ = ["ago", "duration", "error_page", "moment", "number", "page", "render", "size"]

_SECOND = 1_000_000
# Seconds of each unit, the largest first.
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
# The attributes of pages that have a path, which the root path of a proxy precedes.
_PATH_ATTRIBUTE = re.compile(r'\b(?:href|src|action|hx-get|data-post|data-delete|data-then)="(?=/)')
_SIZES = ("B", "KB", "MB", "GB", "TB", "PB")


def ago(us: int | None) -> Markup:
    """Return a date as the time since then, with the exact date in a tooltip; empty for None.

    A damaged record may hold another type, which counts as 1970, as in
    :func:`~mlbench_master.dates.format_date`.

    Example:
        >>> ago(0)  # doctest: +ELLIPSIS
        Markup('<time datetime="1970-01-01T00:00:00.000000Z" title="...">... d ago</time>')
    """
    if us is None:
        return Markup()
    date = format_date(us)
    # static/app.js keeps the age right, and writes the exact date in the zone of the browser.
    since = _since(now_us() - us_of(us))
    return Markup('<time datetime="{}" title="{}">{}</time>').format(date, _in_utc(date), since)


def moment(us: int | None) -> Markup:
    """Return an exact date, which static/app.js writes in the zone of the browser; empty for None.

    Example:
        >>> moment(0)  # doctest: +ELLIPSIS
        Markup('<time class="exact" datetime="1970-...Z">1970-01-01 00:00:00 UTC</time>')
    """
    if us is None:
        return Markup()
    date = format_date(us)
    return Markup('<time class="exact" datetime="{}">{}</time>').format(date, _in_utc(date))


def _in_utc(date: str) -> str:
    return f"{date[:10]} {date[11:19]} UTC"


def _since(us: int) -> str:
    seconds = us // _SECOND
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds // unit} {name} ago"
    return "now"


def number(value: object, digits: int = 4) -> Markup:
    """Return a number with few significant digits, and with all of them in a tooltip.

    Any other text stays as it is.

    Example:
        >>> number("0.09779698171323388")
        Markup('<span title="0.09779698171323388">0.0978</span>')
        >>> number(300), number("nan"), number("<b>")
        (Markup('300'), Markup('nan'), Markup('&lt;b&gt;'))
    """
    text = str(value)
    short = _short(text, digits)
    if short == text:
        return Markup("{}").format(text)
    return Markup('<span title="{}">{}</span>').format(text, short)


def _short(text: str, digits: int) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value) or text.lstrip("-").isdecimal():
        return text
    rounded = f"{value:.{digits}g}"
    if "e" in rounded and abs(value) >= 1:
        return f"{value:.0f}"
    return rounded


def duration(seconds: float | None) -> str:
    """Return a time in seconds with its two largest units.

    Example:
        >>> duration(0.0123), duration(13.1661), duration(75), duration(7322)
        ('0.012 s', '13.2 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    index = 0
    while seconds < _UNITS[index][0]:
        index += 1
    (unit, name), (small, small_name) = _UNITS[index : index + 2]
    text = f"{int(seconds) // unit} {name}"
    if rest := int(seconds % unit) // small:
        text += f" {rest} {small_name}"
    return text


def size(count: float | None) -> str:
    """Return a number of bytes with a unit, of which each is 1,000 of the one before.

    Example:
        >>> size(512), size(130_818_720), size(None)
        ('512 B', '131 MB', '')
    """
    if count is None:
        return ""
    power = 0
    while abs(count) >= 999.5 and power < len(_SIZES) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_SIZES[power]}"


_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    # Names and values in pages are texts of users.
    autoescape=True,
    # By default, a misspelled variable would be an empty text.
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(
    ago=ago,
    date=format_date,
    duration=duration,
    json=functools.partial(json.dumps, indent=2, ensure_ascii=False),
    number=number,
    size=size,
)


def page(request: Request, template: str, **values: Any) -> HTMLResponse:
    """Return a page of a user who is logged in.

    Args:
        request: The request for it.
        template: The file of the template.
        **values: The variables of the template.
    """
    access = request.app.state.access
    root, here = root_path(request.scope), request.url.path
    return render(template, root=root, can_log_out=access.token is not None, here=here, **values)


def error_page(
    request: Request, status: int, message: str, headers: dict[str, str] | None = None
) -> HTMLResponse:
    """Return the page of an error.

    Args:
        request: The request that failed.
        status: The status of the answer.
        message: The problem, as the API says it.
        headers: The headers of the answer.
    """
    if status == 404:
        title = "Not found"
        meaning = "There is nothing at this address: it is wrong, or what it showed was deleted."
    elif status >= 500:
        title = "Something went wrong"
        meaning = "The master cannot show this page now. Reload it after some seconds."
    else:
        title = "Wrong request"
        meaning = "The master cannot show a page for this address."
    if message == "Not Found":  # Starlette has nothing to add
        message = ""
    else:
        # The name before the colon is that of a parameter, which a reader of pages does not know.
        text = message.removeprefix("id: ").removeprefix("name: ")
        message = f"{text[:1].upper()}{text[1:]}."
    texts = {"title": title, "meaning": meaning, "message": message}
    return page(request, "error.html", status=status, headers=headers, **texts)


def render(
    template: str,
    status: int = 200,
    headers: dict[str, str] | None = None,
    root: str = "",
    **values: Any,
) -> HTMLResponse:
    """Return a page.

    Args:
        template: The file of the template.
        status: The status of the answer.
        headers: Its headers.
        root: The root path of the request, see :mod:`mlbench_master.access.proxies`.
        **values: The variables of the template.
    """
    html = _templates.get_template(template).render(values)
    if root:
        # The templates escape quotes in texts, so only attributes match.
        html = _PATH_ATTRIBUTE.sub(rf"\g<0>{root}", html)
    # A text may hold half of a surrogate pair, which UTF-8 cannot encode.
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=headers)
