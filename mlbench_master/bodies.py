"""Reads a request's body: JSON or a form, whatever its sender calls it."""

from __future__ import annotations

import json
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request

__all__ = ["parse_body", "read_body"]

_MAX_BODY_BYTES = 64 * 2**20
_MAX_FIELDS = 1000


async def read_body(request: Request) -> Any:
    """Read and parse a request's body; a dependency of the routes that take one.

    Args:
        request: The request.

    Returns:
        What :func:`parse_body` returns.

    Raises:
        HTTPException: 400 for a body that cannot be parsed, 413 for one that is too long.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MAX_BODY_BYTES:
            raise HTTPException(413, f"body: at most {_MAX_BODY_BYTES} bytes, send it in parts")
        chunks.append(chunk)
    try:
        return parse_body(b"".join(chunks), request.headers.get("content-type", ""))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: {error}") from None


def parse_body(body: bytes, content_type: str) -> Any:
    """Parse a body.

    Args:
        body: The bytes.
        content_type: The header; an unknown one means: JSON if it looks like it, else a form.

    Returns:
        What JSON held; a form as a dictionary of texts.

    Raises:
        ValueError: It is neither.

    Example:
        >>> parse_body(b"name=my-run&num_workers=2", "application/x-www-form-urlencoded")
        {'name': 'my-run', 'num_workers': '2'}
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _parse_multipart(body, content_type)
    looks_like_json = body.lstrip()[:1] in (b"{", b"[")
    if kind.endswith("json") or (kind != "application/x-www-form-urlencoded" and looks_like_json):
        try:
            return json.loads(body.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"is no JSON: {error}") from None
    try:
        text = body.decode("utf-8")
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def _parse_multipart(body: bytes, content_type: str) -> dict[str, str]:
    header = b"Content-Type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n"
    message: Message = BytesParser(policy=HTTP).parsebytes(header + body)
    if not message.is_multipart():
        raise ValueError("is no multipart form")
    fields: dict[str, str] = {}
    for part in message.get_payload():
        name = part.get_param("name", header="content-disposition") if isinstance(part, Message) else None
        if not isinstance(part, Message) or not isinstance(name, str):
            raise ValueError("has a part without a name")
        content = part.get_payload(decode=True)
        try:
            fields[name] = content.decode("utf-8") if isinstance(content, bytes) else ""
        except UnicodeDecodeError:
            raise ValueError(f"the field {name!r} is not UTF-8") from None
    return fields
