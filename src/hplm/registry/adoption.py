"""The registry's part about files: what it says of them, and taking in those it does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from hplm.errors import ConflictError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.domains import domain_row, insert_domain_version, select_domain_versions
from hplm.registry.records import UNFINISHED, BaseRecord, Claim, DomainVersion, NewDomain, NewTenant, Snapshot
from hplm.registry.schema import bases, domain_versions, domains, jobs, state, tenant_versions, tenants, uploads
from hplm.registry.tenants import serve_newest

CHANGED = "the registry was changed meanwhile: look again"


class Adoption(RegistryPart):
    """A look at all that the registry knows of files, and one transaction that adds to it."""

    def snapshot(self) -> Snapshot:
        """What the registry says about files now."""
        v = tenant_versions.c
        with self._database.reading() as connection:

            def column(query: Any) -> list[Any]:
                return list(connection.execute(query).scalars())

            kept = select_domain_versions().where(domain_versions.c.retired_s.is_(None))
            return Snapshot(
                generation=connection.execute(select(state.c.generation)).scalar_one(),
                bases=tuple(
                    BaseRecord(row.name, row.fingerprint, row.path)
                    for row in connection.execute(select(bases).order_by(bases.c.name))
                ),
                domains=tuple(DomainVersion(*row) for row in connection.execute(kept.order_by(domain_versions.c.id))),
                tenants=tuple(
                    Claim(*row)
                    for row in connection.execute(select(v.tenant, v.path).where(v.retired_s.is_(None)).order_by(v.id))
                ),
                paths=frozenset(
                    path
                    for table in (bases, domain_versions, tenant_versions)
                    for path in column(select(table.c.path).distinct())
                ),
                uploads=frozenset(column(select(uploads.c.id))),
                # Not those that jobs name: a version's number is in here before its folder is made, and what lies in the store
                # under a name that only a job has is of a registry that went on longer.
                given={
                    **{f"tenant:{row.name}": row.last_number for row in connection.execute(select(tenants))},
                    **{f"domain:{row.base}/{row.name}": row.last_number for row in connection.execute(select(domains))},
                },
                busy=frozenset(column(select(jobs.c.subject).where(jobs.c.state == "running"))),
                unfinished=frozenset(column(select(jobs.c.id).where(jobs.c.state.in_(UNFINISHED)))),
                ended=frozenset(column(select(jobs.c.id).where(jobs.c.state.not_in(UNFINISHED)))),
            )

    def adopt(
        self,
        generation: int,
        new_bases: Sequence[BaseRecord],
        new_domains: Sequence[NewDomain],
        new_tenants: Sequence[NewTenant],
        now_s: float,
    ) -> None:
        """Register what lies in the store already, parents before children: all of it or nothing.

        The highest number of a tenant or domain becomes current. Raises ConflictError where what the plan was made for, at
        `generation`, was changed since.
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
            for one in new_domains:
                row = domain_row(connection, one.base, one.name)
                parent_id = _kept(ids, one.parent) if one.parent else None
                ids[one.path] = insert_domain_version(
                    connection, row, one.number, parent_id, one.path, now_s, one.about
                )
            newest = select(d.id).where(d.domain_id == domains.c.id, d.number == domains.c.last_number)
            added = {(one.base, one.name) for one in new_domains}
            for base_name, name in added:
                connection.execute(
                    update(domains)
                    .where(domains.c.base == base_name, domains.c.name == name)
                    .values(current_id=newest.scalar_subquery())
                )
            _insert_tenants(connection, new_tenants, ids, now_s, generation)


def _kept(ids: Mapping[str, int], path: str) -> int:
    """Raises ConflictError for a domain version that was retired since the plan was made, which is no generation."""
    if path not in ids:
        raise ConflictError(CHANGED)
    return ids[path]


def _insert_tenants(
    connection: Connection, new: Sequence[NewTenant], domain_ids: dict[str, int], now_s: float, generation: int
) -> None:
    last: dict[str, int] = {}
    for one in new:
        last[one.name] = max(one.number, last.get(one.name, 0))
    if not last:
        return
    # A number may have been given to a name since the plan was made, and that is no generation.
    if not last.keys().isdisjoint(connection.execute(select(tenants.c.name)).scalars()):
        raise ConflictError(CHANGED)
    rows = [{"name": name, "last_number": number, "generation": generation} for name, number in last.items()]
    connection.execute(insert(tenants), rows)
    versions = [
        {
            "tenant": one.name,
            "number": one.number,
            "domain_version_id": _kept(domain_ids, one.domain),
            "path": one.path,
            "created_s": now_s,
            "about": one.about,
        }
        for one in new
    ]
    connection.execute(insert(tenant_versions), versions)
    serve_newest(connection, generation)
