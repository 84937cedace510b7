"""Alembic runs this script before the revisions; the master gives it the connection, which is in a transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
