"""A tenant may have a current version over each of several bases, and a base may be deleted.

The base of a tenant's current version becomes its only base, and its default.
"""

import sqlalchemy as sa
from alembic import op

revision = "2.0002"
down_revision = "2.0001"
branch_labels = None
depends_on = None

# As `schema.Name` was at this revision.
NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("bases", sa.Column("retired_s", sa.Double()))
    op.create_table(
        "tenant_bases",
        sa.Column("tenant", NAME, sa.ForeignKey("tenants.name"), primary_key=True),
        sa.Column("base", NAME, sa.ForeignKey("bases.name"), primary_key=True),
        sa.Column("current_id", sa.BigInteger()),
    )
    op.execute(
        "INSERT INTO tenant_bases (tenant, base, current_id) "
        "SELECT tenants.name, domains.base, tenants.current_id FROM tenants "
        "JOIN tenant_versions ON tenant_versions.id = tenants.current_id "
        "JOIN domain_versions ON domain_versions.id = tenant_versions.domain_version_id "
        "JOIN domains ON domains.id = domain_versions.domain_id"
    )
    op.add_column("tenants", sa.Column("default_base", NAME))
    op.execute(
        "UPDATE tenants SET default_base = (SELECT base FROM tenant_bases WHERE tenant_bases.tenant = tenants.name)"
    )
    op.drop_column("tenants", "current_id")
