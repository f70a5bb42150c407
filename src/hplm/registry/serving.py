"""The part of the registry for serving processes: what changed since their last poll."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, select

from hplm.errors import UnknownVersionError
from hplm.registry.cascades import plans_in_force
from hplm.registry.database import RegistryPart
from hplm.registry.records import Changes, ServedTenant, WithdrawnTenant
from hplm.registry.schema import domain_versions, domains, state, tenant_bases, tenant_versions, tenants


class Serving(RegistryPart):
    """Queries that follow the registry without reading all of it."""

    def generation(self) -> int:
        """Return the generation, which grows with every publication, rollback and deletion. It is one row, cheap to poll."""
        with self._database.reading() as connection:
            return connection.execute(select(state.c.generation)).scalar_one()

    def changes_since(self, generation: int) -> Changes:
        """Return what changed after `generation`, or everything if it is 0 or belongs to another registry.

        The changes are those of all bases.
        """
        with self._database.reading() as connection:
            now, floor = connection.execute(select(state.c.generation, state.c.floor)).one()
            full = not floor <= generation <= now
            rows = connection.execute(changed_since(0 if full else generation)).all()
        return Changes(
            generation=now,
            published=tuple(ServedTenant(*row[:-1]) for row in rows if row.id is not None),
            withdrawn=() if full else tuple(WithdrawnTenant(row.name, row.base) for row in rows if row.id is None),
            full=full,
            plans=plans_in_force((row.name, row.base, row.number, row.cascade) for row in rows if row.id is not None),
        )

    def served_version(self, version_id: int) -> ServedTenant:
        """Return a version by its id, current or not, while its files may exist. Raises UnknownVersionError."""
        v = tenant_versions.c
        query = (
            select(
                *(v.tenant, v.id, v.number, v.path, v.domain_version_id),
                *(domains.c.base, _is_default(domains.c.base), tenants.c.least_students),
            )
            .select_from(tenant_versions)
            .join(tenants)
            .join(domain_versions)
            .join(domains)
            .where(v.id == version_id)
        )
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise UnknownVersionError(f"there is no tenant version with id {version_id}")
        return ServedTenant(*row)


def changed_since(generation: int) -> Select[Any]:
    """Return the query of `changes_since`. It follows the index of generations, so its time does not grow with tenants."""
    v, over = tenant_versions.c, tenant_bases.c
    return (
        select(
            *(tenants.c.name, v.id, v.number, v.path, v.domain_version_id),
            *(over.base, _is_default(over.base), tenants.c.least_students, v.cascade),
        )
        .select_from(tenants)
        .join(tenant_bases)
        .outerjoin(tenant_versions, v.id == over.current_id)
        .where(tenants.c.generation > generation)
        .order_by(tenants.c.generation, tenants.c.name, over.base)
    )


def _is_default(base: ColumnElement[str]) -> ColumnElement[bool]:
    """Return whether a base is the tenant's default; False for a tenant that was deleted."""
    return and_(tenants.c.default_base.is_not(None), tenants.c.default_base == base).label("is_default")
