"""The machines that models are placed on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hplm.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """A machine. `devices` devices have `device_bytes` each for models. `host_cache_bytes` hold tenants' adapters.

    `address` is `HOST` or `HOST:PORT` of the node's Triton server, for the proxy; empty if it is not known.
    """

    name: str
    devices: int
    device_bytes: int
    host_cache_bytes: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1 or self.device_bytes < 1:
            raise ConfigError(
                f"node {self.name!r}: at least one device with memory was expected, got {self.devices} devices of "
                f"{self.device_bytes} bytes"
            )


@dataclass(frozen=True)
class Cluster:
    """All nodes. Devices are numbered from 0 through all nodes, in their order.

    `bytes_per_s` is the speed of sending hidden states from a device to the next device of its group.
    """

    nodes: tuple[Node, ...]
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a cluster needs nodes of different names, got {names}")

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The number of the node of each device, `[devices]`."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in range(node.devices))

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return len(self.node_of)

    def device_bytes(self, device: int) -> int:
        """Return the bytes that a device has for models."""
        return self.nodes[self.node_of[device]].device_bytes


def uniform_cluster(devices: int, device_bytes: int, bytes_per_s: float = float("inf"), per_node: int = 8) -> Cluster:
    """Return a cluster of equal devices, `per_node` on each node. The last node may have fewer."""
    counts = [min(per_node, devices - first) for first in range(0, devices, per_node)]
    nodes = (Node(f"node-{number}", count, device_bytes) for number, count in enumerate(counts, 1))
    return Cluster(tuple(nodes), bytes_per_s)
