"""Writing the Triton model folders: the roles of `model_repository/` with their settings beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings, load_settings
from hplm.errors import ConfigError, DataError, MissingArtifactError, MissingRegistryError, UnknownDomainError
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.instances import instances_in, with_instances
from hplm.triton.launcher.server import MANAGER_ROLES, ROLES, TritonInstall, assemble_backends, check_path, share_folder

Settings = TypeVar("Settings", LookupSettings, EncodeSettings, ManagerSettings)
# All settings but those that say where the store is.
KEEPABLE_SETTINGS = frozenset(
    one.name for kind in (LookupSettings, EncodeSettings, ManagerSettings) for one in fields(kind)
) - {
    "store",
    "registry",
}


def export(
    store: Store,
    target: Path,
    plot: LookupSettings,
    upper: EncodeSettings,
    manager: ManagerSettings | None = None,
    *,
    keep: Collection[str] = (),
    instances: int | None = None,
    look_up_instances: int | None = None,
) -> None:
    """Write `target` beside its place, then rename; model folders that stood there are replaced, anything else is refused.

    Settings with the names in `keep` stay as those folders have them, and with them the registry of the same store,
    where none is given. `instances` processes of the upper stage run beside each other, and `look_up_instances` of the look-up;
    None for as many as those folders have where settings are kept, else one. Without `manager` nobody can create or update
    tenants while it serves: the models for that are left out.
    The settings' `store` and `registry`, and the manager's `miss` and `reduction_factor`, are filled in here; the store's path
    is relative to their own folder, so that store and models can move together.
    Raises MissingArtifactError where the store lacks what the settings name, ConfigError where what is kept cannot be read,
    DataError where `target` holds something that is not ours.
    """
    target = target.resolve()
    if target == share_folder("model_repository").resolve():
        raise DataError(f"{target} holds the templates; choose another folder")
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - {*ROLES, *MANAGER_ROLES}):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is no model of hplm; choose an empty folder")
    registry = store.registry or (_registry_of(target / "hbert_plot", store) if keep else "")
    counts = {
        role: count or (_instances_of(target / role) if keep else 1)
        for role, count in (("hbert_plot", look_up_instances), ("hbert_upper", instances))
    }
    plot, upper = _kept(target / "hbert_plot", plot, keep), _kept(target / "hbert_upper", upper, keep)
    _check_there(replace(store, registry=registry), plot.base, plot.table)
    with artifact.replacing(target) as partial:
        settings: dict[str, LookupSettings | EncodeSettings | ManagerSettings | None] = {
            "hbert_plot": plot,
            "hbert_upper": upper,
            "hbert": None,
        }
        if manager is not None:
            if keep and not (target / MANAGER_ROLES[0]).is_dir():
                manager = replace(manager, base=plot.base, domain=plot.table)
            # Tenants are trained over what they will be served, in floats where that is in int8, and to fit the slots.
            manager = replace(
                _kept(target / MANAGER_ROLES[0], manager, keep),
                miss=plot.miss,
                reduction_factor=upper.reduction_factor,
            )
            settings |= dict.fromkeys(MANAGER_ROLES, manager)
        for role, of_role in settings.items():
            version = partial / role / "1"
            version.mkdir(parents=True)
            text = (share_folder("model_repository") / role / "config.pbtxt").read_text()
            if role in counts:
                text = with_instances(text, counts[role])
            (partial / role / "config.pbtxt").write_text(text)
            if of_role is None:
                # Triton wants the folder of a version even of an ensemble; copying tools drop empty ones.
                (version / "README").write_text("An ensemble has no files; Triton wants its version's folder.\n")
                continue
            values = asdict(of_role)
            values["store"] = os.path.relpath(store.root.resolve(), target / role / "1")
            values["registry"] = registry
            path = version / "settings.json"
            # A registry's URL may hold a password.
            path.touch(0o600 if registry else 0o666)
            path.write_text(json.dumps(values, indent=2) + "\n")


def write_backends(install: TritonInstall, target: Path) -> None:
    """Make `target` a backend directory for a tritonserver of one's own; one that was written before is replaced.

    Our backends in it are links, so they are of the hplm that is installed. Raises DataError where `target` holds something
    else, StartError where Triton cannot start a stub from it.
    """
    target = target.absolute()
    check_path(target, "--out")
    ours = {"python", *(path.name for path in share_folder("backends").iterdir())}
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - ours):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is no backend of hplm; choose an empty folder")
    with artifact.replacing(target) as partial:
        assemble_backends(install, partial)


def has_manager(target: Path) -> bool:
    """Whether an export beside the models in `target` is to have the manager: as they have, or where there are none."""
    return (target / MANAGER_ROLES[0]).is_dir() or not (target / "hbert_plot").is_dir()


def _check_there(store: Store, base: str, plot: str) -> None:
    """Raises MissingArtifactError where the store lacks the base, or both a PLOT and a domain called `plot`."""
    if not store.base(base).is_dir():
        raise MissingArtifactError(f"{store.root} has no base {base!r}, it has {', '.join(store.bases())}: give --base")
    if store.table(plot, "root").is_dir():
        return
    try:
        with closing(Registry.open_read_only(store)) as registry:
            registry.current_domain(base, plot)
    except (MissingRegistryError, UnknownDomainError):
        raise MissingArtifactError(
            f"{store.root} has no tables {plot!r}: give --plot, or make them with `hplm build plot`"
        ) from None


def check_adapter_width(target: Path, reduction_factor: int) -> None:
    """Raises ConfigError where the models in `target` have slots for wider adapters than `reduction_factor` would leave."""
    path = target / "hbert_upper" / "1" / "settings.json"
    try:
        before = load_settings(EncodeSettings, path).reduction_factor
    except ConfigError:
        # None there, or none that can be read: what it had nobody knows, and it is to be replaced.
        return
    if before < reduction_factor:
        raise ConfigError(
            f"{target} has slots for adapters of a reduction factor of {before}; with {reduction_factor} the taggings that "
            f"are as wide could not be asked any more: give --reduction-factor {before}, or {reduction_factor} to narrow it"
        )


def _registry_of(folder: Path, store: Store) -> str:
    """What a model that was exported before has: whoever keeps settings need not know its address and password again."""
    path = folder / "1" / "settings.json"
    if not path.exists():
        return ""
    before = load_settings(LookupSettings, path)
    return before.registry if (path.parent / before.store).resolve() == store.root.resolve() else ""


def _instances_of(folder: Path) -> int:
    """How many processes of it a model has that was exported before. Raises ConfigError where it cannot be told."""
    path = folder / "config.pbtxt"
    if not path.exists():
        return 1
    if (found := instances_in(path.read_text())) is None:
        option = "--instances" if folder.name == "hbert_upper" else "--look-up-instances"
        raise ConfigError(f"{path}: its instance_group is not as it was exported; say how many with {option}")
    return found


def _kept(folder: Path, given: Settings, keep: Collection[str]) -> Settings:
    """`given`, with what a model that was exported to `folder` before was set to under the names in `keep`."""
    path = folder / "1" / "settings.json"
    if not keep or not path.exists():
        return given
    # A setting that this version does not know is refused by name, not left out.
    before = vars(load_settings(type(given), path))
    return replace(given, **{key: value for key, value in before.items() if key in keep})
