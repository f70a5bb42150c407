"""The state of a tenant: the version that is served over each of its bases, and its default base.

A rollback is planned here from plain values, and every change of a state is written here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, and_, bindparam, exists, func, insert, select, update

from hplm.errors import UnknownTenantError
from hplm.registry.records import TenantVersion
from hplm.registry.schema import tenant_bases, tenant_versions, tenants

# Joins a tenant's version with the row that makes it current.
IS_CURRENT = and_(tenant_bases.c.tenant == tenant_versions.c.tenant, tenant_bases.c.current_id == tenant_versions.c.id)


def current_numbers(connection: Connection, name: str) -> dict[str, int]:
    """Return the number of the current version over each base of a tenant. Raises UnknownTenantError."""
    numbers = numbers_by_tenant(connection, tenant_bases.c.tenant == name)
    if name not in numbers:
        raise UnknownTenantError(f"there is no tenant {name!r}")
    return numbers[name]


def numbers_by_tenant(connection: Connection, *which: ColumnElement[bool]) -> dict[str, dict[str, int]]:
    """Return the numbers of the current versions by tenant and base, of the rows of `tenant_bases` that `which` selects."""
    query = (
        select(tenant_bases.c.tenant, tenant_bases.c.base, tenant_versions.c.number)
        .join(tenant_versions, tenant_versions.c.id == tenant_bases.c.current_id)
        .where(*which)
        .order_by(tenant_bases.c.tenant, tenant_bases.c.base)
    )
    found: dict[str, dict[str, int]] = {}
    for name, base, number in connection.execute(query):
        found.setdefault(name, {})[base] = number
    return found


def state_before(current: Mapping[str, int], kept: Sequence[TenantVersion]) -> dict[str, int] | None:
    """Return the numbers by base before the last publication; None if there is no such state.

    `current` has the number by base, and `kept` is in the order in which the versions were last served. The last publication
    is the highest current number. Its base goes back to the version with a lower number that was served last, and without
    such a version the tenant leaves that base.
    """
    base = max(current, key=lambda each: current[each])
    earlier = [version.number for version in kept if version.base == base and version.number < current[base]]
    others = {each: number for each, number in current.items() if each != base}
    if earlier:
        return {**others, base: earlier[-1]}
    return others or None


def state_at(number: int, kept: Sequence[TenantVersion]) -> dict[str, int] | None:
    """Return the newest number up to `number` by base; None if no kept version has this number."""
    if number not in {version.number for version in kept}:
        return None
    bases = {version.base for version in kept if version.number <= number}
    return {
        base: max(version.number for version in kept if version.base == base and version.number <= number)
        for base in bases
    }


def serve(connection: Connection, base: str, version_ids: Mapping[str, int], generation: int) -> None:
    """Make versions current over a base, by the names of their tenants, at most IN_ONE_QUERY."""
    over = tenant_bases.c
    listed = list(version_ids)
    known = set(connection.scalars(select(over.tenant).where(over.base == base, over.tenant.in_(listed))))
    rows = [{"of_tenant": name, "version_id": version_ids[name]} for name in listed]
    new = [row for row in rows if row["of_tenant"] not in known]
    old = [row for row in rows if row["of_tenant"] in known]
    columns = {"tenant": bindparam("of_tenant"), "base": base, "current_id": bindparam("version_id")}
    if new:
        connection.execute(insert(tenant_bases).values(columns), new)
    if old:
        changed = update(tenant_bases).where(over.base == base, over.tenant == bindparam("of_tenant"))
        connection.execute(changed.values(current_id=bindparam("version_id")), old)
    served = update(tenant_versions).where(tenant_versions.c.id.in_(version_ids.values()))
    connection.execute(served.values(served=generation))
    connection.execute(update(tenants).where(tenants.c.name.in_(listed)).values(generation=generation))


def withdraw(connection: Connection, name: str, bases: Collection[str], generation: int) -> None:
    """Stop to serve a tenant over `bases`."""
    rows = update(tenant_bases).where(tenant_bases.c.tenant == name, tenant_bases.c.base.in_(bases))
    connection.execute(rows.values(current_id=None))
    connection.execute(update(tenants).where(tenants.c.name == name).values(generation=generation))


def settle_defaults(connection: Connection, generation: int) -> None:
    """Give tenants that changed in `generation`, and are not served over their default base, the first base that is left.

    A new tenant has one base, which becomes its default. A tenant without a base is deleted by this.
    """
    over = tenant_bases.c
    served = and_(over.tenant == tenants.c.name, over.current_id.is_not(None))
    first = select(func.min(over.base)).where(served).scalar_subquery()
    keeps = exists().where(served, over.base == tenants.c.default_base)
    changed = update(tenants).where(tenants.c.generation == generation, ~keeps)
    connection.execute(changed.values(default_base=first))
