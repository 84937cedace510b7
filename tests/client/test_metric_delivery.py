"""Metrics reach the master once and in order, whatever happens to it."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.client import metric_delivery, undelivered_metrics
from mlbench_core.client.api import ApiClient
from mlbench_core.client.metric_delivery import MAX_BATCH
from mlbench_core.errors import MasterNotFoundError, MasterRequestError
from tests.client.stub_master import StubMaster
from tests.helpers.processes import wait_for

Connect = Callable[..., ApiClient]


def kept(folder: Path) -> list[Any]:
    """Values of the metrics on disk, in order."""
    values = []
    for path in folder.glob("*.sqlite3"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT line FROM metrics ORDER BY key").fetchall()
            values += [json.loads(line)["value"] for (line,) in rows]
    return values


def test_metrics_arrive_in_order_with_an_id_each(master: StubMaster, connect: Connect) -> None:
    client = connect()
    futures = [client.post_metric(7, "loss @ 0", value) for value in range(200)]
    assert client.flush(60)
    assert master.values == list(range(200))
    assert {future.result(60).status_code for future in futures} == {201}
    assert len({metric["id"] for metric in master.metrics}) == 200
    assert len(master.deliveries) == 200


def test_many_metrics_go_in_few_requests(master: StubMaster, connect: Connect) -> None:
    client = connect()
    future = client.post_metrics(
        [{"run_id": 1, "name": "m", "value": i} for i in range(MAX_BATCH + 5)]
    )
    assert future.result(60).status_code == 201
    assert master.batches == [MAX_BATCH, 5]
    assert master.values == list(range(MAX_BATCH + 5))


def test_posting_does_not_wait_for_a_master_that_hangs(
    master: StubMaster, connect: Connect
) -> None:
    reached, release = threading.Event(), threading.Event()

    def hang(method: str, path: str, body: Any) -> None:
        reached.set()
        release.wait(100)

    master.respond = hang
    client = connect(timeout_s=100)
    try:
        futures = [client.post_metric(1, "loss @ 0", 0)]
        assert reached.wait(60)
        futures += [client.post_metric(1, "loss @ 0", value) for value in range(1, 50)]
        assert not any(future.done() for future in futures)
        assert not client.flush(0.05)
    finally:
        release.set()
    assert client.flush(60)
    assert master.values == list(range(50))
    assert master.batches == [1, 49]  # what came while the first request was out went together


def test_a_master_that_is_away_at_the_start_gets_everything_later(
    master: StubMaster, connect: Connect
) -> None:
    master.stop()
    client = connect()
    futures = [client.post_metric(1, "loss @ 0", value) for value in range(30)]
    with pytest.raises(MasterNotFoundError, match="kept and delivered"):
        futures[0].result(60)
    assert not client.flush(0.1)
    master.start()
    assert client.flush(60)
    assert master.values == list(range(30))
    assert len(master.deliveries) == 30


def test_the_background_thread_delivers_without_a_flush(
    master: StubMaster, connect: Connect
) -> None:
    arrived = threading.Event()
    master.stop()
    client = connect()
    with pytest.raises(MasterNotFoundError):
        client.post_metric(1, "loss @ 0", 1).result(60)

    def notice(method: str, path: str, body: Any) -> None:
        arrived.set()

    master.respond = notice
    master.start()
    assert arrived.wait(60)


def test_a_master_that_dies_midway_has_everything_once_and_in_order(
    master: StubMaster, connect: Connect
) -> None:
    client = connect()
    value = 0
    for _ in range(3):
        for _ in range(40):
            client.post_metric(1, "loss @ 0", value)
            value += 1
        master.stop()
        for _ in range(40):
            client.post_metric(1, "loss @ 0", value)
            value += 1
        master.start()
    assert client.flush(60)
    assert master.values == list(range(value))


@pytest.mark.parametrize("outcome", ["no answer", 500, 503, 401, 429, "404 of a proxy"])
def test_an_answer_lost_after_storing_does_not_double(
    master: StubMaster, connect: Connect, outcome: str | int
) -> None:
    """Stored, and the answer is lost or wrong: it is sent again, and its id makes that harmless."""
    failures = iter([True, True])

    def lose(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if not next(failures, False):
            return None
        master.store(body)
        if outcome == "404 of a proxy":
            return 404, b"<html>no such host</html>"
        return (0, None) if outcome == "no answer" else (int(outcome), {"message": "later"})

    master.respond = lose
    client = connect()
    for value in range(5):
        client.post_metric(1, "loss @ 0", value)
    assert client.flush(60)
    assert master.values == list(range(5))
    assert len(master.deliveries) > 5


def test_a_refused_metric_does_not_hold_up_the_others(
    master: StubMaster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        entries = body if isinstance(body, list) else [body]
        if any(entry["name"] == "bad" for entry in entries):
            return 422, {"status": 422, "message": "name: bad (got 'run_id: 1')"}
        return None

    master.respond = picky
    client = connect()
    names = ["good"] * 10 + ["bad"] + ["good"] * 10 + ["bad"]
    future = client.post_metrics(
        [{"run_id": 1, "name": name, "value": i} for i, name in enumerate(names)]
    )
    with (
        caplog.at_level(logging.WARNING, "mlbench_core"),
        pytest.raises(MasterRequestError, match="name: bad") as info,
    ):
        future.result(60)
    assert info.value.status == 422
    assert client.flush(60)
    assert master.values == [i for i, name in enumerate(names) if name == "good"]
    assert caplog.text.count("refused a metric") == 2


@pytest.mark.parametrize(
    ("run", "answer"),
    [
        (2, (404, {"message": "no run 2"})),
        ("try", (400, {"message": "run_id: Input should be a valid integer"})),
    ],
)
def test_metrics_of_a_run_that_does_not_exist_are_dropped_together(
    run: object,
    answer: tuple[int, Any],
    master: StubMaster,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without_run(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        entries = body if isinstance(body, list) else [body]
        return answer if any(entry["run_id"] == run for entry in entries) else None

    master.respond = without_run
    client = connect()
    future = client.post_metrics(
        [{"run_id": run if i % 2 else 1, "name": "m", "value": i} for i in range(1000)]
    )
    with pytest.raises(MasterRequestError):
        future.result(60)
    assert client.flush(60)
    assert master.values == list(range(0, 1000, 2))
    assert len(master.requests) < 40
    (warning,) = caplog.records
    assert warning.getMessage() == f"the master has no run {run}: the run's metrics are dropped"


def test_what_a_closed_client_could_not_deliver_the_next_one_does(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    master.stop()
    first = connect(spill_dir=tmp_path)
    for value in range(10):
        first.post_metric(1, "loss @ 0", value)
    assert first.close(timeout_s=0.1) is False
    assert kept(tmp_path) == list(range(10))
    master.start()
    second = connect(spill_dir=tmp_path)
    second.post_metric(1, "loss @ 0", 10)
    assert second.close(60) is True
    assert master.values == list(range(11))
    assert kept(tmp_path) == []


def test_clients_share_the_outbox_and_deliver_each_row_once(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    master.stop()
    clients = [connect(spill_dir=tmp_path) for _ in range(3)]
    for client in clients:
        for value in range(100):
            future = client.post_metric(1, f"m @ {id(client)}", value)
        assert isinstance(future.exception(60), MasterNotFoundError)
    assert [client._delivery.pending for client in clients] == [100, 100, 100]
    clients[0].close(timeout_s=0)
    clients.append(connect(spill_dir=tmp_path))
    master.start()
    threads = [threading.Thread(target=client.flush, args=(60,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(tmp_path) == []
    assert [client._delivery.pending for client in clients] == [0] * 4
    assert len(master.deliveries) == 300
    for client in clients[:3]:
        assert [m["value"] for m in master.metrics if m["name"] == f"m @ {id(client)}"] == list(
            range(100)
        )


def test_one_client_at_a_time_delivers_rows(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    master.stop()
    clients = [connect(spill_dir=tmp_path, timeout_s=100) for _ in range(2)]
    for value, client in enumerate(clients):
        client.post_metric(1, "m", value).exception(60)
    reached, release = threading.Event(), threading.Event()

    def hang(method: str, path: str, body: Any) -> None:
        reached.set()
        release.wait(100)

    master.respond = hang
    master.start()
    try:
        assert reached.wait(60)
        assert [client.flush(0.3) for client in clients] == [False, False]
        assert len(master.requests) == 1
    finally:
        release.set()
    assert [client.flush(60) for client in clients] == [True, True]
    assert (master.values, len(master.deliveries)) == ([0, 1], 2)


def test_rows_that_cannot_be_deleted_are_not_sent_again(
    master: StubMaster, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk has no room for the journal that deleting needs."""
    master.stop()
    client = connect(spill_dir=tmp_path)
    for value in range(20):
        client.post_metric(1, "m", value).exception(60)
    [path] = tmp_path.glob("*.sqlite3")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE DELETE ON metrics BEGIN "
            "SELECT RAISE(FAIL, 'disk is full'); END"
        )
    master.start()
    assert client.flush(60)
    assert (master.values, len(master.deliveries)) == (list(range(20)), 20)
    assert len(kept(tmp_path)) == 20
    assert "disk is full" in caplog.text
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER full")
    master.stop()
    client.post_metric(1, "m", 20).exception(60)
    master.start()
    assert client.flush(60)
    assert (len(master.deliveries), kept(tmp_path)) == (21, [])


