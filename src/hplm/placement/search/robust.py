"""Whether a placement still serves every model when a node fails."""

from __future__ import annotations

from collections.abc import Iterable

from hplm.placement.cluster import Cluster
from hplm.placement.placement import Placement


def survives_any_node(placement: Placement, cluster: Cluster, models: Iterable[str]) -> bool:
    """Return whether each model has, for every node, a group that has no device of the node."""
    nodes = [frozenset(cluster.node_of[device] for device in group.devices) for group in placement.groups]
    return all(
        any(node not in nodes[group] for group in placement.groups_of(name))
        for name in models
        for node in range(len(cluster.nodes))
    )


def covers_every_model(placement: Placement, models: Iterable[str]) -> bool:
    """Return whether each model is in a group."""
    placed = {name for names in placement.models for name in names}
    return placed >= set(models)
