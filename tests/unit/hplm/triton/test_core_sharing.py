"""Encode stages of several bases share a server's cores."""

from __future__ import annotations

import json
from pathlib import Path

from hplm.core.roles import base_roles, fused_role
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.stages.core_sharing import encode_processes


def args_of(model: Path, count: int) -> dict[str, str]:
    config = {"instance_group": [{"count": count}]}
    return {"model_repository": str(model), "model_version": "1", "model_config": json.dumps(config)}


def test_a_stage_counts_the_processes_of_all_bases_of_its_repository(tmp_path: Path) -> None:
    for role in base_roles("hbert"):
        write_model(tmp_path, role, {"registry": ""}, 2 if role.backend else None)
    alone = encode_processes(args_of(tmp_path / "hbert_upper", 2))
    write_model(tmp_path, fused_role("mpnet"), {"registry": ""}, 3)
    assert (alone, encode_processes(args_of(tmp_path / "hbert_upper", 2))) == (2, 5)
    assert encode_processes(args_of(tmp_path / "mpnet", 3)) == 5


def test_a_stage_outside_a_repository_of_hplm_counts_its_own_processes(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "1").mkdir(parents=True)
    assert encode_processes(args_of(tmp_path / "elsewhere", 4)) == 4