def test_a_full_outbox_is_bounded_and_says_what_is_lost(
    master: StubMaster,
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undelivered_metrics, "_MAX_PAGES", 10)
    monkeypatch.setattr(metric_delivery, "_MAX_IN_MEMORY", 50)
    master.stop()
    client = connect(spill_dir=tmp_path)
    for start in range(0, 300, 10):
        metrics = [{"run_id": 1, "name": "m", "value": value} for value in range(start, start + 10)]
        error = client.post_metrics(metrics).exception(60)
    assert "is lost" in str(error)
    [path] = tmp_path.glob("*.sqlite3")
    assert path.stat().st_size <= 10 * 4096
    count = client._delivery.pending
    assert len(kept(tmp_path)) + 50 == count < 300
    assert client.close(timeout_s=0) is False
    assert f"{300 - count + 50} metric(s)" in caplog.text
    master.start()
    assert connect(spill_dir=tmp_path).flush(60)
    assert master.values == list(range(count - 50))


@pytest.mark.parametrize("is_answered", [True, False])
def test_metrics_that_memory_cannot_hold_during_a_request_wait_on_disk_in_order(
    is_answered: bool,
    master: StubMaster,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metric_delivery, "_MAX_IN_MEMORY", 10)
    reached, release = threading.Event(), threading.Event()

    def hang(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        reached.set()
        release.wait(100)
        master.respond = lambda method, path, body: None
        return None if is_answered else (0, None)

    master.respond = hang
    client = connect(timeout_s=100, spill_dir=tmp_path)
    try:
        first = client.post_metric(1, "m", 0)
        assert reached.wait(60)
        for value in range(1, 50):
            client.post_metric(1, "m", value)
        assert kept(tmp_path)[:10] == list(range(10))
    finally:
        release.set()
    assert client.flush(60)
    assert (master.values, len(master.deliveries)) == (list(range(50)), 50)
    assert (first.exception(60) is None) is is_answered
    assert kept(tmp_path) == []


def test_the_outbox_is_private_and_ignores_what_else_is_in_its_folder(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    other = tmp_path / f"http_127.0.0.1_{master.port}_api" / "00001"
    other.mkdir(parents=True)
    (other / "0000000000.jsonl").write_text("{}\n")
    master.stop()
    client = connect(spill_dir=tmp_path)
    client.post_metric(1, "m", 1).exception(60)
    master.start()
    assert client.flush(60)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".sqlite3", ".lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert (other / "0000000000.jsonl").read_text() == "{}\n"


PROCESS = """
import os, signal, sys
from mlbench_core.client import api
api._FLUSH_AT_EXIT_S = float(sys.argv[4])
client = api.ApiClient(url=sys.argv[1], spill_dir=sys.argv[2])
futures = [client.post_metric(1, "loss @ 0", value) for value in range(20)]
if sys.argv[3] == "killed":
    futures[-1].exception()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_a_process_that_ends_while_the_master_is_away_loses_nothing(
    how: str, master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    master.stop()
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, master.url, tmp_path, how, "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if how == "exits" else -9), done.stderr
    assert "Traceback" not in done.stderr
    assert kept(tmp_path) == list(range(20))
    master.start()
    assert connect(spill_dir=tmp_path).flush(60)
    assert master.values == list(range(20))


def test_a_process_that_exits_without_closing_delivers(master: StubMaster, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, master.url, tmp_path, "exits", "60"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert master.values == list(range(20))
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_client_keeps_its_metrics_on_disk(master: StubMaster, tmp_path: Path) -> None:
    master.stop()
    client = ApiClient(url=master.url, spill_dir=tmp_path)
    assert isinstance(client.post_metric(1, "loss @ 0", 5).exception(60), MasterNotFoundError)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None  # and the leak guard sees that its threads have ended
    assert kept(tmp_path) == [5]


@pytest.mark.parametrize("part", ["beginning", "middle"])
def test_a_damaged_database_is_set_aside(
    part: str,
    master: StubMaster,
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    master.stop()
    first = connect(spill_dir=tmp_path)
    first.post_metrics(
        [{"run_id": 1, "name": "m", "value": value} for value in range(200)]
    ).exception(60)
    first.close(timeout_s=0)
    [path] = tmp_path.glob("*.sqlite3")
    with path.open("r+b") as file:
        file.seek(0 if part == "beginning" else 8192)
        file.write(b"garbage" * 1000)
    second = connect(spill_dir=tmp_path)
    assert isinstance(second.post_metric(1, "m", "new").exception(60), MasterNotFoundError)
    assert "is damaged" in caplog.text
    assert kept(tmp_path) == ["new"]
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1
    master.start()
    assert second.flush(60)
    assert master.values == ["new"]


def test_memory_stays_bounded_while_the_master_is_away(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    master.stop()
    client = connect(spill_dir=tmp_path)
    with pytest.raises(MasterNotFoundError):
        client.post_metric(1, "loss @ 0", 0).result(60)
    with pytest.raises(MasterNotFoundError):
        client.post_metrics(
            [{"run_id": 1, "name": "m", "value": i} for i in range(1, 25_000)]
        ).result(60)
    delivery = client._delivery
    assert delivery.pending == 25_000
    assert len(delivery._queue) + len(delivery._in_flight) == 0
    master.start()
    assert client.flush(60)
    assert master.values == list(range(25_000))
    assert max(master.batches) <= MAX_BATCH


def test_a_disk_that_fails_keeps_metrics_in_memory_up_to_a_limit(
    master: StubMaster,
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    master.stop()
    monkeypatch.setattr(metric_delivery, "_MAX_IN_MEMORY", 10)
    client = connect(spill_dir=blocked)
    futures = [client.post_metric(1, "loss @ 0", value) for value in range(15)]
    for future in futures:
        assert future.exception(60) is not None
    assert "cannot be kept on disk" in caplog.text
    assert "is lost" in str(futures[-1].exception())
    assert caplog.text.count("is lost") == 1
    for _ in range(2):
        assert not client._delivery.drain()
        with client._delivery._sending:
            assert [
                json.loads(receipt.line)["value"] for receipt in client._delivery._queue
            ] == list(range(10))
    master.start()
    assert client.flush(60)
    assert master.values == list(range(10))


def test_flush_says_when_time_is_up_and_closing_twice_is_harmless(
    master: StubMaster, connect: Connect
) -> None:
    master.stop()
    client = connect()
    client.post_metric(1, "loss @ 0", 1)
    assert client.flush(0) is False
    assert client.flush(0.05) is False
    assert client.close(timeout_s=0.05) is False
    assert client.close(timeout_s=0.05) is False
    with pytest.raises(RuntimeError, match="closed"):
        client.post_metric(1, "loss @ 0", 2)


def test_an_outage_is_reported_once(
    master: StubMaster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    master.stop()
    client = connect()
    for value in range(5):
        client.post_metric(1, "loss @ 0", value).exception(60)
    client.flush(0.3)
    assert caplog.text.count("does not answer") == 1


def test_threads_that_post_together_lose_nothing(master: StubMaster, connect: Connect) -> None:
    client = connect()

    def post(worker: int) -> None:
        for value in range(100):
            client.post_metric(1, f"loss @ {worker}", value)

    threads = [threading.Thread(target=post, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    master.stop()
    master.start()
    for thread in threads:
        thread.join()
    assert client.flush(60)
    for worker in range(4):
        assert [m["value"] for m in master.metrics if m["name"] == f"loss @ {worker}"] == list(
            range(100)
        )


class OldMaster:
    """How a master of version 3.0 answers: 500 to a list, to a metric of a run that it does not
    have, and to its own mistakes.
    """

    def __init__(self, stub: StubMaster) -> None:
        self.runs: list[object] = [1]
        self.lists_runs = True
        self.is_broken = False
        self.tried: list[Any] = []
        self._stub = stub
        stub.respond = self.respond

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if method == "GET":
            return (
                (200, [{"id": run} for run in self.runs])
                if self.lists_runs
                else (500, b"<h1>Server Error (500)</h1>")
            )
        is_bad = isinstance(body, list) or body["run_id"] not in self.runs or body["name"] == "bad"
        if not isinstance(body, list):
            self.tried.append(body["value"])
        return (500, b"<h1>Server Error (500)</h1>") if is_bad or self.is_broken else None

    def posts(self) -> int:
        return sum(method == "POST" for method, *_ in self._stub.requests)


def test_metrics_of_a_run_deleted_at_an_old_master_hold_up_nothing(
    master: StubMaster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    old = OldMaster(master)
    client = connect()
    future = client.post_metrics(
        [{"run_id": 1 + i % 2, "name": "m", "value": i} for i in range(100)]
    )
    with pytest.raises(MasterRequestError, match="does not know the metric's run"):
        future.result(60)
    assert client.flush(60)
    assert master.values == list(range(0, 100, 2))
    assert (
        len(master.requests) < 50 + 40
    )  # each good one, the lists that showed that there are none, and few of run 2
    assert caplog.text.count("the master has no run 2") == 1
    client.post_metric(1, "m", "after").result(60)
    assert (master.values[-1], old.tried.count(1)) == ("after", 1)


@pytest.mark.parametrize("lists_runs", [True, False])
def test_a_metric_that_an_old_master_cannot_take_is_dropped_after_three_attempts(
    lists_runs: bool, master: StubMaster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    old = OldMaster(master)
    old.lists_runs = lists_runs
    client = connect()
    names = ["good"] * 3 + ["bad"] * 2 + ["good"] * 3 + ["bad"] * 2 + ["good"]
    users_generator = random.getstate()
    client.post_metrics([{"run_id": 1, "name": name, "value": i} for i, name in enumerate(names)])
    assert client.flush(60)
    assert sorted(master.values) == [i for i, name in enumerate(names) if name == "good"]
    assert [old.tried.count(i) for i, name in enumerate(names) if name == "good"] == [1] * 7
    assert [old.tried.count(i) for i, name in enumerate(names) if name == "bad"] == [3] * 4
    assert caplog.text.count("the master answers 500 to 4 metric(s) and takes others") == 1
    assert random.getstate() == users_generator


def test_a_bad_metric_alone_is_kept_until_another_one_is_accepted(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    """Alone it does not tell a bad metric from a broken master."""
    old = OldMaster(master)
    client = connect(spill_dir=tmp_path)
    with pytest.raises(MasterNotFoundError):
        client.post_metric(1, "bad", "bad").result(60)
    assert not client.flush(0.2)
    assert kept(tmp_path) == ["bad"]
    client.post_metric(1, "good", "good")
    assert client.flush(60)
    assert (master.values, kept(tmp_path)) == (["good"], [])
    assert old.tried.count("good") == 1


def test_bad_metrics_in_batches_of_their_own_hold_up_nothing(
    master: StubMaster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = OldMaster(master)
    client = connect()
    monkeypatch.setattr(metric_delivery, "MAX_BATCH", 1)
    with client._delivery._sending:  # nothing is sent before all are queued
        for index in range(4):
            client.post_metric(1, "bad" if index % 2 == 0 else "good", index)
    assert client.flush(60)
    assert master.values == [1, 3]
    assert len(master.deliveries) == 2
    assert old.tried.count(0) == old.tried.count(2) == 3


def test_a_master_that_answers_500_to_everything_is_away_and_nothing_is_lost(
    master: StubMaster, connect: Connect, tmp_path: Path
) -> None:
    old = OldMaster(master)
    old.is_broken = True
    client = connect(spill_dir=tmp_path)
    future = client.post_metrics([{"run_id": 1, "name": "m", "value": i} for i in range(200)])
    assert isinstance(future.exception(60), MasterNotFoundError)
    first = old.posts()
    wait_for(lambda: old.posts() > first, 60, "the second attempt")
    with client._delivery._sending:  # no request is on its way, which would be answered by chance
        assert kept(tmp_path) == list(range(200))
        assert old.posts() < 100  # a few attempts with a few requests each
        old.is_broken = False
    assert client.flush(60)
    # Each once. Lines that were put aside when the master recovered arrive after later ones.
    assert sorted(master.values) == list(range(200))
    assert len(master.deliveries) == 200


def test_many_metrics_for_an_old_master_need_little_more_than_a_request_each(
    master: StubMaster, connect: Connect
) -> None:
    old = OldMaster(master)
    client = connect()
    client.post_metrics([{"run_id": 1, "name": "m", "value": i} for i in range(300)])
    assert client.flush(60)
    assert master.values == list(range(300))
    assert old.posts() < 300 + 30


def test_what_an_old_master_took_before_an_outage_is_not_sent_again(
    master: StubMaster, connect: Connect
) -> None:
    """It does not know ids, so it would store them twice."""
    old = OldMaster(master)
    answers = old.respond

    def until_50(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        return (
            (0, None)
            if method == "POST" and len(master.metrics) == 50
            else answers(method, path, body)
        )

    client = connect()
    master.respond = until_50
    future = client.post_metrics([{"run_id": 1, "name": "m", "value": i} for i in range(100)])
    # Not flush: its time limit is also that of a request, and a slow answer would be lost.
    assert isinstance(future.exception(60), MasterNotFoundError)
    with client._delivery._sending:
        master.respond = answers
    assert client.flush(60)
    assert master.values == list(range(100))
    assert len(master.deliveries) == 100


def test_a_missing_token_is_named(
    master: StubMaster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    master.respond = lambda method, path, body: (
        401,
        {"message": "Authorization: send the master's token"},
    )
    client = connect()
    assert isinstance(client.post_metric(1, "m", 1).exception(60), MasterNotFoundError)
    assert (
        "it answers 401 Unauthorized: set MLBENCH_TOKEN to "
        "the token that the master was started with"
    ) in caplog.text


def test_a_worker_that_cannot_reach_its_master_sends_nothing_and_keeps_all(
    master: StubMaster, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_SPOOL", str(tmp_path / "own"))
    monkeypatch.setenv("MLBENCH_MASTER_URL", master.url)
    monkeypatch.setenv("MLBENCH_SPOOL_ONLY", "1")
    client = ApiClient(url=master.url)
    with contextlib.closing(client):
        client.post_metric("1", "loss", 0.5)
        # Without the variable, it waits until the master, which answers, has the metric.
        assert client.flush(60) is False
    assert master.values == []
    assert len(kept(tmp_path / "own")) == 1
