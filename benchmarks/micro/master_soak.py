"""Watch the memory of a master that receives metrics for a long time: it must stay flat.

A master is started with a new folder and one run that sleeps. Workers post metrics at a fixed rate,
a browser's event stream is open, and the pages and the API are read now and then. Every ten
seconds, the memory of the master's process is printed (resident set, in MiB). At the end stands its
growth after a warm-up, in which caches and pools fill.

    python benchmarks/micro/master_soak.py [--minutes 30] [--rate 200] [--warm-up 5]

Exit status 1: the memory has grown by more than 5 % after the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_CLIENTS = 8
_NAMES = 20
_SAMPLE_S = 10.0
_READ_EVERY_S = 2.0
_MOST_GROWTH = 0.05
_TOKEN = "a-token-of-the-soak-test-0123456789"
_HEADERS = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}


class Soak:
    """Clients of one master, each a thread; ``failed`` counts their requests without success."""

    def __init__(self, port: int, rate: float) -> None:
        self._port = port
        self._interval_s = _CLIENTS / rate
        self._end = threading.Event()
        self.posted = 0
        self.failed = 0
        run = {"name": "soak-1", "num_workers": 1, "command": "sleep 86400"}
        answer = self._send(self._connection(), "POST", "/api/runs/", run)
        self.run_id = int(json.loads(answer)["id"])
        targets = [*[self._post] * _CLIENTS, self._read, self._subscribe]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def start(self) -> None:
        """Start the clients."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the clients."""
        self._end.set()
        for thread in self._threads:
            thread.join(10)

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> bytes:
        text = None
        if body is not None:
            text = json.dumps(body)
        connection.request(method, path, text, _HEADERS)
        response = connection.getresponse()
        content = response.read()
        if response.status >= 300:
            raise http.client.HTTPException(f"{method} {path}: {response.status} {content[:200]!r}")
        return content

    def _post(self) -> None:
        connection = self._connection()
        due = time.monotonic()
        for number in itertools.count():
            due += self._interval_s
            if self._end.wait(max(0.0, due - time.monotonic())):
                return
            metric = {
                "run_id": self.run_id,
                "name": f"loss-{number % _NAMES} @ 0",
                "value": number / 7,
                "id": f"{threading.get_ident()}-{number}",
            }
            try:
                self._send(connection, "POST", "/api/metrics/", metric)
                self.posted += 1
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection.close()

    def _read(self) -> None:
        connection = self._connection()
        paths = (
            "/api/runs/",
            f"/api/metrics/{self.run_id}/?metric_type=run&last_n=1",
            "/api/pods/",
            "/",
            "/api/health/",
            f"/api/runs/{self.run_id}/curves/",
            f"/runs/{self.run_id}/",
        )
        for path in itertools.cycle(paths):
            if self._end.wait(_READ_EVERY_S):
                return
            try:
                self._send(connection, "GET", path)
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection.close()

    def _subscribe(self) -> None:
        connection = self._connection()
        connection.request("GET", "/api/events/", headers=_HEADERS)
        response = connection.getresponse()
        while not self._end.is_set() and response.read1(65_536):
            pass


def _start_master(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment = {**os.environ, "MLBENCH_HOME": str(folder), "MLBENCH_TOKEN": _TOKEN}
    command = [sys.executable, "-m", "mlbench_cli", "master", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit("the master did not start")


def growth(samples: list[tuple[float, float]], warm_up_s: float) -> float:
    """Return the growth of the memory after the warm-up, as a share.

    It compares the medians of the first and of the last fifth of the samples after the warm-up.

    Example:
        >>> growth([(second, 100 + second / 10) for second in range(101)], 0)
        0.0802...
    """
    after = [memory for second, memory in samples if second >= warm_up_s]
    part = max(1, len(after) // 5)
    return statistics.median(after[-part:]) / statistics.median(after[:part]) - 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=200.0, help="posts per second [%(default)g]")
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes [%(default)g]")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        process, port = _start_master(Path(folder))
        try:
            master = psutil.Process(process.pid)
            soak = Soak(port, args.rate)
            soak.start()
            start = time.monotonic()
            samples: list[tuple[float, float]] = []
            while (second := time.monotonic() - start) < args.minutes * 60:
                memory = master.memory_info().rss / 2**20
                samples.append((second, memory))
                threads, files = master.num_threads(), master.num_fds()
                print(
                    f"{second:6.0f} s {memory:7.1f} MiB {soak.posted:9,} posts "
                    f"{soak.failed} failed {threads} threads {files} files",
                    flush=True,
                )
                time.sleep(_SAMPLE_S)
            soak.stop()
        finally:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate()
            process.wait(30)
    share = growth(samples, min(args.warm_up, args.minutes / 2) * 60)
    print(f"growth after the warm-up: {100 * share:+.1f} %")
    raise SystemExit(int(share > _MOST_GROWTH))


if __name__ == "__main__":
    main()
