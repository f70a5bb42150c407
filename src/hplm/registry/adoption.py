"""The part of the registry that lists the files it names, and registers files that it does not know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Connection, insert, select

from hplm.errors import ConflictError
from hplm.registry.database import IN_ONE_QUERY, RegistryPart, bump
from hplm.registry.domains import (
    domain_row,
    insert_domain_version,
    kept_bases,
    make_current,
    register_base,
    select_domain_versions,
)
from hplm.registry.records import UNFINISHED, BaseRecord, DomainVersion, NewDomain, NewTenant, Snapshot
from hplm.registry.schema import bases, domain_versions, domains, jobs, state, tenant_versions, tenants, uploads
from hplm.registry.tenant_bases import serve, version_values

CHANGED = "the registry was changed meanwhile: run the command again"


class Adoption(RegistryPart):
    """A snapshot of all files that the registry names, and one transaction that adds files."""

    def snapshot(self) -> Snapshot:
        """Return what the registry says about files now."""
        v = tenant_versions.c
        with self._database.reading() as connection:
            kept = select_domain_versions().where(domain_versions.c.retired_s.is_(None))
            tenants_at: dict[str, set[str]] = defaultdict(set)
            for name, path in connection.execute(select(v.tenant, v.path).where(v.retired_s.is_(None))):
                tenants_at[path].add(name)
            return Snapshot(
                generation=connection.execute(select(state.c.generation)).scalar_one(),
                bases=tuple(kept_bases(connection)),
                domains=tuple(DomainVersion(*row) for row in connection.execute(kept.order_by(domain_versions.c.id))),
                tenants=tenants_at,
                paths=frozenset(
                    path
                    for table in (bases, domain_versions, tenant_versions)
                    for path in connection.scalars(select(table.c.path).where(table.c.path != "").distinct())
                ),
                uploads=frozenset(connection.scalars(select(uploads.c.id))),
                # Names that only a job has are left out. A number is given before its folder is made, so a folder under such
                # a name comes from a newer registry.
                last_numbers={
                    **{f"tenant:{row.name}": row.last_number for row in connection.execute(select(tenants))},
                    **{f"domain:{row.base}/{row.name}": row.last_number for row in connection.execute(select(domains))},
                },
                busy_subjects=frozenset(connection.scalars(select(jobs.c.subject).where(jobs.c.state == "running"))),
                unfinished=frozenset(connection.scalars(select(jobs.c.id).where(jobs.c.state.in_(UNFINISHED)))),
                ended=frozenset(connection.scalars(select(jobs.c.id).where(jobs.c.state.not_in(UNFINISHED)))),
            )

    def adopt(
        self,
        generation: int,
        new_bases: Sequence[BaseRecord],
        new_domains: Sequence[NewDomain],
        new_tenants: Sequence[NewTenant],
        now_s: float,
    ) -> None:
        """Register artifacts that lie in the store already, parents before children: all of them or none.

        The highest number of a domain becomes current, and that of a tenant over each base. The base of a tenant's lowest
        number becomes its default. Raises ConflictError if the registry was changed since
        `generation`, when the plan was made.
        """
        with self._database.writing() as connection:
            if connection.execute(select(state.c.generation)).scalar_one() != generation:
                raise ConflictError(CHANGED)
            generation = bump(connection)
            for base in new_bases:
                register_base(connection, base, now_s)
            d = domain_versions.c
            kept = select(d.path, d.id, domains.c.base).join(domains).where(d.retired_s.is_(None))
            found: dict[str, _Domain] = {row.path: _Domain(row.id, row.base) for row in connection.execute(kept)}
            for new in new_domains:
                row = domain_row(connection, new.base, new.name)
                parent_id = _kept_domain(found, new.parent).version_id if new.parent else None
                version_id = insert_domain_version(
                    connection, row.id, new.number, parent_id, new.path, now_s, new.about
                )
                found[new.path] = _Domain(version_id, new.base)
                if new.number >= row.last_number:
                    make_current(connection, row, version_id, new.number)
            _insert_tenants(connection, new_tenants, found, now_s, generation)


class _Domain(NamedTuple):
    """A kept domain version."""

    version_id: int
    base: str


def _kept_domain(found: Mapping[str, _Domain], path: str) -> _Domain:
    """Return the kept domain version at a path. Raises ConflictError if it was retired, which changes no generation."""
    if path not in found:
        raise ConflictError(CHANGED)
    return found[path]


def _insert_tenants(
    connection: Connection, new: Sequence[NewTenant], found: Mapping[str, _Domain], now_s: float, generation: int
) -> None:
    if not new:
        return
    by_number = sorted(new, key=lambda version: version.number)
    over = {version.domain: _kept_domain(found, version.domain) for version in new}
    first = {version.name: over[version.domain].base for version in reversed(by_number)}
    last = {version.name: version.number for version in by_number}
    # Giving a number to a name changes no generation, so it is checked here.
    if not last.keys().isdisjoint(connection.execute(select(tenants.c.name)).scalars()):
        raise ConflictError(CHANGED)
    rows = [
        {"name": name, "last_number": number, "generation": generation, "default_base": first[name]}
        for name, number in last.items()
    ]
    connection.execute(insert(tenants), rows)
    versions = [
        version_values(
            version.name, version.number, over[version.domain].version_id, version.path, now_s, version.about
        )
        for version in by_number
    ]
    inserted = insert(tenant_versions).returning(tenant_versions.c.id, sort_by_parameter_order=True)
    current: dict[str, dict[str, int]] = defaultdict(dict)
    for version, version_id in zip(by_number, connection.scalars(inserted, versions), strict=True):
        current[over[version.domain].base][version.name] = version_id
    for base, ids in current.items():
        rest = iter(ids.items())
        while part := dict(islice(rest, IN_ONE_QUERY)):
            serve(connection, base, part, generation)
