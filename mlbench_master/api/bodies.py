"""Read the body of a request: JSON or a URL-encoded form.

Multipart forms are refused: no client of the master sends files, and a crafted form is costly to
parse.

JSON is parsed in a thread, but in C, so no other thread runs meanwhile. Limits on bytes and values
keep that time and the memory of the values small. Each path has its own limit on bytes: its longest
useful request, with some room.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

__all__ = [
    "MAX_CHANGE_BYTES",
    "MAX_METRICS_BYTES",
    "MAX_RUN_BYTES",
    "parse_body",
    "read_body",
    "read_login",
]

# The client sends at most 8 MiB of metrics at once, and one metric more.
MAX_METRICS_BYTES = 16 * 2**20
# A run has at most 256 arguments of 4096 characters.
MAX_RUN_BYTES = 2 * 2**20
# Twenty tags and a note, each character of up to 12 bytes in URL encoding.
MAX_CHANGE_BYTES = 2**17
# A metric has at most two texts of 65,536 characters, each of up to 12 bytes in URL encoding.
_MAX_FORM_BYTES = 2 * 2**20
_MAX_LOGIN_BYTES = 4096
_MAX_FIELDS = 1000
# A batch has 10,000 metrics of eight fields and metadata. A million values need about 100 MB.
_MAX_VALUES = 1_000_000
# Far more than metadata needs, and far less than the recursion that JSON's encoder can do.
_MAX_DEPTH = 64
_TOO_DEEP = f"must have at most {_MAX_DEPTH} levels of lists and objects"
_SMALL_BYTES = 16_384
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_FORM = "application/x-www-form-urlencoded"


def read_body(max_bytes: int) -> Callable[[Request], Awaitable[Any]]:
    """Make the dependency of a route that reads and parses the body of a request.

    Args:
        max_bytes: Largest body. A form has at most 2 MiB.

    Returns:
        A function that returns the value of :func:`parse_body`. It raises an HTTPException: 400 if
        the body cannot be parsed, 413 if it is too long, 415 if it is a multipart form.
    """

    async def read(request: Request) -> Any:
        kind = _kind(request)
        if kind.startswith("multipart/"):
            message = f"Content-Type: must be application/json or {_FORM}, not {kind[:80]!r}"
            raise HTTPException(415, message)
        if kind == _FORM:
            return await _read(request, kind, min(_MAX_FORM_BYTES, max_bytes))
        return await _read(request, kind, max_bytes)

    return read


async def read_login(request: Request) -> dict[str, str]:
    """Read the form of the login page, as a dependency of its route, which needs no token.

    Args:
        request: The request.

    Returns:
        The fields of the form.

    Raises:
        HTTPException: 400 if the body cannot be parsed, 413 if it has more than 4096 bytes, 415 if
            it is not URL-encoded.
    """
    kind = _kind(request)
    if kind != _FORM:
        raise HTTPException(415, f"Content-Type: must be {_FORM}, not {kind[:80]!r}")
    fields: dict[str, str] = await _read(request, kind, _MAX_LOGIN_BYTES)
    return fields


def parse_body(body: bytes, kind: str) -> Any:
    """Parse a body.

    Args:
        body: The bytes.
        kind: The content type without parameters. A body of an unknown type is JSON if it begins
            like an object or a list, and a form otherwise.

    Returns:
        The JSON value, or the fields of the form as a dictionary of texts.

    Raises:
        ValueError: The body is neither JSON nor a form, or it has too many values or levels.

    Example:
        >>> parse_body(b"name=my-run&num_workers=2", "application/x-www-form-urlencoded")
        {'name': 'my-run', 'num_workers': '2'}
    """
    is_json = kind.endswith("json") or (kind != _FORM and body.lstrip()[:1] in (b"{", b"["))
    try:
        # Programs on Windows may write a byte order mark before JSON.
        text = body.decode("utf-8-sig" if is_json else "utf-8")
        if is_json:
            _check_number_of_values(body)
            value = json.loads(text)
            _check_depth(value)
            return value
        fields = parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
        )
        return dict(fields)
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _check_number_of_values(body: bytes) -> None:
    # Every value but the first one follows one of these characters. Strings, which may have them,
    # too, are removed only if the count is high.
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        outside = _STRING.sub(b"", body)
        if sum(map(outside.count, (b",", b"[", b"{"))) > _MAX_VALUES:
            raise ValueError(
                f"must have at most {_MAX_VALUES} values: send them in several requests"
            )


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, kind: str, max_bytes: int) -> Any:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                message = f"body: must have at most {max_bytes} bytes: send it in parts"
                raise HTTPException(413, message)
            chunks.append(chunk)
    except ClientDisconnect:
        # Nobody gets this answer, but an error would be logged with its traceback.
        raise HTTPException(400, "body: the connection was closed before its end") from None
    body = b"".join(chunks)
    chunks.clear()
    try:
        if size <= _SMALL_BYTES:  # a thread would cost more than the parsing
            return parse_body(body, kind)
        return await run_in_threadpool(parse_body, body, kind)
    except ValueError as error:
        raise HTTPException(400, f"body: {error}") from None
