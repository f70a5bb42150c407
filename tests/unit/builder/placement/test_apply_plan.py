"""The folders that serve a plan, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hplm_builder.placement.apply_plan import Source, apply_plan, serve_command
from hplm_builder.placement.plan_file import write_plan
from hplm_builder.placement.proxy_config import ProxyAddress

from hplm.core.roles import served_base, served_bases
from hplm.errors import ConfigError, DataError
from hplm.placement.plan import Plan
from hplm.runtime.crash_points import CRASH_AT
from tests.triton.placement import making

HPLM = [sys.executable, "-m", "hplm_cli"]
# Where an `apply` may be killed: after the first export's files are written, and before the whole folder takes its place.
CRASHES = ("artifact.durable:1", "artifact.durable:3")


@pytest.fixture(scope="module")
def source(tiny_models: Path) -> Source:
    return Source.read(tiny_models)


def apply(plan: Plan, source: Source, target: Path) -> None:
    apply_plan(plan, source, target, ProxyAddress())


def test_each_node_gets_a_repository_of_its_bases_over_the_same_store(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "placed"
    apply(making.make_plan(), source, target)
    for node in making.NODES:
        (base,) = served_bases(target / node / "models")
        assert base.store_root == source.store.root.resolve()
        assert base.settings.encode.stage_cores == ((0,),)
    assert Plan.load(target / "plan.json") == making.make_plan()
    assert {path.name for path in target.iterdir()} >= {"haproxy.cfg", "bases.map", "tenants.map", "hot.map"}


def test_a_base_in_two_stages_has_a_model_for_each_stage_on_its_device(source: Source, tmp_path: Path) -> None:
    plan = making.make_plan([("east", [1, 0], {"hbert": [1, 1]})])
    apply(plan, source, tmp_path / "placed")
    base = served_base(tmp_path / "placed/east/models")
    assert base.encode_stages == 2
    assert base.settings.encode.stage_layers == (1, 1)
    assert base.settings.encode.stage_cores == ((1,), (0,))
    assert not (tmp_path / "placed/west").exists()


def test_a_base_in_two_groups_of_a_node_has_two_processes(source: Source, tmp_path: Path) -> None:
    plan = making.make_plan([("east", [0], {"hbert": [2]}), ("east", [1], {"hbert": [2]})])
    apply(plan, source, tmp_path / "placed")
    config = (tmp_path / "placed/east/models/hbert_upper/config.pbtxt").read_text()
    assert "count: 2" in config
    assert served_base(tmp_path / "placed/east/models").settings.encode.stage_cores == ((0, 1),)


def test_an_applied_plan_takes_the_place_of_an_earlier_one(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "placed"
    apply(making.make_plan(), source, target)
    apply(making.make_plan([("east", [0], {"hbert": [2]})]), source, target)
    assert not (target / "west").exists()


def test_an_applied_plan_that_has_been_served_is_replaced_with_its_logs(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "placed"
    apply(making.make_plan(), source, target)
    (target / "east" / "triton.log").write_text("ready")
    apply(making.make_plan(), source, target)
    assert not (target / "east" / "triton.log").exists()


@pytest.mark.parametrize("mine", ["thesis.txt", "east/notes.txt"])
def test_a_folder_with_a_plan_and_files_of_others_is_refused_and_stays(
    source: Source, tmp_path: Path, mine: str
) -> None:
    target = tmp_path / "mine"
    apply(making.make_plan(), source, target)
    (target / mine).write_text("precious")
    with pytest.raises(DataError, match=f"is no applied plan: it holds '{mine.partition('/')[0]}'"):
        apply(making.make_plan(), source, target)
    assert (target / mine).read_text() == "precious"


def test_any_other_folder_is_refused(source: Source, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="is no applied plan"):
        apply(making.make_plan(), source, tmp_path / "mine")
    with pytest.raises((ConfigError, DataError)):
        apply(making.make_plan(), source, source.models.parent)


def test_a_plan_of_a_base_that_is_not_there_is_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model 'mpnet' of a base"):
        apply(making.make_plan([("east", [0], {"mpnet": [2]})]), source, tmp_path / "placed")
    assert not (tmp_path / "placed").exists()


@pytest.mark.parametrize("group", [("nowhere", [0]), ("east", [5])])
def test_a_group_of_a_node_or_a_device_that_is_not_there_is_refused(
    source: Source, tmp_path: Path, group: tuple[str, list[int]]
) -> None:
    with pytest.raises(ConfigError, match=f"group 1 of the plan: devices of its node '{group[0]}' were expected"):
        apply(making.make_plan([(*group, {"hbert": [2]})]), source, tmp_path / "placed")
    assert not (tmp_path / "placed").exists()


def test_a_node_whose_name_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(making.make_plan().to_json().replace('"east"', '"../east"'))
    with pytest.raises(ConfigError, match=r"plan\.json.*name of a node"):
        Plan.load(path)


def test_a_node_without_an_address_is_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="node 'east' of the plan has no address"):
        apply(making.at(making.make_plan(), {"east": ""}), source, tmp_path / "placed")


def test_the_command_that_serves_a_node_has_the_ports_of_its_address() -> None:
    node = replace(making.planned_node("east", 1), grpc_port=7, health_port=9)
    assert serve_command(node, Path("/p q"), needs_keys=False) == (
        "hplm serve --models '/p q/east/models' --http-port 9100 --grpc-port 7 --metrics-port 9102 --health-port 9"
    )


@pytest.mark.parametrize(
    ("address", "needs_keys", "end"),
    [
        ("127.0.0.1:8000", False, "--health-port 8003"),
        ("127.0.0.1:8000", True, "--health-port 8003 --keys"),
        ("10.0.0.1:8000", False, "--health-port 8003 --host 10.0.0.1 --keys"),
        ("[fd00::1]:8000", False, "--health-port 8003 --host fd00::1 --keys"),
        ("[::1]:8000", False, "--health-port 8003 --host ::1"),
    ],
)
def test_a_node_listens_on_its_address_and_wants_keys_if_the_store_or_the_address_says_so(
    address: str, needs_keys: bool, end: str
) -> None:
    node = replace(making.planned_node("east"), address=address)
    assert serve_command(node, Path("/p"), needs_keys=needs_keys).endswith(end)


@pytest.mark.parametrize("has_keys", [False, True])
def test_apply_says_how_to_serve_with_keys_where_clients_connect_and_how_to_drain(
    source: Source, tmp_path: Path, has_keys: bool
) -> None:
    hplm = Path(sys.executable).parent / "hplm"
    write_plan(making.make_plan(), tmp_path / "plan.json")
    key = ["--store", str(source.store.root)]
    if has_keys:
        made = subprocess.run(
            [hplm, "key", "create", "--operator", "read", *key], capture_output=True, text=True, check=True
        )
        key_id = made.stdout.split("_")[1]
    command = [hplm, "place", "apply", tmp_path / "plan.json", "--models", source.models, "--out", tmp_path / "placed"]
    done = subprocess.run(
        [*command, "--host", "::1", "--http-port", "8090"], capture_output=True, text=True, check=False
    )
    if has_keys:
        subprocess.run([hplm, "key", "revoke", key_id, *key], capture_output=True, check=True)
    assert done.returncode == 0, done.stderr
    served = [line for line in done.stdout.splitlines() if "hplm serve" in line]
    assert [line.endswith(" --keys") for line in served] == [has_keys] * 2
    assert "Clients connect to http://[::1]:8090 or grpc://[::1]:8081." in done.stdout
    assert '"${XDG_RUNTIME_DIR-/tmp}/hplm-proxy-8090.sock"' in done.stdout
    assert "bind [::1]:8090" in (tmp_path / "placed/haproxy.cfg").read_text()


def test_a_base_in_two_groups_of_a_node_with_gpus_has_a_process_on_each_gpu(source: Source, tmp_path: Path) -> None:
    plan = making.make_plan([("east", [0], {"hbert": [2]}), ("east", [1], {"hbert": [2]})])
    east, *others = plan.nodes
    plan = replace(plan, nodes=(replace(east, cores=(), gpus=(0, 3)), *others))
    apply(plan, source, tmp_path / "placed")
    # Triton starts `count` processes on each GPU.
    config = (tmp_path / "placed/east/models/hbert_upper/config.pbtxt").read_text()
    assert "count: 1 kind: KIND_GPU gpus: [ 0, 3 ]" in config


@pytest.mark.parametrize("crash", CRASHES)
def test_a_kill_midway_leaves_the_old_folders(source: Source, tmp_path: Path, crash: str) -> None:
    target, plan_file = tmp_path / "placed", tmp_path / "plan.json"
    apply(making.make_plan([("east", [0], {"hbert": [2]})]), source, target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    plan_file.write_text(making.make_plan().to_json())
    command = [*HPLM, "place", "apply", str(plan_file), "--models", str(source.models), "--out", str(target)]
    killed = subprocess.run(command, env={**os.environ, CRASH_AT: crash}, check=False, capture_output=True)
    assert killed.returncode == 137, killed.stderr
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    # The next call removes what the killed one left.
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["placed", "plan.json"]
    assert json.loads((target / "plan.json").read_text())["groups"][1]["node"] == "west"
    assert "haproxy -f" in done.stdout
