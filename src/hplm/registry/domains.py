"""The part of the registry that holds bases and their trees of domains."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, or_, select, update

from hplm.errors import BadManageRequestError, ConflictError, DomainInUseError, UnknownDomainError, UnknownVersionError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.jobs import cancel_all, cancel_all_over, jobs_on_domain
from hplm.registry.records import BaseRecord, DomainRecord, DomainVersion
from hplm.registry.schema import bases, domain_versions, domains, tenant_bases, tenant_versions
from hplm.registry.tenant_bases import IS_CURRENT
from hplm.registry.versions import Folder, check_expected, check_free, check_unpublished, number_of, retire
from hplm.runtime.crash_points import crash_point

NAMED = 20  # most names that an error lists


class Domains(RegistryPart):
    """Bases, domains and their versions."""

    def publish_base(self, name: str, fingerprint: str, path: str, now_s: float) -> BaseRecord:
        """Register a base, or confirm that it is registered.

        Raises ConflictError if the base has domains over other weights, which the new weights would not fit.
        """
        with self._database.writing() as connection:
            base = BaseRecord(name, fingerprint, path)
            known = {each.name: each for each in kept_bases(connection)}.get(name)
            if base != known:
                used = select(domains.c.name).where(domains.c.base == name, domains.c.current_id.is_not(None))
                first = connection.scalar(used.limit(1))
                if known is not None and first and known.fingerprint != fingerprint:
                    raise ConflictError(
                        f"base {name!r} is {known.fingerprint} and has domain {first!r}: publish {fingerprint} under "
                        "another name, or delete its domains first"
                    )
                register_base(connection, base, now_s)
                bump(connection)
        return base

    def bases(self) -> list[BaseRecord]:
        """List the bases, sorted by name."""
        with self._database.reading() as connection:
            return kept_bases(connection)

    def base(self, name: str) -> BaseRecord:
        """Return a base. Raises UnknownDomainError if there is none of this name."""
        with self._database.reading() as connection:
            return _base(connection, name)

    def delete_base(self, name: str, now_s: float) -> set[str]:
        """Delete a base with its domains, and cancel its jobs. Return the uploads to drop with these jobs.

        Versions of tenants that were withdrawn from the base are retired. Raises UnknownDomainError for an unknown base, or
        ConflictError while tenants are served over it.
        """
        over = tenant_bases.c
        with self._database.writing() as connection:
            _base(connection, name)
            served = (over.base == name, over.current_id.is_not(None))
            count, first = connection.execute(select(func.count(), func.min(over.tenant)).where(*served)).one()
            if count:
                raise ConflictError(
                    f"base {name!r} cannot be deleted: {count:,} tenants stand on it, as {first!r}; delete them over this base "
                    f"first (`hplm tenant delete {first} --base {name}`)"
                )
            retire(connection, tenant_versions, now_s, tenant_versions.c.domain_version_id.in_(versions_of_base(name)))
            retire(connection, domain_versions, now_s, domain_versions.c.id.in_(versions_of_base(name)))
            connection.execute(update(domains).where(domains.c.base == name).values(current_id=None))
            connection.execute(update(bases).where(bases.c.name == name).values(retired_s=now_s))
            bump(connection)
            return cancel_all_over(connection, name, now_s)

    def next_domain_number(self, base: str, name: str, folder: Folder | None = None) -> int:
        """Give a number for the next version's folder. A number is given once, so a killed build's folder is never reused.

        Raises ConflictError if that `folder` exists.
        """
        with self._database.writing() as connection:
            _base(connection, base)
            row = domain_row(connection, base, name)
            number = row.last_number + 1
            check_free(folder, number)
            connection.execute(update(domains).where(domains.c.id == row.id).values(last_number=number))
            return int(number)

    def publish_domain(
        self,
        base: str,
        name: str,
        path: str,
        now_s: float,
        *,
        parent_id: int | None,
        about: dict[str, Any],
        expected: int | None,
        number: int | None = None,
    ) -> DomainVersion:
        """Publish a new domain or a domain's next version, which is current from now on.

        `expected` is the current number that the caller started from, None for a new domain. `number` comes from
        `next_domain_number`. Raises ConflictError if another version was published meanwhile or the parent version is
        gone, and UnknownDomainError for an unknown base.
        """
        with self._database.writing() as connection:
            _base(connection, base)
            row = domain_row(connection, base, name)
            what, own = f"domain {name!r}", domain_versions.c.domain_id == row.id
            check_expected(what, number_of(connection, domain_versions, row.current_id), expected)
            if parent_id is not None:
                _check_parent(connection, base, name, parent_id)
            number = row.last_number + 1 if number is None else number
            check_unpublished(connection, what, domain_versions, own, number)
            version_id = insert_domain_version(connection, row.id, number, parent_id, path, now_s, about)
            make_current(connection, row, version_id, number)
            crash_point("publish.committing")
            bump(connection)
            return _version(connection, version_id)

    def domain(self, base: str, name: str) -> DomainRecord:
        """Return a domain. Raises UnknownDomainError."""
        with self._database.reading() as connection:
            return _domain(connection, base, name)

    def find_domain(self, base: str, name: str) -> DomainRecord | None:
        """Return a domain, None if there is none of this name."""
        with suppress(UnknownDomainError):
            return self.domain(base, name)
        return None

    def current_domain(self, base: str, name: str) -> DomainVersion:
        """Return the current version of a domain. Raises UnknownDomainError."""
        return self.domain(base, name).current

    def domains(self, base: str | None = None) -> list[DomainRecord]:
        """List the domains of one base or of all, sorted by base and name."""
        query = _records().order_by(domains.c.base, domains.c.name)
        with self._database.reading() as connection:
            found = connection.execute(query.where(domains.c.base == base) if base is not None else query)
            return [_record(row) for row in found]

    def domain_versions(self, base: str, name: str) -> list[DomainVersion]:
        """List the kept versions of a domain, oldest first. Raises UnknownDomainError."""
        with self._database.reading() as connection:
            _domain(connection, base, name)
            query = select_domain_versions().where(
                domains.c.base == base, domains.c.name == name, domain_versions.c.retired_s.is_(None)
            )
            return [DomainVersion(*row) for row in connection.execute(query.order_by(domain_versions.c.number))]

    def lineage(self, version_id: int) -> list[DomainVersion]:
        """Return the version, its parent and so on to the root, in the order of look-up. Raises UnknownVersionError."""
        with self._database.reading() as connection:
            return _lineage(connection, version_id)

    def delete_domain(self, base: str, name: str, now_s: float) -> set[str]:
        """Delete a domain: retire its versions and cancel its jobs. Return the uploads to drop with these jobs.

        Older versions of tenants or domains that stand on it are retired too. Raises UnknownDomainError, or
        DomainInUseError with the tenants, domains and jobs whose current or next version stands on it.
        """
        with self._database.writing() as connection:
            _domain(connection, base, name)
            fallen = _standing_on(connection, base, name)
            if users := _users(connection, base, name, fallen):
                raise DomainInUseError(f"domain {name!r} cannot be deleted: {'; '.join(users)}")
            retire(connection, domain_versions, now_s, domain_versions.c.id.in_(fallen))
            retire(connection, tenant_versions, now_s, tenant_versions.c.domain_version_id.in_(fallen))
            deleted = update(domains).where(domains.c.base == base, domains.c.name == name)
            connection.execute(deleted.values(current_id=None))
            bump(connection)
            return cancel_all(connection, f"domain:{base}/{name}", now_s)


def check_kept(connection: Connection, version_id: int) -> DomainVersion:
    """Return a domain version that is kept. Raises UnknownVersionError or ConflictError."""
    version = _version(connection, version_id)
    retired = select(domain_versions.c.retired_s).where(domain_versions.c.id == version_id)
    if connection.scalar(retired) is not None:
        raise ConflictError(
            f"version {version.number} of domain {version.domain!r} was removed meanwhile: start from its current one"
        )
    return version


def versions_of_base(base: str) -> Select[tuple[int]]:
    """Return the query for the ids of a base's domain versions."""
    return select(domain_versions.c.id).join(domains).where(domains.c.base == base)


