"""Exchange the addresses of all workers, for a framework that needs them at its start.

A launcher gives every worker the address of rank 0 only. The workers meet there once::

    rank 0                                   rank r
    listen on MASTER_ADDR:MASTER_PORT        choose a free port
    wait for one line of each rank     <---  {"rank": r, "port": p}
    send the list to all               --->  ["host0:port0", "host1:port1", ...]

Rank 0 takes the host of a worker from its connection. If that is a loopback address, which other
machines cannot reach, the worker is on the machine of rank 0 and gets its host. Lines that are not
of this form are ignored, because another program may connect to the port. This module imports no
framework.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

from mlbench_core.addresses import is_loopback
from mlbench_core.distributed import environment
from mlbench_core.errors import WorkerError

__all__ = ["worker_addresses"]

_RETRY_S = 0.1
# A connection that sends nothing must not keep the others waiting.
_LINE_TIMEOUT_S = 5.0
# Limits for lines without an end, which another program may send.
_MOST_LINE_BYTES = 256
_MOST_ADDRESS_BYTES = 512


@contextlib.contextmanager
def worker_addresses(place: environment.Place, timeout_s: float) -> Iterator[list[str]]:
    """Exchange the addresses of all workers; each calls it at the same time.

    Args:
        place: This worker's place. Rank 0 listens on its ``master_address`` and ``master_port``.
        timeout_s: Seconds to wait for the other workers.

    Yields:
        ``host:port`` of each worker by rank. Its own port is reserved for this process until the
        end of the block. A server that reuses addresses, such as that of TensorFlow, can listen on
        it.

    Raises:
        WorkerError: A worker did not arrive in time, or two workers have the same rank.

    Example:
        >>> place = environment.Place(rank=0, world_size=1)
        >>> with worker_addresses(place, timeout_s=1) as addresses:
        ...     addresses[0].partition(":")[0]
        '127.0.0.1'
    """
    host = place.master_address or "127.0.0.1"
    # The bound socket reserves the port until the end of the block; it never listens.
    with socket.socket(_family(host)) as reserved:
        # Linux lets a second socket bind this port only if both set the option and none of them
        # listens. So the server of the framework can take the port before this socket is closed.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        port = int(reserved.getsockname()[1])
        if place.world_size == 1:
            yield [_join(host, port)]
        elif place.rank == 0:
            yield _collect(place, host, port, timeout_s)
        else:
            yield _ask(place, host, port, timeout_s)


def _collect(place: environment.Place, host: str, port: int, timeout_s: float) -> list[str]:
    """Wait for the line of every other rank, and send the list to all of them."""
    deadline = time.monotonic() + timeout_s
    arrived = {0: _join(host, port)}
    # With a loopback address, all workers are on this machine, and need no other interface.
    listen = ""
    if is_loopback(host):
        listen = host
    with contextlib.ExitStack() as stack:
        server = socket.create_server((listen, place.master_port), family=_family(host))
        stack.enter_context(server)
        waiting = []
        while len(arrived) < place.world_size:
            # Never 0, which would make the socket non-blocking, and accept() raise another error.
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, peer = server.accept()
            except TimeoutError:
                missing = map(str, sorted(set(range(place.world_size)).difference(arrived)))
                raise WorkerError(
                    f"no message of rank {', '.join(missing)} arrived at "
                    f"{_join(host, place.master_port)} within "
                    f"{timeout_s:g} s: check that all {place.world_size} workers were started"
                ) from None
            # It stays open until all ranks are here, because the list travels back on it.
            stack.enter_context(connection)
            line = _read_message(connection, place.world_size, deadline)
            if line is None:
                continue
            rank, its_port = line
            if rank in arrived:
                raise WorkerError(
                    f"two workers have the rank {rank}: give each of the workers another rank"
                )
            # The connection shows the address at which a worker is reached; it may not know it
            # itself. On Debian, the name of a machine is 127.0.1.1 for its own programs.
            its_host = str(peer[0])
            if is_loopback(its_host):
                its_host = host
            arrived[rank] = _join(its_host, its_port)
            waiting.append(connection)
        addresses = [arrived[rank] for rank in range(place.world_size)]
        for connection in waiting:
            connection.settimeout(_LINE_TIMEOUT_S)
            connection.sendall(json.dumps(addresses).encode() + b"\n")
    return addresses


def _read_line(connection: socket.socket, most_bytes: int, deadline: float) -> bytes:
    """Return a line that arrives before a deadline of the monotonic clock."""
    line = b""
    while not line.endswith(b"\n") and len(line) < most_bytes:
        # The timeout of a socket is that of one call, and each call may return a single byte.
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(most_bytes - len(line))
        if not part:
            break
        line += part
    return line


def _read_message(
    connection: socket.socket, world_size: int, deadline: float
) -> tuple[int, int] | None:
    """Return the rank and the port that a worker sent, or None for anything else."""
    deadline = min(deadline, time.monotonic() + _LINE_TIMEOUT_S)
    try:
        message = json.loads(_read_line(connection, _MOST_LINE_BYTES, deadline))
        rank, port = message["rank"], message["port"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # Not isinstance(), for which True is an integer.
    if type(rank) is not int or type(port) is not int:
        return None
    # Rank 0 is this process.
    is_valid = 0 < rank < world_size and 0 < port < 65536
    if not is_valid:
        return None
    return rank, port


def _ask(place: environment.Place, host: str, port: int, timeout_s: float) -> list[str]:
    """Send this worker's port to rank 0, and wait for the list."""
    deadline = time.monotonic() + timeout_s
    while True:
        # Rank 0 may start later than this worker.
        try:
            left_s = max(0.001, deadline - time.monotonic())
            connection = socket.create_connection((host, place.master_port), left_s)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"rank 0 does not listen on {_join(host, place.master_port)} after "
                    f"{timeout_s:g} s ({error.strerror or error}): check that it was "
                    "started, and MASTER_ADDR and MASTER_PORT"
                ) from None
            time.sleep(_RETRY_S)
    with connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection.sendall(json.dumps({"rank": place.rank, "port": port}).encode() + b"\n")
            most_bytes = _MOST_ADDRESS_BYTES * place.world_size
            addresses = json.loads(_read_line(connection, most_bytes, deadline))
        except (OSError, ValueError):
            raise WorkerError(
                f"rank 0 at {_join(host, place.master_port)} sent no "
                "list of workers: read the error of rank 0"
            ) from None
    return list(map(str, addresses))


def _family(host: str) -> socket.AddressFamily:
    if ":" in host:
        return socket.AF_INET6
    return socket.AF_INET


def _join(host: str, port: int) -> str:
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"
