"""Kill the master while clients post: what it has acknowledged is there, and nothing is there
twice.

The normal suite kills it twice during 1,000 posts. ``MLBENCH_KILLS=20 pytest
tests/faults/test_kills_of_posts.py`` kills it twenty times during 10,000."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from mlbench_core.client.api import ApiClient
from mlbench_core.errors import MLBenchError
from tests.helpers.processes import Master, running_master, wait_for

KILLS = int(os.environ.get("MLBENCH_KILLS", "2"))
POSTS = 500 * KILLS
SEED = 16


class Posts:
    """The posts of four clients to one run, each to a metric of its own.

    Args:
        master: The master that is killed.
        http: The connections of the first three.
        folder: Folder for the client of MLBench.
    """

    def __init__(self, master: Master, http: httpx.Client, folder: Path) -> None:
        self.master = master
        self.http = http
        run = {"name": "r", "num_workers": 1, "command": "true"}
        self.run_id = self.http.post("/api/runs/", json=run).json()["id"]
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.acknowledged: dict[str, list[str]] = {}
        self.is_over = threading.Event()
        self.is_lost = threading.Event()

    def values(self, name: str) -> Iterator[str]:
        """The values to post, until the last kill."""
        while self.sent[name] < POSTS / 4 or not self.is_over.is_set():
            self.sent[name] += 1
            yield str(self.sent[name])

    def post(self, body: Any) -> bool:
        """Post once; whether the master has acknowledged it."""
        try:
            return self.http.post("/api/metrics/", json=body).status_code == 201
        except httpx.TransportError:
            if self.is_lost.is_set():
                raise
            time.sleep(0.02)
            return False

    def metric(self, name: str, value: str, **more: str) -> dict[str, Any]:
        return {"run_id": self.run_id, "name": name, "value": value, **more}

    def plain(self) -> None:
        """A client that posts each value once, and does not try again."""
        done = self.acknowledged["plain"] = []
        for value in self.values("plain"):
            if self.post(self.metric("plain", value)):
                done.append(value)

    def repeated(self) -> None:
        """A client that posts each value with an id until it is acknowledged."""
        done = self.acknowledged["repeated"] = []
        for value in self.values("repeated"):
            while not self.post(self.metric("repeated", value, id=f"r{value}")):
                pass
            done.append(value)

    def lists(self) -> None:
        """A client that posts lists of 10, with ids, until they are acknowledged."""
        done = self.acknowledged["lists"] = []
        values = self.values("lists")
        while part := list(itertools.islice(values, 10)):
            while not self.post([self.metric("lists", value, id=f"l{value}") for value in part]):
                pass
            done += part

    def by_client(self) -> None:
        """The client of MLBench, with some posts on their way at once."""
        done = self.acknowledged["by_client"] = []
        with ApiClient(url=self.master.url, spill_dir=self.folder) as client:
            waiting = []
            for value in self.values("by_client"):
                waiting.append((value, client.post_metric(self.run_id, "by_client", value)))
                if len(waiting) > 20:
                    oldest, future = waiting.pop(0)
                    try:
                        future.result(60)
                        done.append(oldest)
                    except MLBenchError:
                        time.sleep(0.02)  # kept, and delivered later
            assert client.flush(60)

    def stored(self) -> dict[str, list[str]]:
        answer = self.http.get(f"/api/metrics/{self.run_id}/?metric_type=run").json()
        return {name: [entry["value"] for entry in entries] for name, entries in answer.items()}


def test_nothing_acknowledged_is_lost_and_nothing_is_doubled(tmp_path: Path) -> None:
    numbers = random.Random(SEED)
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with (
        running_master(tmp_path / "master") as master,
        httpx.Client(base_url=master.url, timeout=60) as http,
    ):
        posts = Posts(master, http, tmp_path)
        work = (posts.plain, posts.repeated, posts.lists, posts.by_client)
        threads = [threading.Thread(target=guarded, args=(part,)) for part in work]
        for thread in threads:
            thread.start()
        try:
            done = posts.acknowledged.values
            wait_for(
                lambda: errors or (len(done()) == 4 and min(map(len, done())) >= 20),
                60,
                "the first posts of each",
            )
            for _ in range(KILLS):
                time.sleep(numbers.uniform(0, 1))
                master.stop(kill=True)
                master.start()
        except BaseException:
            posts.is_lost.set()  # the master does not come back, for which the clients would wait
            raise
        finally:
            posts.is_over.set()
            for thread in threads:
                thread.join(300)
        if errors:
            raise errors[0]
        stored = posts.stored()
    assert sum(posts.sent.values()) >= POSTS
    for name, done in posts.acknowledged.items():
        found = Counter(stored[name])
        assert max(found.values()) == 1, (
            f"{name}: doubled {[value for value, count in found.items() if count > 1]}"
        )
        assert set(done) <= set(found), f"{name}: lost {sorted(set(done) - set(found))}"
        if name != "plain":  # each of these clients delivers everything in the end
            assert stored[name] == [str(value) for value in range(1, posts.sent[name] + 1)], name
    print(
        {
            name: (posts.sent[name], len(done), len(stored[name]))
            for name, done in posts.acknowledged.items()
        }
    )
