"""Add the column ``runs.goal``."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("runs", sa.Column("goal", sa.Text))
