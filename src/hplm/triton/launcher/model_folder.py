"""Model folders of a Triton repository: a role's `config.pbtxt`, its version folder and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hplm.core import wire
from hplm.core.roles import Role, settings_path
from hplm.triton.launcher.backend_folder import share_folder
from hplm.triton.launcher.instances import with_gpus, with_instances

# A step of an ensemble that calls one model: its lines, and the lines of its maps.
_STEP = re.compile(r'^    \{\n      model_name: "[^"]*"\n      model_version: -1\n((?: {6}.+\n)+)    \}', re.MULTILINE)


def write_model(
    repository: Path,
    role: Role,
    settings: Mapping[str, Any],
    instances: int | None = None,
    gpus: Sequence[int] = (),
) -> None:
    """Write a role's model folder to `repository`, with `settings` and as many `instances`; None leaves one.

    `gpus` as in `with_gpus`.
    """
    config = (share_folder("model_repository") / (role.template or role.name) / "config.pbtxt").read_text()
    config = with_gpus(named(with_encode_stages(config, len(role.needs) - 1), role), gpus)
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


def with_encode_stages(config: str, stages: int) -> str:
    """Return the text of an ensemble's config.pbtxt with its last step cut into `stages` encode stages.

    Each stage hands its hidden states to the next. All stages read the other tensors of the look-up stage.
    """
    if stages < 2:
        return config
    step = [*_STEP.finditer(config)][-1]
    maps = step[1].splitlines(keepends=True)
    features, *others = (line for line in maps if "input_map" in line)
    outputs = [line for line in maps if "output_map" in line]
    parts = []
    for stage in range(1, stages + 1):
        read = features if stage == 1 else _map_states("input", stage - 1)
        written = outputs if stage == stages else [_map_states("output", stage)]
        parts.append(step[0].replace(step[1], "".join([read, *others, *written])))
    return config[: step.start()] + ",\n".join(parts) + config[step.end() :]


def _map_states(kind: str, stage: int) -> str:
    """Return the line of a step for the hidden states that encode stage number `stage` gives."""
    return f'      {kind}_map {{ key: "{wire.STATES}" value: "states_{stage}" }}\n'


def named(template: str, role: Role) -> str:
    """Return the text of a template's config.pbtxt with the role's name, and the names of the models that the role calls."""
    config = re.sub(r'^name: "[^"]*"', f'name: "{role.name}"', template, count=1, flags=re.MULTILINE)
    needs = iter(role.needs)
    return re.sub(r'\bmodel_name: "[^"]*"', lambda _: f'model_name: "{next(needs)}"', config)
