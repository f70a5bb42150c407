"""The registry's part about bases and their trees of domains."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from hplm.errors import BadManageRequestError, ConflictError, DomainInUseError, UnknownDomainError, UnknownVersionError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.jobs import cancel_all, jobs_on_domain
from hplm.registry.records import BaseRecord, DomainRecord, DomainVersion
from hplm.registry.schema import bases, domain_versions, domains, tenant_versions, tenants
from hplm.registry.version_numbers import Folder, check_free
from hplm.runtime.crash_points import crash_point

NAMED = 20  # of those in the way of a deletion


class Domains(RegistryPart):
    """Bases, domains and their versions."""

    def publish_base(self, name: str, fingerprint: str, path: str, now_s: float) -> BaseRecord:
        """Register a base, again and again if need be.

        Raises ConflictError where it has domains over other weights: those would no longer fit.
        """
        with self._database.writing() as connection:
            known = connection.execute(select(bases).where(bases.c.name == name)).first()
            if known is None:
                connection.execute(insert(bases).values(name=name, fingerprint=fingerprint, path=path, created_s=now_s))
                bump(connection)
            elif (known.fingerprint, known.path) != (fingerprint, path):
                used = select(domains.c.name).where(domains.c.base == name, domains.c.current_id.is_not(None))
                if known.fingerprint != fingerprint and (first := connection.execute(used.limit(1)).scalar()):
                    raise ConflictError(
                        f"base {name!r} is {known.fingerprint} and has domain {first!r}: publish {fingerprint} under "
                        "another name, or delete its domains first"
                    )
                connection.execute(update(bases).where(bases.c.name == name).values(fingerprint=fingerprint, path=path))
                bump(connection)
        return BaseRecord(name, fingerprint, path)

    def base(self, name: str) -> BaseRecord:
        """Raises UnknownDomainError: a base is a tree of domains, and this one is not there."""
        with self._database.reading() as connection:
            return _base(connection, name)

    def next_domain_number(self, base: str, name: str, folder: Folder | None = None) -> int:
        """A number for the next version's folder, given once: what a killed build left there is never built into.

        Raises ConflictError where that `folder` is there.
        """
        with self._database.writing() as connection:
            _base(connection, base)
            row = domain_row(connection, base, name)
            check_free(folder, row.last_number + 1)
            connection.execute(update(domains).where(domains.c.id == row.id).values(last_number=row.last_number + 1))
            return row.last_number + 1

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
        """A new domain, or the next version of one, and what is current from now on.

        `expected` is the current number that the caller started from, None where there must be no such domain; `number` is
        one that `next_domain_number` gave. Raises ConflictError where either is overtaken or the parent version is gone,
        UnknownDomainError for an unknown base.
        """
        with self._database.writing() as connection:
            _base(connection, base)
            row = domain_row(connection, base, name)
            current = _number_of(connection, row.current_id)
            if current != expected:
                raise ConflictError(
                    f"domain {name!r} is at version {current}, not {expected}: it was changed meanwhile, look again"
                )
            if parent_id is not None:
                _check_parent(connection, base, name, parent_id)
            if number is None:
                number = row.last_number + 1
            elif connection.execute(
                select(domain_versions.c.id).where(
                    domain_versions.c.domain_id == row.id, domain_versions.c.number == number
                )
            ).first():
                raise ConflictError(f"domain {name!r} has a version {number} already: it was published meanwhile")
            version_id = insert_domain_version(connection, row, number, parent_id, path, now_s, about)
            crash_point("publish.committing")
            bump(connection)
            return _version(connection, version_id)

    def domain(self, base: str, name: str) -> DomainRecord:
        """Raises UnknownDomainError."""
        found = self.find_domain(base, name)
        if found is None:
            raise UnknownDomainError(f"base {base!r} has no domain {name!r}")
        return found

    def find_domain(self, base: str, name: str) -> DomainRecord | None:
        """None where there is no such domain."""
        with self._database.reading() as connection:
            row = connection.execute(_records().where(domains.c.base == base, domains.c.name == name)).first()
        return None if row is None else DomainRecord(*row)

    def current_domain(self, base: str, name: str) -> DomainVersion:
        """What is current of a domain. Raises UnknownDomainError."""
        query = select_domain_versions().where(domains.c.base == base, domains.c.name == name)
        with self._database.reading() as connection:
            row = connection.execute(query.where(domains.c.current_id == domain_versions.c.id)).first()
        if row is None:
            raise UnknownDomainError(f"base {base!r} has no domain {name!r}")
        return DomainVersion(*row)

    def domains(self, base: str | None = None) -> list[DomainRecord]:
        """Of one base or all, sorted by base and name."""
        query = _records().order_by(domains.c.base, domains.c.name)
        with self._database.reading() as connection:
            found = connection.execute(query.where(domains.c.base == base) if base is not None else query)
            return [DomainRecord(*row) for row in found]

    def domain_versions(self, base: str, name: str) -> list[DomainVersion]:
        """Those that are kept, oldest first. Raises UnknownDomainError."""
        with self._database.reading() as connection:
            domain_id = _domain_id(connection, base, name)
            query = select_domain_versions().where(
                domain_versions.c.domain_id == domain_id, domain_versions.c.retired_s.is_(None)
            )
            return [DomainVersion(*row) for row in connection.execute(query.order_by(domain_versions.c.number))]

    def lineage(self, version_id: int) -> list[DomainVersion]:
        """The version, its parent and so on to the root: the order of look-up. Raises UnknownVersionError."""
        with self._database.reading() as connection:
            return _lineage(connection, version_id)

    def delete_domain(self, base: str, name: str, now_s: float) -> set[str]:
        """Retire all its versions, cancel its jobs; returns the uploads that go with those.

        Older versions of tenants or domains that stood on it can no longer be gone back to. Raises DomainInUseError, which
        names the tenants and domains whose current version stands on it, and jobs that make such; or UnknownDomainError.
        """
        with self._database.writing() as connection:
            domain_id = _domain_id(connection, base, name)
            fallen = _standing_on(connection, domain_id)
            in_the_way = _in_the_way(connection, base, name, domain_id, fallen)
            if in_the_way:
                raise DomainInUseError(f"domain {name!r} cannot be deleted: {'; '.join(in_the_way)}")
            for table, column in (
                (domain_versions, domain_versions.c.id),
                (tenant_versions, tenant_versions.c.domain_version_id),
            ):
                connection.execute(
                    update(table).where(column.in_(fallen), table.c.retired_s.is_(None)).values(retired_s=now_s)
                )
            connection.execute(update(domains).where(domains.c.id == domain_id).values(current_id=None))
            bump(connection)
            return cancel_all(connection, f"domain:{base}/{name}", now_s)


def check_kept(connection: Connection, version_id: int) -> None:
    """A domain version that something may be built on. Raises UnknownVersionError or ConflictError."""
    version = _version(connection, version_id)
    retired = select(domain_versions.c.retired_s).where(domain_versions.c.id == version_id)
    if connection.execute(retired).scalar_one() is not None:
        raise ConflictError(
            f"version {version.number} of domain {version.domain!r} was removed meanwhile: start from its current one"
        )


def insert_domain_version(
    connection: Connection,
    row: Row[Any],
    number: int,
    parent_id: int | None,
    path: str,
    now_s: float,
    about: dict[str, Any],
) -> int:
    """A version of the domain in `row` that is current from now on; returns its id."""
    values = {"domain_id": row.id, "number": number, "parent_id": parent_id, "path": path}
    version_id = connection.execute(
        insert(domain_versions).values(**values, created_s=now_s, about=about).returning(domain_versions.c.id)
    ).scalar_one()
    connection.execute(
        update(domains)
        .where(domains.c.id == row.id)
        .values(current_id=version_id, last_number=max(row.last_number, number))
    )
    return int(version_id)


def _base(connection: Connection, name: str) -> BaseRecord:
    row = connection.execute(select(bases).where(bases.c.name == name)).first()
    if row is None:
        raise UnknownDomainError(f"there is no base {name!r}")
    return BaseRecord(row.name, row.fingerprint, row.path)


def domain_row(connection: Connection, base: str, name: str) -> Row[Any]:
    """The domain's row, made where there is none."""
    query = select(domains).where(domains.c.base == base, domains.c.name == name)
    row = connection.execute(query).first()
    if row is None:
        connection.execute(insert(domains).values(base=base, name=name, last_number=0))
        row = connection.execute(query).one()
    return row


