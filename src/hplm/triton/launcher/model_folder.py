"""Model folders of a Triton repository: a role's `config.pbtxt`, its version folder and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hplm.core.roles import Role, settings_path
from hplm.triton.launcher.backend_folder import share_folder
from hplm.triton.launcher.instances import with_instances


def write_model(repository: Path, role: Role, settings: Mapping[str, Any], instances: int | None = None) -> None:
    """Write a role's model folder to `repository`, with `settings` and as many `instances`; None leaves one."""
    config = named((share_folder("model_repository") / (role.template or role.name) / "config.pbtxt").read_text(), role)
    path = settings_path(repository, role)
    path.parent.mkdir(parents=True)
    (repository / role.name / "config.pbtxt").write_text(
        config if instances is None else with_instances(config, instances)
    )
    if role.settings is None:
        # Triton needs a version folder even for an ensemble. The file keeps it, because some tools drop empty folders.
        (path.parent / "README").write_text("An ensemble has no files, but Triton needs the folder of its version.\n")
        return
    # A registry's URL may hold a password.
    path.touch(0o600 if settings["registry"] else 0o666)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def named(template: str, role: Role) -> str:
    """Return the text of a template's config.pbtxt with the role's name, and the names of the models that the role calls."""
    config = re.sub(r'^name: "[^"]*"', f'name: "{role.name}"', template, count=1, flags=re.MULTILINE)
    needs = iter(role.needs)
    return re.sub(r'\bmodel_name: "[^"]*"', lambda _: f'model_name: "{next(needs)}"', config)
