"""Writes and serves emulated devices: Triton models whose stages wait. A group is an ensemble of its stages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hplm.errors import ConfigError
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.emulation.settings import WaitingSettings

BACKENDS = Path(__file__).parent / "backends"
# Outputs that a client of hplm asks for.
_OUTPUTS = {"LABEL": "TYPE_STRING|-1", "SCORE": "TYPE_FP32|-1", "SPAN": "TYPE_INT32|-1, 2", "TRUNCATED": "TYPE_BOOL|1"}
_BETWEEN = {"REQUEST_META": "TYPE_INT64|3", "HIDDEN": "TYPE_UINT8|-1"}
_FROM_CLIENT = {"TEXT": "TYPE_STRING|1", "TENANT": "TYPE_STRING|1"}


@dataclass(frozen=True)
class EmulatedGroup:
    """A group of emulated devices: the seconds of each stage, by the models that the group holds."""

    name: str
    stage_s: Mapping[str, tuple[float, ...]]

    @property
    def stages(self) -> int:
        return len(next(iter(self.stage_s.values())))


def write_groups(
    folder: Path, groups: Sequence[EmulatedGroup], *, hop_s: float, way_back_s: float, boundary_bytes: int = 0
) -> list[str]:
    """Write the models of groups into a repository, and return their names in loading order. See `WaitingSettings`."""
    names = []
    for group in groups:
        if not group.stage_s:
            raise ConfigError(f"group {group.name!r} holds no model: at least one was expected")
        stages = [f"{group.name}_{number}" for number in range(1, group.stages + 1)]
        for number, stage in enumerate(stages):
            settings = WaitingSettings(dict(group.stage_s), number, hop_s, way_back_s, boundary_bytes)
            inputs = _FROM_CLIENT if number == 0 else {"TENANT": _FROM_CLIENT["TENANT"], **_BETWEEN}
            _write(folder / stage, _stage_config(stage, inputs, _OUTPUTS if settings.is_last else _BETWEEN), settings)
        _write(folder / group.name, _ensemble_config(group.name, stages), None)
        names += [*stages, group.name]
    return names


@contextmanager
def serve_groups(folder: Path, models: Sequence[str], *, log: Path) -> Iterator[TritonServer]:
    """Serve groups that `write_groups` wrote until the block ends. Raises StartError."""
    with TritonServer(folder, free_ports(), models=models, backends=(BACKENDS,), log=log, tied=True) as server:
        server.wait_ready()
        yield server


def _write(model: Path, config: str, settings: WaitingSettings | None) -> None:
    version = model / "1"
    version.mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    if settings is not None:
        (version / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


def _tensors(kind: str, tensors: Mapping[str, str]) -> str:
    rows = []
    for name, described in tensors.items():
        data_type, dims = described.split("|")
        rows.append(f'  {{ name: "{name}" data_type: {data_type} dims: [ {dims} ] }}')
    return f"{kind} [\n" + ",\n".join(rows) + "\n]\n"


def _stage_config(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    # Without a batcher of Triton's own: the stage queues, and each request reaches the stage at once.
    head = f'name: "{name}"\nbackend: "waiting"\nmax_batch_size: 64\n'
    return (
        head
        + _tensors("input", inputs)
        + _tensors("output", outputs)
        + "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    )


def _ensemble_config(name: str, stages: Sequence[str]) -> str:
    steps = []
    for number, stage in enumerate(stages):
        inputs = {"TENANT": "TENANT"}
        inputs |= {"TEXT": "TEXT"} if number == 0 else {key: f"{key}_{number}" for key in _BETWEEN}
        is_last = number == len(stages) - 1
        outputs = {key: key for key in _OUTPUTS} if is_last else {key: f"{key}_{number + 1}" for key in _BETWEEN}
        maps = [f'      input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        maps += [f'      output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
        steps.append(f'    {{\n      model_name: "{stage}"\n      model_version: -1\n' + "\n".join(maps) + "\n    }")
    head = f'name: "{name}"\nplatform: "ensemble"\nmax_batch_size: 64\n' + _tensors("input", _FROM_CLIENT)
    scheduling = "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"
    return head + _tensors("output", _OUTPUTS) + scheduling
