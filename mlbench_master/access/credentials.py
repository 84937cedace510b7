"""The secrets of a master: its token, the sessions of browsers, and the proof of its identity.

The secret and the sessions are kept in the master's data folder, which only its owner can read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from mlbench_core import files
from mlbench_core.addresses import is_loopback
from mlbench_core.client.masters import check_token, make_proof
from mlbench_core.errors import ConfigurationError

__all__ = ["CODE_S", "GUESSES_S", "Access", "make_private", "random_token"]

_log = logging.getLogger("mlbench_master")

CODE_S = 600.0
"""Time in which a code of an address must be used, in seconds."""

GUESSES_S = 60.0
"""Time for which wrong guesses of a token count, in seconds."""

_SESSION_S = 7 * 86_400.0
# More would be kept only for somebody who logs in without end.
_MAX_SESSIONS = 1000
_MAX_CODES = 100
_MAX_GUESSES = 10
_MAX_ADDRESSES = 10_000
_NONCE = re.compile(r"[0-9a-f]{32,64}")


def make_private(folder: Path) -> None:
    """Create the master's data folder so that only its owner can read it, or tighten it.

    Raises:
        ConfigurationError: The folder is shared by design, such as ``/tmp``, or belongs to another
            user.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = folder.stat().st_mode
    if mode & 0o1000:
        # All users write there. To make it private would break their programs.
        raise ConfigurationError(
            f"{folder} is shared by all users: choose a private folder with --data-dir"
        )
    if os.name == "posix" and mode & 0o077:
        try:
            folder.chmod(0o700)
        except PermissionError:
            raise ConfigurationError(
                f"{folder} belongs to another user, who could read the token: "
                "choose another with --data-dir"
            ) from None
    # Files of earlier versions. Nobody reaches them in the folder, but a copy of it keeps modes.
    for path in (*folder.glob("master.db*"), *folder.glob("*.log")):
        path.chmod(0o600)


def random_token(folder: Path) -> str:
    """Return the token of a master to which the user gave none.

    It stays the same as long as the data folder exists, so workers go on reporting after a restart
    of the master.
    """
    return _derive(_secret(folder), "token")


def _secret(folder: Path) -> str:
    path = folder / "secret"
    try:
        # O_EXCL refuses a link that somebody else has put there.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        path.chmod(0o600)
    text = path.read_text().strip()
    if len(text) < 64:  # an interrupted write; a short secret can be guessed
        raise ConfigurationError(f"{path} is damaged: delete it, and the master makes a new token")
    return text


def _derive(secret: str, purpose: str) -> str:
    # A value for one purpose does not reveal the secret or the value for another purpose.
    return hmac.new(secret.encode(), f"mlbench {purpose}".encode(), hashlib.sha256).hexdigest()


