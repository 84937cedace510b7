"""Put a load on the master: many posts, event streams, a long list of runs, and slow clients.

    python benchmarks/micro/master_load.py [--save]

The master is a separate process with SQLite on disk; all clients share this process and the machine
with it. Its largest resident memory so far is in the column "memory MB".
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlencode

import psutil
from _bench import Subject, Timed, finish, make_parser, measure, parse

from mlbench_core.client.api import new_metric_id
from mlbench_master.database.store import NewMetric, Run, Store, new_run, run_owner

TOKEN = "load"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
HALF_A_HEADER = b"POST /api/metrics/ HTTP/1.1\r\nHost: 127.0.0.1\r\n"
EVENTS = (
    f"GET /api/events/ HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
).encode()
FIELDS = {
    "num_workers": 2, "num_cpus": 1.0, "max_bandwidth": 1000.0,
    "image": "task1a", "backend": "gloo", "command": "true",
}  # fmt: skip
SUBJECT = Subject(
    "master_load",
    "The master under load (`master_load.py`)",
    "ms",
    (),
    ("Limits, 2 cores: 50,000 metrics/s in bulk, "
     "1,000 posts/s of 16 clients with a 99th percentile of 100 ms, 1 s for",
     "a summary of 1,000,000 entries or the page of a run of 2,000,000, "
     "1 s for a bulk with 50 event streams, 300 MB."),
)  # fmt: skip


class Master:
    """A master on this machine.

    Attributes:
        address: Its host and port.
        run_id: A run that takes the metrics.
        numbers: Numbers of the metrics in bulks. With them, dates of each metric ascend, as those
            of a worker do.
        start: The date of the first one.
    """

    def __init__(self, port: int, pid: int, run_id: int) -> None:
        self.address = ("127.0.0.1", port)
        self.run_id = run_id
        self.numbers = itertools.count()
        self.start = datetime.now(timezone.utc)
        self._process = psutil.Process(pid)
        self._most_memory = 0.0

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that stays open."""
        return http.client.HTTPConnection(*self.address, timeout=60)

    def memory(self) -> float:
        """Return the largest resident memory so far, in MB; without Linux, the largest one seen."""
        peak = self._process.memory_info().rss
        with contextlib.suppress(OSError, AttributeError, TypeError):
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
        self._most_memory = max(self._most_memory, peak / 1e6)
        return self._most_memory


