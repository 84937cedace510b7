"""Serve the master below a path, for proxies that give other programs the paths beside it.

JupyterHub, Open OnDemand and an Ingress serve the master at an address such as
``https://HOST/user/me/proxy/5080/``. This path, the root path, comes from ``--root-path``, or from
the header ``X-Forwarded-Prefix`` of the proxy. Every path that an answer contains then begins with
it: those in pages, redirects, cookies, links to further entries and the description of the API.
Scripts find it in their own address.

A proxy may remove the root path from the requests that it passes on, or not.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlbench_core.errors import ConfigurationError

__all__ = ["RootPathMiddleware", "check_root_path", "root_path"]

# The header reaches pages and headers of the answer, so characters with a meaning there are
# refused. Two slashes are refused because a browser would expect the name of a server after them.
_ROOT_PATH = re.compile(r"(?:/(?:[A-Za-z0-9._~@+,:=-]|%[0-9A-Fa-f]{2})+)+")
_LONGEST = 500
_COOKIE_PATH = re.compile(rb"(?i)(;\s*path=)/(?=;|$)")
_LINKED_PATH = re.compile(rb"<(?=/)")


def check_root_path(text: str) -> str:
    """Return a root path without a final slash; empty for ``/``.

    Raises:
        ConfigurationError: The text is not such a path.

    Example:
        >>> check_root_path("/user/me/proxy/5080/")
        '/user/me/proxy/5080'
    """
    path = text.removesuffix("/")
    steps = unquote(path).split("/")
    is_path = _ROOT_PATH.fullmatch(path) and len(path) <= _LONGEST
    # A browser resolves steps such as "..", also encoded ones.
    if path and (not is_path or "." in steps or ".." in steps):
        raise ConfigurationError(
            f"--root-path must be a path such as /user/me/proxy/5080, not {text[:80]!r}"
        )
    return path


class RootPathMiddleware:
    """A middleware that removes the root path from requests, and adds it to the headers of answers.

    The pages find it with :func:`root_path`.

    Args:
        app: The application behind it.
        root_path: The root path; with an empty one, that of the proxy's header counts.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request and the answer on."""
        root = ""
        if scope["type"] == "http":
            root = self._root_path or _forwarded(scope)
        if not root:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        # In the scope, the path is not quoted.
        rest = path.removeprefix(unquote(root))
        # The root path /user/me is not a part of /user/me2.
        if rest != path and rest[:1] in ("", "/"):
            path = rest or "/"
        raw_path = path.encode("utf-8", "replace")
        scope = {**scope, "mlbench_root": root, "path": path, "raw_path": raw_path}
        prefix = root.encode()

        async def send_with_root(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [_with_root(name, value, prefix) for name, value in message["headers"]]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_root)


def root_path(scope: Scope) -> str:
    """Return the root path of a request, which is empty for a master that has no path above it."""
    return str(scope.get("mlbench_root", ""))


def _forwarded(scope: Scope) -> str:
    try:
        return check_root_path(Headers(scope=scope).get("x-forwarded-prefix", ""))
    except ConfigurationError:
        return ""


def _with_root(name: bytes, value: bytes, root: bytes) -> tuple[bytes, bytes]:
    # After two slashes comes the name of a server.
    if name == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
        value = root + value
    elif name == b"link":
        value = _LINKED_PATH.sub(b"<" + root, value)
    elif name == b"set-cookie":
        # Other programs behind the proxy do not get the cookie.
        value = _COOKIE_PATH.sub(rb"\g<1>" + root, value)
    return name, value
