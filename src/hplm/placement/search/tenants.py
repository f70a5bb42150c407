"""Places tenants on nodes: a hot tenant on several, each cold tenant on the one node that the proxy sends it to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError
from hplm.placement.cluster import Node
from hplm.placement.plan import TenantRule
from hplm.placement.search.proxy_hash import ProxyHash, ProxyServer, load_shares

# A tenant is hot if another node than its owner gets at least this share of its requests.
HOT_SHARE = 0.05
# The weight of the node with the largest host cache: fine enough for ratios, and 1,024 points of the ring.
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


@dataclass(frozen=True)
class TenantPlacement:
    """The nodes that serve tenants, and the nodes that cache them.

    rule: what a plan holds: hot tenants, and the proxy's weights.
    nodes_of: the nodes that answer each tenant, the owner first.
    cached: the tenants that each node's host cache keeps, the busiest first.
    node_rates: requests a second of each node.
    uncached_share: the share of requests that meet a node without the tenant in its host cache.
    """

    rule: TenantRule
    nodes_of: dict[str, tuple[str, ...]]
    cached: dict[str, tuple[str, ...]]
    node_rates: dict[str, float]
    uncached_share: float


def place_tenants(
    tenants: Sequence[TenantLoad],
    nodes: Sequence[Node],
    nodes_of_base: Mapping[str, Iterable[str]],
    *,
    load_factor: int = 150,
    request_s: float = 0.05,
    seed: int = 0,
) -> TenantPlacement:
    """Return where tenants are served and cached. The proxy has a ring for each base, of the nodes that serve the base.

    Nodes have equal weights. If their host caches then overflow, weights in proportion to the caches are tried, and the
    better of the two is returned. `request_s`: seconds that a request is open. Raises ConfigError if a tenant's base is on
    no node.
    """
    equal = {node.name: 1 for node in nodes}
    placed = _placed(tenants, nodes, nodes_of_base, equal, load_factor, request_s, seed)
    if placed.uncached_share and all(node.host_cache_bytes for node in nodes):
        largest = max(node.host_cache_bytes for node in nodes)
        by_cache = {
            node.name: max(1, round(_FINE_WEIGHT * node.host_cache_bytes / largest)) for node in nodes
        }  # A finer ring divides tenants more evenly too.
        other = _placed(tenants, nodes, nodes_of_base, by_cache, load_factor, request_s, seed)
        placed = min(placed, other, key=lambda placement: placement.uncached_share)
    return placed


def _placed(
    tenants: Sequence[TenantLoad],
    nodes: Sequence[Node],
    nodes_of_base: Mapping[str, Iterable[str]],
    weights: dict[str, int],
    load_factor: int,
    request_s: float,
    seed: int,
) -> TenantPlacement:
    numbers = {node.name: number for number, node in enumerate(nodes)}
    rates = np.array([tenant.requests_per_s for tenant in tenants])
    shares = np.zeros((len(tenants), len(nodes)))
    nodes_of: dict[str, tuple[str, ...]] = {}
    hot: dict[str, tuple[str, ...]] = {}
    for base in sorted({tenant.base for tenant in tenants}):
        names = sorted(nodes_of_base.get(base, ()), key=lambda name: numbers[name])
        if not names:
            raise ConfigError(f"base {base!r} has tenants, but no node serves it: place the base first")
        ring = ProxyHash([ProxyServer(name, numbers[name] + 1, weights[name]) for name in names])
        columns = [numbers[name] for name in names]
        of_base = [number for number, tenant in enumerate(tenants) if tenant.base == base]
        predicted = load_shares(
            ring,
            {tenants[number].name: tenants[number].requests_per_s for number in of_base},
            load_factor=load_factor,
            request_s=request_s,
            seed=seed,
        )
        owners = ring.owners([tenants[number].name for number in of_base])
        for number, owner in zip(of_base, owners.tolist(), strict=True):
            name = tenants[number].name
            of_tenant = predicted[name]
            shares[number, columns] = of_tenant
            # A few requests of a cold tenant may overflow by chance: only a busy tenant is worth a second cache entry.
            others = [place for place in ring.order(name)[1:] if of_tenant[place] >= HOT_SHARE]
            busy = rates[number] * len(names) >= rates[of_base].sum() * HOT_SHARE
            serving = (owner, *others) if busy else (owner,)
            nodes_of[name] = tuple(names[place] for place in serving)
            if len(serving) > 1:
                hot[name] = nodes_of[name]
    cached, hits = _cached(tenants, nodes, nodes_of, rates, shares)
    total = float(rates.sum())
    return TenantPlacement(
        TenantRule(hot, load_factor, weights),
        nodes_of,
        cached,
        {node.name: float(rate) for node, rate in zip(nodes, rates @ shares, strict=True)},
        max(0.0, 1.0 - hits / total) if total else 0.0,
    )


def _cached(
    tenants: Sequence[TenantLoad],
    nodes: Sequence[Node],
    nodes_of: Mapping[str, tuple[str, ...]],
    rates: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
) -> tuple[dict[str, tuple[str, ...]], float]:
    """Return the tenants in each node's host cache, and the requests a second that find their tenant there."""
    cached: dict[str, tuple[str, ...]] = {}
    hits = 0.0
    for column, node in enumerate(nodes):
        of_node = [number for number, tenant in enumerate(tenants) if node.name in nodes_of[tenant.name]]
        of_node.sort(key=lambda number: (-rates[number] * shares[number, column], tenants[number].name))
        left = node.host_cache_bytes
        kept: list[str] = []
        for number in of_node:
            if tenants[number].adapter_bytes <= left:
                left -= tenants[number].adapter_bytes
                kept.append(tenants[number].name)
                hits += float(rates[number] * shares[number, column])
        cached[node.name] = tuple(kept)
    return cached, hits
