"""Create the tables of the database, or bring them from an older version to this one."""

from __future__ import annotations

import sqlalchemy as sa

from mlbench_core.errors import ConfigurationError

__all__ = ["MIGRATIONS", "VERSION", "VERSION_TABLE", "prepare_database"]

VERSION = 4
"""Version of the tables that this version of the master writes."""

MIGRATIONS: dict[int, tuple[str, ...]] = {1: (), 2: ("ALTER TABLE runs ADD COLUMN goal TEXT",), 3: ()}
"""SQL statements that lead from each version to the next one. Tables that are missing are created after them.

Version 1 had no table with a version. Version 2 added ``schema_version`` and ``master_lease``. Version 3 added
``runs.goal``. Version 4 added ``metric_pages``.
"""

VERSION_TABLE = "schema_version"
_TABLES_OF_VERSION_1 = {"runs", "metrics"}
# Any number that no other program is likely to lock in the same database of PostgreSQL.
_LOCK = 0x6D6C62656E6368
# SQLite reads the whole file for the check, about 0.3 s for 100 MB.
_LARGEST_CHECKED_BYTES = 2**30


def prepare_database(engine: sa.Engine, metadata: sa.MetaData) -> None:
    """Create the tables in an empty database, or bring those of an older version to this version.

    Everything happens in one transaction, so a kill leaves the database as it was.

    Args:
        engine: The database.
        metadata: The tables of this version; one of them is ``schema_version`` with the column ``version``.

    Raises:
        ConfigurationError: The database is damaged, of a newer version, or of another program.
        SQLAlchemyError: The database cannot be read or written.
    """
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            _check_sqlite(connection)
            connection.rollback()
            # Python's sqlite3 begins no transaction before CREATE and ALTER.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif engine.dialect.name == "postgresql":
            # Of two masters that start at the same time, one waits for the tables of the other.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        versions = metadata.tables[VERSION_TABLE]
        found = _version(connection, versions)
        if found > VERSION:
            raise ConfigurationError(
                f"a newer version of MLBench wrote it (version {found} of the tables, this one knows up to {VERSION}); "
                "update mlbench-core"
            )
        for version in range(found or VERSION, VERSION):
            for statement in MIGRATIONS[version]:
                connection.execute(sa.text(statement))
        metadata.create_all(connection)
        if found != VERSION:
            connection.execute(sa.delete(versions))
            connection.execute(sa.insert(versions).values(version=VERSION))
        _check_columns(connection, metadata)
        connection.commit()


def _version(connection: sa.Connection, versions: sa.Table) -> int:
    """Return the version of the tables, 0 if the database is empty."""
    names = set(sa.inspect(connection).get_table_names())
    if not names:
        return 0
    if VERSION_TABLE in names:
        found = connection.scalars(sa.select(versions.c.version)).all()
        if len(found) == 1 and isinstance(found[0], int) and found[0] > 0:
            return found[0]
        raise ConfigurationError(f"its table {VERSION_TABLE} is damaged: it has the versions {found[:5]}")
    if names >= _TABLES_OF_VERSION_1:
        return 1
    raise ConfigurationError(
        f"it belongs to another program, with the tables {', '.join(sorted(names)[:5])}; give an empty database"
    )


def _check_columns(connection: sa.Connection, metadata: sa.MetaData) -> None:
    inspector = sa.inspect(connection)
    for table in metadata.sorted_tables:
        present = {column["name"] for column in inspector.get_columns(table.name)}
        missing = [column.name for column in table.columns if column.name not in present]
        if missing:
            raise ConfigurationError(
                f"its table {table.name} lacks the columns {', '.join(missing)}, so another program wrote it; give an "
                "empty database"
            )


def _check_sqlite(connection: sa.Connection) -> None:
    """Find damage now, and not in the middle of a run."""
    pages, size = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size"))
    if pages * size > _LARGEST_CHECKED_BYTES:
        return
    answer = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one())
    if answer != "ok":
        raise ConfigurationError(
            f"it is damaged ({answer.splitlines()[-1]}); move it away, or restore a copy (sqlite3 FILE .recover)"
        )