@contextlib.contextmanager
def running(folder: Path, runs: int, sizes: Sequence[tuple[int, int]] = ()) -> Iterator[Master]:
    """Start a master whose database has runs with the longest output that it keeps.

    Args:
        folder: The folder of the master.
        runs: Number of runs.
        sizes: Numbers of metrics and of entries of each, for further runs.
    """
    store = Store(f"sqlite:///{folder / 'master.db'}")
    output = ["x" * 100] * 160
    details = {"stdout": output, "stderr": output, "reason": "", "returncode": 0}
    for number in range(runs):
        name = f"run-{number}"
        store.update_run(store.add_run(new_run(name=name, **FIELDS)).id, details, state="finished")
    for number, (names, entries) in enumerate(sizes):
        fill(store, store.add_run(new_run(name=f"long-{number}", **FIELDS)), names, entries)
    store.close()
    command = [sys.executable, "-m", "mlbench_cli", "master"]
    command += ["--port", "0", "--data-dir", str(folder)]
    environment = {**os.environ, "MLBENCH_TOKEN": TOKEN, "MLBENCH_HOME": str(folder)}
    log = folder / "benchmark.log"
    with log.open("wb") as output_file:
        process = subprocess.Popen(command, env=environment, stdout=output_file, stderr=output_file)
    try:
        deadline = time.monotonic() + 60
        address = re.compile(r"MLBench master on http://127.0.0.1:(\d+)")
        while not (match := address.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the master did not start: {log.read_text()}")
            time.sleep(0.1)
        yield Master(int(match[1]), process.pid, 1)
    finally:
        process.terminate()
        process.wait()


def fill(store: Store, run: Run, names: int, entries: int) -> None:
    """Add metrics to a run as its first worker sends them, and end it."""
    owner = run_owner(run.id)
    for start in range(0, entries, 500):
        metrics = []
        for step in range(start, min(entries, start + 500)):
            extra = json.dumps({"rank": 0, "epoch": step / 1000})
            for name in range(names):
                metrics.append(
                    NewMetric(
                        owner,
                        f"metric {name} @ 0",
                        run.created_at + 1000 * step,
                        repr(math.sin(step) + name),
                        extra=extra,
                        client_id=f"{name}-{step}",
                    )
                )
        store.add_metrics(metrics)
    store.update_run(run.id, state="finished")


def request(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
) -> bytes:
    """Send a request that must succeed and return the answer."""
    text = body
    if not isinstance(body, str | None):
        text = json.dumps(body)
    for attempt in (1, 2):
        try:
            connection.request(method, path, text, HEADERS)
            answer = connection.getresponse()
            break
        except (http.client.HTTPException, ConnectionError):
            # As every client does: the server may have closed a connection that was idle.
            connection.close()
            if attempt == 2:
                raise
    content = answer.read()
    if answer.status >= 300:
        raise SystemExit(f"{method} {path} was answered with {answer.status}: {content[:200]!r}")
    return content


def timed(master: Master, seconds: Sequence[float], **extra: float) -> Timed:
    """Summarize single requests."""
    return Timed(
        median(seconds),
        {
            "99th percentile ms": 1e3 * quantiles(seconds, n=100)[98],
            **extra,
            "memory MB": master.memory(),
        },
    )


def posts(master: Master, clients: int, count: int) -> Timed:
    """Let clients post single metrics at the same time."""
    seconds: list[float] = []
    body = json.dumps({"run_id": master.run_id, "name": "loss @ 0", "value": 0.5})
    # http.client takes longer for a request than the master, and all clients share one interpreter.
    header = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    message = (
        f"POST /api/metrics/ HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )

    def client() -> None:
        with socket.create_connection(master.address) as connection:
            for _ in range(count // clients):
                start = time.perf_counter()
                connection.sendall(message.encode())
                answer = b""
                while not answer.endswith(b"}"):
                    answer += (piece := connection.recv(65_536))
                    if not piece:
                        break
                seconds.append(time.perf_counter() - start)
                if not answer.startswith(b"HTTP/1.1 201"):
                    raise SystemExit(f"a post was answered with {answer[:200]!r}, not with 201")

    start = time.perf_counter()
    run_threads([client] * clients)
    duration = time.perf_counter() - start
    if len(seconds) < count // clients * clients:
        raise SystemExit("a client has failed")
    return timed(master, seconds, **{"posts/s": len(seconds) / duration})


def run_threads(targets: Sequence[Callable[[], None]]) -> None:
    """Run functions at the same time, each in a thread, and wait for all of them."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bulks(master: Master, clients: int, count: int, size: int) -> Timed:
    """Let clients post bulks as the outbox of a worker sends them; the time is that of one bulk."""

    def body(rank: int) -> str:
        metrics = []
        for number in itertools.islice(master.numbers, size):
            date = master.start + timedelta(milliseconds=number)
            metrics.append(
                {
                    "id": new_metric_id(),
                    "run_id": master.run_id,
                    "name": f"m{number % 20} @ {rank}",
                    "date": date.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                    "value": repr(number * 0.37),
                    "cumulative": False,
                    "metadata": json.dumps({"rank": rank, "epoch": number / 1000}),
                }
            )
        return json.dumps(metrics)

    seconds: list[float] = []

    def client(own: Sequence[str]) -> None:
        with contextlib.closing(master.connect()) as connection:
            for text in own:
                start = time.perf_counter()
                request(connection, "POST", "/api/metrics/", text)
                seconds.append(time.perf_counter() - start)

    targets = []
    for rank in range(clients):
        targets.append(partial(client, [body(rank) for _ in range(count // clients)]))
    start = time.perf_counter()
    run_threads(targets)
    rate = size * len(seconds) / (time.perf_counter() - start)
    return Timed(median(seconds), {"metrics/s": rate, "memory MB": master.memory()})


def summary(master: Master, run_id: int, groups: int) -> Timed:
    """Read a metric of a run in groups."""
    path = f"/api/metrics/{run_id}/?metric_type=run&summarize={groups}"
    with contextlib.closing(master.connect()) as connection:
        start = time.perf_counter()
        content = request(connection, "GET", path)
        seconds = time.perf_counter() - start
    if [len(entries) for entries in json.loads(content).values()] != [groups]:
        raise SystemExit(f"the answer does not have {groups} entries for one metric")
    return Timed(seconds, {"answer MB": len(content) / 1e6, "memory MB": master.memory()})


def run_page(master: Master, run_id: int) -> Timed:
    """Read the page of a run, the names of its metrics, and all of their curves in turn."""
    with contextlib.closing(master.connect()) as connection:
        start = time.perf_counter()
        request(connection, "GET", f"/runs/{run_id}/")
        path = f"/api/runs/{run_id}/curves/"
        names = [curve["name"] for curve in json.loads(request(connection, "GET", path))["curves"]]
        query = urlencode([("metric", name) for name in names])
        content = request(connection, "GET", f"{path}?{query}")
        seconds = time.perf_counter() - start
    points = [len(curve["step"]) for curve in json.loads(content)["curves"]]
    if not names or not 0 < min(points) <= max(points) <= 2000:
        raise SystemExit(f"the curves have {points} points, not 1 to 2,000 each")
    return Timed(seconds, {"answer MB": len(content) / 1e6, "memory MB": master.memory()})


def bulk(master: Master, streams: int, size: int) -> Timed:
    """Post many metrics at once, while event streams are read; the time is that of the post."""
    body = []
    for number in range(size):
        name = f"m{number % 20} @ 0"
        body.append({"run_id": master.run_id, "name": name, "value": number * 0.5})
    with (
        sockets(master, streams, EVENTS) as opened,
        reading(opened) as counts,
        contextlib.closing(master.connect()) as connection,
    ):
        while streams and min(counts.values(), default=0) < 1:
            time.sleep(0.01)
        start = time.perf_counter()
        request(connection, "POST", "/api/metrics/", body)
        seconds = time.perf_counter() - start
        # Each stream has the beginning of its answer, and then all events.
        while min(counts.values(), default=1 + size) < 1 + size:
            if time.perf_counter() - start > 60:
                raise SystemExit("an event did not reach every stream within a minute")
            time.sleep(0.01)
        delivered = time.perf_counter() - start
    return Timed(seconds, {"delivered after ms": 1e3 * delivered, "memory MB": master.memory()})


@contextlib.contextmanager
def sockets(master: Master, number: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that have sent these bytes."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(stack.enter_context(socket.create_connection(master.address)))
            opened[-1].sendall(data)
        yield opened


@contextlib.contextmanager
def reading(opened: Sequence[socket.socket]) -> Iterator[dict[socket.socket, int]]:
    """Read connections in a thread, and count the events of each and the start of its stream."""
    counts = dict.fromkeys(opened, 0)
    ends = dict.fromkeys(opened, b"")
    ended = threading.Event()
    with selectors.DefaultSelector() as selector:
        for connection in opened:
            selector.register(connection, selectors.EVENT_READ)

        def read() -> None:
            while not ended.is_set():
                for key, _ in selector.select(0.05):
                    connection: Any = key.fileobj
                    data = ends[connection] + connection.recv(2**20)
                    counts[connection] += data.count(b": connected") + data.count(b"event: metric")
                    ends[connection] = data[data.rfind(b"\n") :][-20:]

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield counts
        finally:
            ended.set()
            thread.join()


def listed(master: Master, path: str) -> Timed:
    """Read all runs."""
    with contextlib.closing(master.connect()) as connection:
        start = time.perf_counter()
        content = request(connection, "GET", path)
        seconds = time.perf_counter() - start
    return Timed(seconds, {"answer MB": len(content) / 1e6, "memory MB": master.memory()})


def posts_among(master: Master, slow: int, count: int) -> Timed:
    """Post single metrics while other clients have sent half a request, and trickle bytes."""
    with sockets(master, slow, HALF_A_HEADER) as opened:
        ended = threading.Event()

        def trickle() -> None:
            while not ended.wait(1):
                for connection in opened:
                    # The master may have closed it.
                    with contextlib.suppress(OSError):
                        connection.send(b"X")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            return posts(master, 1, count)
        finally:
            ended.set()
            thread.join()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=5)
    add = parser.add_argument
    add("--count", type=int, default=1000, help="single posts in a block")
    add("--size", type=int, default=10_000, help="metrics in a bulk")
    add("--bulks", type=int, default=20, help="bulks in a block")
    add("--entries", type=int, default=1_000_000, help="entries of the long metric")
    add("--runs", type=int, default=1000, help="runs in the list")
    add("--slow", type=int, default=500, help="half requests")
    add("--streams", type=int, default=50, help="event streams")
    arguments = parse(
        parser, argv, count=32, size=100, bulks=4, entries=20_000, runs=10, slow=20, streams=3
    )
    sizes = [(1, arguments.entries), (1, 2 * arguments.entries), (20, arguments.entries // 10)]
    conditions = f"{arguments.blocks} blocks; {arguments.count} posts in a block; SQLite on disk."
    if hasattr(os, "getloadavg"):
        conditions += f" Load of the machine before: {os.getloadavg()[0]:.1f}."
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), arguments.runs, sizes) as master,
    ):
        rows = []
        for case, variants in make_cases(master, arguments).items():
            rows += measure(SUBJECT, case, variants, arguments.blocks)
    finish(SUBJECT, rows, arguments, conditions)


def make_cases(
    master: Master, arguments: argparse.Namespace
) -> dict[str, dict[str, Callable[[], Timed]]]:
    """Return the variants of each case, by their names."""
    count, size = arguments.count, arguments.size
    # The long runs come after those of the list.
    single, one, twenty = range(arguments.runs + 1, arguments.runs + 4)
    return {
        "a post": {
            "1 client": partial(posts, master, 1, count),
            "8 clients": partial(posts, master, 8, count),
            "16 clients": partial(posts, master, 16, count),
        },
        f"a bulk of {size:,} metrics": {
            "0 event streams": partial(bulk, master, 0, size),
            f"{arguments.streams} event streams": partial(bulk, master, arguments.streams, size),
        },
        f"bulks of {size:,} metrics": {
            "1 client": partial(bulks, master, 1, arguments.bulks, size),
            "2 clients": partial(bulks, master, 2, arguments.bulks, size),
        },
        "a summary in 1,000 groups": {
            f"{arguments.entries:,} entries": partial(summary, master, single, 1000),
        },
        f"the page of a run of {2 * arguments.entries:,} entries with its curves": {
            "1 metric": partial(run_page, master, one),
            "20 metrics": partial(run_page, master, twenty),
        },
        f"a list of {arguments.runs:,} runs": {
            "/api/runs/": partial(listed, master, "/api/runs/"),
            "/api/pods/": partial(listed, master, "/api/pods/"),
            "/": partial(listed, master, "/"),
        },
        "a post of one client": {
            "0 half requests": partial(posts_among, master, 0, count),
            f"{arguments.slow} half requests": partial(posts_among, master, arguments.slow, count),
        },
    }


if __name__ == "__main__":
    main()
