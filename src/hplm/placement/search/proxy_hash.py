"""Predicts which node HAProxy sends a tenant's requests to: `balance hdr(hplm-tenant)` with `hash-type consistent`.

The owner of a tenant is HAProxy's own: the same ring, hash and tie rule. A node with too many open requests passes requests on
by HAProxy's rule of `hash-balance-factor`. Tests hold both equal to a real HAProxy. Which nodes have too many open requests
depends on when requests end. `load_shares` approximates that: it draws Poisson arrivals, and every request is open for the
same seconds, whatever its node. HAProxy counts a request a little longer than it lasts, which is ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError

_U32 = 0xFFFFFFFF
# HAProxy's points on the ring for each unit of a server's weight.
_POINTS_PER_WEIGHT = 16
# HAProxy gives each server's points numbers of their own: the server's id times this, plus the point's number.
_POINT_NUMBERS = 4096
# The greatest weight that HAProxy accepts.
MOST_WEIGHT = 256


@dataclass(frozen=True)
class ProxyServer:
    """A server line of HAProxy's backend: `server NAME ADDRESS id NUMBER weight WEIGHT`."""

    name: str
    number: int
    weight: int = 1

    def __post_init__(self) -> None:
        if self.number < 1 or not 1 <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"server {self.name!r}: an id of 1 or more and a weight of 1 to {MOST_WEIGHT} were expected, got id "
                f"{self.number} and weight {self.weight}"
            )


class ProxyHash:
    """The ring of HAProxy's consistent hash."""

    def __init__(self, servers: Sequence[ProxyServer]) -> None:
        if not servers or len({server.number for server in servers}) < len(servers):
            raise ConfigError(f"servers with different ids were expected, got {list(servers)}")
        self.servers = tuple(servers)
        points = [
            np.arange(server.weight * _POINTS_PER_WEIGHT, dtype=np.uint64) + server.number * _POINT_NUMBERS
            for server in servers
        ]
        owners = np.repeat(np.arange(len(servers)), [len(of_server) for of_server in points])
        keys = _mixed(np.concatenate(points))
        order = np.argsort(keys, kind="stable")
        self._keys: npt.NDArray[np.uint64] = keys[order]
        self._owners: npt.NDArray[np.int64] = owners[order]

    def owners(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the position in `servers` of the owner of each name, `[names]`."""
        return self._owners[self._points(names)]

    def order(self, name: str) -> tuple[int, ...]:
        """Return all servers in the order in which they take a name's requests: the owner, then those that follow it."""
        first = int(self._points([name])[0])
        following = np.concatenate([self._owners[first:], self._owners[:first]])
        _, places = np.unique(following, return_index=True)
        return tuple(int(following[place]) for place in np.sort(places))

    def _points(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the point of the ring that is nearest to each name's hash."""
        hashes = _mixed(np.array([_sdbm(name.encode()) for name in names], dtype=np.uint64))
        count = len(self._keys)
        following = np.searchsorted(self._keys, hashes) % count
        before = (following - 1) % count
        to_before = (hashes - self._keys[before]) & np.uint64(_U32)
        to_following = (self._keys[following] - hashes) & np.uint64(_U32)
        return np.where(to_before <= to_following, before, following)


def load_shares(
    ring: ProxyHash,
    rates: Mapping[str, float],
    *,
    load_factor: int,
    request_s: float,
    requests: int = 20_000,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the share of each tenant's requests that each server gets, `[servers]`, predicted from simulated arrivals.

    rates: requests a second of each tenant. `request_s`: seconds that a request is open at a server.
    load_factor: `hash-balance-factor`; 0 passes nothing on. A tenant that was not drawn goes to its owner.
    """
    names = [name for name, rate in rates.items() if rate > 0]
    counts = {name: np.zeros(len(ring.servers)) for name in rates}
    if names:
        weights = np.array([rates[name] for name in names])
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(names), size=requests, p=weights / weights.sum())
        # Times are in mean gaps, not in seconds: with a tiny rate the seconds would be infinite.
        times = np.cumsum(rng.exponential(size=requests))
        open_for = request_s * float(weights.sum())
        orders: dict[int, tuple[int, ...]] = {}
        open_requests = OpenRequests(ring.servers, load_factor)
        for number, now in zip(drawn.tolist(), times.tolist(), strict=True):
            if number not in orders:
                orders[number] = ring.order(names[number])
            counts[names[number]][open_requests.start(orders[number], now, now + open_for)] += 1
    for name, owner in zip(counts, ring.owners(list(counts)).tolist(), strict=True):
        if not counts[name].any():
            counts[name][owner] = 1
    return {name: count / count.sum() for name, count in counts.items()}


class OpenRequests:
    """The open requests of each server, and HAProxy's rule of which servers may take one more."""

    def __init__(self, servers: Sequence[ProxyServer], load_factor: int) -> None:
        self._weights = [server.weight * _POINTS_PER_WEIGHT for server in servers]
        self._total_weight = sum(self._weights)
        self._before = [sum(self._weights[:number]) for number in range(len(servers))]
        self._load_factor = load_factor
        self._open = [0] * len(servers)
        self._ends: list[tuple[float, int]] = []

    def start(self, order: Sequence[int], now: float, end: float) -> int:
        """Return the first server of `order` that may take a request, and count the request until the time `end`."""
        while self._ends and self._ends[0][0] <= now:
            self._open[heapq.heappop(self._ends)[1]] -= 1
        server = next((number for number in order if self._may_take(number)), order[0])
        self._open[server] += 1
        heapq.heappush(self._ends, (end, server))
        return server

    def _may_take(self, server: int) -> bool:
        if not self._load_factor:
            return True
        # The open requests that all servers together may have, rounded up, divided by weight and in the servers' order.
        allowed = ((len(self._ends) + 1) * self._load_factor + 99) // 100
        each, rest = divmod(allowed, self._total_weight)
        weight, before = self._weights[server], self._before[server]
        mine = weight * each + (before + weight) * rest // self._total_weight - before * rest // self._total_weight
        return self._open[server] < max(1, mine)


def _sdbm(text: bytes) -> int:
    """Return the sdbm hash of a text, 32 bits."""
    value = 0
    for byte in text:
        # HAProxy reads signed characters.
        value = ((byte - 256 if byte > 127 else byte) + (value << 6) + (value << 16) - value) & _U32
    return value


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return Bob Jenkins' full avalanche of 32-bit numbers, times HAProxy's prime."""
    mask = np.uint64(_U32)

    def shifted(value: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
        return (value << np.uint64(bits)) & mask

    a = values & mask
    a = (a + np.uint64(0x7ED55D16) + shifted(a, 12)) & mask
    a = (a ^ np.uint64(0xC761C23C)) ^ (a >> np.uint64(19))
    a = (a + np.uint64(0x165667B1) + shifted(a, 5)) & mask
    a = ((a + np.uint64(0xD3A2646C)) & mask) ^ shifted(a, 9)
    a = (a + np.uint64(0xFD7046C5) + shifted(a, 3)) & mask
    a = (a ^ np.uint64(0xB55A4F09)) ^ (a >> np.uint64(16))
    return (a * np.uint64(3221225473)) & mask
