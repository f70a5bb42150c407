"""The part of the registry that holds cascades: tenant versions that are published, rolled back and in force as one.

Each level of a cascade has a row of `tenant_versions`, whose `cascade` is `{"levels": {base: number}, "plan": plan or null}`.
`levels` are the versions that came into force with the row, its own number among them. The row of the plan's last level keeps
the plan. A plan is in force while all of `levels` are current, so at most one plan of a tenant is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from hplm.cascade.plan import CascadePlan
from hplm.core.numbers import finite
from hplm.errors import ConfigError, InternalError, UnknownTenantError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.domains import check_kept
from hplm.registry.jobs import move_queued_updates
from hplm.registry.records import CascadeRecord, NewLevel, TenantVersion
from hplm.registry.schema import tenant_bases, tenant_versions, tenants
from hplm.registry.tenant_bases import IS_CURRENT, numbers_by_tenant, serve, tenant_row, version_values
from hplm.registry.versions import check_expected, check_unpublished
from hplm.runtime.crash_points import crash_point
from hplm.runtime.rate_limited_log import log_rate_limited

# The tenant, base, number and `cascade` of a current version.
CurrentVersion = tuple[str, str, int, dict[str, Any] | None]


class Cascades(RegistryPart):
    """Publishes cascades and tells which plan of a tenant is in force."""

    def publish_levels(
        self, name: str, levels: Sequence[NewLevel], plan: CascadePlan, now_s: float
    ) -> dict[str, TenantVersion]:
        """Publish a tenant's next version over the base of each level, and their plan; return the versions by base.

        All levels are served from now on, or none. The base of the plan's last level becomes the tenant's default. A level
        need not be part of the plan: it is kept for a later selection. Raises ConflictError as `publish_tenant` does.
        """
        with self._database.writing() as connection:
            bases = [check_kept(connection, level.domain_version_id).base for level in levels]
            numbers = {base: level.number for base, level in zip(bases, levels, strict=True)}
            _check_plan(plan, numbers)
            row = tenant_row(connection, name)
            current = numbers_by_tenant(connection, tenant_bases.c.tenant == name).get(name, {})
            generation = bump(connection)
            made: dict[str, TenantVersion] = {}
            for base, level in zip(bases, levels, strict=True):
                check_expected(f"tenant {name!r} over base {base!r}", current.get(base), level.expected)
                values = version_values(name, level.number, level.domain_version_id, level.path, now_s, level.about)
                made[base] = _insert_level(connection, base, values, numbers, plan, generation)
                crash_point("publish.committing")
            highest = max(row.last_number, *numbers.values())
            _set(connection, name, default_base=plan.levels[-1].base, last_number=highest)
            crash_point("publish.committing")
        return made

    def retarget_tenant(
        self,
        name: str,
        plan: CascadePlan,
        now_s: float,
        *,
        about: dict[str, Any],
        number: int,
        expected: Mapping[str, int],
    ) -> TenantVersion:
        """Publish another plan over the levels that a tenant has; return the new version of the plan's last level.

        The version has the files of the current version over the same base, and `about`. `expected` are the current numbers by
        base of all levels that the caller selected from. Raises ConflictError if a level was changed meanwhile.
        """
        last = plan.levels[-1].base
        with self._database.writing() as connection:
            numbers = {**expected, last: number}
            _check_plan(plan, numbers)
            row = tenant_row(connection, name)
            current = numbers_by_tenant(connection, tenant_bases.c.tenant == name).get(name, {})
            for base, wanted in expected.items():
                check_expected(f"tenant {name!r} over base {base!r}", current.get(base), wanted)
            v = tenant_versions.c
            now = connection.execute(
                select(v.path, v.domain_version_id).where(v.tenant == name, v.number == expected[last])
            ).one()
            generation = bump(connection)
            values = version_values(name, number, now.domain_version_id, now.path, now_s, about)
            made = _insert_level(connection, last, values, numbers, plan, generation)
            _set(connection, name, default_base=last, last_number=max(row.last_number, number))
            crash_point("publish.committing")
        return made

    def cascade_of(self, name: str) -> CascadeRecord | None:
        """Return the newest cascade of a tenant, in force or not; None if it has none. Raises UnknownTenantError."""
        with self._database.reading() as connection:
            rows = _current_versions(connection, name)
        if not rows:
            raise UnknownTenantError(f"there is no tenant {name!r}")
        current = {base: number for _, base, number, _ in rows}
        cascades = [(number, cascade) for _, _, number, cascade in rows if cascade is not None]
        if not cascades:
            return None
        _, newest = max(cascades, key=lambda row: (row[1]["plan"] is not None, row[0]))
        lost = tuple(base for base, number in newest["levels"].items() if current.get(base) != number)
        return CascadeRecord(_plan(newest, name), newest["levels"], lost)


def plans_in_force(rows: Iterable[CurrentVersion]) -> dict[str, CascadePlan]:
    """Return the plans in force by tenant, from all current versions of the tenants.

    A plan that this version of hplm cannot read, such as one that a newer version has published, is left out and logged: it
    must not keep the changes of all other tenants from a serving process.
    """
    listed = list(rows)
    with_plan = [(name, cascade) for name, _, _, cascade in listed if cascade is not None and cascade["plan"]]
    if not with_plan:
        return {}
    current = {(name, base): number for name, base, number, _ in listed}
    found: dict[str, CascadePlan] = {}
    for name, cascade in with_plan:
        try:
            plan = _plan(cascade, name)
        except ConfigError as error:
            log_rate_limited(f"tenant {name} is served without its cascade, because its plan cannot be read: {error}")
            continue
        if plan is not None and all(current.get((name, base)) == n for base, n in cascade["levels"].items()):
            found[name] = plan
    return found


def default_to_cascade(connection: Connection, name: str) -> None:
    """Make the base of the last level the tenant's default, if a plan of the tenant is in force."""
    for plan in plans_in_force(_current_versions(connection, name)).values():
        _set(connection, name, default_base=plan.levels[-1].base)


