"""Times the check of a key: a client must not learn from its time why a key was refused."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import fmean, median

from hplm.access.key_ring import KeyRing
from hplm.access.keys import Key, new_key
from hplm.errors import ForbiddenError
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.reporting.benchmark_result import Goal, Report
from hplm.store.layout import Store

TENANT, OTHER = "films", "news"
# Largest difference between the mean times of two reasons to refuse a key, in microseconds.
MOST_DIFFERENCE_US = 2.0


def key_check(checks: int, tenants: int, seed: int = 1) -> Report:
    """Time `checks` checks of keys that are refused, in a random order of the reasons, and as many checks of a valid key.

    The registry is a new one with `tenants` tenants, each with a key.
    """
    with _ring(tenants) as (ring, attempts):
        times_us: dict[str, list[float]] = {name: [] for name in attempts}
        refused = [name for name in attempts if name != "valid"]
        order = [refused[number % len(refused)] for number in range(checks)] + ["valid"] * checks
        random.Random(seed).shuffle(order)
        for name in order[: len(order) // 10]:  # to warm up
            _time_us(ring, *attempts[name])
        for name in order:
            times_us[name].append(_time_us(ring, *attempts[name]))
    rows = [
        {"key": name, "checks": len(times), "mean_us": fmean(times), "median_us": median(times)}
        for name, times in times_us.items()
    ]
    means = [fmean(times_us[name]) for name in refused]
    text = "largest difference between the mean times of two reasons to refuse a key"
    difference = Goal("58-key-timing", text, MOST_DIFFERENCE_US, max(means) - min(means), "us", "lower")
    return Report("access-check", {"checks": checks, "tenants": tenants, "seed": seed}, rows, [difference])


def _time_us(ring: KeyRing, key: bytes, tenant: str) -> float:
    start_ns = time.perf_counter_ns()
    with suppress(ForbiddenError):
        ring.check(key, tenant)
    return (time.perf_counter_ns() - start_ns) / 1e3


@contextmanager
def _ring(tenants: int) -> Iterator[tuple[KeyRing, dict[str, tuple[bytes, str]]]]:
    """Make a registry with keys; yield its key ring, and a key with a tenant for each reason to refuse it."""
    now_s = time.time()
    with tempfile.TemporaryDirectory(prefix="hplm-access-") as folder:
        store = Store(Path(folder) / "store")
        with closing(Registry.open(store, create=True)) as registry:
            registry.publish_base("b", "print", "bases/b", now_s)
            root = registry.publish_domain("b", "g", "plots/g", now_s, parent_id=None, about={}, expected=None)
            names = [TENANT, OTHER, *(f"tenant-{number}" for number in range(tenants - 2))]
            registry.publish_tenants(root.id, "banks/b", names, now_s)

            def add(tenant: str, expires_s: float | None = None) -> Key:
                key = new_key()
                registry.add_key(AccessKey(key.id, tenant, "infer", key.sha256(), now_s, expires_s))
                return key

            valid, revoked, expired = add(TENANT), add(TENANT), add(TENANT, now_s - 1)
            for name in names[1:]:
                add(name)
            registry.revoke_key(revoked.id, now_s)
        attempts = {
            "valid": (valid, TENANT),
            "unknown tenant": (valid, "nobody"),
            "another tenant's key": (valid, OTHER),
            "wrong secret": (Key(valid.id, new_key().secret), TENANT),
            "unknown key": (new_key(), TENANT),
            "revoked": (revoked, TENANT),
            "expired": (expired, TENANT),
        }
        with closing(KeyRing(store)) as ring:
            yield ring, {name: (key.text().encode(), tenant) for name, (key, tenant) in attempts.items()}
