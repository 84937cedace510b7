"""Find the masters that this user runs on this machine, with the secrets that their clients need.

A running master keeps a record in the user's folder: its address, its process, its token and its
key. Only the user can read it. A client that finds the record of its address sends the token from
there, so a user need not copy it.

A record can be stale: the master was killed, and a program of another user has its port or its
process id. Two checks keep the token away from such a program. A process is the one of the record
only if it also started at the recorded time. And a server must prove on each new connection that it
knows the key, before the client sends anything else::

    client --- GET /api/health/, header X-MLBench-Nonce: NONCE -------------------> server
    client <-- header X-MLBench-Proof: HMAC(key, NONCE, the server's address) ----- server
    client --- requests with the token -------------------------------------------> server

The address in the proof is the one at which the connection arrived. A server at another address,
which passes the nonce on to the real master, therefore gets a proof that its own client refuses.
The key is not the token: with the proof of a short token that a user chose, anybody could try all
short tokens without asking the master.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mlbench_core.addresses import is_loopback
from mlbench_core.client import settings
from mlbench_core.client.clusters import read_clusters
from mlbench_core.errors import MasterTokenError
from mlbench_core.paths import user_folder

__all__ = [
    "KEY_VARIABLE",
    "NONCE_HEADER",
    "PROOF_HEADER",
    "Credentials",
    "MasterRecord",
    "boot_id",
    "check_token",
    "find_credentials",
    "forget_master",
    "make_proof",
    "read_record",
    "remember_master",
    "start_mark",
]

KEY_VARIABLE = "MLBENCH_MASTER_KEY"
"""Environment variable with the key of the master that ``MLBENCH_MASTER_URL`` names.

The master sets it for its workers.
"""

NONCE_HEADER = "X-MLBench-Nonce"
"""Header of a request that demands the proof."""

PROOF_HEADER = "X-MLBench-Proof"
"""Header of the answer with the proof."""


class MasterRecord(NamedTuple):
    """The record of a running master.

    Attributes:
        url: Its address.
        pid: Its process id.
        started: The mark of its start, see :func:`start_mark`.
        token: The token that it demands, or None.
        key: The key with which it proves its identity.
        folder: Its data folder; None in records of earlier versions.
        engine: The name of its engine.
    """

    url: str
    pid: int
    started: str
    token: str | None
    key: str
    folder: str | None = None
    engine: str = "local"

    def is_alive(self) -> bool:
        """Return True if the process that wrote the record is running on this machine."""
        return start_mark(self.pid) == self.started


class Credentials(NamedTuple):
    """The secrets for one master.

    Attributes:
        token: The token to send, or None.
        key: The key that the server must know before the token is sent, or None if the server need
            not prove anything.
    """

    token: str | None
    key: str | None


def find_credentials(url: str, token: str | None = None) -> Credentials:
    """Return the secrets for a master of which only the address is known.

    Args:
        url: The address.
        token: The token that the user gave, if any; it is preferred to a recorded one.
    """
    server = _server_of(url)
    for record in _records():
        if not _same_server(_server_of(record.url), server):
            continue
        # A stale record of this machine may name a port that another user's program has now.
        if record.is_alive() or not is_loopback(server[1]):
            return Credentials(token or record.token, record.key)
    for cluster in read_clusters().values():
        if _same_server(_server_of(cluster.url), server):
            return Credentials(token or cluster.token, cluster.key)
    if token is None:
        chosen = settings.read(settings.SETTINGS)
        if chosen.get("master_url") and _server_of(str(chosen["master_url"])) == server:
            token = chosen.get("token") or None
    key = None
    # A worker outlives its master's record: the master may have ended, and another program may have
    # its port.
    if _server_of(os.environ.get("MLBENCH_MASTER_URL") or "") == server:
        key = os.environ.get(KEY_VARIABLE) or None
    return Credentials(token, key)


def read_record(name: str = settings.MASTER) -> MasterRecord | None:
    """Return the record in a file of the user's folder, or None if it is missing or damaged."""
    values = settings.read(name)
    for field, kind in (("url", str), ("pid", int), ("started", str), ("key", str)):
        if not isinstance(values.get(field), kind):
            return None
    # A master may have no token, and records of earlier versions lack the other two.
    for field in ("token", "folder", "engine"):
        if not isinstance(values.get(field), str):
            values[field] = None
    values["engine"] = values["engine"] or "local"
    return MasterRecord(**{field: values[field] for field in MasterRecord._fields})


