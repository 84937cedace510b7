"""The curves of the API against a plain reference that has all entries in memory."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mlbench_master import create_app
from mlbench_master.api import export
from mlbench_master.database import store as database
from mlbench_master.database.columns import Columns
from mlbench_master.database.store import NewMetric, Store, new_run, pod_owner, run_owner
from tests.master.helpers import TestClient, wait_for

COLUMNS = {
    "num_workers": 1,
    "num_cpus": 1.0,
    "max_bandwidth": 1000.0,
    "image": "i",
    "backend": "gloo",
    "command": "x",
}
START_US = 1_700_000_000_000_000
EMPTY: dict[str, list[Any]] = {"time_s": [], "epoch": [], "step": [], "value": []}


@pytest.fixture
def client(tmp_path: Path) -> Any:
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


@pytest.fixture
def store(client: Any) -> Store:
    found: Store = client.app.state.store
    return found


@pytest.fixture
def run_key(store: Store) -> str:
    """The owner of a run that has started."""
    made = new_run(name="r", **COLUMNS)
    # Before a scheduler sees it, which would start it.
    made.state, made.started_at = "finished", START_US
    return run_owner(store.add_run(made).id)


def asked(client: Any, query: str = "", path: str = "/api/runs/1/curves/") -> Any:
    response = client.get(f"{path}?{query}")
    assert response.status_code == 200, response.text
    # A browser refuses NaN and Infinity, which Python accepts.
    return json.loads(response.text, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def curve(client: Any, name: str = "m", points: int = 2000) -> list[tuple[Any, ...]]:
    [found] = asked(client, f"metric={name}&points={points}")["curves"]
    assert found["name"] == name
    return list(zip(found["step"], found["time_s"], found["epoch"], found["value"], strict=True))


def reference(metrics: list[NewMetric], points: int) -> list[tuple[Any, ...]]:
    """The points that are kept of metrics in the order of their arrival."""
    rows: list[tuple[Any, ...]] = []
    for step, metric in enumerate(
        sorted(metrics, key=lambda metric: metric.date)
    ):  # equal dates keep their order
        try:
            value = float(metric.value)
        except ValueError:
            value = math.nan
        try:
            epoch = json.loads(metric.extra)["epoch"]
        except (ValueError, KeyError, TypeError):
            epoch = None
        epoch = epoch if isinstance(epoch, (int, float)) else None
        row = (step, (metric.date - START_US) / 1e6, epoch, value if math.isfinite(value) else None)
        rows.append(row)
    if len(rows) <= points:
        return rows
    kept = {len(rows) - 1} if points == 1 else {0, len(rows) - 1}
    groups = (points - 2) // 2
    for _, grouped in itertools.groupby(
        rows if groups > 0 else [], lambda row: row[0] * groups // len(rows)
    ):
        members = list(grouped)
        numbers = [row for row in members if row[3] is not None]
        if numbers:
            kept |= {
                min(numbers, key=lambda row: row[3])[0],
                max(numbers, key=lambda row: row[3])[0],
            }
        else:
            kept.add(members[0][0])
    return [rows[step] for step in sorted(kept)]


VALUES = [
    "nan",
    "inf",
    "-inf",
    '{"a": 1}',
    "",
    "1e999",
    "0.5",
    "0.5",
    "1",
    "-3e-5",
    " 2 ",
    "1_0",
    "True",
    "0x10",
    "٣",
]
EXTRAS = [
    '{"rank": 0, "epoch": 1.5}',
    '{"epoch": "last"}',
    "",
    "[1]",
    '{"rank": 1}',
    '"epoch"',
    '{"epoch": 7}',
]


def packed(store: Store) -> list[tuple[int, bytes]]:
    """Date of the end and content of all packed pages."""
    with store._reading() as session:
        pages = sa.select(database._Page).order_by(
            database._Page.owner, database._Page.name, database._Page.page
        )
        return [(page.end_date, page.data) for page in session.scalars(pages)]


def drop_pages(store: Store) -> None:
    with store._writing() as session:
        session.execute(sa.delete(database._Page))


@pytest.mark.parametrize("page", [3, 64, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_curves_are_those_of_the_reference(
    client: Any, store: Store, run_key: str, seed: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAGE", page)
    draw = random.Random(100 * seed + page)
    count = draw.choice([1, 2, 3, 40, 700, 5000] if page > 3 else [7, 200])
    few_dates = draw.random() < 0.5
    texts = draw.random()
    metrics = [
        NewMetric(
            run_key,
            "m",
            START_US + (draw.randrange(5) if few_dates else draw.randrange(-1000, 10**9)),
            draw.choice(VALUES) if draw.random() < texts else repr(draw.gauss(0, 1)),
            extra=draw.choice(EXTRAS),
        )
        for _ in range(count)
    ]
    start = 0
    while start < count:
        size = draw.choice([1, 7, 300, count])
        store.add_metrics(metrics[start : start + size])
        start += size
        # Late entries have deleted pages, which are not packed again yet.
        assert draw.random() < 0.9 or curve(client, points=50) == reference(metrics[:start], 50)
    for points in (1, 2, 3, 4, 5, 6, 7, 17, 100, 699, 2000):
        assert curve(client, points=points) == reference(metrics, points), points
    assert len(packed(store)) == count // page


def test_a_long_curve_has_at_most_2000_points_and_its_extremes(
    client: Any, store: Store, run_key: str
) -> None:
    draw = random.Random(1)
    values = [math.sin(step / 500) + draw.random() for step in range(21_000)]
    values[12_345], values[17_000] = 99.0, -99.0
    metrics = [
        NewMetric(run_key, "m", START_US + 1000 * step, repr(value))
        for step, value in enumerate(values)
    ]
    # Nine of ten are one bulk without dates, which has one date.
    metrics += [NewMetric(run_key, "n", START_US, repr(value)) for value in values]
    draw.shuffle(metrics)
    store.add_metrics(metrics)
    for name in "mn":
        found = curve(client, name)
        assert 1900 < len(found) <= 2000
        assert found == reference([metric for metric in metrics if metric.name == name], 2000)
        assert {row[3] for row in found} >= {99.0, -99.0}


def test_pages_hold_the_rows_by_date(
    store: Store, run_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAGE", 4)

    def add(*dates: int, name: str = "m") -> list[int]:
        """Add entries; return the dates in the packed pages of both metrics."""
        store.add_metrics(
            [NewMetric(run_key, name, date, str(date), client_id=f"{name}{date}") for date in dates]
        )
        return [date for _, data in packed(store) for date in Columns.unpack(data).dates.tolist()]

    def shown() -> list[int]:
        return [int(date) for part in store.columns(run_key, "m") for date in part.dates]

    first = [10, 20, 30, 40]
    assert add(*first[::-1]) == first
    second = [50, 60, 70, 80]
    assert add(*second, 90) == first + second
    # A metric of another name, and one of a later date, do not change the pages.
    assert add(1, name="n") == first + second
    assert add(95) == first + second
    # A late entry deletes its page and those after it; the first page stays.
    with monkeypatch.context() as patch:
        patch.setattr(store, "pack_loose", lambda *_: None)
        assert add(55) == first
        assert shown() == [*first, 50, 55, 60, 70, 80, 90, 95]
    store.pack_pages(run_key, "m")
    assert [end for end, _ in packed(store)] == [40, 70]
    assert shown() == [*first, 50, 55, 60, 70, 80, 90, 95]
    # The last page is full again; a repeated delivery adds nothing.
    assert add(100) == [*first, 50, 55, 60, 70, 80, 90, 95, 100]
    add(100, 55)
    assert shown() == [*first, 50, 55, 60, 70, 80, 90, 95, 100]
    store.delete_run(1)
    assert packed(store) == [] and shown() == []
    assert not store._loose, (
        "a master that runs for months keeps nothing of deleted runs and unknown metrics"
    )


@pytest.mark.parametrize("change", ["late", "thinned"])
def test_pages_that_are_packed_again_while_they_are_read_repeat_and_omit_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(database, "PAGE", 4)
    monkeypatch.setattr(database, "_PACKED", 1)
    store.add_metrics(
        [NewMetric("pod:p", "cpu", date, "1", client_id=f"x{date}") for date in range(10, 22)]
    )
    parts = store.columns("pod:p", "cpu")
    assert next(parts).dates.tolist() == [10, 11, 12, 13]
    if change == "late":
        store.add_metrics([NewMetric("pod:p", "cpu", 9, "1")])
    else:
        store.thin_metrics("pod:p", ["cpu"], "x", since=10, until=14, interval_us=2)
    store.pack_pages("pod:p", "cpu")
    assert [date for part in parts for date in part.dates.tolist()] == list(range(14, 22))


def test_thinning_the_load_drops_the_pages_that_it_changes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAGE", 4)
    store.add_metrics(
        [NewMetric("pod:p", "cpu", date, str(date), client_id=f"x{date}") for date in range(12)]
    )
    assert [end for end, _ in packed(store)] == [3, 7, 11]
    store.thin_metrics("pod:p", ["cpu"], "x", since=6, until=12, interval_us=3)
    assert [end for end, _ in packed(store)] == [3]
    shown = [number for part in store.columns("pod:p", "cpu") for number in part.numbers.tolist()]
    assert shown == [0, 1, 2, 3, 4, 5, 7, 10]


@pytest.mark.parametrize("seed", range(3))
def test_long_metrics_are_summarized_as_short_ones(
    client: Any, store: Store, run_key: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    count = draw.choice([40, 500, 900])
    metrics = [
        NewMetric(
            run_key,
            "m",
            START_US + draw.randrange(10**6),
            draw.choice(VALUES)
            if draw.random() < 0.1
            else repr(draw.gauss(0, 10 ** draw.randrange(-5, 5))),
            cumulative=draw.random() < 0.5,
            extra=str(draw.random()),
        )
        for _ in range(count)
    ]
    store.add_metrics(metrics)
    parts = (
        "",
        "&since=2023-11-14T22:13:20.3Z",
        "&last_n=37",
        "&last_n=33&since=2023-11-14T22:13:20.5Z",
    )
    paths = [
        f"/api/metrics/1/?metric_type=run&summarize={most}{part}"
        for most in (1, 2, 7, 36, 300)
        for part in parts
    ]
    read = [client.get(path).json() for path in paths]
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            export,
            "summarize_long",
            lambda *a, f=export.summarize_long: (calls.append(a), f(*a))[1],
        )
        patch.setattr(database, "_PAGE", 30)
        for page in (5, 30):
            patch.setattr(database, "PAGE", page)
            patch.setattr(export, "PAGE", 30)
            drop_pages(store)
            store.pack_pages(run_key, "m")
            assert [client.get(path).json() for path in paths] == read
    assert len(calls) >= 10


def test_a_curve_packs_the_pages_of_an_older_database(
    client: Any, store: Store, run_key: str
) -> None:
    metrics = [NewMetric(run_key, "m", START_US + step, repr(step / 7)) for step in range(9000)]
    store.add_metrics(metrics)
    drop_pages(store)
    store._loose.clear()  # as after a restart
    assert curve(client) == reference(metrics, 2000)
    wait_for(lambda: len(packed(store)) == 2)
    assert curve(client) == reference(metrics, 2000)


def test_names_and_counts_come_without_a_metric(client: Any, store: Store, run_key: str) -> None:
    assert asked(client) == {"curves": [], "last_id": 0}
    store.add_metrics([NewMetric(run_key, name, START_US, "1") for name in ("b", "a & b", "b")])
    both = [{"name": "a & b", "count": 1}, {"name": "b", "count": 2}]
    assert asked(client) == {"curves": both, "last_id": 3}
    # In the order of the request, each once; one that has no entries yet is empty.
    found = asked(client, "metric=b&metric=soon&metric=a+%26+b&metric=b")
    assert [(item["name"], item["count"], len(item["step"])) for item in found["curves"]] == [
        ("b", 2, 2),
        ("soon", 0, 0),
        ("a & b", 1, 1),
    ]
    assert found["curves"][1] == {"name": "soon", "count": 0, **EMPTY}
    assert found["last_id"] == 3


def test_the_time_of_a_pod_begins_with_its_run(client: Any, store: Store, run_key: str) -> None:
    dates = [START_US + 2_000_000, START_US + 3_500_000]
    for pod in ("r-worker-0", "alone"):
        store.add_metrics([NewMetric(pod_owner(pod), "cpu", date, "50") for date in dates])
    store.add_metrics([NewMetric(pod_owner("alone"), "memory", START_US, "1")])
    times = [
        asked(client, "metric=cpu", f"/api/pods/{pod}/curves/") for pod in ("r-worker-0", "alone")
    ]
    # Without its run, a pod's time begins with its first entry of any metric.
    assert [found["curves"][0]["time_s"] for found in times] == [[2.0, 3.5], [2.0, 3.5]]
    store.add_run(new_run(name="soon", **COLUMNS))
    assert asked(client, "metric=cpu", "/api/pods/soon-worker-0/curves/")["curves"][0]["count"] == 0


def test_the_time_of_a_run_that_has_not_started_begins_with_its_creation(
    client: Any, store: Store
) -> None:
    run = store.add_run(new_run(name="r", **COLUMNS))
    store.add_metrics([NewMetric(run_owner(run.id), "m", run.created_at + 1_250_000, "1")])
    assert curve(client) == [(0, 1.25, None, 1.0)]


@pytest.mark.parametrize(
    "query",
    [
        "points=0",
        "points=2001",
        "points=many",
        "metric=a%00",
        f"metric={'x' * 256}",
        "&".join(["metric=a"] * 101),
    ],
)
def test_a_wrong_query_is_refused(client: Any, run_key: str, query: str) -> None:
    response = client.get(f"/api/runs/1/curves/?{query}")
    assert response.status_code == 400
    assert query.partition("=")[0] in response.json()["message"]


@pytest.mark.parametrize(
    "path", ["/api/runs/7/curves/", "/api/pods/nobody/curves/", "/api/runs/x/curves/"]
)
def test_unknown_owners_are_not_found(client: Any, run_key: str, path: str) -> None:
    assert client.get(path).status_code == 404
