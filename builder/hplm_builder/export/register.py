"""Naming in the registry what a builder has made, so that it is served; what is named already stays as it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.core.names import check_name_of
from hplm.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    MissingArtifactError,
    MissingRegistryError,
    UnknownDomainError,
    WrongBaseError,
)
from hplm.housekeeping import garbage_collection
from hplm.models.base import Base
from hplm.plot import table as tables
from hplm.registry.records import DomainVersion, ServedTenant, TenantRecord, TenantVersion
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store


def domain_version(registry: Registry, store: Store, base: Base, domain: str) -> DomainVersion:
    """A domain that is there, at its current version; a root whose tables are in place is registered first.

    Raises UnknownDomainError, WrongBaseError where those tables are of another base.
    """
    name = base.config.name
    registry.publish_base(name, base.fingerprint, store.relative(store.base(name)), time.time())
    try:
        return registry.current_domain(name, domain)
    except UnknownDomainError:
        path = _root_of(store, base, domain)
        if path is None:
            raise
        return registry.publish_domain(name, domain, path, time.time(), parent_id=None, about={}, expected=None)


def _root_of(store: Store, base: Base, domain: str) -> str | None:
    """The folder of a root's tables, None where there are none. Raises WrongBaseError where they are of another base."""
    folder = store.table(domain, "root")
    if not folder.is_dir():
        return None
    if artifact.read(folder, tables.KIND).meta.get("base") != base.fingerprint:
        raise WrongBaseError(
            f"PLOT {domain!r} was built for another base than {base.config.name!r}: name one of its own, "
            f"`hplm build plot --base {base.config.name} --plot NAME` makes it"
        )
    return store.relative(folder.parent)


def name_root(store: Store, base: Base, root: str) -> None:
    """Name a base and its root domain, before anything that stands on them is written.

    Raises DataError where a domain below another is called so: its tables are not those of the PLOT of that name.
    """
    with closing(open_registry(store)) as registry:
        if domain_version(registry, store, base, root).parent_id is not None:
            raise DataError(
                f"{root!r} is a domain below another too, and would be served over that: fine-tune by "
                f"`hplm tenant create --domain {root}`, or make the PLOT under another name (`hplm build plot --plot NAME`)"
            )


def check_unused(store: Store, base_name: str, fingerprint: str = "") -> None:
    """Before a base takes another's place: raises ConfigError where domains stand on weights other than those of `fingerprint`.

    They and their tenants would fit no more.
    """
    with suppress(MissingRegistryError), closing(Registry.open_read_only(store)) as registry:
        standing = registry.domains(base_name)
        if standing and registry.base(base_name).fingerprint != fingerprint:
            raise ConfigError(
                f"base {base_name!r} has domain {standing[0].name!r}, which would not fit other weights: give another --name, "
                "or another --store"
            )


def publish_domain(
    store: Store, base: Base, parent: str, name: str, build: Callable[[list[str], str, Path], dict[str, Any]]
) -> DomainVersion:
    """The next version of a domain below `parent`, which may be a root that is not registered yet.

    `build(lineage, above, folder)` puts it in place below `above`, going on from the version before where there is one, and
    says what is worth keeping of it. Raises UnknownDomainError for a parent that is not there, WrongBaseError for a root of
    another base, DataError for a root and for another parent than it has, ConflictError where another published meanwhile.
    """
    check_name_of("domain", name)
    base_name = base.config.name
    with closing(open_registry(store)) as registry:
        check_parent(name, _parent(registry, base_name, name), parent)
        above = domain_version(registry, store, base, parent)
        try:
            before = registry.current_domain(base_name, name)
        except UnknownDomainError:
            before = None
        if before is not None and before.parent_id is None:
            raise DataError(
                f"{name!r} is the root of a tree, which `hplm build plot` makes: give the domain another name"
            )
        number = registry.next_domain_number(base_name, name, lambda n: store.domain(base_name, name, n))
        folder = store.domain(base_name, name, number)
        about = build([one.path for one in registry.lineage((before or above).id)], above.path, folder)
        return registry.publish_domain(
            base_name,
            name,
            store.relative(folder),
            time.time(),
            parent_id=above.id,
            about=about,
            expected=before.number if before else None,
            number=number,
        )


def parent_of(store: Store, base_name: str, name: str) -> str | None:
    """Where a domain stands already; None where there is no such domain, or it is a root."""
    try:
        with closing(Registry.open_read_only(store)) as registry:
            return _parent(registry, base_name, name)
    except MissingRegistryError:
        return None