def insert_domain_version(
    connection: Connection,
    domain_id: int,
    number: int,
    parent_id: int | None,
    path: str,
    now_s: float,
    about: dict[str, Any],
) -> int:
    """Insert a version of a domain; return its id."""
    values = {"domain_id": domain_id, "number": number, "parent_id": parent_id, "path": path}
    added = insert(domain_versions).values(**values, created_s=now_s, about=about)
    return connection.execute(added.returning(domain_versions.c.id)).scalar_one()


def make_current(connection: Connection, row: Row[Any], version_id: int, number: int) -> None:
    """Make the version with this id and number the current one of the domain in `row`."""
    last = max(row.last_number, number)
    connection.execute(update(domains).where(domains.c.id == row.id).values(current_id=version_id, last_number=last))


def register_base(connection: Connection, base: BaseRecord, now_s: float) -> None:
    """Insert a base, or change the row of the base with this name, which may have been deleted."""
    changed = update(bases).where(bases.c.name == base.name)
    values = {"fingerprint": base.fingerprint, "path": base.path, "retired_s": None}
    if not connection.execute(changed.values(**values)).rowcount:
        connection.execute(insert(bases).values(name=base.name, created_s=now_s, **values))


def kept_bases(connection: Connection) -> list[BaseRecord]:
    """Return the bases that were not deleted, sorted by name."""
    query = select(bases.c.name, bases.c.fingerprint, bases.c.path).where(bases.c.retired_s.is_(None))
    return [BaseRecord(*row) for row in connection.execute(query.order_by(bases.c.name))]


