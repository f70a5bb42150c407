"""Lists the ways to divide models and devices into buckets, so that slow models do not hold up fast models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from hplm.placement.cluster import Cluster
from hplm.placement.served_model import ServedModel
from hplm.workloads.model_requests import ModelRequests


@dataclass(frozen=True)
class DeviceSplit:
    """The devices of each bucket. `discrepancy`: the greatest number of devices per need, divided by the least."""

    devices: tuple[tuple[int, ...], ...]
    discrepancy: float


def model_buckets(
    models: Sequence[ServedModel], most_ratio: float, most_buckets: int
) -> list[tuple[tuple[ServedModel, ...], ...]]:
    """Return partitions of the models into buckets of similar latency: one bucket of all, and those that keep `most_ratio`.

    In a bucket the slowest model takes at most `most_ratio` times as long as the fastest. A partition has at most one bucket
    more than it needs, and at most `most_buckets`. Models of equal latency are never separated.
    """
    ordered = sorted(models, key=lambda model: (model.latency_s, model.name))
    steps = [i for i in range(1, len(ordered)) if ordered[i].latency_s > ordered[i - 1].latency_s * (1 + 1e-9)]
    partitions: list[tuple[tuple[ServedModel, ...], ...]] = [(tuple(ordered),)]
    fewest = 0
    for cuts in range(min(len(steps), most_buckets - 1) + 1):
        if fewest and cuts + 1 > fewest + 1:
            break
        for chosen in combinations(steps, cuts):
            edges = (0, *chosen, len(ordered))
            buckets = tuple(tuple(ordered[first:last]) for first, last in pairwise(edges))
            if all(bucket[-1].latency_s <= most_ratio * bucket[0].latency_s for bucket in buckets):
                fewest = fewest or cuts + 1
                if buckets not in partitions:
                    partitions.append(buckets)
    return partitions


def device_splits(
    buckets: Sequence[Sequence[ServedModel]],
    cluster: Cluster,
    requests: ModelRequests,
    *,
    spread: bool,
    most_discrepancy: float,
    most_splits: int,
) -> list[DeviceSplit]:
    """Return divisions of the devices among buckets of models, the most balanced first.

    A bucket's need is its share of the computing time that the requests ask for, or of all weights if that is greater.
    Divisions with a greater discrepancy than `most_discrepancy` are left out, unless none is left.
    `spread`: each bucket gets devices of as many nodes as possible; otherwise of as few as possible.
    """
    order = sorted(range(cluster.devices), key=lambda device: (_place_in_node(cluster, device), device))
    order = order if spread else list(range(cluster.devices))
    if len(buckets) == 1:
        return [DeviceSplit((tuple(order),), 1.0)]
    needs = _needs(buckets, requests)
    # About 16 steps: more would be nearly equal divisions.
    unit = max(1, cluster.devices // 16)
    units = -(-cluster.devices // unit)
    splits: list[DeviceSplit] = []
    for chosen in combinations(range(1, units), len(buckets) - 1):
        edges = (0, *(place * unit for place in chosen), cluster.devices)
        counts = [last - first for first, last in pairwise(edges)]
        supply = [count / need for count, need in zip(counts, needs, strict=True)]
        devices = tuple(tuple(order[first:last]) for first, last in pairwise(edges))
        splits.append(DeviceSplit(devices, max(supply) / min(supply)))
    splits.sort(key=lambda split: split.discrepancy)
    balanced = [split for split in splits if split.discrepancy <= most_discrepancy]
    return (balanced or splits[:1])[:most_splits]


def _needs(buckets: Sequence[Sequence[ServedModel]], requests: ModelRequests) -> list[float]:
    rates = requests.rates()
    work = [sum(rates.get(model.name, 0.0) * model.latency_s for model in bucket) for bucket in buckets]
    weights = [sum(model.weight_bytes + model.fixed_bytes for model in bucket) for bucket in buckets]
    shares = [
        max(of_work / (sum(work) or 1.0), of_bytes / (sum(weights) or 1))
        for of_work, of_bytes in zip(work, weights, strict=True)
    ]
    # A bucket without requests and weights still needs a device.
    return [max(share, 1e-3) for share in shares]


def _place_in_node(cluster: Cluster, device: int) -> int:
    """Return the number of a device within its node."""
    return device - cluster.node_of.index(cluster.node_of[device])
