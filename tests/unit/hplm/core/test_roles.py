"""The catalogue of roles."""

from __future__ import annotations

import re

import pytest

from hplm.core.roles import ENSEMBLE, FUSED, MANAGING, SERVING, Role, base_roles, names
from hplm.triton.launcher.backend_folder import share_folder


@pytest.mark.parametrize("role", [*SERVING, FUSED, *MANAGING], ids=lambda role: role.template or role.name)
def test_a_role_has_the_model_folder_and_the_backend_that_the_catalogue_names(role: Role) -> None:
    config = (share_folder("model_repository") / (role.template or role.name) / "config.pbtxt").read_text()
    assert f'\nname: "{role.name}"\n' in f"\n{config}"
    assert re.findall(r'^backend: "(\w+)"', config, flags=re.M) == ([role.backend] if role.backend else [])
    assert tuple(re.findall(r'model_name: "(\w+)"', config)) == role.needs
    if role.backend:
        assert (share_folder("backends") / role.backend / "model.py").is_file()


def test_every_model_folder_has_a_role() -> None:
    folders = {path.name for path in share_folder("model_repository").iterdir() if path.is_dir()}
    assert folders == {*names(SERVING), FUSED.template, *names(MANAGING)}


def test_clients_see_no_difference_between_the_ensemble_and_the_fused_model() -> None:
    def tensors(folder: str) -> list[str]:
        config = (share_folder("model_repository") / folder / "config.pbtxt").read_text()
        return re.findall(r"^(?:name|max_batch_size): .+|(?<=\{ )name: .+?\](?= )", config, flags=re.MULTILINE)

    assert len(tensors(ENSEMBLE.name)) == 9
    assert tensors(FUSED.template) == tensors(ENSEMBLE.name)


def test_models_of_another_base_are_named_after_it() -> None:
    roles = base_roles("mpnet")
    assert names(roles) == ("mpnet_plot", "mpnet_upper", "mpnet")
    assert roles.ensemble.needs == ("mpnet_plot", "mpnet_upper")
