"""The part of the registry that lists the files it names, and registers files that it does not know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, insert, select

from hplm.errors import ConflictError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.domains import domain_row, insert_domain_version, make_current, select_domain_versions
from hplm.registry.records import UNFINISHED, BaseRecord, DomainVersion, NewDomain, NewTenant, Snapshot
from hplm.registry.schema import bases, domain_versions, domains, jobs, state, tenant_versions, tenants, uploads
from hplm.registry.tenants import serve_newest, version_values

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
                bases=tuple(
                    BaseRecord(row.name, row.fingerprint, row.path)
                    for row in connection.execute(select(bases).order_by(bases.c.name))
                ),
                domains=tuple(DomainVersion(*row) for row in connection.execute(kept.order_by(domain_versions.c.id))),
                tenants=tenants_at,
                paths=frozenset(
                    path
                    for table in (bases, domain_versions, tenant_versions)
                    for path in connection.scalars(select(table.c.path).distinct())
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

        The highest number of a tenant or domain becomes current. Raises ConflictError if the registry was changed since
        `generation`, when the plan was made.
        """
        with self._database.writing() as connection:
            if connection.execute(select(state.c.generation)).scalar_one() != generation:
                raise ConflictError(CHANGED)
            generation = bump(connection)
            for base in new_bases:
                connection.execute(insert(bases).values(**vars(base), created_s=now_s))
            d = domain_versions.c
            kept = select(d.path, d.id).where(d.retired_s.is_(None))
            ids: dict[str, int] = {row.path: row.id for row in connection.execute(kept)}
            for new in new_domains:
                row = domain_row(connection, new.base, new.name)
                parent_id = _kept_id(ids, new.parent) if new.parent else None
                ids[new.path] = version_id = insert_domain_version(
                    connection, row.id, new.number, parent_id, new.path, now_s, new.about
                )
                if new.number >= row.last_number:
                    make_current(connection, row, version_id, new.number)
            _insert_tenants(connection, new_tenants, ids, now_s, generation)


def _kept_id(ids: Mapping[str, int], path: str) -> int:
    """Return the id of a kept domain version. Raises ConflictError if it was retired, which changes no generation."""
    if path not in ids:
        raise ConflictError(CHANGED)
    return ids[path]


def _insert_tenants(
    connection: Connection, new: Sequence[NewTenant], domain_ids: dict[str, int], now_s: float, generation: int
) -> None:
    last: dict[str, int] = {}
    for version in new:
        last[version.name] = max(version.number, last.get(version.name, 0))
    if not last:
        return
    # Giving a number to a name changes no generation, so it is checked here.
    if not last.keys().isdisjoint(connection.execute(select(tenants.c.name)).scalars()):
        raise ConflictError(CHANGED)
    rows = [{"name": name, "last_number": number, "generation": generation} for name, number in last.items()]
    connection.execute(insert(tenants), rows)
    versions = [version_values(v.name, v.number, _kept_id(domain_ids, v.domain), v.path, now_s, v.about) for v in new]
    connection.execute(insert(tenant_versions), versions)
    serve_newest(connection, generation)
