"""Finds the smallest number of devices that meets a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster
from hplm.placement.search.enumeration import SearchOptions, SearchResult, search
from hplm.placement.served_model import ServedModel
from hplm.workloads.model_requests import ModelRequests

# A search, such as `search` or `selective_replication`.
Search = Callable[[Sequence[ServedModel], Cluster, ModelRequests, SearchOptions], SearchResult]


@dataclass(frozen=True)
class FewestDevices:
    """The smallest number of devices that was found, and its placement on `cluster`."""

    devices: int
    cluster: Cluster
    result: SearchResult


def fewest_devices(
    models: Sequence[ServedModel],
    cluster_of: Callable[[int], Cluster],
    requests: ModelRequests,
    target: float,
    options: SearchOptions | None = None,
    *,
    most_devices: int,
    find: Search = search,
) -> FewestDevices:
    """Return the fewest devices with which a share `target` of the requests is in time, by bisection from 1 to `most_devices`.

    cluster_of: the cluster of a number of devices. The bisection assumes that more devices never make the best placement worse.
    Raises ConfigError if `most_devices` are not enough.
    """
    if not 0 < target <= 1:
        raise ConfigError(f"a target above 0 and at most 1 was expected, got {target}")
    options = options or SearchOptions()

    def tried(devices: int) -> FewestDevices | None:
        cluster = cluster_of(devices)
        try:
            return FewestDevices(devices, cluster, find(models, cluster, requests, options))
        except ConfigError:
            # The required copies do not fit: more devices are needed.
            return None

    cluster = cluster_of(most_devices)
    best = FewestDevices(most_devices, cluster, find(models, cluster, requests, options))
    if best.result.attainment < target:
        raise ConfigError(
            f"{target:.2%} of the requests in time was expected, but with {most_devices} devices "
            f"{best.result.attainment:.2%} are in time: allow more devices, or loosen the deadlines"
        )
    too_few = 0
    while best.devices - too_few > 1:
        middle = (too_few + best.devices) // 2
        found = tried(middle)
        if found is not None and found.result.attainment >= target:
            best = found
        else:
            too_few = middle
    return best