def remember_master(
    url: str,
    pid: int,
    token: str | None,
    key: str,
    folder: str | None = None,
    engine: str = "local",
) -> None:
    """Write the record of a master that has started."""
    # The first running master is the one that the command uses. Others are found by their
    # addresses.
    first = read_record()
    name = settings.MASTER
    if first is not None and first.is_alive() and first.pid != pid:
        name = f"master-{_server_of(url)[2]}.json"
    record = MasterRecord(url, pid, start_mark(pid) or "", token, key, folder, engine)
    settings.remember(name, record._asdict())


def forget_master(pid: int) -> None:
    """Remove the records of a master."""
    for name in _record_names():
        if settings.read(name).get("pid") == pid:
            settings.forget(name)


def make_proof(key: str, nonce: str, address: str, port: int) -> str:
    """Return the proof that a server knows a key.

    Args:
        key: The key.
        nonce: The number that the client has chosen for this connection.
        address: The IP address of the server, at which the connection arrived.
        port: The port of the server.

    Example:
        >>> proof = make_proof("key", "0a", "127.0.0.1", 80)
        >>> proof == make_proof("key", "0a", "::ffff:127.0.0.1", 80)
        True
    """
    # The two ends of a connection may write one address differently: a zone after "%", IPv4 within
    # IPv6.
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        address = str(getattr(parsed, "ipv4_mapped", None) or parsed)
    message = f"mlbench master {nonce} {address} {port}"
    return hmac.new(key.encode(), message.encode(), hashlib.sha256).hexdigest()


def check_token(token: str) -> str:
    """Return a token that can be sent in the header of a request.

    Raises:
        MasterTokenError: It cannot. The message does not show it.
    """
    if not token or not all("!" <= character <= "~" for character in token):
        raise MasterTokenError(
            "token must be one or more printable ASCII characters without blanks and line "
            "breaks: correct --token, --token-file, MLBENCH_TOKEN or the argument token"
        )
    return token


def start_mark(pid: int) -> str | None:
    """Return a text that no other process with this id has; None if the process has ended.

    It does not change when the clock is set. A start time in seconds would: Linux has only the time
    since boot, and the time of the boot moves with the clock.

    Args:
        pid: The process id.
    """
    import psutil

    try:
        if sys.platform.startswith("linux"):
            # The name in parentheses may contain blanks and parentheses. Field 3 is the state, 22
            # the start in ticks.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            # A zombie, or a process that is being removed.
            if fields[0] in (b"Z", b"X"):
                return None
            return f"{boot_id()}-{int(fields[19])}"
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return repr(process.create_time())
    except (OSError, IndexError, ValueError, psutil.Error):
        return None


@functools.cache
def boot_id() -> str:
    """Return the id of the machine's boot, or an empty text if the system has none.

    Ticks count from the boot, so another boot may give the same process id and the same ticks.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _record_names() -> list[str]:
    return sorted(path.name for path in user_folder().glob("master*.json"))


def _records() -> Iterator[MasterRecord]:
    for name in _record_names():
        record = read_record(name)
        if record is not None:
            yield record


def _server_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of an address; the port is 0 if it is not an address."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return parts.scheme, parts.hostname or "", port
    except ValueError:
        return "", "", 0


def _same_server(one: Any, other: Any) -> bool:
    # localhost and 127.0.0.1 are usually one address. If they are not, the proof fails.
    same_host = one[1] == other[1] or (is_loopback(one[1]) and is_loopback(other[1]))
    return bool(same_host and (one[0], one[2]) == (other[0], other[2]))