class Access:
    """Who may use a master.

    Sessions are kept in the data folder, so a browser stays logged in while the master restarts.

    Args:
        folder: The master's data folder.
        token: The token, or None if every user of this machine may use the master.

    Attributes:
        token: The token, or None.
        key: The key with which the master proves its identity to clients.
        cookie: The name of the cookie. Cookies do not belong to a port, so two masters on one host
            need two names.

    Raises:
        MasterTokenError: The token has characters that a request cannot carry.
    """

    def __init__(self, folder: Path, token: str | None) -> None:
        self.token = None if token is None else check_token(token)
        secret = _secret(folder)
        self.key = _derive(secret, "key")
        self.cookie = f"mlbench_session_{_derive(secret, 'cookie')[:12]}"
        # Guesses are limited for a token that a user chose, which may be short.
        self._is_random = token == _derive(secret, "token")
        self._path = folder / "sessions.json"
        self._lock = threading.Lock()
        self._codes: dict[str, float] = {}
        self._guesses: dict[str, list[float]] = {}
        try:
            kept = json.loads(self._path.read_text())
            self._sessions = {str(digest): float(end) for digest, end in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._sessions = {}

    def accepts(self, text: str) -> bool:
        """Return True if a text is the token."""
        # In constant time, so that an attacker cannot find the token byte by byte.
        return self.token is not None and hmac.compare_digest(_bytes(text), _bytes(self.token))

    def new_code(self) -> str:
        """Return a code that logs a browser in once."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._codes[code] = time.monotonic() + CODE_S
            _drop_oldest(self._codes, _MAX_CODES)
        return code

    def redeem(self, code: str) -> bool:
        """Return True if a code is valid; it is not valid a second time."""
        with self._lock:
            # Removed before the check, so that two requests cannot both use it.
            end = self._codes.pop(code, None)
        return end is not None and time.monotonic() <= end

    def open_session(self) -> str:
        """Return the value of a cookie for a browser that has logged in."""
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            now = time.time()
            self._sessions = {digest: end for digest, end in self._sessions.items() if end > now}
            self._sessions[_digest(cookie)] = now + _SESSION_S
            _drop_oldest(self._sessions, _MAX_SESSIONS)
            self._save()
        return cookie

    def has_session(self, headers: Headers) -> bool:
        """Return True if a request has the cookie of a browser that is logged in."""
        end = self._sessions.get(_digest(self._cookie_of(headers)))
        return end is not None and time.time() < end

    def close_session(self, headers: Headers) -> None:
        """Forget the session of a browser, also after a restart."""
        with self._lock:
            if self._sessions.pop(_digest(self._cookie_of(headers)), None) is None or self._save():
                return
            # A full disk takes no new file, but gives up the old one. The other browsers stay
            # logged in until a restart.
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                text = "a logout ends with this master, because %s cannot be deleted: %s"
                _log.error(text, self._path, error)

    def must_wait(self, address: str) -> bool:
        """Return True if a client has guessed wrongly too often within a minute."""
        with self._lock:
            times = self._guesses.get(_network(address), [])
        if len(times) < _MAX_GUESSES:
            return False
        return time.monotonic() - times[-_MAX_GUESSES] < GUESSES_S

    def limits_tokens_of(self, address: str) -> bool:
        """Return True if also tokens in headers count as guesses.

        On loopback they do not: all users of this machine share the address, so one of them could
        lock out the others.
        """
        return not self._is_random and not is_loopback(address)

    def count_guess(self, address: str) -> None:
        """Count a wrong guess."""
        with self._lock:
            network = _network(address)
            times = self._guesses.pop(network, [])  # removed, so that it moves to the end
            self._guesses[network] = [*times[1 - _MAX_GUESSES :], time.monotonic()]
            _drop_oldest(self._guesses, _MAX_ADDRESSES)

    def prove(self, nonce: str, scope: Scope) -> str | None:
        """Return the proof of the master's identity for the connection of a request.

        Args:
            nonce: The random text of the client.
            scope: The request.

        Returns:
            The proof, or None for a malformed nonce.
        """
        server = scope.get("server")
        if not server or server[1] is None or not _NONCE.fullmatch(nonce):
            return None
        return make_proof(self.key, nonce, server[0], server[1])

    def _cookie_of(self, headers: Headers) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _save(self) -> bool:
        """Write the sessions; return False if the disk does not take them."""
        try:
            # Only digests: a reader of the file or of its backup cannot log in with them.
            with files.replacing(self._path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps(self._sessions))
        except OSError as error:
            # The sessions in memory stay valid.
            text = "logins are lost when the master ends, because %s cannot be written: %s"
            _log.warning(text, self._path, error)
            return False
        return True


def _network(address: str) -> str:
    """Return the part of an address that one client cannot change: of IPv6, the first 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    # A client usually has a whole network of 64 bits, and can use each address in it.
    return parsed.exploded[:19]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _digest(cookie: str) -> str:
    return hashlib.sha256(_bytes(cookie)).hexdigest()


def _drop_oldest(items: MutableMapping[str, Any], most: int) -> None:
    while len(items) > most:
        del items[next(iter(items))]
