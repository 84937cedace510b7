"""The master on a real PostgreSQL: a throwaway server on a Unix socket, with tests of the API and
of its own.

They are skipped where the programs of PostgreSQL or the package psycopg are missing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="needs the extra 'postgres'")

import sqlalchemy as sa

from mlbench_master import create_app
from mlbench_master.database.store import LeaseRow, NewMetric, Run, Store, new_run, run_owner

# These tests run here again, with the client of this module.
from tests.master.api.test_api import (
    run,  # noqa: F401 - a fixture
    test_a_list_is_all_or_nothing,  # noqa: F401
    test_a_run_has_every_field,  # noqa: F401
    test_a_stored_date_out_of_range_does_not_hide_the_other_metrics,  # noqa: F401
    test_asking_for_a_part,  # noqa: F401
    test_deleting_takes_the_metrics_and_never_reuses_the_id,  # noqa: F401
    test_diverged_values_are_kept,  # noqa: F401
    test_pods_and_all_metrics,  # noqa: F401
    test_repeated_delivery_is_harmless_and_order_is_by_date,  # noqa: F401
    test_the_first_and_the_last_date_are_read_back,  # noqa: F401
    test_the_zip_holds_safe_names_and_the_official_result,  # noqa: F401
)
from tests.master.api.test_curves import (
    run_key,  # noqa: F401 - a fixture
    test_a_long_curve_has_at_most_2000_points_and_its_extremes,  # noqa: F401
    test_curves_are_those_of_the_reference,  # noqa: F401
    test_names_and_counts_come_without_a_metric,  # noqa: F401
    test_pages_hold_the_rows_by_date,  # noqa: F401
)
from tests.master.api.test_queries import (
    add_run,
)
from tests.master.helpers import IdleEngine, TestClient, wait_for
from tests.master.old_tables import VERSIONS, check_upgraded, old_tables, upgrade_until_killed
from tests.master.web.test_runs_page import test_the_list_can_be_filtered_and_sorted_by_each_column  # noqa: F401

_NUMBERS = itertools.count()


def program(name: str) -> str:
    """Path of a program of PostgreSQL; Debian keeps them outside of PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(versions[-1]) if versions else None)
    if found is None:
        pytest.skip(f"needs the program {name} of PostgreSQL")
    return found


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The folder of the socket of a server, which a user without rights runs: PostgreSQL refuses to
    run as root."""
    initdb, control = program("initdb"), program("pg_ctl")
    # The path of a Unix socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="mlbench-pg-", dir="/tmp"))
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        user = {"user": "nobody", "extra_groups": ()}
        shutil.chown(folder, "nobody")
    data = folder / "data"

    def call(*arguments: str) -> None:
        # The server would keep a pipe open.
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            subprocess.run(
                arguments, check=True, cwd="/", stdout=log, stderr=log, timeout=60, **user
            )

    try:
        call(
            initdb,
            "-D",
            str(data),
            "-A",
            "trust",
            "-U",
            "mlbench",
            "-E",
            "UTF8",
            "--no-locale",
            "--no-sync",
        )
        call(control, "-D", str(data), "-w", "-o", f"-F -k {folder} -c listen_addresses=", "start")
        try:
            yield str(folder)
        finally:
            call(control, "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / f"{folder.name}.log").unlink(missing_ok=True)


@pytest.fixture
def url(postgres: str) -> str:
    """The address of an empty schema, which takes a hundredth of the time of an empty database."""
    database, name = f"postgresql://mlbench@/postgres?host={postgres}", f"test{next(_NUMBERS)}"
    run_sql(database, f"CREATE SCHEMA {name}")
    return f"{database}&options=-csearch_path%3D{name}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = Store(url)
    yield made
    made.close()


@pytest.fixture
def client(url: str, tmp_path: Path) -> Iterator[TestClient]:
    """A master with an empty database."""
    app = create_app(database_url=url, data_dir=tmp_path, engine=IdleEngine())
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


def run_sql(url: str, *statements: str) -> list[Any]:
    """Execute statements in one transaction; the rows of the last one."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.begin() as connection:
            results = [connection.execute(sa.text(statement)) for statement in statements]
            return list(results[-1]) if results[-1].returns_rows else []
    finally:
        engine.dispose()


def a_run(name: str, **values: Any) -> Run:
    columns = {
        "num_workers": 1,
        "num_cpus": 1.0,
        "max_bandwidth": 1.0,
        "image": "",
        "backend": "gloo",
        "command": "x",
    }
    return new_run(name=name, **columns, **values)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_an_older_version_is_brought_to_this_one(url: str, version: int) -> None:
    run_sql(url, *old_tables(version, "postgresql"))
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: Store(url), range(4)))
    for store in stores:
        check_upgraded(store)
    assert stores[0].add_metrics([NewMetric(run_owner(1), "loss", 1, "0.5", client_id="a")]) == 0
    assert stores[0].add_run(a_run("next")).id == 2
    for store in stores:
        store.close()


