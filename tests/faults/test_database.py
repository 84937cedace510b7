"""Databases that are damaged, of another version, or used by two masters."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic.script import ScriptDirectory

from mlbench_core.errors import ConfigurationError
from mlbench_master import create_app
from mlbench_master.database import migrations
from mlbench_master.database.store import Store, _prepare_sqlite
from mlbench_master.events import EventBus
from mlbench_master.runs import lease
from mlbench_master.runs.lease import Lease
from mlbench_master.runs.scheduler import Scheduler
from tests.faults.helpers import add_run
from tests.helpers.processes import environment
from tests.master.helpers import IdleEngine, TestClient, server, wait_for
from tests.master.old_tables import VERSIONS, check_upgraded, old_tables, upgrade_until_killed
from tests.master.test_server import master


def run_sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database of this version with one run."""
    path = tmp_path / "master.db"
    store = Store(f"sqlite:///{path}")
    add_run(store, "kept")
    store.close()
    return path


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (
            ["UPDATE alembic_version SET version_num = '0099'"],
            (
                r"newer version of MLBench wrote it \(version 99 of the tables, this one knows up "
                r"to .* update mlben"
            ),
        ),
        (
            ["DROP TABLE alembic_version", "UPDATE schema_version SET version = 98"],
            r"newer version of MLBench wrote it \(version 98 ",
        ),
        (["DELETE FROM alembic_version"], "its table alembic_version is damaged"),
        (
            ["UPDATE alembic_version SET version_num = 'a1'"],
            r"its table alembic_version is damaged: it has the versions \['a1'\]",
        ),
        (
            ["DROP TABLE alembic_version", "DELETE FROM schema_version"],
            "its table schema_version is damaged",
        ),
        (
            ["DROP TABLE schema_version"],
            "it belongs to another program, with the tables alembic_version, master_lease",
        ),
        (["DROP TABLE metrics"], "its table metrics lacks the columns id, owner"),
        (
            ["ALTER TABLE runs DROP COLUMN light_target"],
            "its table runs lacks the columns light_target",
        ),
        (
            [f"DROP TABLE {name}" for name in ("runs", "metrics", "metric_pages", "schema_version")]
            + ["DROP TABLE master_lease", "DROP TABLE alembic_version"]
            + ["CREATE TABLE django_migrations (id INTEGER)"],
            (
                "it belongs to another program, with the tables "
                "django_migrations; give an empty database"
            ),
        ),
    ],
)
def test_a_database_that_does_not_fit_is_refused(
    database: Path, statements: list[str], reason: str
) -> None:
    run_sql(database, *statements)
    before = database.read_bytes()
    with pytest.raises(ConfigurationError, match=reason):
        Store(f"sqlite:///{database}")
    assert database.read_bytes() == before


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_an_older_version_is_brought_to_this_one(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "100% old" / "master.db"
    path.parent.mkdir()
    run_sql(path, *old_tables(version, "sqlite"))
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: Store(f"sqlite:///{path}"), range(4)))
    for store in stores:
        check_upgraded(store)
        store.close()


def test_a_connection_waits_for_another_that_changes_the_mode_of_the_file(tmp_path: Path) -> None:
    """SQLite does not wait then: of eight connections at once, one in a thousand failed."""
    refused = []

    class Cursor(sqlite3.Cursor):
        def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
            if "journal_mode" in statement and len(refused) < 3:
                refused.append(statement)
                raise sqlite3.OperationalError("database is locked")
            return super().execute(statement, *arguments)

    class Connection(sqlite3.Connection):
        def cursor(self) -> Cursor:  # type: ignore[override]
            return super().cursor(Cursor)

    with closing(sqlite3.connect(tmp_path / "master.db", factory=Connection)) as connection:
        _prepare_sqlite(connection, None)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert len(refused) == 3


def test_an_upgrade_is_one_line_of_the_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "master.db"
    run_sql(path, *old_tables(3, "sqlite"))
    with caplog.at_level(logging.INFO):
        Store(f"sqlite:///{path}").close()
    assert caplog.messages == [
        (
            "an older version wrote the database; its tables "
            f"are brought from 0003 to {migrations.HEAD}"
        )
    ]


