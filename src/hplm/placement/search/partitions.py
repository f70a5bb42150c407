"""Lists the ways to divide devices into groups, and a group into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, ParallelConfig

# With at most so many devices to divide, every group size is tried; with more, powers of two and all of them.
EVERY_SIZE_UP_TO = 8


def blocks_of(devices: Sequence[int], cluster: Cluster, span_nodes: bool) -> list[tuple[int, ...]]:
    """Return the devices that groups may be formed of: those of each node, or all if groups may span nodes."""
    if span_nodes:
        return [tuple(devices)]
    by_node = sorted(devices, key=lambda device: (cluster.node_of[device], device))
    return [tuple(block) for _, block in groupby(by_node, key=lambda device: cluster.node_of[device])]


def group_sizes(blocks: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return the group sizes to try, the smallest first."""
    largest = max(len(block) for block in blocks)
    if largest <= EVERY_SIZE_UP_TO:
        sizes = set(range(1, largest + 1))
    else:
        sizes = {1 << power for power in range(largest.bit_length())} | {largest}
    return sorted(size for size in sizes if size <= most)


def parallel_configs(size: int, most_stages: int, most_intra: int) -> list[ParallelConfig]:
    """Return each way to divide a group of `size` devices into stages. `intra` is a power of two."""
    powers = (1 << power for power in range(size.bit_length()))
    return [
        ParallelConfig(size // intra, intra)
        for intra in powers
        if size % intra == 0 and intra <= most_intra and size // intra <= most_stages
    ]


def equal_groups(blocks: Sequence[Sequence[int]], config: ParallelConfig) -> tuple[Group, ...]:
    """Return groups of one configuration. What is left of a block is a last group of fewer stages."""
    groups: list[Group] = []
    for block in blocks:
        for first in range(0, len(block), config.devices):
            devices = tuple(block[first : first + config.devices])
            intra = math.gcd(config.intra, len(devices))
            groups.append(Group(devices, ParallelConfig(len(devices) // intra, intra)))
    return tuple(groups)
