"""The file in which an operator describes the nodes that bases are placed on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hplm.core.names import check_name_of
from hplm.core.settings import parse_settings
from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster, Node
from hplm.placement.plan import PlannedNode, check_address

MIB = 1 << 20


@dataclass(frozen=True)
class NodeEntry:
    """A node of the file. Each device is a GPU of `gpus`, or the cores of an element of `cores`.

    `device_mib` is the memory of each device for models, `host_cache_mib` that of the node for adapters of tenants. `address`
    is `HOST:PORT` or `[IPv6]:PORT` of the HTTP port of the node's server. Other ports that are 0 are those of `hplm serve`.
    """

    name: str
    device_mib: int
    address: str = ""
    cores: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[int, ...] = ()
    host_cache_mib: int = 0
    grpc_port: int = 0
    health_port: int = 0

    def __post_init__(self) -> None:
        check_name_of("name", self.name)
        devices = self.cores or self.gpus
        if not devices or (self.cores and self.gpus):
            raise ConfigError('either "cores", such as [[0], [1]], or "gpus", such as [0, 1], was expected')
        used = [core for device in self.cores for core in device] or list(self.gpus)
        if not all(self.cores) or len(set(used)) < len(used) or min(used) < 0:
            raise ConfigError(f"devices of different cores or GPUs, numbered from 0, were expected, got {used}")
        if self.device_mib < 1 or self.host_cache_mib < 0:
            raise ConfigError(f"device_mib of 1 or more was expected, got {self.device_mib}")
        check_address(self.address, self.grpc_port, self.health_port)

    def planned(self) -> PlannedNode:
        """Return the node as plans name it."""
        return PlannedNode(
            self.name,
            len(self.cores or self.gpus),
            self.device_mib * MIB,
            self.host_cache_mib * MIB,
            self.address,
            self.cores,
            self.gpus,
            self.grpc_port,
            self.health_port,
        )


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster file. `bytes_per_s` is the speed between two devices of a node, None if it is without limit."""

    nodes: tuple[PlannedNode, ...]
    bytes_per_s: float | None = None

    def cluster(self) -> Cluster:
        """Return the cluster that the search places models on."""
        return cluster_of(self.nodes, self.bytes_per_s)

    def first(self, devices: int) -> Nodes:
        """Return the first `devices` devices of all nodes."""
        kept = []
        for node in self.nodes:
            count = min(node.devices, devices)
            devices -= count
            if count:
                kept.append(shortened(node, count))
        return Nodes(tuple(kept), self.bytes_per_s)


def shortened(node: PlannedNode, devices: int) -> PlannedNode:
    """Return a node with its first `devices` devices alone."""
    return PlannedNode(**{**vars(node), "devices": devices, "cores": node.cores[:devices], "gpus": node.gpus[:devices]})


def cluster_of(nodes: Sequence[PlannedNode], bytes_per_s: float | None) -> Cluster:
    """Return the cluster of the nodes of a plan."""
    made = (Node(node.name, node.devices, node.device_bytes, node.host_cache_bytes, node.address) for node in nodes)
    return Cluster(tuple(made), float("inf") if bytes_per_s is None else bytes_per_s)


def read_cluster(path: Path) -> Nodes:
    """Read a cluster file. Raises ConfigError, which names the file and the line, if it is malformed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a cluster file: {error}") from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}{line}: a cluster file is JSON: {error}") from error
    if not isinstance(values, dict) or set(values) - {"nodes", "mib_per_s"} or not _is_full_list(values.get("nodes")):
        raise ConfigError(
            f'{path}, line 1: {{"nodes": [...], "mib_per_s": ...}} was expected, with at least one node; docs/placement.md '
            "has an example"
        )
    nodes: list[PlannedNode] = []
    for value, line_number in zip(values["nodes"], _lines_of_nodes(text), strict=True):
        where = f"{path}, line {line_number}"
        node = parse_settings(NodeEntry, value, where).planned()
        if any(node.name == other.name for other in nodes):
            raise ConfigError(f"{where}: a second node {node.name!r}: each node needs a name of its own")
        nodes.append(node)
    speed = values.get("mib_per_s")
    if speed is not None and not (isinstance(speed, int | float) and not isinstance(speed, bool) and 0 < speed < 1e12):
        raise ConfigError(f"{path}, line 1: mib_per_s: a number above 0 was expected, got {speed!r}")
    return Nodes(tuple(nodes), None if speed is None else float(speed) * MIB)


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _lines_of_nodes(text: str) -> list[int]:
    """Return the line on which each node of a file begins. The text is a JSON object with a list `nodes`."""
    found = re.search(r'"nodes"\s*:\s*\[', text)
    assert found is not None
    decoder, at = json.JSONDecoder(), found.end()
    lines: list[int] = []
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        if text[at] == "]":
            return lines
        lines.append(text.count("\n", 0, at) + 1)
        _, at = decoder.raw_decode(text, at)
