"""Plans from placements, and placements from plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hplm.errors import ConfigError
from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.plan import (
    Assumptions,
    Plan,
    PlannedBase,
    PlannedGroup,
    Prediction,
    TenantRule,
)
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm_builder.placement.cluster_file import Nodes, cluster_of


def make_plan(
    placement: Placement,
    nodes: Nodes,
    models: Sequence[ServedModel],
    outcomes: Outcomes,
    assumptions: Assumptions,
    *,
    tenants: TenantRule,
    algorithm: str,
    survives_any_node: bool,
) -> Plan:
    """Return the plan that serves a placement. `outcomes` are those of the simulated workload.

    Raises ConfigError if a group has devices of two nodes, or if a node would serve a base with two cuts.
    """
    stage_times = StageTimes(nodes.cluster(), models)
    groups = []
    for group, names in zip(placement.groups, placement.models, strict=True):
        if names:
            groups.append(_planned(group, names, nodes, stage_times))
    _check_one_cut(groups)
    return Plan(
        nodes=nodes.nodes,
        groups=tuple(groups),
        tenants=tenants,
        assumptions=assumptions,
        prediction=predicted(placement, outcomes),
        algorithm=algorithm,
        models=tuple(models),
        bytes_per_s=nodes.bytes_per_s,
        survives_any_node=survives_any_node,
    )


def predicted(placement: Placement, outcomes: Outcomes) -> Prediction:
    """Return what a simulation predicts, with the busy share of each group that holds a model."""
    requests, in_time = outcomes.requests, outcomes.in_time
    of_base = {
        name: float(in_time[requests.models == number].mean())
        for number, name in enumerate(requests.names)
        if (requests.models == number).any()
    }
    busy = tuple(
        float(np.mean(outcomes.busy_s[list(group.devices)])) / requests.duration_s
        for group, names in zip(placement.groups, placement.models, strict=True)
        if names
    )
    return Prediction(outcomes.attainment, of_base, busy, len(requests))


def with_one_cut(placement: Placement, nodes: Nodes) -> Placement:
    """Return a placement in which each node serves a base with one configuration.

    A Triton model has one cut, so a node cannot serve a base whole in one group and in two stages in another. The configuration
    with the most devices stays.
    """
    node_of = nodes.cluster().node_of
    devices: dict[tuple[int, str], dict[ParallelConfig, int]] = defaultdict(lambda: defaultdict(int))
    for group, names in zip(placement.groups, placement.models, strict=True):
        for name in names:
            devices[node_of[group.devices[0]], name][group.config] += len(group.devices)
    kept = {key: max(counts, key=lambda config: (counts[config], config)) for key, counts in devices.items()}
    models = tuple(
        tuple(name for name in names if kept[node_of[group.devices[0]], name] == group.config)
        for group, names in zip(placement.groups, placement.models, strict=True)
    )
    return Placement(placement.groups, models)


def nodes_of(plan: Plan) -> Nodes:
    """Return the nodes of a plan."""
    return Nodes(plan.nodes, plan.bytes_per_s)


def placement_of(plan: Plan) -> Placement:
    """Return the placement that a plan serves. Raises ConfigError if a group names a node or a device that is not there."""
    first_device, count = {}, 0
    for node in plan.nodes:
        first_device[node.name] = count
        count += node.devices
    devices_of = {node.name: node.devices for node in plan.nodes}
    groups = []
    for number, group in enumerate(plan.groups, 1):
        if not all(0 <= device < devices_of.get(group.node, 0) for device in group.devices):
            raise ConfigError(
                f"group {number} of the plan: devices of its node {group.node!r} were expected, got {group.devices}"
            )
        devices = tuple(first_device[group.node] + device for device in group.devices)
        groups.append(Group(devices, ParallelConfig(len(devices))))
    return Placement(tuple(groups), tuple(tuple(base.base for base in group.bases) for group in plan.groups))


def stage_times_of(plan: Plan) -> StageTimes:
    """Return the stage times of a plan's bases on its nodes."""
    return StageTimes(cluster_of(plan.nodes, plan.bytes_per_s), plan.models)


def bases_of_nodes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return the bases that each node serves, by the node's name."""
    return {
        node.name: frozenset(base.base for group in plan.groups if group.node == node.name for base in group.bases)
        for node in plan.nodes
    }


def _planned(group: Group, names: Sequence[str], nodes: Nodes, stage_times: StageTimes) -> PlannedGroup:
    node_of = stage_times.cluster.node_of
    (number, *others) = sorted({node_of[device] for device in group.devices})
    if others or group.config.intra > 1:
        raise ConfigError(
            f"a group of devices of one node, one for each stage, was expected, got devices {group.devices} of "
            f"configuration {group.config}"
        )
    bases = []
    for name in names:
        cut, seconds = stage_times.cut_of(name, group.config), stage_times.of(name, group.config)
        if cut is None or seconds is None:
            raise ConfigError(f"base {name!r} cannot be cut into {group.config.stages} stages")
        bases.append(PlannedBase(name, cut, tuple(1000 * each for each in seconds)))
    first = node_of.index(number)
    return PlannedGroup(nodes.nodes[number].name, tuple(device - first for device in group.devices), tuple(bases))


def _check_one_cut(groups: Sequence[PlannedGroup]) -> None:
    cuts: dict[tuple[str, str], tuple[int, ...]] = {}
    for group in groups:
        for base in group.bases:
            if cuts.setdefault((group.node, base.base), base.cut) != base.cut:
                raise ConfigError(f"node {group.node!r} serves base {base.base!r} with one cut, and the plan has two")
