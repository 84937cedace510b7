"""The tables of earlier versions of the master, as SQLAlchemy wrote them then, with one run and one
metric."""

from __future__ import annotations

import subprocess
import sys

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from mlbench_master.database import migrations
from mlbench_master.database.store import Run, Store, run_owner
from tests.helpers.processes import environment

__all__ = ["VERSIONS", "check_upgraded", "old_tables", "upgrade_until_killed"]

VERSIONS = (1, 2, 3)

_COLUMNS = {
    "sqlite": {
        "id": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "long_id": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "real": "DOUBLE",
    },
    "postgresql": {
        "id": "SERIAL PRIMARY KEY",
        "long_id": "BIGSERIAL PRIMARY KEY",
        "real": "DOUBLE PRECISION",
    },
}
_VERSION_1 = (
    "CREATE TABLE runs (id {id}, name VARCHAR(63) NOT NULL, created_at BIGINT NOT NULL, "
    "started_at BIGINT, "
    "finished_at BIGINT, state VARCHAR(16) NOT NULL, job_id VARCHAR(255), job_metadata TEXT "
    "NOT NULL, "
    "num_workers INTEGER NOT NULL, num_cpus {real} NOT NULL, max_bandwidth {real} NOT NULL, "
    "image VARCHAR(512) NOT NULL, backend VARCHAR(64) NOT NULL, run_all_nodes BOOLEAN NOT "
    "NULL, command TEXT NOT NULL, "
    "gpu_enabled BOOLEAN NOT NULL, light_target BOOLEAN NOT NULL, goal_result TEXT, "
    "{goal}UNIQUE (name))",
    "CREATE INDEX ix_runs_state ON runs (state)",
    "CREATE TABLE metrics (id {long_id}, owner VARCHAR(300) NOT NULL, client_id VARCHAR(128), "
    "name VARCHAR(255) NOT NULL, date BIGINT NOT NULL, value TEXT NOT NULL, cumulative BOOLEAN "
    "NOT NULL, "
    "metadata TEXT NOT NULL, UNIQUE (owner, client_id))",
    "CREATE INDEX metrics_by_name ON metrics (owner, name, date, id)",
    "INSERT INTO runs (name, created_at, state, job_metadata, num_workers, num_cpus, "
    "max_bandwidth, image, backend, "
    "run_all_nodes, command, gpu_enabled, light_target) VALUES ('kept', 1, 'finished', '{{}}', "
    "1, 1.5, 1000, '', "
    "'gloo', true, 'true', false, false)",
    "INSERT INTO metrics (owner, client_id, name, date, value, cumulative, metadata) VALUES "
    "('run:1', 'a', 'loss', 1, '0.5', false, '')",
)
_VERSION_2 = (
    "CREATE TABLE schema_version (version INTEGER NOT NULL, PRIMARY KEY (version))",
    "CREATE TABLE master_lease (id INTEGER NOT NULL, holder VARCHAR(32) NOT NULL, beat BIGINT "
    "NOT NULL, host VARCHAR(255) NOT NULL, place VARCHAR(255) NOT NULL, pid BIGINT NOT NULL, "
    "started VARCHAR(255) NOT NULL, PRIMARY KEY (id))",
    "INSERT INTO schema_version VALUES ({version})",
)


def old_tables(version: int, dialect: str) -> list[str]:
    """Statements that make a database of this version.

    Args:
        version: One of :data:`VERSIONS`; the newer ones come from Alembic.
        dialect: ``"sqlite"`` or ``"postgresql"``.
    """
    statements = [*_VERSION_1, *(_VERSION_2 if version > 1 else ())]
    goal = "goal TEXT, " if version > 2 else ""
    return [text.format(**_COLUMNS[dialect], version=version, goal=goal) for text in statements]


def check_upgraded(store: Store) -> None:
    """Check that a store has the rows and the tables it should have after it was opened with
    :func:`old_tables`."""
    assert [(run.id, run.name, run.num_cpus, run.goal) for run in store.runs()] == [
        (1, "kept", 1.5, None)
    ]
    assert [point.value for point in store.points(run_owner(1), "loss")] == ["0.5"]
    with store._database_engine.connect() as connection:
        assert connection.scalars(sa.text("SELECT version_num FROM alembic_version")).all() == [
            migrations.HEAD
        ]
        # Masters before Alembic look here.
        assert connection.scalars(sa.text("SELECT version FROM schema_version")).all() == [
            int(migrations.HEAD)
        ]
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, Run.metadata) == []


_KILLED = """
import os, signal, sys
from alembic import command
from mlbench_master.database.store import Store
upgrade = command.upgrade
command.upgrade = lambda *arguments: (upgrade(*arguments), os.kill(os.getpid(), signal.SIGKILL))
Store(sys.argv[1])
"""


def upgrade_until_killed(url: str) -> None:
    """Open a database of an older version in a process that is killed after the last revision,
    before the commit."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, url], env=environment(), timeout=240, check=False
    )
    assert done.returncode == -9