def test_an_upgrade_is_one_line_in_a_process_that_has_not_loaded_alembic(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    run_sql(path, *old_tables(3, "sqlite"))
    code = "import logging, sys; logging.basicConfig(level=logging.INFO); "
    code += "from mlbench_master.database.store import Store; Store(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, f"sqlite:///{path}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert len(done.stderr.splitlines()) == 1 and "brought from 0003" in done.stderr


def test_a_kill_in_an_upgrade_leaves_the_old_tables(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    run_sql(path, *old_tables(1, "sqlite"))
    upgrade_until_killed(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection:
        names = (
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite%' ORDER BY name"
        )
        assert connection.execute(names).fetchall() == [("metrics",), ("runs",)]
    store = Store(f"sqlite:///{path}")
    check_upgraded(store)
    store.close()


def test_the_revisions_are_numbered_up_to_the_newest(tmp_path: Path) -> None:
    revisions = [
        revision.revision for revision in ScriptDirectory(str(migrations._SCRIPTS)).walk_revisions()
    ][::-1]
    assert revisions == [f"{number:04}" for number in range(1, len(revisions) + 1)]
    assert revisions[-1] == migrations.HEAD


def test_a_start_on_tables_of_this_version_does_not_import_alembic(database: Path) -> None:
    code = (
        "import sys; from mlbench_master.database.store import Store; "
        "[Store(url).close() for url in sys.argv[1:]]; "
    )
    code += "assert 'sqlalchemy' in sys.modules and 'alembic' not in sys.modules"
    urls = [f"sqlite:///{path}" for path in (database, database.with_name("new.db"))]
    subprocess.run([sys.executable, "-c", code, *urls], env=environment(), timeout=240, check=True)


def test_a_file_that_cannot_be_written_is_refused_with_one_line(
    database: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///file:{database}?mode=ro&uri=true"
    done = master("--port", "0", "--data-dir", str(tmp_path / "data"), "--database-url", url)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1), done.stderr
    assert "cannot open the database" in done.stderr and "readonly database" in done.stderr
    assert not Path("file:").exists()


def test_a_damaged_database_is_refused_by_the_command_with_one_line(
    database: Path, tmp_path: Path
) -> None:
    run_sql(
        database,
        "CREATE TABLE filling AS SELECT zeroblob(100000) AS x",
        "PRAGMA wal_checkpoint(TRUNCATE)",
    )
    content = bytearray(database.read_bytes())
    content[4096 * 2 : 4096 * 8] = b"\xff" * 4096 * 6
    database.write_bytes(content)
    done = master(
        "--port", "0", "--data-dir", str(tmp_path), "--database-url", f"sqlite:///{database}"
    )
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1), done.stderr
    assert "cannot open the database" in done.stderr


def test_health_says_that_the_database_fails(tmp_path: Path) -> None:
    with TestClient(create_app(data_dir=tmp_path), base_url="http://127.0.0.1:5080") as client:
        assert client.get("/api/health/").json()["status"] == "ok"
        run_sql(tmp_path / "master.db", "DROP TABLE alembic_version")
        answer = client.get("/api/health/")
        assert (
            answer.status_code,
            "the database failed: no such table" in answer.json()["message"],
        ) == (503, True)


def test_an_error_that_lasts_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    scheduler = Scheduler(store, IdleEngine(), EventBus(), {}, poll_s=0.001)
    run_sql(tmp_path / "master.db", "ALTER TABLE runs RENAME TO others")
    scheduler.start()
    try:
        wait_for(lambda: caplog.records)
        time.sleep(0.1)
        assert len(caplog.records) == 1
    finally:
        scheduler.close()


def test_two_masters_share_no_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    with server(tmp_path / "one", "--database-url", url) as (base, first):
        body = {"name": "r", "num_workers": 1, "command": "sleep 2"}
        run_id = httpx.post(f"{base}/api/runs/", json=body).json()["id"]
        second = master("--port", "0", "--data-dir", str(tmp_path / "two"), "--database-url", url)
        assert (second.returncode, len(second.stderr.strip().splitlines())) == (1, 1), second.stderr
        assert f"another master uses the database (process {first.pid} on " in second.stderr
        wait_for(lambda: httpx.get(f"{base}/api/runs/{run_id}/").json()["state"] == "finished")
        first.kill()
        first.wait()
    # The holder of the lease is dead, so the next one need not wait ten minutes for its end.
    setup = "from mlbench_master.runs.lease import Lease; Lease.__init__.__defaults__ = (600.0,)"
    with server(tmp_path / "one", "--database-url", url, setup=setup) as (base, _):
        assert httpx.get(f"{base}/api/runs/{run_id}/").json()["state"] == "finished"


def test_a_lease_that_is_not_renewed_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a master on another machine, whose processes nobody here can see."""
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    monkeypatch.setattr(lease, "place", lambda: "machine-a")
    expires_s = 3.0  # in which a slow machine manages to renew it
    frozen = Lease(store, expires_s)
    frozen.acquire()
    assert frozen.is_held
    monkeypatch.setattr(lease, "place", lambda: "machine-b")
    other = Lease(store, expires_s)
    started = time.monotonic()
    other.acquire()
    has_waited = time.monotonic() - started > 0.9 * expires_s
    assert (has_waited, frozen.is_held, other.is_held) == (True, False, True)
    other.start()
    try:
        monkeypatch.setattr(lease, "place", lambda: "machine-c")
        third = Lease(store, expires_s)
        with pytest.raises(ConfigurationError, match="another master uses the database"):
            third.acquire()
        # The first one wakes up: it neither takes the lease back nor looks after a run.
        ticks: list[Any] = []
        scheduler = Scheduler(store, IdleEngine(), EventBus(), {}, poll_s=0.01, lease=frozen)
        monkeypatch.setattr(scheduler, "tick", lambda: ticks.append(1))
        scheduler.start()
        wait_for(lambda: frozen._lost)
        scheduler.close()
        assert (ticks, other.is_held, store.lease() is not None) == ([], True, True)
    finally:
        other.release()
    assert store.lease() is None
