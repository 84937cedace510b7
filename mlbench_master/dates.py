"""Points in time: ISO 8601 text outside, microseconds since 1970 (UTC) in the database.

An integer sorts and compares the same in SQLite and PostgreSQL and keeps every digit.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

__all__ = ["format_date", "now_us", "parse_date"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LOST_PLUS = re.compile(r"(\d\d:\d\d(?::\d\d(?:\.\d+)?)?) (\d\d:?\d\d)$")
_FRACTION = re.compile(r"\.(\d+)")


def now_us() -> int:
    """The current time in microseconds since 1970, UTC."""
    return _to_us(datetime.now(timezone.utc))


def parse_date(text: str) -> int:
    """Read an ISO 8601 date.

    Args:
        text: Date with ``T`` or a blank before the time, with or without a zone. Without one it is UTC. A ``+``
            that a query string turned into a blank is put back.

    Returns:
        Microseconds since 1970, UTC.

    Raises:
        ValueError: It is no ISO 8601 date between the years 1 and 9999.

    Example:
        >>> parse_date("1970-01-01 00:00:01.5")
        1500000
        >>> parse_date("1970-01-01T01:00:00+01:00")
        0
    """
    cleaned = text.strip()
    if cleaned[-1:] in ("Z", "z"):
        cleaned = cleaned[:-1] + "+00:00"
    cleaned = _LOST_PLUS.sub(r"\1+\2", cleaned)
    cleaned = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", cleaned) if "T" in cleaned or " " in cleaned else cleaned
    cleaned = _FRACTION.sub(lambda match: "." + (match.group(1) + "000000")[:6], cleaned, count=1)
    try:
        date = datetime.fromisoformat(cleaned)
        if date.tzinfo is None:
            date = date.replace(tzinfo=timezone.utc)
        return _to_us(date)
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:60]!r} is no ISO 8601 date such as 2026-01-31T12:00:00.5Z") from None


def format_date(us: int) -> str:
    """Write a date as the API does.

    Args:
        us: Microseconds since 1970, UTC.

    Returns:
        ``%Y-%m-%dT%H:%M:%S.%fZ``.

    Example:
        >>> format_date(1500000)
        '1970-01-01T00:00:01.500000Z'
    """
    date = _EPOCH + timedelta(microseconds=us)
    return date.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _to_us(date: datetime) -> int:
    return (date - _EPOCH) // timedelta(microseconds=1)
