"""Check a result against its published JSON schema, ``result.schema.json`` in this package."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_core.results.raw_lines import SCHEMA_VERSION

__all__ = ["check_result", "result_schema"]


@functools.cache
def result_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of ``result.json``."""
    file = resources.files("mlbench_core.results").joinpath("result.schema.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


@functools.cache
def _validator() -> Callable[[Any], object]:
    import fastjsonschema

    validator: Callable[[Any], object] = fastjsonschema.compile(result_schema())
    return validator


def check_result(result: Any, name: str = "result.json") -> Mapping[str, Any]:
    """Return a result if it follows the schema.

    Args:
        result: The parsed content of ``result.json``.
        name: Name of the file, for the message of an error.

    Raises:
        ConfigurationError: The version of the schema is unknown, or a field is missing or wrong;
            the message names it.

    Example:
        >>> check_result({"schema_version": 9})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        mlbench_core.errors.ConfigurationError: schema_version of result.json is 9, not 1: read ...
    """
    import fastjsonschema

    version = result.get("schema_version") if isinstance(result, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ConfigurationError(
            f"schema_version of {name} is {version!r}, not {SCHEMA_VERSION}: read it with the "
            "version of mlbench-core that wrote it, or with a later one"
        )
    for field, number in _not_finite(result):
        raise ConfigurationError(
            f"{field} of {name} is {number}, not a finite number: restore it from a copy"
        )
    try:
        _validator()(result)
    except fastjsonschema.JsonSchemaValueException as error:
        field = ".".join(error.path[1:]) or "the whole file"
        raise ConfigurationError(
            f"wrong field in {name}: {field} {error.message.partition(' ')[2]}; restore it "
            "from a copy"
        ) from error
    checked: Mapping[str, Any] = result
    return checked


def _not_finite(value: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """Yield the field and the value of each number that is infinite or nan.

    JSON schemas have no rule for such numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield field, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            inner = f"{field}.{name}" if field else str(name)
            yield from _not_finite(each, inner)
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _not_finite(each, f"{field}[{position}]")