def _base(connection: Connection, name: str) -> BaseRecord:
    for base in kept_bases(connection):
        if base.name == name:
            return base
    raise UnknownDomainError(f"there is no base {name!r}")


def domain_row(connection: Connection, base: str, name: str) -> Row[Any]:
    """Return the domain's row; insert it if there is none."""
    query = select(domains).where(domains.c.base == base, domains.c.name == name)
    row = connection.execute(query).first()
    if row is None:
        connection.execute(insert(domains).values(base=base, name=name, last_number=0))
        row = connection.execute(query).one()
    return row


def _domain(connection: Connection, base: str, name: str) -> DomainRecord:
    row = connection.execute(_records().where(domains.c.base == base, domains.c.name == name)).first()
    if row is None:
        raise UnknownDomainError(f"base {base!r} has no domain {name!r}")
    return _record(row)


def _records() -> Select[Any]:
    """Return the query for rows of `_record`, of domains that exist."""
    parent, above = domain_versions.alias("parent"), domains.alias("above")
    return (
        select_domain_versions()
        .add_columns(above.c.name)
        .outerjoin(parent, parent.c.id == domain_versions.c.parent_id)
        .outerjoin(above, above.c.id == parent.c.domain_id)
        .where(domain_versions.c.id == domains.c.current_id)
    )


def _record(row: Any) -> DomainRecord:
    current = DomainVersion(*row[:-1])
    return DomainRecord(current.base, current.domain, row[-1], current)


def select_domain_versions() -> Select[Any]:
    """Return the query for rows of DomainVersion."""
    v = domain_versions.c
    columns = (v.id, domains.c.base, domains.c.name, v.number, v.parent_id, v.path, v.created_s, v.about)
    return select(*columns).join_from(domain_versions, domains)


def _version(connection: Connection, version_id: int) -> DomainVersion:
    row = connection.execute(select_domain_versions().where(domain_versions.c.id == version_id)).first()
    if row is None:
        raise UnknownVersionError(f"there is no domain version with id {version_id}")
    return DomainVersion(*row)


def _lineage(connection: Connection, version_id: int) -> list[DomainVersion]:
    versions = [_version(connection, version_id)]
    while (parent_id := versions[-1].parent_id) is not None:
        versions.append(_version(connection, parent_id))
    return versions


def _check_parent(connection: Connection, base: str, name: str, parent_id: int) -> None:
    check_kept(connection, parent_id)
    above = _lineage(connection, parent_id)
    if above[0].base != base:
        raise BadManageRequestError(f"domain {above[0].domain!r} is of base {above[0].base!r}, {name!r} of {base!r}")
    if name in {version.domain for version in above}:
        raise BadManageRequestError(f"domain {name!r} cannot stand on {above[0].domain!r}, which stands on it")


def _standing_on(connection: Connection, base: str, name: str) -> list[int]:
    """Return the ids of the domain's kept versions and of all kept versions below them."""
    kept = select_domain_versions().where(domain_versions.c.retired_s.is_(None)).order_by(domain_versions.c.id)
    found: set[int] = set()
    # A parent has a smaller id than its children, so one pass finds the whole tree.
    for version in (DomainVersion(*row) for row in connection.execute(kept)):
        if (version.base, version.domain) == (base, name) or version.parent_id in found:
            found.add(version.id)
    return sorted(found)


def _users(connection: Connection, base: str, name: str, fallen: list[int]) -> list[str]:
    """List, as phrases, the tenants, domains and jobs that use the versions `fallen` of a domain."""
    children = select(domains.c.name).where(
        domains.c.current_id.in_(fallen), or_(domains.c.base != base, domains.c.name != name)
    )
    standing = (
        select(tenant_bases.c.tenant)
        .join(tenant_versions, IS_CURRENT)
        .where(tenant_versions.c.domain_version_id.in_(fallen))
        .order_by(tenant_bases.c.tenant)
    )
    found = {
        "tenants": connection.scalars(standing).all(),
        "domains": connection.scalars(children.order_by(domains.c.name)).all(),
        "jobs": jobs_on_domain(connection, base, name),
    }
    return [
        f"{kind} {', '.join(names[:NAMED])}" + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        for kind, names in found.items()
        if names
    ]
