"""The part of the registry that decides which versions are no longer kept, and which files may be removed."""

from __future__ import annotations

from sqlalchemy import delete, func, select, update

from hplm.registry.database import RegistryPart
from hplm.registry.jobs import domains_in_work
from hplm.registry.schema import domain_versions, domains, tenant_versions, tenants


class Retention(RegistryPart):
    """Retires versions, lists the files that may be removed, and deletes their rows."""

    def retire(self, keep: int, now_s: float, *, base: str, by_job: str = "") -> int:
        """Retire old versions of a base's tenants and domains; return how many.

        `keep` versions of each tenant stay: those that were served last, so that a version that was rolled back to
        outlives newer ones. Of each domain the `keep` newest stay. Other bases are left alone, because their servers may
        keep more. A domain version also stays while a kept tenant version is tied to it, a kept domain version stands on
        it, or a job runs over its domain; `by_job` does not count, because it has published already.
        """
        assert keep >= 1
        with self._database.writing() as connection:
            v = tenant_versions.c
            last = (v.served.desc(), v.number.desc())
            age = func.row_number().over(partition_by=v.tenant, order_by=last).label("age")
            aged = (
                select(v.id, tenants.c.current_id, age)
                .join(tenants, tenants.c.name == v.tenant)
                .join(domain_versions, domain_versions.c.id == v.domain_version_id)
                .join(domains, domains.c.id == domain_versions.c.domain_id)
                .where(v.retired_s.is_(None), domains.c.base == base)
                .subquery()
            )
            old = select(aged.c.id).where(aged.c.age > keep, aged.c.id.is_distinct_from(aged.c.current_id))
            retired = connection.execute(update(tenant_versions).where(v.id.in_(old)).values(retired_s=now_s)).rowcount
            pinned = set(
                connection.execute(select(v.domain_version_id).where(v.retired_s.is_(None)).distinct()).scalars()
            )
            d = domain_versions.c
            # Children before parents, so that a retired child frees its parent in the same pass.
            rows = connection.execute(
                select(d.id, d.domain_id, d.number, d.parent_id, domains.c.current_id, domains.c.name)
                .join(domains, domains.c.id == d.domain_id)
                .where(d.retired_s.is_(None), domains.c.base == base)
                .order_by(d.id.desc())
            ).all()
            in_work = domains_in_work(connection, base, by_job)
            numbers: dict[int, list[int]] = {}
            for row in rows:
                numbers.setdefault(row.domain_id, []).append(row.number)
            newest = {domain_id: sorted(every)[-keep:] for domain_id, every in numbers.items()}
            old_domains: list[int] = []
            for row in rows:
                is_used = row.id == row.current_id or row.id in pinned or row.name in in_work
                if row.number not in newest[row.domain_id] and not is_used:
                    old_domains.append(row.id)
                elif row.parent_id is not None:
                    pinned.add(row.parent_id)
            connection.execute(update(domain_versions).where(d.id.in_(old_domains)).values(retired_s=now_s))
        return retired + len(old_domains)

    def collectable(self, before_s: float) -> list[str]:
        """List the paths of versions retired before `before_s` that no kept version uses; children before parents."""
        v, d = tenant_versions.c, domain_versions.c
        with self._database.reading() as connection:
            kept = select(v.path).where(v.retired_s.is_(None))
            of_tenants = connection.execute(
                select(v.path).where(v.retired_s.is_not(None)).group_by(v.path).having(func.max(v.retired_s) < before_s)
            ).scalars()
            in_use = set(connection.execute(kept.distinct()).scalars())
            of_domains = connection.execute(
                select(d.path).where(d.retired_s < before_s).order_by(d.id.desc())
            ).scalars()
            in_use |= set(connection.execute(select(d.path).where(d.retired_s.is_(None))).scalars())
            return [path for path in dict.fromkeys([*sorted(of_tenants), *of_domains]) if path not in in_use]

    def forget(self, path: str) -> None:
        """Delete the rows of retired versions whose files at `path` are gone. A parent's row stays as long as its child's."""
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
