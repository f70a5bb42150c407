"""What the tests of housekeeping fill stores with."""

from __future__ import annotations

from hplm.housekeeping.inventory import Kind, StoreEntry, list_entries
from hplm.registry.records import Snapshot
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, put_bank, put_domain, put_tenant

NOTHING = Snapshot(0, (), (), {}, frozenset(), frozenset(), frozenset(), {})


def publish(store: Store, registry: Registry, base: str, name: str, expected: int | None = None) -> str:
    """A tenant's next version with its files; returns their path."""
    number = registry.next_number(name)
    path = f"tenants/{name}/{number}"
    put_tenant(store, path, base)
    registry.publish_tenant(name, 1, path, NOW_S, about={}, number=number, expected=expected)
    return path


def paths(store: Store) -> set[str]:
    return {entry.path for entry in list_entries(store)}


def found(path: str, kind: Kind, age_s: float = 1000.0, held: bool = False) -> StoreEntry:
    return StoreEntry(path, kind, 1, NOW_S - age_s, held)


def fill(store: Store, base: str) -> None:
    """Artifacts of every kind and age."""
    put_domain(store, "domains/b/law/1", base, "plots/general")
    put_domain(store, "domains/b/law/3", base, "plots/general")
    put_domain(store, "domains/b/tax/1", base, "domains/b/law/1")
    put_tenant(store, "tenants/old/1", base)
    put_tenant(store, "tenants/old/2", base, "domains/b/tax/1")
    put_tenant(store, "tenants/new/9", base, "domains/b/law/3")
    put_tenant(store, "tenants/new/10", base, "domains/b/law/3")
    put_bank(store, "fleet", base, ["a", "b", "new"])
