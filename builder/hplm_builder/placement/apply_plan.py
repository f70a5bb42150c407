"""The folders and the proxy configuration that serve a plan."""

from __future__ import annotations

import ipaddress
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hplm.core.roles import MANAGER, ServedBase, served_base, served_bases, settings_path
from hplm.core.settings import ManagerSettings, load_settings
from hplm.errors import ConfigError, DataError
from hplm.placement.plan import Plan, PlannedGroup, PlannedNode
from hplm.registry.catalog import Catalog
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.instances import instances_in
from hplm_builder.export.model_folders import export
from hplm_builder.placement.plan_build import bases_of_nodes, placement_of
from hplm_builder.placement.proxy_config import (
    BASES_FILE,
    CONFIG_FILE,
    HOT_FILE,
    TENANTS_FILE,
    ProxiedNode,
    ProxyAddress,
    proxy_files,
)

PLAN_FILE = "plan.json"
# The folder of a node's model repository, below the node's folder.
MODELS = "models"
# The files that an applied plan has beside its nodes' folders.
FILES = frozenset({PLAN_FILE, CONFIG_FILE, BASES_FILE, TENANTS_FILE, HOT_FILE})
# Names of the host on which `hplm serve` listens by default.
DEFAULT_HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Source:
    """The repository whose bases a plan places: their settings, and their store."""

    models: Path
    bases: tuple[ServedBase, ...]

    @classmethod
    def read(cls, models: Path) -> Source:
        """Read which bases a repository has. Raises ConfigError if it has none."""
        served_base(models)
        return cls(models, served_bases(models))

    @property
    def store(self) -> Store:
        """The store of the bases. Raises ConfigError if the settings cannot be read."""
        first = self.bases[0]
        return Store(first.store_root, first.settings.encode.registry)

    def base(self, name: str) -> ServedBase:
        """Return the base that clients call by `name`. Raises ConfigError if there is none."""
        return served_base(self.models, name)

    def has_keys(self) -> bool:
        """Return whether the store has a key that is not revoked. Raises RegistryError if the registry cannot be read."""
        with closing(Registry.open_read_only(self.store)) as registry:
            return any(key.revoked_s is None for key in registry.keys_since(0).keys)

    def model_of_tenant(self) -> dict[str, str]:
        """Return the model of each tenant's default base, by tenant, for the bases of the repository."""
        models = {base.base: base.name for base in self.bases}
        with closing(Catalog(self.store, None)) as catalog:
            return {tenant.name: models[tenant.base] for tenant in catalog.served() if tenant.base in models}


def apply_plan(plan: Plan, source: Source, target: Path, listen: ProxyAddress) -> None:
    """Write the folders of a plan to `target`: NODE/models for each node with bases, the proxy's files, and the plan.

    An earlier applied plan is replaced in one step: readers see the old folders or the new folders. Raises ConfigError if a
    node has no address or a base cannot be cut so, and DataError if `target` holds anything else, because it would be lost.
    """
    target = target.resolve()
    proxied = proxied_nodes(plan)
    files = proxy_files(proxied, source.model_of_tenant(), plan.tenants, listen)
    write_folders(plan, source, target, files)


def write_folders(plan: Plan, source: Source, target: Path, files: Mapping[str, str]) -> None:
    """Write the folders of a plan, and `files` beside them, as `apply_plan` does."""
    target = target.resolve()
    # Refuses groups of nodes and devices that the plan does not have.
    placement_of(plan)
    if target.exists() and (foreign := _foreign_in(target)):
        raise DataError(f"{target} is no applied plan: {foreign}; give --out a folder that does not exist yet")
    if source.store.root.resolve().is_relative_to(target) or source.models.resolve().is_relative_to(target):
        raise ConfigError(
            f"{target} holds the store or the models that the plan needs: choose another folder for --out"
        )
    _remove_leftovers(target)
    with artifact.replacing(target) as partial:
        for node in plan.nodes:
            groups = [group for group in plan.groups if group.node == node.name and group.bases]
            if groups:
                _write_node(node, groups, source, partial / node.name / MODELS)
        for name, text in files.items():
            (partial / name).write_text(text)
        (partial / PLAN_FILE).write_text(plan.to_json())


