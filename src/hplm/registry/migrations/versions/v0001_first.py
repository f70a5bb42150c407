"""The whole registry of stores of format 2. This file never changes: a later change is another migration."""

import sqlalchemy as sa
from alembic import op

revision = "2.0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    row_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    json = sa.JSON(none_as_null=True)

    state = op.create_table(
        "state",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name="state_is_one_row"), autoincrement=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("floor", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "bases",
        sa.Column("name", name, primary_key=True),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
    )
    op.create_table(
        "domains",
        sa.Column("id", row_id, primary_key=True),
        sa.Column("base", name, sa.ForeignKey("bases.name"), nullable=False),
        sa.Column("name", name, nullable=False),
        sa.Column("current_id", sa.BigInteger),
        sa.Column("last_number", sa.Integer, nullable=False),
        sa.UniqueConstraint("base", "name", name="domains_by_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "domain_versions",
        sa.Column("id", row_id, primary_key=True),
        sa.Column("domain_id", sa.BigInteger, sa.ForeignKey("domains.id"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("parent_id", sa.BigInteger, sa.ForeignKey("domain_versions.id")),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("about", json, nullable=False),
        sa.Column("retired_s", sa.Double),
        sa.UniqueConstraint("domain_id", "number", name="domain_versions_by_number"),
        sqlite_autoincrement=True,
    )
    op.create_index("domain_versions_by_parent", "domain_versions", ["parent_id"])
    op.create_table(
        "tenants",
        sa.Column("name", name, primary_key=True),
        sa.Column("current_id", sa.BigInteger),
        sa.Column("last_number", sa.Integer, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.create_index("tenants_by_generation", "tenants", ["generation"])
    op.create_table(
        "tenant_versions",
        sa.Column("id", row_id, primary_key=True),
        sa.Column("tenant", name, sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("domain_version_id", sa.BigInteger, sa.ForeignKey("domain_versions.id"), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("about", json, nullable=False),
        sa.Column("retired_s", sa.Double),
        sa.Column("served", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.UniqueConstraint("tenant", "number", name="tenant_versions_by_number"),
        sqlite_autoincrement=True,
    )
    op.create_index("tenant_versions_by_domain_version", "tenant_versions", ["domain_version_id"])
    op.create_index("tenant_versions_by_path", "tenant_versions", ["path"])
    op.create_index("tenant_versions_by_retirement", "tenant_versions", ["retired_s"])
    op.create_table(
        "jobs",
        sa.Column("seq", row_id, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("request", json, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("step", sa.Text, nullable=False),
        sa.Column("progress", sa.Double, nullable=False),
        sa.Column("eta_s", sa.Double),
        sa.Column("worker", sa.Text),
        sa.Column("local", sa.Boolean, nullable=False),
        sa.Column("lease_until_s", sa.Double),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("started_s", sa.Double),
        sa.Column("ended_s", sa.Double),
        sa.Column("error", json),
        sa.Column("result", json),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state", "seq"])
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("received", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
    )
    # Each registry starts at another number, so that a server notices a registry that was lost and made anew.
    floor = _start()
    op.bulk_insert(state, [{"id": 1, "generation": floor, "floor": floor}])


def _start() -> int:
    """Return a number that no other registry starts at, with room above it. JSON holds it exactly."""
    import secrets

    return (1 + secrets.randbelow(1 << 28)) << 22
