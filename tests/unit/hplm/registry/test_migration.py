"""Older tables are migrated with everything that is in them, on both databases."""

from __future__ import annotations

from contextlib import closing

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import BigInteger, Column, Connection, Double, Index, Integer, MetaData, Table, Text, insert, text

from hplm.registry import schema
from hplm.registry.database import Database
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S

TENANTS = 5_000
DELETED = 4_000  # of every ten tenants one was deleted, up to this number
OF_BASE = {"b": 1, "c": 2}  # the id of the root's version of each base


def tables_of_2_0001() -> dict[str, Table]:
    """The tables as they were at revision 2.0001, before tenants had several bases."""
    old = MetaData()
    bases = Table(
        "bases",
        old,
        Column("name", schema.Name, primary_key=True),
        Column("fingerprint", Text, nullable=False),
        Column("path", Text, nullable=False),
        Column("created_s", Double, nullable=False),
    )
    tenants = Table(
        "tenants",
        old,
        Column("name", schema.Name, primary_key=True),
        Column("current_id", BigInteger),
        Column("last_number", Integer, nullable=False),
        Column("generation", BigInteger, nullable=False),
        Index("tenants_by_generation", "generation"),
    )
    new = ("bases", "tenants", "tenant_bases", "keys", "limits", "leases", "audit")
    same = [table for table in schema.metadata.sorted_tables if table.name not in new]
    tables = {table.name: table for table in (bases, tenants, *(table.to_metadata(old) for table in same))}
    tables["tenant_versions"]._columns.remove(tables["tenant_versions"].c.cascade)
    return tables


def fill(connection: Connection, tables: dict[str, Table]) -> None:
    """Two bases with a root each. Tenants stand on them in turn; each has two versions, and serves the first or the second."""
    for table in tables["tenants"].metadata.sorted_tables:
        table.create(connection)
    connection.execute(insert(tables["state"]).values(id=1, generation=9_000, floor=1))
    names = [f"t{number:04d}" for number in range(TENANTS)]
    bases = [
        {"name": base, "fingerprint": f"f-{base}", "path": f"bases/{base}", "created_s": NOW_S} for base in OF_BASE
    ]
    connection.execute(insert(tables["bases"]), bases)
    roots = [
        {"id": id, "base": base, "name": "general", "current_id": id, "last_number": 1} for base, id in OF_BASE.items()
    ]
    connection.execute(insert(tables["domains"]), roots)
    versions = [
        {"id": id, "domain_id": id, "number": 1, "path": f"plots/{base}", "created_s": NOW_S, "about": {}}
        for base, id in OF_BASE.items()
    ]
    connection.execute(insert(tables["domain_versions"]), versions)
    rows, made = [], []
    for place, name in enumerate(names):
        is_deleted = place % 10 == 0 and place < DELETED
        current = None if is_deleted else 2 * place + 1 + place % 3 % 2
        rows.append({"name": name, "current_id": current, "last_number": 2, "generation": 1_000 + place})
        for number in (1, 2):
            version = {"tenant": name, "number": number, "domain_version_id": 1 + place % 2}
            about = {"path": f"tenants/{name}/{number}", "created_s": NOW_S, "about": {"texts": 1}, "served": number}
            made.append({**version, **about, "retired_s": NOW_S if is_deleted else None})
    connection.execute(insert(tables["tenants"]), rows)
    connection.execute(insert(tables["tenant_versions"]), made)  # the database gives the ids 1, 2, 3 and so on
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES ('2.0001')"))


def test_a_store_with_thousands_of_tenants_is_migrated_and_each_tenant_is_served_as_before(store: Store) -> None:
    with closing(Database(store, writer=True, create=True)) as database, database._transaction(True) as connection:
        fill(connection, tables_of_2_0001())
    with closing(Registry.open(store)) as registry:
        with registry._database.reading() as connection:
            assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        assert registry.faults() == []
        changes = registry.changes_since(0)
        assert changes.generation == 9_000
        wanted = {
            f"t{place:04d}": ("bc"[place % 2], 1 + place % 3 % 2)
            for place in range(TENANTS)
            if place % 10 or place >= DELETED
        }
        assert {one.name: (one.base, one.number) for one in changes.published} == wanted
        assert len(changes.published) == len(wanted) == registry.tenant_count()
        assert all(one.is_default for one in changes.published)
        assert registry.find_tenant("t0000") is None
        record = registry.tenant("t0003")
        assert (record.base, record.bases) == ("c", {"c": 1})
        # A migrated tenant goes on as another does.
        assert {base: one.number for base, one in registry.rollback_tenant("t0003", 2, NOW_S).items()} == {"c": 2}
        number = registry.next_number("t0003")
        made = registry.publish_tenant("t0003", 1, "p", NOW_S, about={}, number=number, expected=None)
        assert (made.base, made.number) == ("b", 3)
        assert registry.tenant("t0003").bases == {"b": 3, "c": 2}


def test_a_store_that_was_migrated_is_opened_as_it_is(store: Store) -> None:
    with closing(Database(store, writer=True, create=True)) as database, database._transaction(True) as connection:
        fill(connection, tables_of_2_0001())
    Registry.open(store).close()
    with closing(Registry.open_read_only(store)) as registry:
        assert registry.tenant("t0001").bases == {"c": 2}
