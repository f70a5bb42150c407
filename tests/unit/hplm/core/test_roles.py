"""The catalogue of roles."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hplm.core.roles import (
    CALLING,
    MANAGER,
    Role,
    base_roles,
    cascade_role,
    check_model_name,
    models_of,
    names,
    of_whole_base,
    route_role,
    served_base,
    served_bases,
    staged_roles,
    unload_order,
)
from hplm.errors import ConfigError
from hplm.triton.launcher.backend_folder import share_folder
from hplm.triton.launcher.model_folder import write_model

# The parts of several encode stages. Their ensemble is made of the one with a single encode stage.
PARTS = staged_roles("hbert", 3)[1:4]
ROLES = [
    *base_roles(),
    *map(of_whole_base, base_roles()),
    *PARTS,
    of_whole_base(PARTS[0]),
    MANAGER,
    route_role(),
    cascade_role(),
]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.template or role.name)
def test_a_role_has_the_model_folder_and_the_backend_that_the_catalogue_names(role: Role) -> None:
    config = (share_folder("model_repository") / (role.template or role.name) / "config.pbtxt").read_text()
    assert f'\nname: "{role.name}"\n' in f"\n{config}"
    assert re.findall(r'^backend: "(\w+)"', config, flags=re.M) == ([role.backend] if role.backend else [])
    assert tuple(re.findall(r'model_name: "(\w+)"', config)) == role.needs
    if role.backend:
        assert (share_folder("backends") / role.backend / "model.py").is_file()


def test_every_model_folder_has_a_role() -> None:
    folders = {path.name for path in share_folder("model_repository").iterdir() if path.is_dir()}
    assert folders == {role.template or role.name for role in ROLES}


def test_clients_see_no_difference_between_ensembles() -> None:
    def tensors(folder: str) -> list[str]:
        config = (share_folder("model_repository") / folder / "config.pbtxt").read_text()
        return re.findall(r"^(?:name|max_batch_size): .+|(?<=\{ )name: .+?\](?= )", config, flags=re.MULTILINE)

    assert len(tensors("hbert")) == 12
    assert tensors("hbert_whole") == tensors("hbert")
    assert tensors("hbert_dispatch_whole") == tensors("hbert_dispatch")
    assert set(tensors("hbert")[1:]) < set(tensors("hbert_dispatch")[1:])


def test_a_base_that_an_earlier_release_exported_is_found_without_the_level_of_a_cascade(tmp_path: Path) -> None:
    write_base(tmp_path, "hbert", "small")
    shutil.rmtree(tmp_path / "hbert_dispatch")
    (base,) = served_bases(tmp_path)
    assert names(base.roles) == ("hbert_plot", "hbert_upper", "hbert")
    assert base.base == "small"


def test_encode_stages_of_several_are_numbered_and_the_ensemble_calls_all_of_them() -> None:
    roles = staged_roles("mpnet", 3)
    assert names(roles) == ("mpnet_plot", "mpnet_upper_1", "mpnet_upper_2", "mpnet_upper_3", "mpnet")
    assert [role.backend for role in roles] == ["plot", "layers", "layers", "upper", None]
    assert roles[-1].needs == names(roles[:-1])


@pytest.mark.parametrize("kind", ["hierarchical", "whole"])
def test_the_ensemble_hands_the_states_of_each_encode_stage_to_the_next(tmp_path: Path, kind: str) -> None:
    write_base(tmp_path, "hbert", "small", stages=3, is_whole=kind == "whole")
    config = (tmp_path / "hbert" / "config.pbtxt").read_text()
    steps = config.split("model_name: ")[1:]
    assert [step.split('"')[1] for step in steps] == ["hbert_plot", "hbert_upper_1", "hbert_upper_2", "hbert_upper_3"]
    states = [re.findall(r'(\w+)_map { key: "STATES" value: "(\w+)" }', step) for step in steps]
    assert states == [
        [],
        [("output", "states_1")],
        [("input", "states_1"), ("output", "states_2")],
        [("input", "states_2")],
    ]
    features = "IDS" if kind == "whole" else "HIDDEN"
    assert [f'input_map {{ key: "{features}"' in step for step in steps] == [False, True, False, False]
    for step in steps[1:]:
        for tensor in ("TOKENS", "REQUEST_META", "PROOF", "TENANT"):
            assert step.count(f'input_map {{ key: "{tensor}"') == 1
    assert ['key: "LABEL"' in step for step in steps] == [False, False, False, True]
    assert config.count("{") == config.count("}")


def test_a_base_of_several_encode_stages_is_found_with_their_number(tmp_path: Path) -> None:
    write_base(tmp_path, "hbert", "small", stages=3)
    write_base(tmp_path, "other", "big")
    base, other = served_bases(tmp_path)
    assert (base.encode_stages, other.encode_stages) == (3, 1)
    assert base.roles == staged_roles("hbert", 3)
    assert base.base == "small"
    assert unload_order(names(base.roles))[1:] == ({"hbert"}, set(names(base.roles)) - {"hbert"})


def test_models_of_another_base_are_named_after_it() -> None:
    roles = base_roles("mpnet")
    assert names(roles) == ("mpnet_plot", "mpnet_upper", "mpnet", "mpnet_dispatch")
    assert roles.ensemble.needs == roles.dispatch.needs == ("mpnet_plot", "mpnet_upper")


def write_base(models: Path, name: str, base: str, *, stages: int = 1, is_whole: bool = False) -> None:
    """Write the model folders of a base."""
    settings = {"store": "../../../store", "base": base, "registry": ""}
    roles = staged_roles(name, stages) if stages > 1 else base_roles(name)
    for role in roles:
        has_table = role.backend == "plot"
        written = of_whole_base(role) if is_whole else role
        write_model(models, written, {**settings, "table": "general"} if has_table else settings)


def test_the_bases_of_a_repository_are_found_with_their_names_forms_and_settings(tmp_path: Path) -> None:
    for name, base in (("mpnet", "big"), ("hbert", "small"), ("late", "third")):
        write_base(tmp_path, name, base)
    write_model(tmp_path, MANAGER, {"store": "s", "base": "small", "domain": "general", "registry": ""})
    found = served_bases(tmp_path)
    assert [(base.name, base.base) for base in found] == [("hbert", "small"), ("late", "third"), ("mpnet", "big")]
    assert found[2].settings.look_up.table == found[1].settings.look_up.table == "general"
    assert found[1].store_root == (tmp_path / "late_upper" / "1" / "../../../store").resolve()
    bases = [name for base in ("hbert", "late", "mpnet") for name in names(base_roles(base))]
    assert models_of(tmp_path) == (*bases, "manager")
    assert served_base(tmp_path) == found[0]
    assert served_base(tmp_path, "mpnet") == found[2]
    with pytest.raises(ConfigError, match="no model 'nobody' of a base; its models of bases are: hbert, late, mpnet"):
        served_base(tmp_path, "nobody")
    config = (tmp_path / "mpnet" / "config.pbtxt").read_text()
    assert re.findall(r'name: "(mpnet\w*|hbert\w*)"', config) == ["mpnet", "mpnet_plot", "mpnet_upper"]


def test_a_model_is_unloaded_before_those_that_it_calls() -> None:
    models = (*names(base_roles("hbert")), "late", "manager", "hplm", "cascade")
    callers = {"hbert", "hbert_dispatch", "late", "manager"}
    assert unload_order(models) == ({"hplm", "cascade"}, callers, {"hbert_plot", "hbert_upper"})


@pytest.mark.parametrize(
    "name", ["manager", *CALLING, "mpnet_plot", "mpnet_upper", "mpnet_upper_2", "mpnet_dispatch", "Large", "a/b", ""]
)
def test_a_name_of_another_model_or_none_at_all_names_no_base(name: str) -> None:
    with pytest.raises(ConfigError, match="--name: "):
        check_model_name(name)


def test_a_base_whose_settings_are_away_is_found_and_its_settings_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path, "hbert", "small")
    path = tmp_path / "hbert_upper" / "1" / "settings.json"
    path.write_text(json.dumps({"store": "s"}))
    (base,) = served_bases(tmp_path)
    with pytest.raises(ConfigError, match="missing base"):
        _ = base.base
