"""Clients that are slow on purpose, that open many connections, or that make the master write a
long log."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from mlbench_master import connection_limits
from mlbench_master.connection_limits import LogLimit
from tests.master.helpers import server, wait_for

HEADERS = {"Authorization": "Bearer sesame"}
HALF_A_HEADER = b"POST /api/metrics/ HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HALF_A_BODY = HALF_A_HEADER + b"Authorization: Bearer sesame\r\nContent-Length: 5000\r\n\r\n["
EVENTS = b"GET /api/events/ HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer sesame\r\n\r\n"


@contextlib.contextmanager
def sockets(base: str, number: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent these bytes."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(
                stack.enter_context(
                    socket.create_connection((urlsplit(base).hostname, urlsplit(base).port))
                )
            )
            opened[-1].settimeout(60)
            opened[-1].sendall(data)
        yield opened


def answer(connection: socket.socket) -> bytes:
    """Everything that the master sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            received += part
    return received


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def connections_of(process: subprocess.Popen[bytes]) -> int:
    """The number of connections that a master has not closed."""
    master = psutil.Process(process.pid)
    found = getattr(master, "net_connections", None) or master.connections
    return sum(bool(connection.raddr) for connection in found("tcp"))


SHORT = "import mlbench_master.connection_limits as c; c.HEADER_S = 0.6; c.BODY_S = 0.9"


def test_a_request_that_does_not_arrive_in_time_is_closed(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--token", "sesame", setup=SHORT) as (base, _):
        after_another = b"GET /api/health/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for beginning, more in (
            (b"", b""),
            (HALF_A_HEADER, b"X-A: b\r\n"),
            (HALF_A_BODY, b"1,"),
            (after_another, HALF_A_HEADER),
        ):
            with sockets(base, 1, beginning) as (connection,):
                start = time.monotonic()
                received = b""
                connection.settimeout(0.1)
                # Bytes that trickle in do not extend the time.
                while b"HTTP/1.1 408 " not in received:
                    assert time.monotonic() - start < 60, (beginning, received)
                    with contextlib.suppress(TimeoutError):
                        received += connection.recv(65_536)
                        continue
                    connection.sendall(more)
        assert "Traceback" not in (tmp_path / "master.log").read_text()


def test_an_answer_that_nobody_reads_is_given_up(tmp_path: Path) -> None:
    setup = "import mlbench_master.connection_limits as c; c.WRITE_S = 0.5"
    with server(tmp_path / "data", "--token", "sesame", setup=setup) as (base, process):
        run = {"name": "r", "num_workers": 1, "command": "true"}
        made = httpx.post(f"{base}/api/runs/", json=run, headers=HEADERS).json()
        metric = {"run_id": made["id"], "name": "m", "value": "x" * 1000}
        for _ in range(2):
            httpx.post(
                f"{base}/api/metrics/", json=[metric] * 9000, headers=HEADERS
            ).raise_for_status()
        request = f"GET /api/metrics/{made['id']}/?metric_type=run HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        with sockets(base, 1, f"{request}Authorization: Bearer sesame\r\n\r\n".encode()) as (
            connection,
        ):
            assert connection.recv(1, socket.MSG_PEEK), "the answer begins"
            wait_for(lambda: connections_of(process) == 0, what="the end of the connection")
            assert 0 < len(answer(connection)) < 18_000_000
        assert process.poll() is None


def test_half_requests_do_not_keep_others_out(tmp_path: Path) -> None:
    """Nor do they fill the disk with a log, though the process may open only 200 files."""
    setup = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    with server(tmp_path / "data", "--token", "sesame", setup=setup) as (base, _):
        with (
            sockets(base, 300, HALF_A_HEADER) as slow,
            httpx.Client(base_url=base, headers=HEADERS) as client,
        ):
            for _ in range(5):
                assert client.post("/api/metrics/", json=[]).status_code == 201
                assert httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200
            wait_for(lambda: sum(map(is_open, slow)) <= 100, what="the end of most of them")
        assert (tmp_path / "master.log").stat().st_size < 20_000


def test_an_address_has_a_bounded_number_of_connections(tmp_path: Path) -> None:
    setup = (
        "import mlbench_master.connection_limits as c; c.MAX_PER_ADDRESS "
        "= 4; c.is_loopback = lambda address: False"
    )
    with server(tmp_path / "data", "--token", "sesame", setup=setup) as (base, process):
        with sockets(base, 3, HALF_A_HEADER) as slow:
            assert httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200
            assert httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200
            assert sum(map(is_open, slow)) >= 2
        wait_for(lambda: connections_of(process) == 0, what="the end of these connections")
        with sockets(base, 4, EVENTS) as streams:
            for stream in streams:
                assert stream.recv(12) == b"HTTP/1.1 200"
            refused = httpx.get(f"{base}/api/runs/", headers=HEADERS)
            assert (refused.status_code, "too many connections" in refused.json()["message"]) == (
                503,
                True,
            )
        wait_for(lambda: httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200)


def test_event_streams_are_bounded(tmp_path: Path) -> None:
    setup = (
        "import mlbench_master.events as e, functools, mlbench_master.app as a; "
        "a.EventBus = functools.partial(e.EventBus, max_per_client=3)"
    )
    with server(tmp_path / "data", "--token", "sesame", setup=setup) as (base, _):
        with sockets(base, 3, EVENTS) as streams:
            for stream in streams:
                assert stream.recv(12) == b"HTTP/1.1 200"
            refused = httpx.get(f"{base}/api/events/", headers=HEADERS)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert (
                refused.json()["message"]
                == "events: at most 3 streams of one client may be open: close one of them"
            )

        # The ends of streams are noticed, so their places are free again.
        def is_accepted() -> bool:
            with sockets(base, 1, EVENTS) as (stream,):
                return stream.recv(65_536).startswith(b"HTTP/1.1 200")

        wait_for(is_accepted, what="a place")


def test_a_request_that_breaks_off_leaves_no_traceback(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--token", "sesame") as (base, _):
        with sockets(base, 5, HALF_A_BODY), sockets(base, 5, b"\x16\x03\x01 no HTTP\r\n\r\n"):
            pass
        assert httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200
        time.sleep(0.2)
        assert "Traceback" not in (tmp_path / "master.log").read_text()


def test_one_cause_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 7.0
    monkeypatch.setattr(connection_limits.time, "monotonic", lambda: now)
    log = logging.getLogger("a test")
    limit = LogLimit(records=3, period_s=0.3)
    caplog.handler.addFilter(limit)
    try:

        def fail(error: Exception) -> None:
            try:
                raise error
            except type(error):
                log.exception("it failed: %s", "again")

        for _ in range(100):
            fail(OSError("accept"))
        fail(ValueError("another cause"))
        assert len(caplog.records) == 4
        now += 0.35
        fail(OSError("accept"))
        assert (
            caplog.records[-1].getMessage()
            == "it failed: again (97 more of these since the last one)"
        )
    finally:
        caplog.handler.removeFilter(limit)
