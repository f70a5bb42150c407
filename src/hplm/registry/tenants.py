"""The part of the registry that holds tenants and their versions.

A tenant has versions over one base or several. Its numbers count all of them, and each base serves one version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, insert, or_, select, update

from hplm.errors import ConflictError, UnknownTenantError, UnknownVersionError
from hplm.registry.cascades import default_to_cascade, level_fields
from hplm.registry.database import IN_ONE_QUERY, RegistryPart, bump
from hplm.registry.domains import check_kept, versions_of_base
from hplm.registry.jobs import at_work_on, cancel_all, move_queued_updates, unfinished_subjects
from hplm.registry.records import TenantRecord, TenantVersion
from hplm.registry.schema import domain_versions, domains, tenant_bases, tenant_versions, tenants
from hplm.registry.tenant_bases import (
    IS_CURRENT,
    current_numbers,
    numbers_by_tenant,
    serve,
    settle_defaults,
    state_at,
    state_before,
    tenant_row,
    version_values,
    withdraw,
)
from hplm.registry.uploads import expire_uploads
from hplm.registry.versions import Folder, check_expected, check_free, check_unpublished, retire
from hplm.runtime.crash_points import crash_point

AFTER_EVERY_NAME = "\x7f"  # names are plain ASCII below it


class Tenants(RegistryPart):
    """Publishes, finds, rolls back and deletes tenants."""

    def check_next_number(self, tenant: str, folder: Folder) -> None:
        """Raise ConflictError if `next_number` would, so that nothing is trained that could not be published."""
        with self._database.reading() as connection:
            last = connection.scalar(select(tenants.c.last_number).where(tenants.c.name == tenant))
        check_free(folder, 1 + (last or 0))

    def next_number(self, tenant: str, folder: Folder | None = None) -> int:
        """Give a number for the next version's folder. A number is given once, so a killed job's folder is never reused.

        Raises ConflictError if that `folder` exists.
        """
        with self._database.writing() as connection:
            number = tenant_row(connection, tenant).last_number + 1
            check_free(folder, number)
            connection.execute(update(tenants).where(tenants.c.name == tenant).values(last_number=number))
            return int(number)

    def publish_tenant(
        self,
        name: str,
        domain_version_id: int,
        path: str,
        now_s: float,
        *,
        about: dict[str, Any],
        number: int,
        expected: int | None,
    ) -> TenantVersion:
        """Publish a tenant's next version, which is served from now on over the base of its domain version.

        `expected` is the current number over that base that the caller started from, None if the tenant has none there. The
        first base of a tenant becomes its default. Other bases of the tenant serve what they served before. Raises
        ConflictError if another version was published meanwhile or the domain version is gone.
        """
        with self._database.writing() as connection:
            base = check_kept(connection, domain_version_id).base
            row = tenant_row(connection, name)
            own = tenant_versions.c.tenant == name
            numbers = numbers_by_tenant(connection, tenant_bases.c.tenant == name).get(name, {})
            check_expected(f"tenant {name!r} over base {base!r}", numbers.get(base), expected)
            check_unpublished(connection, f"tenant {name!r}", tenant_versions, own, number)
            values = version_values(name, number, domain_version_id, path, now_s, about)
            version_id = connection.execute(
                insert(tenant_versions).values(values).returning(tenant_versions.c.id)
            ).scalar_one()
            counted = update(tenants).where(tenants.c.name == name)
            connection.execute(counted.values(last_number=max(row.last_number, number)))
            generation = bump(connection)
            serve(connection, base, {name: version_id}, generation)
            settle_defaults(connection, generation, now_s)
            move_queued_updates(connection, f"tenant:{name}", domain_version_id)
            crash_point("publish.committing")
        return TenantVersion(version_id, base=base, **values)

    def publish_tenants(
        self,
        domain_version_id: int,
        path: str,
        names: Iterable[str],
        now_s: float,
        *,
        about: Mapping[str, dict[str, Any]] | None = None,
        instead_of: Collection[str] = (),
    ) -> int:
        """Publish many tenants in one transaction, all in the bank at `path`; return their number. `about` is by name.

        Each tenant gets a next version, which is served over the base of the domain version. Its older versions at `path`
        are retired, because those files were replaced; versions elsewhere are kept. Tenants that are not in `names` stay as
        they are, except tenants that are served from banks at `instead_of`: the base no longer has these tenants, and all
        versions in these banks are retired.
        """
        listed = sorted(set(names))
        with self._database.writing() as connection:
            domain = check_kept(connection, domain_version_id)
            generation = bump(connection)
            rest = iter(listed)
            while part := list(islice(rest, IN_ONE_QUERY)):
                ids = _publish_part(connection, part, domain_version_id, path, now_s, about or {})
                serve(connection, domain.base, ids, generation)
            _replace(connection, domain.base, instead_of, now_s, generation)
            settle_defaults(connection, generation, now_s)
        return len(listed)

    def tenant(self, name: str, base: str | None = None) -> TenantRecord:
        """Return a tenant as `find_tenant` does. Raises UnknownTenantError."""
        found = self.find_tenant(name, base)
        if found is None:
            raise UnknownTenantError(f"there is no tenant {name!r}" + (f" over base {base!r}" if base else ""))
        return found

    def find_tenant(self, name: str, base: str | None = None) -> TenantRecord | None:
        """Return a tenant with its current version over `base`, by default its default base; None if there is none."""
        with self._database.reading() as connection:
            query = _records(tenants.c.default_base if base is None else base)
            row = connection.execute(query.add_columns(tenant_versions.c.about).where(tenants.c.name == name)).first()
            if row is None:
                return None
            return _record(row[:-1], row.about, current_numbers(connection, name))

    def tenant_versions(self, name: str) -> list[TenantVersion]:
        """List the kept versions of a tenant over all bases, oldest first. Raises UnknownTenantError."""
        with self._database.reading() as connection:
            current_numbers(connection, name)
            return _kept(connection, name, tenant_versions.c.number)

    def tenants(self, *, prefix: str = "", after: str = "", limit: int = 100) -> list[TenantRecord]:
        """Return the tenants whose names start with `prefix` and come after `after`, sorted by name, at most `limit`.

        Each has its version over its default base. Of a version's `about` only `texts` is read, because the `about` of a
        thousand versions may be a quarter of a gigabyte.
        """
        query = listing(prefix, after, limit).add_columns(tenant_versions.c.about["texts"].as_integer())
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            if not rows:
                return []
            of = tenant_bases.c.tenant
            numbers = numbers_by_tenant(connection, of >= rows[0].tenant, of <= rows[-1].tenant)
        return [_record(row[:-1], {} if row[-1] is None else {"texts": row[-1]}, numbers[row.tenant]) for row in rows]

    def tenant_count(self) -> int:
        with self._database.reading() as connection:
            return connection.execute(select(func.count(tenants.c.default_base))).scalar_one()

    def tenants_by_domain(self) -> dict[tuple[str, str], int]:
        """Count the tenants of each domain, by `(base, name)`. Domains without tenants are left out.

        A tenant over several bases counts over each.
        """
        query = (
            select(domains.c.base, domains.c.name, func.count())
            .join(domain_versions)
            .join(tenant_versions)
            .join(tenant_bases, IS_CURRENT)
            .group_by(domains.c.base, domains.c.name)
        )
        with self._database.reading() as connection:
            return {(row[0], row[1]): row[2] for row in connection.execute(query)}

    def rollback_tenant(self, name: str, number: int | None, now_s: float) -> dict[str, TenantVersion]:
        """Roll back all bases of a tenant as one; return the version that is served now over each base.

        To `number`, each base serves its newest kept version up to that number. With `number` None the tenant goes back to
        the state before its last publication: the version with a lower number over the same base that was served last. The
        tenant leaves a base that has no such version, and its jobs over that base are cancelled. The levels of a cascade go
        back as one: to the number of any level means to all levels that were published with it.

        Raises UnknownTenantError, UnknownVersionError, or ConflictError if an update is running: it started from the
        current version, and could not publish after a rollback.
        """
        subject = f"tenant:{name}"
        with self._database.writing() as connection:
            current = current_numbers(connection, name)
            kept = _kept(connection, name, tenant_versions.c.served, tenant_versions.c.number)
            state = state_before(current, kept) if number is None else state_at(number, kept)
            if state is None:
                raise UnknownVersionError(
                    f"tenant {name!r} is at version {max(current.values())} and has no "
                    + (f"version {number}" if number is not None else "earlier one")
                    + (" whose levels are all kept" if any(version.number == number for version in kept) else "")
                    + f"; kept are {', '.join(map(str, sorted(version.number for version in kept)))}"
                )
            if (job := at_work_on(connection, subject)) is not None:
                raise ConflictError(
                    f"job {job} is updating tenant {name!r} from version {max(current.values())}, and could not publish after "
                    "a roll back: wait for it, or cancel it first"
                )
            generation = bump(connection)
            served = {version.base: version for version in kept if version.number == state.get(version.base)}
            for base, version in served.items():
                serve(connection, base, {name: version.id}, generation)
                move_queued_updates(connection, subject, version.domain_version_id)
            if left := current.keys() - served.keys():
                withdraw(connection, name, left, generation)
                for base in left:
                    expire_uploads(connection, cancel_all(connection, subject, now_s, base=base))
            settle_defaults(connection, generation, now_s)
            default_to_cascade(connection, name)
            return dict(sorted(served.items()))

    def set_least_students(self, name: str, least: int) -> None:
        """Serve each text of a tenant by at least so many of its students from now on. Raises UnknownTenantError."""
        with self._database.writing() as connection:
            current_numbers(connection, name)
            changed = update(tenants).where(tenants.c.name == name)
            connection.execute(changed.values(least_students=least, generation=bump(connection)))

    def delete_tenant(self, name: str, now_s: float, *, base: str | None = None) -> set[str]:
        """Delete a tenant, or only its versions over `base`, and cancel their jobs. Return the uploads to drop with the jobs.

        A tenant goes with its last base. Raises UnknownTenantError.
        """
        with self._database.writing() as connection:
            bases = set(current_numbers(connection, name))
            if base is not None and base not in bases:
                raise UnknownTenantError(f"there is no tenant {name!r} over base {base!r}")
            which = [tenant_versions.c.tenant == name]
            if base is not None and bases != {base}:
                bases = {base}
                which.append(tenant_versions.c.domain_version_id.in_(versions_of_base(base)))
            else:
                base = None  # jobs over any base go with the tenant
            retire(connection, tenant_versions, now_s, *which)
            generation = bump(connection)
            withdraw(connection, name, bases, generation)
            settle_defaults(connection, generation, now_s)
            return cancel_all(connection, f"tenant:{name}", now_s, base=base)


def listing(prefix: str, after: str, limit: int) -> Select[Any]:
    """Return the query of `tenants`. It follows the index of names, so its time does not grow with tenants."""
    query = _records(tenants.c.default_base).where(tenants.c.name > after)
    if prefix:
        query = query.where(tenants.c.name >= prefix, tenants.c.name < prefix + AFTER_EVERY_NAME)
    return query.order_by(tenants.c.name).limit(limit)


def _records(base: ColumnElement[str | None] | str) -> Select[Any]:
    """Return the query for rows of `_record`, of tenants that exist over `base`, without `about`."""
    v = tenant_versions.c
    return (
        select(
            *(v.id, v.tenant, domains.c.base, v.number, v.domain_version_id, v.path, v.created_s),
            *(domains.c.name, domain_versions.c.number.label("domain_number"), tenants.c.default_base),
            tenants.c.least_students,
        )
        .select_from(tenants)
        .join(tenant_bases, and_(tenant_bases.c.tenant == tenants.c.name, tenant_bases.c.base == base))
        .join(tenant_versions, v.id == tenant_bases.c.current_id)
        .join(domain_versions)
        .join(domains)
    )


def _record(row: Any, about: dict[str, Any], numbers: dict[str, int]) -> TenantRecord:
    version = TenantVersion(*(*row[:7], about))
    domain, domain_number, default_base, least = row[7:]
    return TenantRecord(version.tenant, version.base, version, domain, domain_number, default_base, numbers, least)


def _kept(connection: Connection, name: str, *order: ColumnElement[int]) -> list[TenantVersion]:
    """Return the kept versions of a tenant in an order."""
    v = tenant_versions.c
    query = (
        select(v.id, v.tenant, domains.c.base, v.number, v.domain_version_id, v.path, v.created_s, v.about, v.cascade)
        .select_from(tenant_versions)
        .join(domain_versions)
        .join(domains)
        .where(v.tenant == name, v.retired_s.is_(None))
        .order_by(*order)
    )
    rows = connection.execute(query)
    return [
        TenantVersion(*row[:-1], **({} if row.cascade is None else level_fields(row.cascade, name))) for row in rows
    ]


def _publish_part(
    connection: Connection,
    names: list[str],
    domain_version_id: int,
    path: str,
    now_s: float,
    about: Mapping[str, dict[str, Any]],
) -> dict[str, int]:
    """Insert rows of tenants and versions for `names`; return the ids of the versions by name."""
    query = select(tenants.c.name, tenants.c.last_number).where(tenants.c.name.in_(names)).order_by(tenants.c.name)
    new = set(names) - set(connection.scalars(query))
    if new:
        connection.execute(insert(tenants), [{"name": name, "last_number": 0, "generation": 0} for name in new])
    connection.execute(update(tenants).where(tenants.c.name.in_(names)).values(last_number=tenants.c.last_number + 1))
    v = tenant_versions.c
    retire(connection, tenant_versions, now_s, v.tenant.in_(names), v.path == path)
    rows = [
        version_values(name, number, domain_version_id, path, now_s, about.get(name, {}))
        for name, number in connection.execute(query)
    ]
    made = connection.execute(insert(tenant_versions).returning(v.tenant, v.id), rows)
    return {name: version_id for name, version_id in made}


def _replace(connection: Connection, base: str, paths: Collection[str], now_s: float, generation: int) -> None:
    """Withdraw the tenants that `base` serves from banks at `paths`, and retire every version in these banks."""
    v, over = tenant_versions.c, tenant_bases.c
    at_paths = (over.base == base, v.path.in_(paths))
    served = select(over.tenant).join(tenant_versions, IS_CURRENT).where(*at_paths).correlate(None)
    gone = set(connection.scalars(served))
    for subject in unfinished_subjects(connection) & {f"tenant:{name}" for name in gone}:
        expire_uploads(connection, cancel_all(connection, subject, now_s, base=base))
    of_gone = and_(v.tenant.in_(served), v.domain_version_id.in_(versions_of_base(base)))
    retire(connection, tenant_versions, now_s, or_(v.path.in_(paths), of_gone))
    connection.execute(update(tenants).where(tenants.c.name.in_(served)).values(generation=generation))
    withdrawn = update(tenant_bases).where(
        over.base == base, over.current_id.in_(select(v.id).where(v.path.in_(paths)))
    )
    connection.execute(withdrawn.values(current_id=None))
