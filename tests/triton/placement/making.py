"""Plans for tiny bases: two nodes of two devices each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hplm.placement.plan import (
    Assumptions,
    Plan,
    PlannedBase,
    PlannedGroup,
    PlannedNode,
    Prediction,
    TenantRule,
)
from hplm.placement.served_model import ServedModel

MIB = 1 << 20
NODES = ("east", "west")


def served(name: str = "hbert", layers: int = 2, layer_s: float = 0.01) -> ServedModel:
    return ServedModel(name, (layer_s,) * layers, (MIB,) * layers, fixed_bytes=MIB)


def planned_node(name: str, number: int = 0, devices: int = 2) -> PlannedNode:
    return PlannedNode(
        name,
        devices,
        64 * MIB,
        16 * MIB,
        f"127.0.0.1:{9000 + 100 * number}",
        cores=tuple((core % 2,) for core in range(devices)),
    )


def make_plan(
    groups: Sequence[tuple[str, Sequence[int], Mapping[str, Sequence[int]]]] = (
        ("east", [0], {"hbert": [2]}),
        ("west", [0], {"hbert": [2]}),
    ),
    *,
    rate: float = 10.0,
    nodes: Sequence[str] = NODES,
) -> Plan:
    """A plan. Each of `groups` has a node, its devices, and the cut of each base. All layers take 10 ms."""
    bases = sorted({base for _, _, cuts in groups for base in cuts})
    layers = {base: sum(cut) for _, _, cuts in groups for base, cut in cuts.items()}
    return Plan(
        nodes=tuple(planned_node(name, number) for number, name in enumerate(nodes)),
        groups=tuple(
            PlannedGroup(
                node,
                tuple(devices),
                tuple(
                    PlannedBase(base, tuple(cut), tuple(10.0 * layers for layers in cut)) for base, cut in cuts.items()
                ),
            )
            for node, devices, cuts in groups
        ),
        tenants=TenantRule(),
        assumptions=Assumptions(
            dict.fromkeys(bases, rate), 1.0, dict.fromkeys(bases, 500.0), 16, "--rate", duration_s=20.0
        ),
        prediction=Prediction(1.0, dict.fromkeys(bases, 1.0), (0.1,) * len(groups), 100),
        algorithm="a test",
        models=tuple(served(base, layers[base]) for base in bases),
    )


def at(plan: Plan, addresses: Mapping[str, str]) -> Plan:
    """The plan with other addresses of nodes."""
    nodes = tuple(replace(node, address=addresses.get(node.name, node.address)) for node in plan.nodes)
    return replace(plan, nodes=nodes)