def test_a_kill_in_an_upgrade_leaves_the_old_tables(url: str) -> None:
    run_sql(url, *old_tables(1, "postgresql"))
    upgrade_until_killed(url)
    names = (
        "SELECT table_name FROM information_schema.tables "
        "WHERE table_schema = current_schema ORDER BY 1"
    )
    assert run_sql(url, names) == [("metrics",), ("runs",)]
    store = Store(url)
    check_upgraded(store)
    store.close()


def test_masters_that_start_together_make_the_tables_once(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: Store(url), range(8)))
    rows = [
        LeaseRow(f"master {number}", 1, "host", "place", number, "start") for number in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda store, row: store.replace_lease(None, row), stores, rows))
    assert sorted(taken) == [False] * 7 + [True]
    assert stores[0].lease() == rows[taken.index(True)]
    for store in stores:
        store.close()


def test_deliveries_of_many_threads_are_stored_once(store: Store) -> None:
    owner = run_owner(store.add_run(a_run("r")).id)
    metrics = [
        NewMetric(owner, "loss", date, str(date), client_id=str(date)) for date in range(3000)
    ]
    barrier = threading.Barrier(6)

    def deliver(index: int) -> int:
        barrier.wait()
        # Rows in another order could lock each other out if transactions ran at the same time.
        ordered = metrics if index % 2 else metrics[::-1]
        return sum(
            store.add_metrics(ordered[start : start + 1000]) for start in range(0, 3000, 1000)
        )

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(deliver, range(6))) == 3000
    assert [point.value for point in store.points(owner, "loss")] == list(map(str, range(3000)))


def test_a_list_of_runs_is_without_their_output(store: Store) -> None:
    output = '{"stdout": ["a\\u0000b"], "stderr": ["c"], "notes": ["d"]}'
    run_id = store.add_run(a_run("r", job_metadata=output)).id
    assert [found.metadata_dict() for found in store.runs()] == [{"notes": ["d"]}]
    stored = store.run(run_id)
    assert stored is not None and stored.job_metadata == output


def test_an_id_that_no_run_can_have_is_none(client: TestClient) -> None:
    metric = {"name": "m", "value": 1}
    for number in (2**31, 2**63 - 1):
        assert client.get(f"/api/runs/{number}/").status_code == 404
        assert client.get(f"/api/metrics/{number}/?metric_type=run").status_code == 404
        assert client.post("/api/metrics/", json={**metric, "run_id": number}).status_code == 404
        assert client.get(f"/api/runs/?after={number}").json() == []


def test_runs_are_filtered_and_sorted(store: Store) -> None:
    ids = [
        store.add_run(a_run(name, finished_at=end)).id
        for name, end in (("a-1", 2), ("a_2", None), ("b-1", 1))
    ]
    for query, wanted in (
        ({"sort": "finished_at"}, [2, 0, 1]),
        ({"sort": "-finished_at", "limit": 2}, [0, 2]),
        ({"sort": "finished_at", "offset": 2}, [1]),
        ({"name": "A_"}, [1]),
        ({"after": 10**18}, []),
    ):
        assert [found.id for found in store.runs(**query)] == [ids[index] for index in wanted], (
            query
        )


def backend_of(store: Store) -> int:
    """The server's process for the one connection that the idle store's pool keeps."""
    with store._database_engine.connect() as connection:
        pid = connection.scalar(sa.text("SELECT pg_backend_pid()"))
    assert isinstance(pid, int)
    return pid


def test_a_connection_that_the_server_closed_is_replaced(store: Store, url: str) -> None:
    store.check()
    # Exactly this process: the server has others, such as the autovacuum's.
    closed = backend_of(store)
    assert run_sql(url, f"SELECT pg_terminate_backend({closed})") == [(True,)]
    left = f"SELECT pid FROM pg_stat_activity WHERE pid = {closed}"
    wait_for(lambda: run_sql(url, left) == [], 60, "the end of the connection")
    store.check()
    assert backend_of(store) != closed
    assert store.add_run(a_run("r")).id == 1


def test_imported_runs_are_found_again(store: Store) -> None:
    first = store.import_run(a_run("r"), "a" * 64)
    assert store.import_run(a_run("r"), "a" * 64).id == first.id
    assert store.import_run(a_run("r"), "b" * 64).name == "r-2"


def test_statements_do_not_grow_with_metrics(store: Store) -> None:
    run_id = add_run(store, "r", 8, 20)
    statements: list[str] = []
    sa.event.listen(
        store._database_engine, "before_cursor_execute", lambda *a: statements.append(a[2])
    )
    counts = store.metric_counts([run_owner(run_id)])
    values = [[point.value for point in points] for _, _, points in store.entries(counts)]
    assert values == [["0", "1", "2"]] * 160
    assert len(statements) == 2
