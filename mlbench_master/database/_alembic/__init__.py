"""The scripts of Alembic; see :mod:`mlbench_master.database.migrations`."""
