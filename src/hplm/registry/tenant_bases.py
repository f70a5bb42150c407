"""The state of a tenant: the version that is served over each of its bases, and its default base.

A rollback is planned here from plain values, and every change of a state is written here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, case, exists, func, insert, select, update

from hplm.errors import UnknownTenantError
from hplm.registry.records import TenantVersion
from hplm.registry.schema import keys, limits, tenant_bases, tenant_versions, tenants

# Joins a tenant's version with the row that makes it current.
IS_CURRENT = and_(tenant_bases.c.tenant == tenant_versions.c.tenant, tenant_bases.c.current_id == tenant_versions.c.id)


def tenant_row(connection: Connection, name: str) -> Row[Any]:
    """Return the tenant's row; insert it if there is none."""
    query = select(tenants).where(tenants.c.name == name)
    row = connection.execute(query).first()
    if row is None:
        # Generation 0, because serving has nothing to see yet.
        connection.execute(insert(tenants).values(name=name, last_number=0, generation=0))
        row = connection.execute(query).one()
    return row


def version_values(
    tenant: str, number: int, domain_version_id: int, path: str, now_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    """Return the values of a new row of `tenant_versions`."""
    of_version = {"tenant": tenant, "number": number, "domain_version_id": domain_version_id}
    return {**of_version, "path": path, "created_s": now_s, "about": about}


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
    is the highest current number with the levels that were published with it. Their bases go back to the version that was
    served last and brought a lower number over one of them, with all levels of that version. Without such a version the
    tenant leaves these bases.
    """
    last = max(current, key=lambda each: current[each])
    levels = _levels_at(current[last], kept)
    undone = {base: number for base, number in current.items() if levels and _levels_at(number, kept) == levels}
    undone = undone or {last: current[last]}
    others = {base: number for base, number in current.items() if base not in undone}
    for version in reversed(kept):
        state = _published_with(version, kept)
        if state is not None and any(state.get(base, number) < number for base, number in undone.items()):
            return {**others, **state}
    return others or None


def state_at(number: int, kept: Sequence[TenantVersion]) -> dict[str, int] | None:
    """Return the newest number up to `number` by base, but the levels of a cascade as they were published.

    Return None if no kept version has this number, or if levels that were published with it are not kept.
    """
    version = next((version for version in kept if version.number == number), None)
    if version is None or (state := _published_with(version, kept)) is None:
        return None
    highest = max(state.values())
    up_to: dict[str, int] = {}
    for each in kept:
        if each.number <= highest:
            up_to[each.base] = max(each.number, up_to.get(each.base, 0))
    return {**up_to, **state}


def _levels_at(number: int, kept: Sequence[TenantVersion]) -> Mapping[str, int]:
    return next((version.levels for version in kept if version.number == number), {})


def _published_with(version: TenantVersion, kept: Sequence[TenantVersion]) -> dict[str, int] | None:
    """Return the numbers by base that came into force with a version; None if not all of these are kept.

    A base over which the tenant was deleted does not count.
    """
    numbers = {(each.base, each.number) for each in kept}
    bases = {each.base for each in kept}
    levels = {base: number for base, number in version.levels.items() if base in bases} or {
        version.base: version.number
    }
    return levels if numbers.issuperset(levels.items()) else None


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


def settle_defaults(connection: Connection, generation: int, now_s: float) -> None:
    """Give tenants that changed in `generation`, and are not served over their default base, the first base that is left.

    A new tenant has one base, which becomes its default. A tenant without a base is deleted by this. A later tenant of its name
    must not have its least number of students, its limits, and must not accept its keys.
    """
    over = tenant_bases.c
    served = and_(over.tenant == tenants.c.name, over.current_id.is_not(None))
    first = select(func.min(over.base)).where(served).scalar_subquery()
    keeps = exists().where(served, over.base == tenants.c.default_base)
    changed = update(tenants).where(tenants.c.generation == generation, ~keeps)
    least = case((first.is_(None), 1), else_=tenants.c.least_students)
    connection.execute(changed.values(default_base=first, least_students=least))
    gone = select(tenants.c.name).where(tenants.c.generation == generation, tenants.c.default_base.is_(None))
    theirs = update(keys).where(keys.c.tenant.in_(gone), keys.c.revoked_s.is_(None))
    connection.execute(theirs.values(revoked_s=now_s, generation=generation))
    none = {"requests_per_s": None, "tokens_per_s": None, "concurrent": None, "generation": generation}
    connection.execute(update(limits).where(limits.c.tenant.in_(gone)).values(none))
