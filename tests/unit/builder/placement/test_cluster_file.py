"""The cluster file: what it says, and the file and line of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.placement.cluster_file import MIB, read_cluster

from hplm.errors import ConfigError

EAST: dict[str, Any] = {"name": "east", "device_mib": 1000, "cores": [[0], [1]], "address": "10.0.0.1:8000"}
WEST: dict[str, Any] = {"name": "west", "device_mib": 2000, "gpus": [0, 1, 2], "host_cache_mib": 10}


def written(folder: Path, *nodes: Any, **more: Any) -> Path:
    """Write a file with a node on each line from the second line on."""
    lines = ",\n".join(json.dumps(node) for node in nodes)
    others = "".join(f', "{key}": {json.dumps(value)}' for key, value in more.items())
    path = folder / "cluster.json"
    path.write_text(f'{{"nodes": [\n{lines}\n]{others}}}')
    return path


def test_a_file_gives_nodes_with_devices_of_cores_or_gpus(tmp_path: Path) -> None:
    nodes = read_cluster(written(tmp_path, EAST, WEST, mib_per_s=100))
    east, west = nodes.nodes
    assert (east.devices, east.cores, east.gpus, east.device_bytes) == (2, ((0,), (1,)), (), 1000 * MIB)
    assert (west.devices, west.gpus, west.host_cache_bytes) == (3, (0, 1, 2), 10 * MIB)
    cluster = nodes.cluster()
    assert (cluster.devices, cluster.bytes_per_s) == (5, 100.0 * MIB)


def test_a_node_may_have_an_ipv6_address(tmp_path: Path) -> None:
    (node,) = read_cluster(written(tmp_path, {**EAST, "address": "[fd00::1]:8000", "grpc_port": 9000})).nodes
    assert node.host == "fd00::1"
    assert node.ports == {"http": 8000, "grpc": 9000, "metrics": 8002, "health": 8003}


def test_the_first_devices_are_those_of_the_first_nodes(tmp_path: Path) -> None:
    nodes = read_cluster(written(tmp_path, EAST, WEST))
    assert [(node.name, node.devices) for node in nodes.first(3).nodes] == [("east", 2), ("west", 1)]
    assert [(node.name, node.cores) for node in nodes.first(1).nodes] == [("east", ((0,),))]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cores": []}, 'either "cores"'),
        ({"gpus": [0]}, 'either "cores"'),
        ({"cores": [[0], [0]]}, "different cores"),
        ({"cores": [[0], []]}, "different cores"),
        ({"device_mib": 0}, "device_mib of 1 or more"),
        ({"device_mib": "much"}, "device_mib must be int"),
        ({"address": "10.0.0.1"}, "HOST:PORT"),
        ({"address": "fd00::1:8000"}, "HOST:PORT was expected, such as 10.0.0.1:8000 or [fd00::1]:8000"),
        ({"address": "[fd00::g]:8000"}, "HOST:PORT"),
        ({"address": "[fd00:::1]:8000"}, "HOST:PORT"),
        ({"address": "10.0.0.1:65533"}, "port below 65533"),
        ({"address": "10.0.0.1:0"}, "port below 65533"),
        ({"name": "Big Node"}, "a name is"),
        ({"nmae": "east"}, "unknown key 'nmae'"),
        ({"grpc_port": 70000}, "a port"),
    ],
)
def test_a_node_that_is_wrong_is_refused_with_file_and_line(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = written(tmp_path, WEST, {**EAST, **changed})
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    assert str(refused.value).startswith(f"{path}, line 3: ")
    assert said in str(refused.value)


def test_two_nodes_of_one_name_are_refused_with_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, EAST, EAST)
    with pytest.raises(ConfigError, match=f"{path}, line 3: a second node 'east'"):
        read_cluster(path)


def test_text_that_is_not_json_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"nodes": [\n{"name": "east",}]}')
    with pytest.raises(ConfigError, match=f"{path}, line 2: a cluster file is JSON"):
        read_cluster(path)


@pytest.mark.parametrize("text", ["[]", '{"nodes": []}', '{"nodes": 3}', '{"nodes": [{}], "speed": 1}'])
def test_a_file_without_nodes_or_with_unknown_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}, line 1: "):
        read_cluster(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a cluster file"):
        read_cluster(tmp_path / "none.json")
