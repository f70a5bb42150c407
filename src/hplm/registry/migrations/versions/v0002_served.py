"""Which version of a tenant was served last, so that the one to go back to is not retired."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant_versions", sa.Column("served", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    # Of all but the current ones nothing is known but the order of the numbers.
    op.execute(
        "UPDATE tenant_versions SET served = (SELECT generation FROM tenants WHERE current_id = tenant_versions.id) "
        "WHERE id IN (SELECT current_id FROM tenants)"
    )
