"""Counting the processes that compute, over all bases of a repository."""

from __future__ import annotations

from pathlib import Path

from hplm.core.roles import base_roles
from hplm.triton.launcher.instances import count_encode_processes, count_sharing_processes
from hplm.triton.launcher.model_folder import write_model


def write_stages(models: Path, name: str, count: int) -> None:
    """Write a base's models with `count` encode processes, and look-up processes, which compute no upper layers."""
    for role in base_roles(name):
        write_model(models, role, {"registry": ""}, 4 if role.backend == "plot" else count if role.backend else None)


def test_encode_processes_of_all_bases_count(tmp_path: Path) -> None:
    write_stages(tmp_path, "hbert", 2)
    assert count_encode_processes(tmp_path) == 2
    write_stages(tmp_path, "mpnet", 3)
    assert count_encode_processes(tmp_path) == 5


def test_a_config_that_was_changed_by_hand_counts_as_one_process(tmp_path: Path) -> None:
    write_stages(tmp_path, "mpnet", 3)
    path = tmp_path / "mpnet_upper" / "config.pbtxt"
    path.write_text(path.read_text().replace("count: 3 kind", "count: 3, gpus: [ 0 ] kind"))
    assert count_encode_processes(tmp_path) == 1


def test_a_folder_without_bases_has_no_processes(tmp_path: Path) -> None:
    assert count_encode_processes(tmp_path / "missing") == 0


def test_a_stage_shares_cores_with_every_base_of_its_repository(tmp_path: Path) -> None:
    write_stages(tmp_path, "mpnet", 3)
    assert count_sharing_processes(tmp_path / "mpnet_upper" / "1", 3) == 3
    write_stages(tmp_path, "minilm", 2)
    assert count_sharing_processes(tmp_path / "mpnet_upper" / "1", 3) == 5


def test_a_stage_outside_a_repository_of_hplm_shares_cores_among_its_own_processes(tmp_path: Path) -> None:
    assert count_sharing_processes(tmp_path / "elsewhere" / "1", 4) == 4
