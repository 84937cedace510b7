"""Authenticate requests to the master.

The master runs commands that its users post, so it must authenticate them. If it has a token, each request carries it
in ``Authorization: Bearer``, and a browser gets a cookie from the login page. Without a token, the master listens on
loopback only. The remaining danger is then a foreign web page in the user's own browser:

* A page that rebinds its name to 127.0.0.1 is refused by its ``Host`` header.
* A page that posts across origins is refused by its ``Origin`` header.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlbench_core.addresses import is_loopback

__all__ = ["COOKIE", "GuardMiddleware", "session_cookie", "token_matches"]

COOKIE = "mlbench_session"
_OPEN_PATHS = ("/api/health/", "/login/")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def token_matches(given: str, token: str) -> bool:
    """Compare two secrets in constant time, so that an attacker cannot find a secret byte by byte."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode("utf-8", "surrogateescape"))


def session_cookie(token: str) -> str:
    """Return the cookie of a browser that has sent the token; the token cannot be derived from it."""
    return hmac.new(token.encode(), b"mlbench dashboard session", hashlib.sha256).hexdigest()


class GuardMiddleware:
    """A middleware that refuses requests which must not reach the API; see the module's docstring.

    Args:
        app: The application behind it.
        token: The secret, or None if the master listens on loopback only.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        path = scope["path"]
        if self._token is None:
            if not _is_local_name(headers.get("host", "")):
                return _refuse(
                    403, "Forbidden", "Host: a master without a token answers only to localhost; start it with --token"
                )
        elif self._has_bearer(headers):
            return None
        elif not self._has_cookie(headers) and path not in _OPEN_PATHS:
            if not path.startswith("/api/") and "text/html" in headers.get("accept", ""):
                return RedirectResponse("/login/", status_code=303)
            return _refuse(
                401,
                "Unauthorized",
                "Authorization: send the master's token as 'Bearer TOKEN'",
                {"WWW-Authenticate": "Bearer"},
            )
        # Any web page can make a browser send a request, so only the master's own pages may write.
        origin = headers.get("origin")
        if scope["method"] not in _SAFE_METHODS and origin is not None and not _same_origin(origin, headers):
            return _refuse(403, "Forbidden", f"Origin: {origin[:80]!r} may not write to this master")
        return None

    def _has_bearer(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token_matches(given.strip(), self._token or "")

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and token_matches(morsel.value, session_cookie(self._token or ""))


def _is_local_name(host: str) -> bool:
    """Accept loopback and names without a dot, which no public DNS server resolves and nobody can rebind."""
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return bool(name) and (is_loopback(name) or ("." not in name and ":" not in name))


def _same_origin(origin: str, headers: Headers) -> bool:
    _, separator, place = origin.partition("://")
    return bool(separator) and place.lower() == headers.get("host", "").lower()


def _refuse(status: int, phrase: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"status": phrase, "message": message}, status_code=status, headers=headers)