def _domain_id(connection: Connection, base: str, name: str) -> int:
    found = connection.execute(
        select(domains.c.id).where(domains.c.base == base, domains.c.name == name, domains.c.current_id.is_not(None))
    ).scalar()
    if found is None:
        raise UnknownDomainError(f"base {base!r} has no domain {name!r}")
    return int(found)


def _number_of(connection: Connection, version_id: int | None) -> int | None:
    return connection.execute(select(domain_versions.c.number).where(domain_versions.c.id == version_id)).scalar()


def _records() -> Select[Any]:
    """Rows of DomainRecord, of domains that exist."""
    current, parent, above = domain_versions.alias("current"), domain_versions.alias("parent"), domains.alias("above")
    return (
        select(domains.c.base, domains.c.name, above.c.name, current.c.number)
        .join(current, current.c.id == domains.c.current_id)
        .outerjoin(parent, parent.c.id == current.c.parent_id)
        .outerjoin(above, above.c.id == parent.c.domain_id)
    )


def select_domain_versions() -> Select[Any]:
    """Rows of DomainVersion."""
    v = domain_versions.c
    return select(v.id, domains.c.base, domains.c.name, v.number, v.parent_id, v.path, v.created_s, v.about).join(
        domains, domains.c.id == v.domain_id
    )


