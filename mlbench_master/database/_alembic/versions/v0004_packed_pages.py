"""Add the table ``metric_pages``."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table, which stays empty until pages are packed."""
    op.create_table(
        "metric_pages",
        sa.Column("owner", sa.String(300), primary_key=True),
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("page", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("end_date", sa.BigInteger, nullable=False),
        sa.Column("end_id", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
