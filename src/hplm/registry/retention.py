"""The registry's part about what may go: versions that nothing serves, and the files that were theirs."""

from __future__ import annotations

from sqlalchemy import delete, func, select, update

from hplm.registry.database import RegistryPart
from hplm.registry.jobs import domains_in_work
from hplm.registry.schema import domain_versions, domains, tenant_versions, tenants


class Retention(RegistryPart):
    """Retire versions, say which files may be removed, forget them."""

    def retire(self, keep: int, now_s: float, *, base: str, by_job: str = "") -> int:
        """Retire all but the `keep` versions of a tenant that were served last, and of a domain the newest; returns how many.

        So what was good enough to go back to outlives newer ones that were not. Of one base: servers of others that share
        the registry may keep more. A domain version stays while a kept tenant version is tied to it, a kept domain version
        stands on it, or a job runs over its domain, but for `by_job`, which has made what it was to make.
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
            # Children before what they stand on, so that one that goes frees its parent in the same pass.
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
            newest = {domain_id: sorted(found)[-keep:] for domain_id, found in numbers.items()}
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
        """Paths of versions retired before `before_s` that no kept version uses: what stands on others comes first."""
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
        """Drop retired versions whose files at `path` are gone. What retired versions stand on is dropped after them."""
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
