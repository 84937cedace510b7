"""Turn the metrics of a request into rows.

Metrics that look as clients send them are checked here, in a tenth of the time of pydantic, which
checks all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from pydantic import ValidationError

from mlbench_master.api.schemas import MAX_ID, MetricIn, describe_error
from mlbench_master.database.store import NewMetric, run_owner
from mlbench_master.dates import to_us
from mlbench_master.runs.undelivered_metrics import new_metric

__all__ = ["Intake", "read_metrics"]

# Limits of the fields of MetricIn.
_NAME, _TEXT, _ID = 255, 65_536, 128
# A date as clients send it: 2026-01-31T12:00:00.500000Z. Many metrics share the first part.
_MINUTE = len("2026-01-31T12:00:")
_USUAL_MINUTE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:", re.ASCII)
_DATE = len("2026-01-31T12:00:00.500000Z")


def read_metrics(items: Sequence[Any], now: int, many: bool) -> list[NewMetric]:
    """Check the metrics of a request.

    Args:
        items: The metrics as JSON values.
        now: The date of a metric without one, in microseconds since 1970.
        many: True if the body is a list, of which an error names the index.

    Returns:
        The metrics in their order.

    Raises:
        ValueError: A metric is not valid; the message names the field.
    """
    intake = Intake(now)
    if not many:
        return [intake.read(item) for item in items]
    return [intake.read(item, f"[{index}].") for index, item in enumerate(items)]


class Intake:
    """A reader of the metrics of one request.

    Args:
        now: The date of a metric without one, in microseconds since 1970.
    """

    def __init__(self, now: int) -> None:
        self._now = now
        # Most metrics of a request share these texts, so each is checked once.
        self._names: set[str] = set()
        self._minutes: dict[str, int] = {}

    def read(self, item: Any, prefix: str = "") -> NewMetric:
        """Return a metric.

        Args:
            item: The metric as a JSON value.
            prefix: Text before the names of fields in the message of an error.

        Raises:
            ValueError: It is not valid.
        """
        metric = self.read_usual(item)
        if metric is not None:
            return metric
        try:
            return new_metric(MetricIn.model_validate(item), self._now)
        except ValidationError as error:
            raise ValueError(describe_error(error, prefix)) from None

    def read_usual(self, item: Any) -> NewMetric | None:
        """Return a metric if every field has its usual form, or None."""
        if type(item) is not dict or not item.keys() <= MetricIn.model_fields.keys():
            return None
        # Below, type() and not isinstance, because a bool is an int, too.
        get: Any = item.get
        run_id, name, value, metadata = get("run_id"), get("name"), get("value"), get("metadata")
        cumulative, key, date = get("cumulative", False), get("id"), get("date")
        if type(run_id) is not int or not 0 < run_id <= MAX_ID or get("pod_name") is not None:
            return None
        if type(value) is float or type(value) is int:
            value = repr(value)
        elif not _is_text(value, _TEXT):
            return None
        if type(name) is not str:
            return None
        if name not in self._names:
            if not _is_line(name, _NAME):
                return None
            self._names.add(name)
        if cumulative is not False and cumulative is not True:
            return None
        if type(metadata) is dict:
            metadata = json.dumps(metadata)
        if metadata is None:
            metadata = ""
        elif not _is_text(metadata, _TEXT):
            return None
        if key is not None and not _is_line(key, _ID):
            return None
        us = self._now if date is None else self._usual_date(date)
        if us is None:
            return None
        return NewMetric(run_owner(run_id), name, us, value, cumulative, metadata, key)

    def _usual_date(self, text: Any) -> int | None:
        """Return a date in microseconds since 1970, or None if it does not have its usual form."""
        if type(text) is not str or len(text) != _DATE:
            return None
        if text[-1] != "Z" or text[_MINUTE + 2] != ".":
            return None
        seconds, fraction = text[_MINUTE : _MINUTE + 2], text[_MINUTE + 3 : -1]
        # isdigit alone accepts digits of other scripts.
        if not text.isascii() or not seconds.isdigit() or not fraction.isdigit() or seconds > "59":
            return None
        minute = text[:_MINUTE]
        us = self._minutes.get(minute)
        if us is None:
            if not _USUAL_MINUTE.fullmatch(minute):
                return None
            try:
                date = datetime.fromisoformat(minute[:-1])
            except ValueError:
                return None
            us = self._minutes[minute] = to_us(date.replace(tzinfo=timezone.utc))
        return us + int(seconds) * 1_000_000 + int(fraction)


def _is_text(text: Any, most: int) -> bool:
    return type(text) is str and len(text) <= most and text.isascii() and "\x00" not in text


def _is_line(text: Any, most: int) -> bool:
    return (
        type(text) is str
        and len(text) <= most
        and text.isascii()
        and text.isprintable()
        and text.strip() != ""
    )
