"""Convert dates: ISO 8601 text in the API, microseconds since 1970 (UTC) in the database.

An integer sorts and compares the same in SQLite and PostgreSQL, and keeps every digit.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

__all__ = ["Date", "format_date", "now_us", "to_us", "us_of"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ZONE = re.compile(r"(:\d\d(?:[.,]\d{1,12})?)([ +-])(\d\d)(?::?(\d\d))?$")


def now_us() -> int:
    """Return the current time in microseconds since 1970, UTC."""
    return to_us(datetime.now(timezone.utc))


def to_us(date: datetime) -> int:
    """Convert a date with a zone to microseconds since 1970, UTC."""
    return (date - _EPOCH) // timedelta(microseconds=1)


def format_date(us: int) -> str:
    """Format a date as the API writes it.

    Args:
        us: Microseconds since 1970, UTC. A number outside the years 1 to 9999 becomes the nearest
            date inside them, and another type becomes 1970: one entry of a database must not make
            the others unreadable.

    Returns:
        ``%Y-%m-%dT%H:%M:%S.%fZ``.

    Example:
        >>> format_date(1500000)
        '1970-01-01T00:00:01.500000Z'
    """
    date = _EPOCH + timedelta(microseconds=min(max(us_of(us), _FIRST_US), _LAST_US))
    return date.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def us_of(value: object) -> int:
    """Return a date of the database, 0 if it is not a number: SQLite may hold any type."""
    return value if isinstance(value, int) else 0


def _iso_text(value: object) -> str:
    """Accept only text that begins with a year."""
    # pydantic would read a number as seconds since 1970.
    text = value.strip() if isinstance(value, str) else ""
    if text[4:5] != "-":
        raise ValueError("must be an ISO 8601 date such as 2026-01-31T12:00:00.5Z")
    return _ZONE.sub(_full_zone, text)


def _full_zone(match: re.Match[str]) -> str:
    time, sign, hours, minutes = match.groups()
    # A query string turns the + of a zone into a blank.
    if sign == " ":
        sign = "+"
    # PostgreSQL writes zones without minutes.
    return f"{time}{sign}{hours}:{minutes or '00'}"


def _utc(date: datetime) -> datetime:
    """Convert a date to UTC; a date without a zone is in UTC already."""
    if date.tzinfo is None:
        return date.replace(tzinfo=timezone.utc)
    try:
        return date.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError("must lie between the years 1 and 9999 in UTC") from None


_FIRST_US = to_us(datetime.min.replace(tzinfo=timezone.utc))
_LAST_US = to_us(datetime.max.replace(tzinfo=timezone.utc))

Date = Annotated[datetime, BeforeValidator(_iso_text), AfterValidator(_utc)]
"""A field of a pydantic model: ISO 8601 text, with or without a zone, with ``T`` or a blank."""
