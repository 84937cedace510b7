"""Measure a link between two hosts.

Usage: ``python probe.py receive|send|echo|ping|count|shoot ADDRESS VALUES...``. The first program
of a pair runs on the host with ADDRESS, the second one on the other host. They import only the
standard library, so they start quickly. Results are one line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable

_PORT = 29_400
_BLOCK_BYTES = 2**20
_TIMEOUT_S = 60.0
_DATAGRAM = bytes(100)
_END = b"end"


def _write(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def _listen(address: str) -> socket.socket:
    server = socket.create_server((address, _PORT))
    server.settimeout(_TIMEOUT_S)
    _write("ready")
    connection, _ = server.accept()
    connection.settimeout(_TIMEOUT_S)
    # The byte of a ping must not wait until there are more to send.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect(address: str) -> socket.socket:
    connection = socket.create_connection((address, _PORT), timeout=_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(address: str, skip_s: str, duration_s: str) -> None:
    """Write the bits per second that one connection receives."""
    buffer = bytearray(_BLOCK_BYTES)
    with _listen(address) as connection:
        # In this time, TCP finds the bandwidth.
        start = time.perf_counter()
        while time.perf_counter() - start < float(skip_s):
            connection.recv_into(buffer)
        start, received = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < float(duration_s):
            received += connection.recv_into(buffer)
    _write(received * 8 / spent)


def _send(address: str) -> None:
    block = bytes(_BLOCK_BYTES)
    with _connect(address) as connection, contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(block)


def _echo(address: str) -> None:
    with _listen(address) as connection, contextlib.suppress(ConnectionError):
        while content := connection.recv(1):
            connection.sendall(content)


def _ping(address: str, count: str) -> None:
    """Write the seconds of round trips of one byte."""
    times = []
    with _connect(address) as connection:
        # The first one may wait for the address of the other host.
        for _ in range(int(count) + 1):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
    _write(times[1:])


def _count(address: str) -> None:
    """Write the number of datagrams that arrive before the end is reported."""
    received = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, _PORT))
        server.settimeout(_TIMEOUT_S)
        _write("ready")
        while server.recv(len(_DATAGRAM)) != _END:
            received += 1
    _write(received)


def _shoot(address: str, count: str, interval_s: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for _ in range(int(count)):
            client.sendto(_DATAGRAM, (address, _PORT))
            time.sleep(float(interval_s))
        # Several, because the link loses some. The first one must not overtake a datagram: frames
        # stay in order.
        for _ in range(50):
            client.sendto(_END, (address, _PORT))
            time.sleep(float(interval_s))


_PROBES: dict[str, Callable[..., None]] = {
    "receive": _receive,
    "send": _send,
    "echo": _echo,
    "ping": _ping,
    "count": _count,
    "shoot": _shoot,
}


if __name__ == "__main__":
    _PROBES[sys.argv[1]](*sys.argv[2:])
