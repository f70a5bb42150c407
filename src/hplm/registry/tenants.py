"""The part of the registry that holds tenants and their versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, or_, select, update

from hplm.errors import ConflictError, UnknownTenantError, UnknownVersionError
from hplm.registry.database import IN_ONE_QUERY, RegistryPart, bump
from hplm.registry.domains import check_kept
from hplm.registry.jobs import at_work_on, cancel_all, move_queued_updates, unfinished_subjects
from hplm.registry.records import TenantRecord, TenantVersion
from hplm.registry.schema import domain_versions, domains, tenant_versions, tenants
from hplm.registry.uploads import expire_uploads
from hplm.registry.versions import Folder, check_expected, check_free, check_unpublished, number_of, retire
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
            number = _row(connection, tenant).last_number + 1
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
        """Publish a new tenant or a tenant's next version, which is served from now on.

        `expected` is the current number that the caller started from, None for a new tenant. Raises ConflictError if
        another version was published meanwhile or the domain version is gone.
        """
        with self._database.writing() as connection:
            check_kept(connection, domain_version_id)
            row = _row(connection, name)
            what, own = f"tenant {name!r}", tenant_versions.c.tenant == name
            check_expected(what, number_of(connection, tenant_versions, row.current_id), expected)
            check_unpublished(connection, what, tenant_versions, own, number)
            values = version_values(name, number, domain_version_id, path, now_s, about)
            version_id = connection.execute(
                insert(tenant_versions).values(values).returning(tenant_versions.c.id)
            ).scalar_one()
            _serve(connection, name, version_id, last_number=max(row.last_number, number))
            move_queued_updates(connection, f"tenant:{name}", domain_version_id)
            crash_point("publish.committing")
        return TenantVersion(version_id, **values)

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

        Each tenant gets a next version, which is served. Its older versions at `path` are retired, because those files
        were replaced; versions elsewhere are kept. Tenants that are not in `names` stay as they are, except tenants that
        are served from banks at `instead_of`: these are deleted, and all versions in these banks are retired.
        """
        listed = sorted(set(names))
        with self._database.writing() as connection:
            check_kept(connection, domain_version_id)
            generation = bump(connection)
            rest = iter(listed)
            while part := list(islice(rest, IN_ONE_QUERY)):
                _publish_part(connection, part, domain_version_id, path, now_s, generation, about or {})
            serve_newest(connection, generation)
            _replace(connection, instead_of, now_s, generation)
        return len(listed)

    def tenant(self, name: str) -> TenantRecord:
        """Return a tenant. Raises UnknownTenantError."""
        found = self.find_tenant(name)
        if found is None:
            raise UnknownTenantError(f"there is no tenant {name!r}")
        return found

    def find_tenant(self, name: str) -> TenantRecord | None:
        """Return a tenant, None if there is none of this name."""
        with self._database.reading() as connection:
            query = _records().add_columns(tenant_versions.c.about).where(tenants.c.name == name)
            row = connection.execute(query).first()
        return None if row is None else _record(row[:-1], row.about)

    def tenant_versions(self, name: str) -> list[TenantVersion]:
        """List the kept versions of a tenant, oldest first. Raises UnknownTenantError."""
        with self._database.reading() as connection:
            _current_id(connection, name)
            query = _versions().where(tenant_versions.c.tenant == name, tenant_versions.c.retired_s.is_(None))
            return [TenantVersion(*row) for row in connection.execute(query.order_by(tenant_versions.c.number))]

    def tenants(self, *, prefix: str = "", after: str = "", limit: int = 100) -> list[TenantRecord]:
        """Return the tenants whose names start with `prefix` and come after `after`, sorted by name, at most `limit`.

        Of a version's `about` only `texts` is read, because the `about` of a thousand versions may be a quarter of a gigabyte.
        """
        query = listing(prefix, after, limit).add_columns(tenant_versions.c.about["texts"].as_integer())
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [_record(row[:-1], {} if row[-1] is None else {"texts": row[-1]}) for row in rows]

    def tenant_count(self) -> int:
        with self._database.reading() as connection:
            return connection.execute(select(func.count(tenants.c.current_id))).scalar_one()

    def tenants_by_domain(self) -> dict[tuple[str, str], int]:
        """Count the tenants of each domain, by `(base, name)`. Domains without tenants are left out."""
        query = (
            select(domains.c.base, domains.c.name, func.count())
            .join(domain_versions)
            .join(tenant_versions)
            .join(tenants, tenants.c.current_id == tenant_versions.c.id)
            .group_by(domains.c.base, domains.c.name)
        )
        with self._database.reading() as connection:
            return {(row[0], row[1]): row[2] for row in connection.execute(query)}

    def rollback_tenant(self, name: str, number: int | None) -> TenantVersion:
        """Serve another kept version; `number` None is the version with a lower number that was served last.

        Raises UnknownTenantError, UnknownVersionError, or ConflictError if an update is running: it started from the
        current version, and could not publish after a rollback.
        """
        versions = tenant_versions.c
        with self._database.writing() as connection:
            current = number_of(connection, tenant_versions, _current_id(connection, name))
            query = _versions().where(versions.tenant == name, versions.retired_s.is_(None))
            wanted = versions.number == number if number is not None else versions.number < current
            last = (versions.served.desc(), versions.number.desc())
            row = connection.execute(query.where(wanted).order_by(*last).limit(1)).first()
            if row is None:
                kept = connection.execute(query.order_by(versions.number)).all()
                raise UnknownVersionError(
                    f"tenant {name!r} is at version {current} and has no "
                    + (f"version {number}" if number is not None else "earlier one")
                    + f"; kept are {', '.join(str(one.number) for one in kept)}"
                )
            if (job := at_work_on(connection, f"tenant:{name}")) is not None:
                raise ConflictError(
                    f"job {job} is updating tenant {name!r} from version {current}, and could not publish after a roll back: "
                    "wait for it, or cancel it first"
                )
            _serve(connection, name, row.id)
            move_queued_updates(connection, f"tenant:{name}", row.domain_version_id)
            return TenantVersion(*row)

    def delete_tenant(self, name: str, now_s: float) -> set[str]:
        """Delete a tenant: retire its versions and cancel its jobs. Return the uploads to drop with these jobs.

        Raises UnknownTenantError.
        """
        with self._database.writing() as connection:
            _current_id(connection, name)
            retire(connection, tenant_versions, now_s, tenant_versions.c.tenant == name)
            _serve(connection, name, None)
            return cancel_all(connection, f"tenant:{name}", now_s)


