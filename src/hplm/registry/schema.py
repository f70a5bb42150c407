"""The registry's tables, the same on SQLite and PostgreSQL. A change of them needs a migration in `migrations/versions`.

A version that must not be used any more has `retired_s` set. Its row is deleted when its files are gone.
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

# The newest migration. Its number before the dot is the format of stores: an older registry is built anew, not migrated.
HEAD = "2.0006"

# Both databases compare names byte by byte: listings page through names, and a prefix is a range of names.
Name = Text().with_variant(Text(collation="C"), "postgresql")
# SQLite gives automatic ids only to a column of type INTEGER.
Id = BigInteger().with_variant(Integer, "sqlite")
Json = JSON(none_as_null=True)

metadata = MetaData()

# One row. `generation` grows with every change that serving must see. A generation below `floor` is another registry's.
state = Table(
    "state",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="state_is_one_row"), primary_key=True, autoincrement=False),
    Column("generation", BigInteger, nullable=False),
    Column("floor", BigInteger, nullable=False),
)

# A base with `retired_s` was deleted. Its row stays, because its domains' rows name it. Without files its `path` is empty.
bases = Table(
    "bases",
    metadata,
    Column("name", Name, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("retired_s", Double),
)

# `current_id` has no foreign key, because two tables that name each other cannot be created in one order on both databases.
# If it is null the domain does not exist (any more). Its row stays, so that its numbers are never given twice.
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

# A tenant without a `default_base` does not exist (any more). As for domains, its row stays. `generation` is that of its last
# change over any base. Its numbers count its versions over all bases. `least_students` answer each of its texts at least.
tenants = Table(
    "tenants",
    metadata,
    Column("name", Name, primary_key=True),
    Column("last_number", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("default_base", Name),
    Column("least_students", Integer, nullable=False, server_default=text("1")),
    Index("tenants_by_generation", "generation"),
)

# The version that is served of a tenant over a base. If `current_id` is null, the tenant was withdrawn from the base; its row
# stays, so that serving hears of the withdrawal.
tenant_bases = Table(
    "tenant_bases",
    metadata,
    Column("tenant", Name, ForeignKey("tenants.name"), primary_key=True),
    Column("base", Name, ForeignKey("bases.name"), primary_key=True),
    Column("current_id", BigInteger),
)

# A version belongs to the base of its domain version. `served` is the generation in which it last became current.
# `cascade` is null unless the version is a level of a cascade, see `cascades.py`.
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
    Column("cascade", Json),
    UniqueConstraint("tenant", "number", name="tenant_versions_by_number"),
    Index("tenant_versions_by_domain_version", "domain_version_id"),
    Index("tenant_versions_by_path", "path"),
    Index("tenant_versions_by_retirement", "retired_s"),
    sqlite_autoincrement=True,
)

# `seq` is the order of submission, even if the clock jumps. A `local` job is run by the command that inserted it.
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
    Column("local", Boolean, nullable=False),
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

# A key of a tenant, or of an operator if `tenant` is null. `sha256` is of the secret, in hex: nobody can read the secret from
# it. `generation` is that of the last change, so that servers hear of new and revoked keys.
keys = Table(
    "keys",
    metadata,
    Column("id", Name, primary_key=True),
    Column("tenant", Name, ForeignKey("tenants.name")),
    Column("role", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double),
    Column("revoked_s", Double),
    Column("last_used_s", Double),
    Column("generation", BigInteger, nullable=False),
    Index("keys_by_tenant", "tenant"),
    Index("keys_by_generation", "generation"),
)

# Quotas of a tenant; `tenant` is empty for the default of all tenants. A null quota is not limited. There is no foreign key,
# because the default has no tenant.
limits = Table(
    "limits",
    metadata,
    Column("tenant", Name, primary_key=True),
    Column("requests_per_s", Double),
    Column("tokens_per_s", Double),
    Column("concurrent", Integer),
    Column("generation", BigInteger, nullable=False),
    Index("limits_by_generation", "generation"),
)

# Allowances that a server has taken out of a tenant's quotas until `until_s`, by the name of the quota.
leases = Table(
    "leases",
    metadata,
    Column("server", Text, primary_key=True),
    Column("tenant", Name, primary_key=True),
    Column("until_s", Double, nullable=False),
    Column("amounts", Json, nullable=False),
    Index("leases_by_tenant", "tenant"),
    Index("leases_by_end", "until_s"),
)

# Manage requests and commands that change the registry: who asked, what, and the outcome (`ok`, or the code of an error).
# `key` and `role` are null if no key was needed or the key was not valid. `times` equal requests are one entry.
# `details` has what was changed, without secrets. There is no foreign key, because entries outlive keys.
audit = Table(
    "audit",
    metadata,
    Column("seq", Id, primary_key=True),
    Column("at_s", Double, nullable=False),
    Column("key", Text),
    Column("role", Text),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("times", Integer, nullable=False),
    Column("details", Json, nullable=False, server_default=text("'{}'")),
    Index("audit_by_time", "at_s"),
    sqlite_autoincrement=True,
)