def _version(connection: Connection, version_id: int) -> DomainVersion:
    row = connection.execute(select_domain_versions().where(domain_versions.c.id == version_id)).first()
    if row is None:
        raise UnknownVersionError(f"there is no domain version with id {version_id}")
    return DomainVersion(*row)


def _lineage(connection: Connection, version_id: int) -> list[DomainVersion]:
    found = [_version(connection, version_id)]
    while (parent_id := found[-1].parent_id) is not None:
        found.append(_version(connection, parent_id))
    return found


def _check_parent(connection: Connection, base: str, name: str, parent_id: int) -> None:
    check_kept(connection, parent_id)
    above = _lineage(connection, parent_id)
    if above[0].base != base:
        raise BadManageRequestError(f"domain {above[0].domain!r} is of base {above[0].base!r}, {name!r} of {base!r}")
    if name in {version.domain for version in above}:
        raise BadManageRequestError(f"domain {name!r} cannot stand on {above[0].domain!r}, which stands on it")


def _standing_on(connection: Connection, domain_id: int) -> list[int]:
    """Ids of the domain's versions and of all kept versions below them."""
    query = select(domain_versions.c.id, domain_versions.c.domain_id, domain_versions.c.parent_id)
    found: set[int] = set()
    # A parent has a smaller id than its children, so one pass finds the whole tree.
    for row in connection.execute(query.where(domain_versions.c.retired_s.is_(None)).order_by(domain_versions.c.id)):
        if row.domain_id == domain_id or row.parent_id in found:
            found.add(row.id)
    return sorted(found)


def _in_the_way(connection: Connection, base: str, name: str, domain_id: int, fallen: list[int]) -> list[str]:
    """What stands on the versions `fallen` of a domain and is in use, or will once its job is done, in words."""
    children = connection.execute(
        select(domains.c.name).where(domains.c.current_id.in_(fallen), domains.c.id != domain_id).order_by("name")
    ).scalars()
    users = (
        select(tenants.c.name)
        .join(tenant_versions, tenant_versions.c.id == tenants.c.current_id)
        .where(tenant_versions.c.domain_version_id.in_(fallen))
        .order_by(tenants.c.name)
    )
    found = {
        "tenants": list(connection.execute(users).scalars()),
        "domains": list(children),
        "jobs": jobs_on_domain(connection, base, name),
    }
    return [
        f"{kind} {', '.join(names[:NAMED])}" + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        for kind, names in found.items()
        if names
    ]
