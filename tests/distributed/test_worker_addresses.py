"""Workers exchange their addresses through rank 0."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlbench_core.distributed import worker_addresses as worker_addresses_module
from mlbench_core.distributed.environment import Place
from mlbench_core.distributed.worker_addresses import worker_addresses
from mlbench_core.errors import WorkerError
from tests.helpers.processes import free_port


def exchange(
    rank: int, world_size: int, port: int, timeout_s: float = 30.0, host: str = "127.0.0.1"
) -> list[str]:
    with worker_addresses(Place(rank, world_size, 0, host, port), timeout_s) as addresses:
        # The own port is kept for this process, and a server that reuses addresses can listen on
        # it.
        own = int(addresses[rank].rpartition(":")[2])
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("", own))
        socket.create_server(("", own)).close()
        return addresses


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_workers_get_the_same_list(world_size: int) -> None:
    port = free_port()
    with ThreadPoolExecutor(world_size) as pool:
        # The last ranks first, because rank 0 may start later than they do.
        started = [
            pool.submit(exchange, rank, world_size, port) for rank in reversed(range(world_size))
        ]
        lists = [one.result() for one in started]
    assert lists == [lists[0]] * world_size
    assert len(set(lists[0])) == world_size
    assert all(address.startswith("127.0.0.1:") for address in lists[0])


def test_a_worker_of_rank_0s_machine_has_an_address_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Debian, ``/etc/hosts`` has 127.0.1.1 for the name of its own machine."""
    find, port = socket.getaddrinfo, free_port()

    def find_node1(host: str, *rest: Any, **more: Any) -> list[Any]:
        return find("127.0.1.1" if host == "node1" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", find_node1)
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(exchange, rank, 2, port, host="node1") for rank in range(2)]
        lists = [one.result() for one in started]
    assert lists[0] == lists[1]
    assert [address.partition(":")[0] for address in lists[0]] == ["node1", "node1"]


def test_rank_0_names_the_workers_that_are_missing() -> None:
    port = free_port()
    with pytest.raises(
        WorkerError, match=rf"no message of rank 1, 2 arrived at 127\.0\.0\.1:{port} within 0\.2 s"
    ):
        exchange(0, 3, port, 0.2)


def test_a_worker_says_that_rank_0_is_missing() -> None:
    port = free_port()
    with pytest.raises(
        WorkerError,
        match=rf"rank 0 does not listen on 127\.0\.0\.1:{port} after 0\.2 s .*MASTER_PORT",
    ):
        exchange(1, 2, port, 0.2)


def send(port: int, *lines: bytes) -> list[socket.socket]:
    found = []
    for line in lines:
        connection = socket.create_connection(("127.0.0.1", port), 10)
        connection.sendall(line + b"\n")
        found.append(connection)
    return found


def test_messages_of_other_programs_are_ignored() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange, 0, 2, port)
        connections: list[socket.socket] = []
        while not connections:
            try:
                connections = send(
                    port,
                    b"GET / HTTP/1.1",
                    b"[1]",
                    b'{"rank": 0, "port": 5}',
                    b'{"rank": 7, "port": 5}',
                    b'{"rank": 1, "port": 0}',
                    b'{"rank": true, "port": 5}',
                    b'{"rank": 1, "port": "' + b"5" * 1000 + b'"}',
                )
            except ConnectionRefusedError:
                continue
        second = pool.submit(exchange, 1, 2, port)
        assert first.result() == second.result()
    for connection in connections:
        connection.close()


def test_a_connection_that_sends_byte_by_byte_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte arrives within the deadline of the line, but not all of them together."""
    monkeypatch.setattr(worker_addresses_module, "_LINE_TIMEOUT_S", 1.0)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange, 0, 2, port)
        slow: list[socket.socket] = []
        while not slow:
            try:
                slow = [socket.create_connection(("127.0.0.1", port), 10)]
            except ConnectionRefusedError:
                continue
        second = pool.submit(exchange, 1, 2, port)
        with slow[0], contextlib.suppress(OSError):  # rank 0 may have ended
            for byte in b'{"rank": 1, "port": 4000}\n':
                slow[0].sendall(bytes([byte]))
                time.sleep(0.1)
        assert first.result() == second.result()


def test_two_workers_with_one_rank_are_an_error() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(exchange, 0, 3, port)
        connections: list[socket.socket] = []
        while not connections:
            try:
                connections = send(port, *[json.dumps({"rank": 1, "port": 4000}).encode()] * 2)
            except ConnectionRefusedError:
                continue
        with pytest.raises(WorkerError, match="two workers have the rank 1"):
            first.result()
    for connection in connections:
        connection.close()
