"""The part of the registry that decides which versions are no longer kept, and which files may be removed."""

from __future__ import annotations

import math

from sqlalchemy import and_, delete, func, select, update

from hplm.registry.database import RegistryPart
from hplm.registry.jobs import domains_in_work
from hplm.registry.schema import bases, domain_versions, domains, tenant_bases, tenant_versions
from hplm.registry.versions import retire


class Retention(RegistryPart):
    """Retires versions, lists the files that may be removed, and deletes their rows."""

    def retire(self, keep: int, now_s: float, *, base: str, by_job: str = "") -> int:
        """Retire old versions of a base's tenants and domains; return how many.

        `keep` versions of each tenant over the base stay: those that were served last, so that a version that was rolled
        back to outlives newer ones. Of each domain the `keep` newest stay. Other bases are left alone, because their servers
        may keep more. A domain version also stays while a kept tenant version is tied to it, a kept domain version stands on
        it, or a job runs over its domain; `by_job` does not count, because it has published already.
        """
        assert keep >= 1
        with self._database.writing() as connection:
            v = tenant_versions.c
            last = (v.served.desc(), v.number.desc())
            age = func.row_number().over(partition_by=v.tenant, order_by=last).label("age")
            aged = (
                select(v.id, tenant_bases.c.current_id, age)
                .select_from(tenant_versions)
                .join(domain_versions)
                .join(domains)
                .outerjoin(tenant_bases, and_(tenant_bases.c.tenant == v.tenant, tenant_bases.c.base == domains.c.base))
                .where(v.retired_s.is_(None), domains.c.base == base)
                .subquery()
            )
            old = select(aged.c.id).where(aged.c.age > keep, aged.c.id.is_distinct_from(aged.c.current_id))
            retired = retire(connection, tenant_versions, now_s, v.id.in_(old))
            pinned = set(connection.scalars(select(v.domain_version_id).where(v.retired_s.is_(None)).distinct()))
            d = domain_versions.c
            age = func.row_number().over(partition_by=d.domain_id, order_by=d.number.desc()).label("age")
            in_work = domains_in_work(connection, base, by_job)
            old_domains: list[int] = []
            # Children before parents, so that a retired child frees its parent in the same pass.
            for row in connection.execute(
                select(d.id, d.parent_id, domains.c.current_id, domains.c.name, age)
                .join(domains)
                .where(d.retired_s.is_(None), domains.c.base == base)
                .order_by(d.id.desc())
            ):
                is_used = row.id == row.current_id or row.id in pinned or row.name in in_work
                if row.age > keep and not is_used:
                    old_domains.append(row.id)
                elif row.parent_id is not None:
                    pinned.add(row.parent_id)
            return retired + retire(connection, domain_versions, now_s, d.id.in_(old_domains))

    def collectable(self, before_s: float) -> list[str]:
        """List the paths of versions and bases retired before `before_s` that nothing kept uses; children before parents."""
        v, d = tenant_versions.c, domain_versions.c
        kept = select(v.path).where(v.retired_s.is_(None)).distinct()
        with self._database.reading() as connection:
            of_tenants = connection.scalars(
                select(v.path).where(v.retired_s.is_not(None)).group_by(v.path).having(func.max(v.retired_s) < before_s)
            )
            of_domains = connection.scalars(select(d.path).where(d.retired_s < before_s).order_by(d.id.desc()))
            old_bases = (bases.c.retired_s < before_s, bases.c.path != "")
            of_bases = connection.scalars(select(bases.c.path).where(*old_bases).order_by(bases.c.name))
            paths = dict.fromkeys([*sorted(of_tenants), *of_domains, *of_bases])
            in_use = {
                *connection.scalars(kept),
                *connection.scalars(select(d.path).where(d.retired_s.is_(None))),
                *connection.scalars(select(bases.c.path).where(bases.c.retired_s.is_(None))),
            }
            return [path for path in paths if path not in in_use]

    def last_retired_s(self, path: str) -> float:
        """Return when the newest base or domain version at a path was retired; infinity if none was."""
        with self._database.reading() as connection:
            times = [
                connection.scalar(select(func.max(table.c.retired_s)).where(table.c.path == path))
                for table in (bases, domain_versions)
            ]
        return max((time_s for time_s in times if time_s is not None), default=math.inf)

    def forget(self, path: str) -> None:
        """Delete the rows of retired versions whose files at `path` are gone. A parent's row stays as long as its child's.

        The row of a deleted base stays without its path.
        """
        v, d = tenant_versions.c, domain_versions.c
        with self._database.writing() as connection:
            connection.execute(delete(tenant_versions).where(v.path == path, v.retired_s.is_not(None)))
            child = domain_versions.alias("child")
            connection.execute(
                delete(domain_versions).where(
                    d.path == path,
                    d.retired_s.is_not(None),
                    ~select(v.id).where(v.domain_version_id == d.id).exists(),
                    ~select(child.c.id).where(child.c.parent_id == d.id).exists(),
                )
            )
            gone = update(bases).where(bases.c.path == path, bases.c.retired_s.is_not(None))
            connection.execute(gone.values(path=""))
