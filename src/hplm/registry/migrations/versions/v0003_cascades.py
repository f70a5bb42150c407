"""A tenant version may be a level of a cascade: it then names the levels that were published with it, and may have a plan."""

import sqlalchemy as sa
from alembic import op

revision = "2.0003"
down_revision = "2.0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant_versions", sa.Column("cascade", sa.JSON(none_as_null=True)))
