"""Read the body of a request: JSON or a URL-encoded form.

Multipart forms are refused: no client of the master sends files, and a crafted form is costly to parse.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request

__all__ = ["parse_body", "read_body", "read_login"]

_MAX_BODY_BYTES = 64 * 2**20
# A metric has at most two texts of 65,536 characters. URL encoding needs up to 12 bytes per character.
_MAX_FORM_BYTES = 2 * 2**20
_MAX_LOGIN_BYTES = 4096
_MAX_FIELDS = 1000
_FORM = "application/x-www-form-urlencoded"


async def read_body(request: Request) -> Any:
    """Read and parse the body of a request, as a dependency of routes.

    Args:
        request: The request.

    Returns:
        The value that :func:`parse_body` returns.

    Raises:
        HTTPException: 400 if the body cannot be parsed, 413 if it is too long, 415 if it is a multipart form.
    """
    kind = _kind(request)
    if kind.startswith("multipart/"):
        raise HTTPException(415, f"Content-Type: must be application/json or {_FORM}, not {kind[:80]!r}")
    return await _read(request, kind, _MAX_FORM_BYTES if kind == _FORM else _MAX_BODY_BYTES)


async def read_login(request: Request) -> dict[str, str]:
    """Read the form of the login page, as a dependency of its route, which needs no token.

    Args:
        request: The request.

    Returns:
        The fields of the form.

    Raises:
        HTTPException: 400 if the body cannot be parsed, 413 if it has more than 4096 bytes, 415 if it is not
            URL-encoded.
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
        kind: The content type without parameters. A body of an unknown type is JSON if it begins like an object or a
            list, and a form otherwise.

    Returns:
        The JSON value, or the fields of the form as a dictionary of texts.

    Raises:
        ValueError: The body is neither JSON nor a form.

    Example:
        >>> parse_body(b"name=my-run&num_workers=2", "application/x-www-form-urlencoded")
        {'name': 'my-run', 'num_workers': '2'}
    """
    is_json = kind.endswith("json") or (kind != _FORM and body.lstrip()[:1] in (b"{", b"["))
    try:
        text = body.decode("utf-8-sig" if is_json else "utf-8")
        if is_json:
            return json.loads(text)
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS))
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, kind: str, max_bytes: int) -> Any:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise HTTPException(413, f"body: must have at most {max_bytes} bytes: send it in parts")
        chunks.append(chunk)
    try:
        return parse_body(b"".join(chunks), kind)
    except (ValueError, RecursionError) as error:  # deeply nested JSON exceeds the recursion limit
        raise HTTPException(400, f"body: {error}") from None
