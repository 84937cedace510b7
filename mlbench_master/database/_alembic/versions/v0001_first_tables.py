"""The tables of the first masters, which recorded no version: ``runs`` and ``metrics``.

Nothing has to be done: a database in which they are missing is empty and gets the tables of the
models.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing."""
