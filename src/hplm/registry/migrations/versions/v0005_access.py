"""Keys of tenants and operators, quotas with their leases, and the audit log of manage requests."""

import sqlalchemy as sa
from alembic import op

from hplm.registry.schema import Id, Name

revision = "2.0005"
down_revision = "2.0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", Name, primary_key=True),
        sa.Column("tenant", Name, sa.ForeignKey("tenants.name")),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double),
        sa.Column("revoked_s", sa.Double),
        sa.Column("last_used_s", sa.Double),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.create_index("keys_by_tenant", "keys", ["tenant"])
    op.create_index("keys_by_generation", "keys", ["generation"])
    op.create_table(
        "limits",
        sa.Column("tenant", Name, primary_key=True),
        sa.Column("requests_per_s", sa.Double),
        sa.Column("tokens_per_s", sa.Double),
        sa.Column("concurrent", sa.Integer),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.create_index("limits_by_generation", "limits", ["generation"])
    op.create_table(
        "leases",
        sa.Column("server", sa.Text, primary_key=True),
        sa.Column("tenant", Name, primary_key=True),
        sa.Column("until_s", sa.Double, nullable=False),
        sa.Column("amounts", sa.JSON(none_as_null=True), nullable=False),
    )
    op.create_index("leases_by_tenant", "leases", ["tenant"])
    op.create_index("leases_by_end", "leases", ["until_s"])
    op.create_table(
        "audit",
        sa.Column("seq", Id, primary_key=True),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("role", sa.Text),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("times", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_time", "audit", ["at_s"])