def listing(prefix: str, after: str, limit: int) -> Select[Any]:
    """Return the query of `tenants`. It follows the index of names, so its time does not grow with tenants."""
    query = _records().where(tenants.c.name > after)
    if prefix:
        query = query.where(tenants.c.name >= prefix, tenants.c.name < prefix + AFTER_EVERY_NAME)
    return query.order_by(tenants.c.name).limit(limit)


def _records() -> Select[Any]:
    """Return the query for rows of `_record`, of tenants that exist, without `about`."""
    v = tenant_versions.c
    return (
        select(
            *(v.id, v.tenant, v.number, v.domain_version_id, v.path, v.created_s),
            *(domains.c.base, domains.c.name, domain_versions.c.number.label("domain_number")),
        )
        .select_from(tenants)
        .join(tenant_versions, v.id == tenants.c.current_id)
        .join(domain_versions)
        .join(domains)
    )


def _record(row: Any, about: dict[str, Any]) -> TenantRecord:
    version = TenantVersion(*(*row[:6], about))
    base, domain, number = row[6:]
    return TenantRecord(version.tenant, base, version, domain, number)


def _versions() -> Select[Any]:
    """Return the query for rows of TenantVersion."""
    v = tenant_versions.c
    return select(v.id, v.tenant, v.number, v.domain_version_id, v.path, v.created_s, v.about)


def _current_id(connection: Connection, name: str) -> int:
    found = connection.scalar(select(tenants.c.current_id).where(tenants.c.name == name))
    if found is None:
        raise UnknownTenantError(f"there is no tenant {name!r}")
    return found


def _row(connection: Connection, name: str) -> Row[Any]:
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


def _serve(connection: Connection, name: str, version_id: int | None, **also: int) -> None:
    """Make a version current, and increase the generation so that serving sees it."""
    generation = bump(connection)
    connection.execute(
        update(tenants).where(tenants.c.name == name).values(current_id=version_id, generation=generation, **also)
    )
    connection.execute(update(tenant_versions).where(tenant_versions.c.id == version_id).values(served=generation))


def _publish_part(
    connection: Connection,
    names: list[str],
    domain_version_id: int,
    path: str,
    now_s: float,
    generation: int,
    about: Mapping[str, dict[str, Any]],
) -> None:
    """Insert rows of tenants and versions for `names`. The caller sets `current_id` for all parts together."""
    query = select(tenants.c.name, tenants.c.last_number).where(tenants.c.name.in_(names)).order_by(tenants.c.name)
    new = set(names) - set(connection.scalars(query))
    if new:
        connection.execute(insert(tenants), [{"name": name, "last_number": 0, "generation": 0} for name in new])
    connection.execute(
        update(tenants)
        .where(tenants.c.name.in_(names))
        .values(last_number=tenants.c.last_number + 1, generation=generation)
    )
    v = tenant_versions.c
    retire(connection, tenant_versions, now_s, v.tenant.in_(names), v.path == path)
    rows = [
        version_values(name, number, domain_version_id, path, now_s, about.get(name, {}))
        for name, number in connection.execute(query)
    ]
    connection.execute(insert(tenant_versions), rows)


def _replace(connection: Connection, paths: Collection[str], now_s: float, generation: int) -> None:
    """Delete the tenants that are served from banks at `paths`, and retire every version in these banks."""
    v = tenant_versions.c
    served = (tenants.c.current_id == v.id, v.path.in_(paths))
    gone = set(connection.scalars(select(tenants.c.name).where(*served)))
    for subject in unfinished_subjects(connection) & {f"tenant:{name}" for name in gone}:
        expire_uploads(connection, cancel_all(connection, subject, now_s))
    of_gone = v.tenant.in_(select(tenants.c.name).where(*served).correlate(None))
    retire(connection, tenant_versions, now_s, or_(v.path.in_(paths), of_gone))
    at_paths = select(v.id).where(v.path.in_(paths))
    connection.execute(
        update(tenants).where(tenants.c.current_id.in_(at_paths)).values(current_id=None, generation=generation)
    )


def serve_newest(connection: Connection, generation: int) -> None:
    """Make the newest version current for every tenant that was changed in `generation`."""
    v = tenant_versions.c
    newest = select(v.id).where(v.tenant == tenants.c.name, v.number == tenants.c.last_number).scalar_subquery()
    connection.execute(update(tenants).where(tenants.c.generation == generation).values(current_id=newest))
    current = select(tenants.c.current_id).where(tenants.c.generation == generation)
    connection.execute(update(tenant_versions).where(v.id.in_(current)).values(served=generation))
