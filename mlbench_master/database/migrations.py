"""Create the tables of the database, or bring them from an older version to this one with Alembic.

Each file in ``_alembic/versions`` is a revision: it leads from the tables of the revision before it
to its own. The names of revisions are numbers, so a master recognizes the database of a newer one.
A change of the tables needs a new file there and the new value of :data:`HEAD`. A change that
SQLite's ALTER cannot do goes into ``batch_alter_table``.

The master runs Alembic in the transaction that also holds the lock, and only on a database of an
older version: an empty one gets the tables of the models and the number of the newest revision, so
a start imports nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

import sqlalchemy as sa

from mlbench_core.errors import ConfigurationError

__all__ = ["HEAD", "REVISION_TABLE", "VERSION_TABLE", "prepare_database"]

HEAD = "0004"
"""The newest revision: the tables that this version of the master reads and writes."""

REVISION_TABLE = "alembic_version"
"""Alembic's own table; its only row is the revision of the tables."""

VERSION_TABLE = "schema_version"
"""The table of masters before Alembic, which read the version there and refuse a newer one."""

_log = logging.getLogger(__name__)
_SCRIPTS = Path(__file__).parent / "_alembic"
_TABLES_OF_VERSION_1 = {"runs", "metrics"}
# Any number that no other program is likely to lock in the same database of PostgreSQL.
_LOCK = 0x6D6C62656E6368
# SQLite reads the whole file for the check, about 0.3 s for 100 MB.
_LARGEST_CHECKED_BYTES = 2**30


def prepare_database(database_engine: sa.Engine, metadata: sa.MetaData) -> None:
    """Create the tables in an empty database, or bring those of an older version to this version.

    Everything happens in one transaction, so a kill leaves the database as it was.

    Args:
        database_engine: The database.
        metadata: The tables of this version; two of them are ``alembic_version`` with the column
            ``version_num`` and ``schema_version`` with the column ``version``.

    Raises:
        ConfigurationError: The database is damaged, of a newer version, or of another program.
        SQLAlchemyError: The database cannot be read or written.
    """
    with database_engine.connect() as connection:
        if database_engine.dialect.name == "sqlite":
            _check_sqlite(connection)
            connection.rollback()
            # Python's sqlite3 begins no transaction before CREATE and ALTER.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif database_engine.dialect.name == "postgresql":
            # Of two masters that start at the same time, one waits for the tables of the other.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        names = set(sa.inspect(connection).get_table_names())
        number = _version(connection, metadata, names)
        if number > int(HEAD):
            raise ConfigurationError(
                f"a newer version of MLBench wrote it (version {number} of the tables, "
                f"this one knows up to {int(HEAD)}); update mlbench-core"
            )
        revisions = metadata.tables[REVISION_TABLE]
        versions = metadata.tables[VERSION_TABLE]
        if number == 0:
            metadata.create_all(connection)
            connection.execute(sa.insert(versions).values(version=int(HEAD)))
        if REVISION_TABLE not in names:
            revisions.create(connection, checkfirst=True)
            connection.execute(sa.insert(revisions).values(version_num=f"{number or int(HEAD):04}"))
        if 0 < number < int(HEAD):
            text = "an older version wrote the database; its tables are brought from %04d to %s"
            _log.info(text, number, HEAD)
            _upgrade(connection)
            connection.execute(sa.delete(versions))
            connection.execute(sa.insert(versions).values(version=int(HEAD)))
        _check_columns(connection, metadata)
        # A file that cannot be written, or a full disk, is known here, with the name of the file.
        connection.execute(sa.update(versions).values(version=versions.c.version))
        connection.commit()


def _version(connection: sa.Connection, metadata: sa.MetaData, names: set[str]) -> int:
    """Return the number of the revision of the tables, 0 if the database is empty."""
    if not names:
        return 0
    if VERSION_TABLE in names:
        name = VERSION_TABLE
        if REVISION_TABLE in names:
            name = REVISION_TABLE
        # Each of the two has one column.
        numbers = connection.scalars(sa.select(*metadata.tables[name].columns)).all()
        if len(numbers) == 1 and str(numbers[0]).isdecimal() and int(numbers[0]) > 0:
            return int(numbers[0])
        raise ConfigurationError(f"its table {name} is damaged: it has the versions {numbers[:5]}")
    # Another program, such as MLflow, may have tables of these names and use Alembic as well.
    if names >= _TABLES_OF_VERSION_1 and REVISION_TABLE not in names:
        return 1
    raise ConfigurationError(
        f"it belongs to another program, with the tables {', '.join(sorted(names)[:5])}; "
        "give an empty database"
    )


def _upgrade(connection: sa.Connection) -> None:
    """Run the revisions that are missing, in the transaction of the connection."""
    # At the level INFO, Alembic lists its plugins, some of them already when it is imported.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # The import takes longer than everything else here, and few starts need it.
    from alembic import command
    from alembic.config import Config

    # Python's configparser interprets "%", and a folder's name may have one.
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)


def _check_columns(connection: sa.Connection, metadata: sa.MetaData) -> None:
    # By schema and name; the schema of all tables is the default one.
    tables = sa.inspect(connection).get_multi_columns()
    for table in metadata.sorted_tables:
        present = {column["name"] for column in tables.get((None, table.name), ())}
        missing = [column.name for column in table.columns if column.name not in present]
        if missing:
            raise ConfigurationError(
                f"its table {table.name} lacks the columns {', '.join(missing)}, so another "
                "program wrote it; give an empty database"
            )


def _check_sqlite(connection: sa.Connection) -> None:
    """Find damage now, and not in the middle of a run."""
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    if pages * size > _LARGEST_CHECKED_BYTES:
        return
    answer = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one())
    if answer != "ok":
        raise ConfigurationError(
            f"it is damaged ({answer.splitlines()[-1]}); "
            "move it away, or restore a copy (sqlite3 FILE .recover)"
        )
