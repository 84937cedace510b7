"""Refuse requests that must not reach the API.

The master runs commands that its users post, so it must authenticate them. Every program on this
machine and every web page in the user's browser can send requests to it.
:class:`~mlbench_master.access.credentials.Access` holds the secrets; :class:`GuardMiddleware`
refuses requests without them:

* A program sends the token in ``Authorization: Bearer``.
* A browser sends a cookie. It gets the cookie for the token, on the login page, or for a code in
  the address, which works once.
* A page of another site can make the browser send the cookie, so its requests are refused by their
  ``Origin`` header.

Without a token (``--no-token``), every user of this machine has access. A page that rebinds its
name to 127.0.0.1 is then refused by its ``Host`` header.
"""

from __future__ import annotations

import ipaddress
import re
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlbench_core.client.masters import NONCE_HEADER, PROOF_HEADER
from mlbench_master.access.credentials import GUESSES_S, Access

__all__ = ["TOO_MANY_GUESSES", "GuardMiddleware", "client_address", "refuse", "wants_page"]

TOO_MANY_GUESSES = {"Retry-After": f"{GUESSES_S:.0f}"}
"""Headers of the answer to a client that has guessed wrongly too often."""

_OPEN_PATHS = ("/api/health/", "/login/")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?")
# The pages load nothing from other servers, and no other page can frame them to catch clicks.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # With "no-referrer", a browser would send "Origin: null" with the forms of the master's pages.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class GuardMiddleware:
    """A middleware that refuses requests which must not reach the API; see the module's docstring.

    Args:
        app: The application behind it.
        access: Who may use the master.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400, 401, 403 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # Also with errors: a client must recognize a master whose database fails.
                proof = self._access.prove(Headers(scope=scope).get(NONCE_HEADER, ""), scope)
                if proof is not None:
                    headers[PROOF_HEADER] = proof
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                # Answers show users' data, which must not stay in a cache after a logout.
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_protected)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        path = scope["path"]
        # A proxy in front of the master may believe the other header, and see another request in
        # the body (request smuggling).
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "Content-Length: must be left out with Transfer-Encoding"
            return refuse(400, message, {"Connection": "close"})
        if self._access.token is None:
            if not _is_loopback_host(headers.get("host", "")):
                message = (
                    "Host: a master without a token answers only to localhost; "
                    "start it with a token"
                )
                return refuse(403, message)
        elif "authorization" in headers:
            address = client_address(scope)
            limited = self._access.limits_tokens_of(address)
            if limited and self._access.must_wait(address):
                message = (
                    "Authorization: too many wrong tokens came from this address; "
                    "try again in a minute"
                )
                return refuse(429, message, TOO_MANY_GUESSES)
            scheme, _, token = headers["authorization"].partition(" ")
            if scheme.lower() == "bearer" and self._access.accepts(token.strip()):
                # A page of another site does not have the token, so the Origin does not matter.
                return None
            if limited:
                self._access.count_guess(address)
            if path not in _OPEN_PATHS:
                return _unauthorized()
        elif not (
            path in _OPEN_PATHS or path.startswith("/static/") or self._access.has_session(headers)
        ):
            if wants_page(path, headers):
                return RedirectResponse("/login/", status_code=303)
            return _unauthorized()
        # Any web page can make a browser send a request, so only the master's own pages may write.
        origin = headers.get("origin")
        if scope["method"] in _SAFE_METHODS or origin is None or _same_origin(origin, headers):
            return None
        return refuse(403, f"Origin: {origin[:80]!r} may not write to this master")


def client_address(scope: Scope) -> str:
    """Return the address of the client of a request, empty if it is not known."""
    client = scope.get("client")
    return client[0] if client else ""


def wants_page(path: str, headers: Headers) -> bool:
    """Return True if a browser asks for a page, and not a program for data."""
    return not path.startswith(("/api/", "/static/")) and "text/html" in headers.get("accept", "")


def refuse(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the answer of the API to a request that is refused.

    Args:
        status: The status of the answer.
        message: The reason.
        headers: The headers of the answer.
    """
    content = {"status": HTTPStatus(status).phrase, "message": message}
    return JSONResponse(content, status_code=status, headers=headers)


def _unauthorized() -> JSONResponse:
    message = "Authorization: send the master's token as 'Bearer TOKEN'"
    return refuse(401, message, {"WWW-Authenticate": "Bearer"})


def _is_loopback_host(host: str) -> bool:
    """Accept only names that mean this machine everywhere."""
    # Anybody on a local network may answer for another name.
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _same_origin(origin: str, headers: Headers) -> bool:
    host = headers.get("host", "").lower()
    # Not other schemes: a page of a browser's extension does not belong to the master.
    return origin.lower() in (f"http://{host}", f"https://{host}")
