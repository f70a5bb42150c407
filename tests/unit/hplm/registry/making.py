"""Registries and stores with something in them."""

from __future__ import annotations

import json
from typing import Any

from hplm.registry.records import DomainVersion, TenantVersion
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store

NOW_S = 1_000_000.0


def publish_root(registry: Registry, name: str = "general", base: str = "b") -> DomainVersion:
    registry.publish_base(base, f"fingerprint of {base}", f"bases/{base}", NOW_S)
    return publish_next(registry, base, name, f"plots/{name}", None)


def publish_branch(registry: Registry, name: str, parent: DomainVersion) -> DomainVersion:
    return publish_next(registry, parent.base, name, f"domains/{parent.base}/{name}/{{number}}", parent)


def publish_next(
    registry: Registry, base: str, name: str, path: str, parent: DomainVersion | None, now_s: float = NOW_S
) -> DomainVersion:
    """The next version of a domain, whatever is current; `{number}` in `path` is filled in."""
    found = registry.find_domain(base, name)
    number = registry.next_domain_number(base, name)
    return registry.publish_domain(
        base,
        name,
        path.format(number=number),
        now_s,
        parent_id=parent.id if parent else None,
        about={},
        expected=found.current.number if found else None,
        number=number,
    )


def publish(registry: Registry, name: str, domain: DomainVersion, expected: int | None = None) -> TenantVersion:
    """The next version of a tenant."""
    number = registry.next_number(name)
    path = f"tenants/{name}/{number}"
    return registry.publish_tenant(name, domain.id, path, NOW_S, about={}, number=number, expected=expected)


def put(store: Store, path: str, kind: str, **meta: Any) -> artifact.Artifact:
    """A small artifact on disk."""
    with artifact.publish(store.path(path), kind, meta) as partial:
        (partial / "weights").write_text(path)
    return artifact.read(store.path(path), kind)


def put_base(store: Store, name: str = "b") -> str:
    """A base; returns its fingerprint."""
    return put(store, f"bases/{name}", "base").fingerprint


def put_plot(store: Store, name: str, base: str) -> None:
    for level in ("root", "bigram", "unigram"):
        put(store, f"plots/{name}/{level}", "plot-table", base=base, size=3)


def put_domain(store: Store, path: str, base: str, parent: str = "", *, has_branch: bool = True) -> None:
    with artifact.replacing(store.path(path)) as partial:
        inside = Store(partial)
        if has_branch:
            put(inside, "branch", "plot-table", base=base)
        put(inside, "lower", "lower", base=base, has_branch=has_branch, domain={"parent": parent} if parent else {})


def put_tenant(store: Store, path: str, base: str, domain: str = "") -> None:
    name = path.split("/")[1]
    about = {"domain": domain} if domain else {}
    put(store, path, "tenant", name=name, base=base, task="classification", labels=["x", "y"], about=about)


def put_bank(store: Store, name: str, base: str, members: list[str]) -> None:
    with artifact.publish(store.bank(name), "bank", {"base": base}) as partial:
        lines = [json.dumps({"card": {"name": member}}) for member in members]
        (partial / "cards.jsonl").write_text("\n".join(lines))