def level_fields(cascade: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `levels` and `plan` of a TenantVersion from the row's `cascade`."""
    return {"levels": cascade["levels"], "plan": _plan(cascade, name)}


def _plan(cascade: Mapping[str, Any], name: str) -> CascadePlan | None:
    return CascadePlan.from_json(cascade["plan"], f"plan of tenant {name!r}") if cascade["plan"] else None


def _check_plan(plan: CascadePlan, numbers: Mapping[str, int]) -> None:
    """Raise InternalError if a plan names other versions than `numbers` by base, or ConfigError if it cannot be read again."""
    if wrong := [level for level in plan.levels if numbers.get(level.base) != level.number]:
        raise InternalError(f"a plan over the versions {dict(numbers)} names {wrong}")
    # A plan that every serving process fails to read would keep all tenants' changes from them.
    CascadePlan.from_json(finite(plan.to_json()), "plan")


def _current_versions(connection: Connection, name: str) -> list[CurrentVersion]:
    v = tenant_versions.c
    query = (
        select(v.tenant, tenant_bases.c.base, v.number, v.cascade)
        .join(tenant_bases, IS_CURRENT)
        .where(v.tenant == name)
        .order_by(tenant_bases.c.base)
    )
    return [(row[0], row[1], row[2], row[3]) for row in connection.execute(query)]


def _insert_level(
    connection: Connection,
    base: str,
    values: dict[str, Any],
    numbers: Mapping[str, int],
    plan: CascadePlan,
    generation: int,
) -> TenantVersion:
    """Insert a level's version and serve it. Raises ConflictError if the tenant has had its number already."""
    name = values["tenant"]
    own = tenant_versions.c.tenant == name
    check_unpublished(connection, f"tenant {name!r}", tenant_versions, own, values["number"])
    kept = plan if base == plan.levels[-1].base else None
    cascade = {"levels": dict(numbers), "plan": kept and kept.to_json()}
    added = insert(tenant_versions).values(**values, cascade=cascade).returning(tenant_versions.c.id)
    version_id = connection.execute(added).scalar_one()
    serve(connection, base, {name: version_id}, generation)
    move_queued_updates(connection, f"tenant:{name}", values["domain_version_id"])
    return TenantVersion(version_id, base=base, **values, levels=dict(numbers), plan=kept)


def _set(connection: Connection, name: str, **values: Any) -> None:
    connection.execute(update(tenants).where(tenants.c.name == name).values(**values))