def proxied_nodes(plan: Plan) -> list[ProxiedNode]:
    """Return the nodes of a plan that have bases, as the proxy reaches them. Raises ConfigError if one has no address."""
    found = []
    bases_of = bases_of_nodes(plan)
    for number, node in enumerate(plan.nodes, 1):
        if not bases_of[node.name]:
            continue
        if not node.address:
            raise ConfigError(
                f'node {node.name!r} of the plan has no address: add "address": "HOST:PORT" to the cluster file and plan again'
            )
        ports = node.ports
        found.append(
            ProxiedNode(
                node.name, number, node.host, ports["http"], ports["grpc"], ports["health"], bases_of[node.name]
            )
        )
    return found


def serve_command(node: PlannedNode, folder: Path, *, needs_keys: bool) -> str:
    """Return the command that serves a node, to be run on that node. `needs_keys`: the store has keys."""
    options = [f"--{name}-port {port}" for name, port in node.ports.items()]
    if node.host not in DEFAULT_HOSTS:
        options.append(f"--host {node.host}")
    # A server beyond this machine needs keys, unless the operator decides otherwise.
    if needs_keys or not _is_loopback(node.host):
        options.append("--keys")
    return f"hplm serve --models {shlex.quote(str(folder / node.name / MODELS))} {' '.join(options)}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_node(node: PlannedNode, groups: Sequence[PlannedGroup], source: Source, models: Path) -> None:
    """Export each base of a node: as many processes of a stage as there are groups with the base, on their devices."""
    cuts = {base.base: base.cut for group in groups for base in group.bases}
    for name, cut in sorted(cuts.items()):
        holding = [group for group in groups if any(base.base == name for base in group.bases)]
        devices = [[group.devices[stage] for group in holding] for stage in range(len(cut))]
        _export_base(source, name, models, node, cut, devices)


def _export_base(
    source: Source, name: str, models: Path, node: PlannedNode, cut: Sequence[int], devices: Sequence[Sequence[int]]
) -> None:
    """Export a base with `cut` layers in each stage. `devices` are the devices of each stage's processes."""
    base = source.base(name)
    look_up, encode, _ = base.settings
    layers = tuple(cut) if len(cut) > 1 else ()
    cores = [tuple(sorted(core for device in stage for core in node.cores[device])) for stage in devices if node.cores]
    export(
        source.store,
        models,
        replace(look_up, stage_layers=layers),
        replace(encode, stage_layers=layers, stage=1, stage_cores=tuple(cores)),
        _manager_of(source),
        name=name,
        # Triton starts so many processes on each GPU.
        instances=1 if node.gpus else len(devices[0]),
        look_up_instances=_processes(base),
        route=True,
        gpus=tuple(tuple(node.gpus[device] for device in stage) for stage in devices if node.gpus),
    )


def _manager_of(source: Source) -> ManagerSettings | None:
    if not (source.models / MANAGER.name).is_dir():
        return None
    return load_settings(ManagerSettings, settings_path(source.models, MANAGER))


def _processes(base: ServedBase) -> int:
    """Return the number of look-up processes of a base."""
    return instances_in((base.models / base.roles[0].name / "config.pbtxt").read_text()) or 1


def _foreign_in(target: Path) -> str:
    """Return what tells a folder from an applied plan, in words; empty if it is one."""
    if not (target / PLAN_FILE).is_file():
        return f"it has no {PLAN_FILE}"
    for path in sorted(target.iterdir()):
        is_node = (path / MODELS).is_dir() and all(_is_of_node(inner.name) for inner in path.iterdir())
        if not (is_node or (path.name in FILES and path.is_file())):
            return f"it holds {path.name!r}"
    return ""


def _is_of_node(name: str) -> bool:
    # `hplm serve` writes its logs beside the models.
    return name == MODELS or name.startswith("triton")


def _remove_leftovers(target: Path) -> None:
    """Remove the folders that killed calls left beside `target`."""
    for kind in artifact.LEFTOVERS:
        for left in target.parent.glob(f".{target.name}.*.{kind}"):
            if not artifact.is_held(left):
                shutil.rmtree(left, ignore_errors=True)
