"""Add the tables ``schema_version`` and ``master_lease``."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "schema_version", sa.Column("version", sa.Integer, primary_key=True, autoincrement=False)
    )
    op.create_table(
        "master_lease",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("holder", sa.String(32), nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("place", sa.String(255), nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("started", sa.String(255), nullable=False),
    )
