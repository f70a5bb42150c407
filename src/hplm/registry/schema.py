"""The registry's tables, the same on SQLite and PostgreSQL. `migrations/` makes them; a test holds the two equal.

A version that nothing may use any more has `retired_s` set; its row goes when its files have gone.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

HEAD = "0002"  # the newest migration

# Compared byte by byte on both databases: listings page through names, and a prefix is a range of them.
Name = Text().with_variant(Text(collation="C"), "postgresql")
# SQLite counts rows up in an INTEGER only.
Id = BigInteger().with_variant(Integer, "sqlite")
Json = JSON(none_as_null=True)

metadata = MetaData()

# One row. `generation` grows with everything that serving must hear of; below `floor` it is another registry's.
state = Table(
    "state",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="state_is_one_row"), primary_key=True, autoincrement=False),
    Column("generation", BigInteger, nullable=False),
    Column("floor", BigInteger, nullable=False),
)

bases = Table(
    "bases",
    metadata,
    Column("name", Name, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("created_s", Double, nullable=False),
)

# `current_id` has no foreign key: two tables that name each other cannot be made in one order on both databases.
# Without it the domain does not exist (any more); the row stays, so that its numbers are never given twice.
domains = Table(
    "domains",
    metadata,
    Column("id", Id, primary_key=True),
    Column("base", Name, ForeignKey("bases.name"), nullable=False),
    Column("name", Name, nullable=False),
    Column("current_id", BigInteger),
    Column("last_number", Integer, nullable=False),
    UniqueConstraint("base", "name", name="domains_by_name"),
    sqlite_autoincrement=True,
)

domain_versions = Table(
    "domain_versions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("domain_id", BigInteger, ForeignKey("domains.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("parent_id", BigInteger, ForeignKey("domain_versions.id")),
    Column("path", Text, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("about", Json, nullable=False),
    Column("retired_s", Double),
    UniqueConstraint("domain_id", "number", name="domain_versions_by_number"),
    Index("domain_versions_by_parent", "parent_id"),
    sqlite_autoincrement=True,
)

# As in domains: without `current_id` it does not exist (any more). `generation` is that of its last change. A version's
# `served` is the generation in which it last became current.
tenants = Table(
    "tenants",
    metadata,
    Column("name", Name, primary_key=True),
    Column("current_id", BigInteger),
    Column("last_number", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Index("tenants_by_generation", "generation"),
)

tenant_versions = Table(
    "tenant_versions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", Name, ForeignKey("tenants.name"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("domain_version_id", BigInteger, ForeignKey("domain_versions.id"), nullable=False),
    Column("path", Text, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("about", Json, nullable=False),
    Column("retired_s", Double),
    Column("served", BigInteger, nullable=False, server_default=text("0")),
    UniqueConstraint("tenant", "number", name="tenant_versions_by_number"),
    Index("tenant_versions_by_domain_version", "domain_version_id"),
    Index("tenant_versions_by_path", "path"),
    Index("tenant_versions_by_retirement", "retired_s"),
    sqlite_autoincrement=True,
)

# `seq` is the order of submission, whatever the clock does.
jobs = Table(
    "jobs",
    metadata,
    Column("seq", Id, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("request", Json, nullable=False),
    Column("state", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("progress", Double, nullable=False),
    Column("eta_s", Double),
    Column("worker", Text),
    Column("lease_until_s", Double),
    Column("created_s", Double, nullable=False),
    Column("started_s", Double),
    Column("ended_s", Double),
    Column("error", Json),
    Column("result", Json),
    Column("cancel_requested", Boolean, nullable=False),
    Column("attempts", Integer, nullable=False),
    Index("jobs_by_state", "state", "seq"),
    sqlite_autoincrement=True,
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("received", BigInteger, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("complete", Boolean, nullable=False),
)
