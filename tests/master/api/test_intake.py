"""The quick way of reading metrics gives what pydantic gives, and requests that are written
together stay apart."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from mlbench_master import create_app
from mlbench_master.api.intake import Intake, read_metrics
from mlbench_master.api.schemas import MetricIn
from mlbench_master.database.store import NewMetric, Store, new_run
from mlbench_master.database.writer import MetricWriter, UnknownRunError
from mlbench_master.runs.undelivered_metrics import new_metric
from tests.master.helpers import TestClient

NOW = 1_700_000_000_000_000
USUAL = {
    "run_id": 1,
    "name": "train_loss @ 0",
    "date": "2026-01-31T12:00:05.500000Z",
    "value": 0.5,
    "cumulative": False,
    "metadata": '{"rank": 0, "epoch": 1}',
    "id": "a1",
}
ODD: dict[str, list[Any]] = {
    "run_id": [1, 0, -1, True, "1", 1.0, 1.5, 2**63 - 1, 2**63, None, "", []],
    "pod_name": ["r-worker-0", None, "", "A", 7],
    "name": [
        "m",
        "",
        " ",
        "x" * 255,
        "x" * 256,
        "a\tb",
        "a\x7fb",
        "ä",
        "\ud800",
        "a\x00",
        None,
        7,
        "a\u2028b",
    ],
    "date": [
        "2026-01-31T12:00:05.500000Z",
        "0001-01-01T00:00:00.000000Z",
        "9999-12-31T23:59:59.999999Z",
        "2026-01-31T12:00:60.000000Z",
        "2026-01-31T12:60:00.000000Z",
        "2026-01-31T24:00:00.000000Z",
        "2026-02-30T12:00:05.500000Z",
        "0000-01-01T00:00:00.000000Z",
        "2026-01- 1T12:00:05.500000Z",
        "2026-01-31 12:00:05.500000Z",
        "2026-01-31T12:00:05.50000٣Z",
        "2026-01-31T12:00: 5.500000Z",
        "2026-01-31T12:00:05.500000z",
        "2026-01-31T12:00:05,500000Z",
        "2026-01-31T12:00:05.5000+00",
        "2026-01-31T12:00:05.500000+02:00",
        "2026-01-31T12:00:05Z",
        "+026-01-31T12:00:05.500000Z",
        "soon",
        "",
        None,
        5,
    ],
    "value": [
        *(0.5, 1, -0.0, 1e300, float("nan"), float("inf"), 10**30, True, None, [1]),
        *("", "text", "ä", "a\x00", "\ud800", "x" * 65_536, "x" * 65_537),
    ],
    "cumulative": [True, False, None, 0, 1, "true", "no", ""],
    "metadata": [
        *("", "ä", "a\x00b", "x" * 65_537, None, [1], 7, True),
        *({"rank": 0, "epoch": 0.5}, {"ä": "\x00"}, {"x": "y" * 65_536}),
    ],
    "id": ["", None, " ", "x" * 128, "x" * 129, 7, True, "a\nb", "ä"],
    "other": [1, None],
}


def slowly(item: Any) -> NewMetric | str:
    try:
        return new_metric(MetricIn.model_validate(item), NOW)
    except ValueError:
        return "refused"


def test_every_odd_value_alone_is_read_as_pydantic_reads_it() -> None:
    intake = Intake(NOW)
    assert intake.read_usual(USUAL) == slowly(USUAL) and slowly(USUAL) != "refused"
    for field, values in ODD.items():
        for value in values:
            item = {**USUAL, field: value}
            quickly = intake.read_usual(item)
            assert quickly is None or repr(quickly) == repr(slowly(item)), (field, value)


def test_random_metrics_are_read_as_pydantic_reads_them() -> None:
    draw = random.Random(1)
    intake = Intake(NOW)
    quick = 0
    for _ in range(4000):
        item: dict[str, Any] = dict(USUAL)
        for field in draw.choices(sorted(ODD), k=draw.choice([0, 1, 1, 2, 3])):
            item[field] = draw.choice(ODD[field])
        for field in draw.sample(sorted(item), k=draw.choice([0, 0, 0, 1, 2])):
            del item[field]
        found = intake.read_usual(item)
        quick += found is not None
        # repr: NaN is not equal to itself, and True is equal to 1.
        assert found is None or repr(found) == repr(slowly(item)), item
    assert quick > 1000
    others: list[Any] = [None, [], "x", 1]
    assert not any(map(intake.read_usual, others))


def test_an_error_names_the_first_wrong_metric_and_its_field() -> None:
    with pytest.raises(ValueError, match=r"^\[1\]\.value: is required"):
        read_metrics([USUAL, {"run_id": 1, "name": "m"}, {}], NOW, many=True)
    with pytest.raises(ValueError, match=r"^name: must not be empty"):
        read_metrics([{**USUAL, "name": " "}], NOW, many=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'master.db'}")
    columns = {
        "num_workers": 1,
        "num_cpus": 1.0,
        "max_bandwidth": 1.0,
        "image": "",
        "backend": "g",
        "command": "x",
    }
    made.add_run(new_run(name="r", **columns))
    yield made
    made.close()


def test_requests_that_wait_are_written_together_and_fail_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    first, rest = threading.Event(), threading.Event()
    add = store.add_batches

    def slow_add(batches: Any) -> list[int]:
        groups.append(len(batches))
        first.set()
        assert rest.wait(60)
        if any(metric.value == "bad" for batch in batches for metric in batch):
            # A driver of a database raises this error itself, so SQLAlchemy passes it on.
            raise OverflowError("int too large")
        return add(batches)

    monkeypatch.setattr(store, "add_batches", slow_add)
    writer = MetricWriter(store)

    async def request(owner: str, *values: str) -> int | str:
        try:
            metrics = [
                NewMetric(owner, "m", 1, value, client_id=f"{owner} {value}") for value in values
            ]
            return await writer.add(metrics)
        except (UnknownRunError, OverflowError) as error:
            return type(error).__name__

    async def main() -> list[int | str]:
        leader = asyncio.create_task(request("run:1", "1"))
        await asyncio.to_thread(first.wait, 60)
        others = [
            request("run:1", "2", "3"),
            request("run:7", "4"),
            request("run:1", "bad"),
            request("pod:p", "5"),
        ]
        tasks = [asyncio.create_task(task) for task in (*others, request("run:1", "2", "6"))]
        await asyncio.sleep(0.05)
        rest.set()
        return list(await asyncio.gather(leader, *tasks))

    assert asyncio.run(main()) == [1, 2, "UnknownRunError", "OverflowError", 1, 1]
    # The group without the unknown run fails as a whole, and each request is then written alone.
    assert groups == [1, 4, 1, 0, 1, 1, 1]
    assert [point.value for point in store.points("run:1", "m")] == ["1", "2", "3", "6"]
    writer.close()


async def outcome(writer: MetricWriter, *values: str) -> int | str:
    try:
        return await asyncio.wait_for(
            writer.add([NewMetric("run:1", "m", 1, value) for value in values]), 60
        )
    except Exception as error:
        return type(error).__name__


def test_a_database_that_does_not_answer_is_asked_once_for_all_requests_that_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0
    first, rest = threading.Event(), threading.Event()

    def fail(_: Any) -> list[int]:
        nonlocal attempts
        attempts += 1
        first.set()
        assert rest.wait(60)
        # After half a minute, of a file that another program has locked.
        raise OperationalError("INSERT", {}, Exception("database is locked"))

    monkeypatch.setattr(store, "add_batches", fail)
    writer = MetricWriter(store)

    async def main() -> list[int | str]:
        leader = asyncio.create_task(outcome(writer, "1"))
        await asyncio.to_thread(first.wait, 60)
        others = [asyncio.create_task(outcome(writer, str(number))) for number in range(2, 12)]
        await asyncio.sleep(0.05)
        rest.set()
        return list(await asyncio.gather(leader, *others))

    assert asyncio.run(main()) == ["OperationalError"] * 11
    assert attempts == 2
    writer.close()


def test_a_run_that_is_deleted_meanwhile_leaves_no_metrics(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    existing = store.existing_runs
    deleting = threading.Thread(target=store.delete_run, args=(1,))

    def slow_existing(ids: Any) -> set[int]:
        found = existing(ids)
        deleting.start()
        deleting.join(0.2)
        return found

    monkeypatch.setattr(store, "existing_runs", slow_existing)
    writer = MetricWriter(store)
    assert asyncio.run(outcome(writer, "1")) == 1
    deleting.join()
    assert store.metric_counts(["run:1"]) == {}
    writer.close()


def test_a_request_that_gets_no_thread_fails_and_holds_up_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricWriter(store)
    start = threading.Thread.start

    def no_thread(_: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    async def main() -> list[int | str]:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        return [await outcome(writer, "1"), await outcome(writer, "2")]

    assert asyncio.run(main()) == ["RuntimeError", 1]
    assert [point.value for point in store.points("run:1", "m")] == ["2"]
    writer.close()


def test_posts_of_many_clients_are_all_kept_and_answered_with_their_own_entry(
    tmp_path: Path,
) -> None:
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None
    with TestClient(app, base_url="http://127.0.0.1:5080") as client:
        client.post("/api/runs/", json={"name": "r", "num_workers": 1, "command": "true"})

        def post(number: int) -> None:
            item = {
                "run_id": 1 if number % 10 else 7,
                "name": "m",
                "value": number,
                "id": f"{number}",
            }
            answer = client.post("/api/metrics/", content=json.dumps(item))
            assert answer.status_code == (201 if number % 10 else 404)
            assert not number % 10 or (answer.json()["value"], answer.json()["run_id"]) == (
                str(number),
                1,
            )

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(post, range(200)))
        found = client.get("/api/metrics/1/?metric_type=run").json()["m"]
        assert sorted(int(entry["value"]) for entry in found) == [
            number for number in range(200) if number % 10
        ]
