"""A tenant may set how many of its students answer each of its texts at least."""

import sqlalchemy as sa
from alembic import op

revision = "2.0004"
down_revision = "2.0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("least_students", sa.Integer, nullable=False, server_default=sa.text("1")))
