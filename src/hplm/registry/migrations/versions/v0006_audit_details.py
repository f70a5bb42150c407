"""An entry of the audit log says what was changed: of a key its id, role and expiry, of limits their values."""

import sqlalchemy as sa
from alembic import op

revision = "2.0006"
down_revision = "2.0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    details = sa.Column("details", sa.JSON(none_as_null=True), nullable=False, server_default=sa.text("'{}'"))
    op.add_column("audit", details)