def check_parent(name: str, known: str | None, parent: str) -> None:
    """Raises DataError where a domain stands elsewhere already, or would on itself."""
    if name == parent:
        raise DataError(f"domain {name!r} cannot stand on itself: give the new one another name")
    if known not in (None, parent):
        raise DataError(f"domain {name!r} is below {known!r}, which its next version cannot change")


def _parent(registry: Registry, base_name: str, name: str) -> str | None:
    found = registry.find_domain(base_name, name)
    return found.parent if found else None


def lineage_of(store: Store, base: Base, domain: str) -> list[str]:
    """Folders of a domain's current version and those above it, also of a root that is not registered yet.

    Raises as `domain_version` does, MissingRegistryError where there are neither tables nor a registry.
    """
    try:
        with closing(Registry.open_read_only(store)) as registry:
            return [one.path for one in registry.lineage(registry.current_domain(base.config.name, domain).id)]
    except (UnknownDomainError, MissingRegistryError):
        path = _root_of(store, base, domain)
        if path is None:
            raise
        return [path]


def open_registry(store: Store) -> Registry:
    """The registry, made where the store is new.

    Where it is not, an empty one would look as if all were deleted: MissingRegistryError says what to do.
    """
    used = any(any((store.root / kind).glob("*")) for kind in ("tenants", "domains", "banks"))
    return Registry.open(store, create=not used)


def publish_tenant(store: Store, base: Base, domain: str, made: Tenant, *, expected: int | None) -> TenantVersion:
    """Write a tenant's next version and serve it from now on.

    `expected` is the version that it was made from, None for a new tenant. Raises ConflictError where another was published
    meanwhile, DataError where the tenant stands on another base.
    """
    name = made.card.name
    with closing(open_registry(store)) as registry:
        version = domain_version(registry, store, base, domain)
        check_base(registry.find_tenant(name), base)
        number = registry.next_number(name, lambda n: store.tenant_version(name, n))
        folder = store.tenant_version(name, number)
        tenants.save(folder, made)
        about = told_of(made.card)
        return registry.publish_tenant(
            *(name, version.id, store.relative(folder), time.time()),
            about=about,
            number=number,
            expected=expected,
        )


def check_base(known: TenantRecord | None, base: Base) -> None:
    """Raises DataError where a tenant stands on another base already."""
    if known is not None and known.base != base.config.name:
        raise DataError(f"tenant {known.name!r} stands on base {known.base!r}: delete it first, or take another name")


def told_of(card: TenantCard) -> dict[str, Any]:
    """What the registry says of a tenant version: all that its card has of how it was made."""
    return {**card.about, "task": card.task, "labels": list(card.labels), "texts": card.texts}


def fresh_bank(store: Store, name: str) -> str:
    """What to call a bank that takes another's place, which is served until then: `name`, else `name-2` and so on.

    What lies there that the registry does not name is of a build that was killed.
    """
    with closing(open_registry(store)) as registry:
        known = registry.snapshot().paths
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if store.relative(store.bank(one)) not in known)


def publish_bank(store: Store, base: Base, domain: str, bank: str) -> int:
    """Serve all tenants of a bank file from now on, in the place of the base's other banks; returns how many.

    Tenants that only those have are deleted, and they themselves are removed once no request can be under way with them.
    """
    folder, now_s = store.bank(bank), time.time()
    members = BankFile(folder, base.fingerprint)
    # What is made up, by seeded perturbation, has nothing to tell.
    about = {card.name: told_of(card) for card in map(members.card, members.names) if card.about}
    others = [store.relative(other) for other in banks_of(store, base) if other != folder]
    with closing(Registry.open(store)) as registry:
        root = domain_version(registry, store, base, domain)
        path = store.relative(folder)
        count = registry.publish_tenants(root.id, path, members.names, now_s, about=about, instead_of=others)
        # It is published, whatever else the registry names that is not there: a worker says so each time.
        with suppress(MissingArtifactError):
            garbage_collection.collect(store, registry, now_s)
        return count


def banks_of(store: Store, base: Base) -> dict[Path, list[str]]:
    """Folders of the whole banks over a base -> names of their tenants."""
    found = {}
    for folder in store.banks():
        with suppress(ArtifactError):
            found[folder] = BankFile(folder, base.fingerprint).names
    return found


def served(store: Store) -> tuple[ServedTenant, ...]:
    """All tenants that are served now."""
    with closing(Registry.open_read_only(store)) as registry:
        return registry.changes_since(0).published


def published(store: Store, name: str) -> TenantRecord | None:
    """A tenant as it is served now, None where there is none."""
    try:
        with closing(Registry.open_read_only(store)) as registry:
            return registry.find_tenant(name)
    except MissingRegistryError:
        return None
