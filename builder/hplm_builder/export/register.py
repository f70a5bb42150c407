"""Registers roots and banks, which no job makes. Tenants and domains are published by their jobs."""

from __future__ import annotations

import itertools
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import TenantCard
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
from hplm.housekeeping.removal_plan import DEFAULT_ROOT
from hplm.models.base import Base
from hplm.plot import table as tables
from hplm.registry.records import DomainVersion, ServedTenant, TenantRecord
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store

# The only domain of a whole base. It has no tables, so its folder is the base's own.
ROOT_OF_WHOLE = DEFAULT_ROOT


def open_registry(store: Store) -> Registry:
    """Open the registry to write, and create it if the store is new.

    If the store holds tenants or domains, an empty registry would look as if all were deleted: then a missing registry
    raises MissingRegistryError, which says what to do.
    """
    is_used = any(any((store.root / kind).glob("*")) for kind in ("tenants", "domains", "banks"))
    return Registry.open(store, create=not is_used)


def register_root(registry: Registry, store: Store, base: Base, domain: str) -> DomainVersion:
    """Return the current version of a domain. Register the base, and a root whose tables are in place, if need be.

    The root of a whole base needs no tables.

    Raises UnknownDomainError, or WrongBaseError if those tables belong to another base.
    """
    name = base.config.name
    registry.publish_base(name, base.fingerprint, store.relative(store.base(name)), time.time())
    try:
        return registry.current_domain(name, domain)
    except UnknownDomainError:
        path = _root_path(store, base, domain)
        if path is None:
            raise
        return registry.publish_domain(name, domain, path, time.time(), parent_id=None, about={}, expected=None)


def _root_path(store: Store, base: Base, domain: str) -> str | None:
    """Return the folder of a root's tables, None if there are none; of a whole base, the base's folder.

    Raises WrongBaseError for tables of another base.
    """
    if base.config.is_whole:
        return store.relative(base.folder) if domain == ROOT_OF_WHOLE else None
    folder = store.table(domain, "root")
    if not folder.is_dir():
        return None
    if artifact.read(folder, tables.KIND).meta.get("base") != base.fingerprint:
        raise WrongBaseError(
            f"PLOT {domain!r} was built for another base than {base.config.name!r}: name a PLOT of this base, "
            f"`hplm build plot --base {base.config.name} --plot NAME` makes it"
        )
    return store.relative(folder.parent)


def name_root(store: Store, base: Base, root: str) -> None:
    """Register a base and its root, before a bank over them is written.

    Raises DataError if `root` is the name of a domain below another: a bank's tenants stand on the tables of a root.
    """
    with closing(open_registry(store)) as registry:
        if register_root(registry, store, base, root).parent_id is not None:
            raise DataError(
                f"{root!r} is also a domain below another, over which the tenants would be served: "
                "make the PLOT under another name (`hplm build plot --base BASE --plot NAME`)"
            )


def lineage_of(store: Store, base: Base, domain: str) -> list[str]:
    """Return the folders of a domain's current version and of those above it. A root need not be registered yet.

    Raises as `register_root` does, and MissingRegistryError if there are neither tables nor a registry.
    """
    try:
        with closing(Registry.open_read_only(store)) as registry:
            versions = registry.lineage(registry.current_domain(base.config.name, domain).id)
            return [version.path for version in versions]
    except (UnknownDomainError, MissingRegistryError):
        path = _root_path(store, base, domain)
        if path is None:
            raise
        return [path]


def check_unused(store: Store, base_name: str, fingerprint: str = "") -> None:
    """Check that a base may be replaced: its domains and their tenants would not fit other weights.

    Raises ConfigError if the base has domains and its weights are not those of `fingerprint`.
    """
    with suppress(MissingRegistryError), closing(Registry.open_read_only(store)) as registry:
        domains = registry.domains(base_name)
        if domains and registry.base(base_name).fingerprint != fingerprint:
            raise ConfigError(
                f"base {base_name!r} has domain {domains[0].name!r}, which would not fit other weights: give another --name, "
                "or another --store"
            )


def registered_about(card: TenantCard) -> dict[str, Any]:
    """Return what the registry keeps about a tenant version: how it was made, its task, labels and number of texts."""
    return {**card.about, "task": card.task, "labels": list(card.labels), "texts": card.texts}


def fresh_bank(store: Store, name: str) -> str:
    """Return a name for a bank that will replace the served one: `name`, else `name-2` and so on.

    A bank that lies under that name and is not in the registry comes from a build that was killed.
    """
    with closing(open_registry(store)) as registry:
        registered = registry.snapshot().paths
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if store.relative(store.bank(name)) not in registered)


def publish_bank(store: Store, base: Base, domain: str, bank: str) -> int:
    """Serve all tenants of a bank file over the base instead of the base's other banks; return their number.

    The base no longer has tenants that only the other banks have. The other banks are removed when no request can use them.
    """
    folder, now_s = store.bank(bank), time.time()
    members = BankFile(folder, base.fingerprint)
    # Tenants that were made by seeded perturbation have nothing to say about it.
    about = {card.name: registered_about(card) for card in map(members.card, members.names) if card.about}
    others = [store.relative(other) for other in banks_of(store, base) if other != folder]
    with closing(Registry.open(store)) as registry:
        root = register_root(registry, store, base, domain)
        path = store.relative(folder)
        count = registry.publish_tenants(root.id, path, members.names, now_s, about=about, instead_of=others)
        # The bank is published even if other files that the registry names are missing: a worker process reports that.
        with suppress(MissingArtifactError):
            garbage_collection.collect(store, registry, now_s)
        return count


def banks_of(store: Store, base: Base) -> dict[Path, list[str]]:
    """Return the folders of the sound banks over a base, with the names of their tenants."""
    banks = {}
    for folder in store.banks():
        with suppress(ArtifactError):
            banks[folder] = BankFile(folder, base.fingerprint).names
    return banks


def served(store: Store) -> tuple[ServedTenant, ...]:
    """Return all tenants that are served now, once for each of their bases."""
    with closing(Registry.open_read_only(store)) as registry:
        return registry.changes_since(0).published


def published(store: Store, name: str, base: str | None = None) -> TenantRecord | None:
    """Return a tenant as `base` serves it now, by default its default base; None if there is no such tenant."""
    try:
        with closing(Registry.open_read_only(store)) as registry:
            return registry.find_tenant(name, base)
    except MissingRegistryError:
        return None
