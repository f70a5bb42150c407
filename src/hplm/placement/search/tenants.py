"""Gives tenants their nodes: a hot tenant several, each other tenant the one node that the proxy's hash of its name picks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from hplm.errors import ConfigError
from hplm.placement.cluster import Node
from hplm.placement.plan import TenantRule

# The weight of the node with the largest host cache, of the 256 that HAProxy allows: fine enough for ratios of caches.
_FINE_WEIGHT = 64


@dataclass(frozen=True)
class TenantLoad:
    """A tenant's base, its requests a second, and the bytes of its adapter in a host cache."""

    name: str
    base: str
    requests_per_s: float
    adapter_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.requests_per_s < float("inf") or self.adapter_bytes < 0:
            raise ConfigError(
                f"tenant {self.name!r}: a rate and bytes of 0 or more were expected, got {self.requests_per_s} requests/s and "
                f"{self.adapter_bytes} bytes"
            )


def place_tenants(
    tenants: Sequence[TenantLoad],
    nodes: Sequence[Node],
    nodes_of_base: Mapping[str, Iterable[str]],
    *,
    load_factor: int = 150,
) -> TenantRule:
    """Return the proxy's rule: hot tenants with their nodes, and the weight of each node.

    A tenant is hot if it sends more than `load_factor` % of an even share of its base's requests for one node. It gets so many
    nodes that each has an even share at most. Weights follow the host caches if even parts of the adapters would not fit.
    Raises ConfigError if no node serves a tenant's base.
    """
    hot: dict[str, tuple[str, ...]] = {}
    bytes_of_node = dict.fromkeys((node.name for node in nodes), 0.0)
    for base in sorted({tenant.base for tenant in tenants}):
        serving = set(nodes_of_base.get(base, ()))
        names = [node.name for node in nodes if node.name in serving]
        if not names:
            raise ConfigError(f"base {base!r} has tenants, but no node serves it: place the base first")
        of_base = [tenant for tenant in tenants if tenant.base == base]
        even_per_s = sum(tenant.requests_per_s for tenant in of_base) / len(names)
        of_hot = dict.fromkeys(names, 0.0)
        for tenant in sorted(of_base, key=lambda one: (-one.requests_per_s, one.name)):
            if tenant.requests_per_s * 100 > load_factor * even_per_s > 0:
                count = min(len(names), ceil(tenant.requests_per_s / even_per_s))
                chosen = sorted(names, key=lambda name: of_hot[name])[:count]
                for name in chosen:
                    of_hot[name] += tenant.requests_per_s / count
                hot[tenant.name] = tuple(name for name in names if name in chosen)
            for name in hot.get(tenant.name, names):
                bytes_of_node[name] += tenant.adapter_bytes / (1 if tenant.name in hot else len(names))
    weights = dict.fromkeys(bytes_of_node, 1)
    largest = max((node.host_cache_bytes for node in nodes), default=0)
    if any(bytes_of_node[node.name] > node.host_cache_bytes for node in nodes) and all(
        node.host_cache_bytes for node in nodes
    ):
        weights = {node.name: max(1, round(_FINE_WEIGHT * node.host_cache_bytes / largest)) for node in nodes}
    return TenantRule(hot, load_factor, weights)
