"""Writing Triton model folders: a copy of each role in `model_repository/`, with its settings beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from hplm.core.roles import ENCODE, ENSEMBLE, LOOK_UP, MANAGER, MANAGING, SERVING, names
from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings, load_settings
from hplm.errors import ConfigError, DataError, MissingArtifactError, MissingRegistryError, UnknownDomainError
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.backend_folder import assemble_backends, share_folder
from hplm.triton.launcher.install import TritonInstall
from hplm.triton.launcher.instances import instances_in, with_instances
from hplm.triton.workarounds.shell_paths import check_path

Settings = TypeVar("Settings", LookupSettings, EncodeSettings, ManagerSettings)
# All settings but the place of the store and of its registry.
KEEPABLE_SETTINGS = frozenset(
    field.name for role in (*SERVING, *MANAGING) if role.settings is not None for field in fields(role.settings)
) - {"store", "registry"}


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
    """Write the model folders to `target` atomically. Earlier model folders are replaced, anything else there is refused.

    If `keep` names settings, they stay as in the earlier folders. So does the registry, if it is of the same store and
    `store` names none. `instances` and `look_up_instances` are the numbers of processes of the upper and look-up stages.
    None means the earlier number if settings are kept, else one. Without `manager`, the models that create and update tenants
    are left out.

    The function itself sets `store` and `registry` in all settings, and `miss` and `reduction_factor` in the manager's. The
    path of the store is relative to the settings' folder, so that store and models can be moved together.
    Raises MissingArtifactError if the store lacks what the settings name, ConfigError if kept settings cannot be read, and
    DataError if `target` holds anything but model folders of hplm.
    """
    target = target.resolve()
    if target == share_folder("model_repository").resolve():
        raise DataError(f"{target} holds the templates of the model folders; choose another folder")
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - {*names(SERVING), *names(MANAGING)}):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is not a model of hplm; choose an empty folder")
    registry = store.registry or (_registry_of(target / LOOK_UP.name, store) if keep else "")
    counts = {
        role: count or (_instances_of(target / role) if keep else 1)
        for role, count in ((LOOK_UP.name, look_up_instances), (ENCODE.name, instances))
    }
    plot = _with_kept_settings(target / LOOK_UP.name, plot, keep)
    upper = _with_kept_settings(target / ENCODE.name, upper, keep)
    _check_store_has(replace(store, registry=registry), plot.base, plot.table)
    with artifact.replacing(target) as partial:
        settings: dict[str, LookupSettings | EncodeSettings | ManagerSettings | None] = {
            LOOK_UP.name: plot,
            ENCODE.name: upper,
            ENSEMBLE.name: None,
        }
        if manager is not None:
            if keep and not (target / MANAGER.name).is_dir():
                manager = replace(manager, base=plot.base, domain=plot.table)
            # Tenants are trained as they will be served: with the same misses, and adapters that fit the slots.
            manager = replace(
                _with_kept_settings(target / MANAGER.name, manager, keep),
                miss=plot.miss,
                reduction_factor=upper.reduction_factor,
            )
            settings |= dict.fromkeys(names(MANAGING), manager)
        for role, role_settings in settings.items():
            version = partial / role / "1"
            version.mkdir(parents=True)
            text = (share_folder("model_repository") / role / "config.pbtxt").read_text()
            if role in counts:
                text = with_instances(text, counts[role])
            (partial / role / "config.pbtxt").write_text(text)
            if role_settings is None:
                # Triton needs a version folder even for an ensemble. The file keeps it, because some tools drop empty folders.
                (version / "README").write_text(
                    "An ensemble has no files, but Triton needs the folder of its version.\n"
                )
                continue
            values = asdict(role_settings)
            values["store"] = os.path.relpath(store.root.resolve(), target / role / "1")
            values["registry"] = registry
            path = version / "settings.json"
            # A registry's URL may hold a password.
            path.touch(0o600 if registry else 0o666)
            path.write_text(json.dumps(values, indent=2) + "\n")


def write_backends(install: TritonInstall, target: Path) -> None:
    """Write a backend directory for a separate tritonserver to `target`. An earlier one is replaced.

    Its backends of hplm are links to the installed hplm. Raises DataError if `target` holds anything but backends, and
    StartError if Triton cannot start a stub from that path.
    """
    target = target.absolute()
    check_path(target, "--out")
    ours = {"python", *(path.name for path in share_folder("backends").iterdir())}
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - ours):
        raise DataError(
            f"{target} holds {sorted(foreign)[0]!r}, which is not a backend of hplm; choose an empty folder"
        )
    with artifact.replacing(target) as partial:
        assemble_backends(install, partial)


def has_manager(target: Path) -> bool:
    """Return whether an export to `target` should have the manager: if its models have it, or if it has no models."""
    return (target / MANAGER.name).is_dir() or not (target / LOOK_UP.name).is_dir()


def _check_store_has(store: Store, base: str, plot: str) -> None:
    """Refuse a store that lacks the base, or has neither a PLOT nor a domain called `plot`. Raises MissingArtifactError."""
    if not store.base(base).is_dir():
        raise MissingArtifactError(
            f"{store.root} has no base {base!r}, its bases are {', '.join(store.bases()) or 'none'}: give --base"
        )
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
    """Refuse a `reduction_factor` with narrower adapter slots than the models in `target` have. Raises ConfigError."""
    path = target / ENCODE.name / "1" / "settings.json"
    try:
        before = load_settings(EncodeSettings, path).reduction_factor
    except ConfigError:
        # No earlier settings, or unreadable ones: there is nothing to compare, and the export replaces them.
        return
    if before < reduction_factor:
        raise ConfigError(
            f"{target} has adapter slots for a reduction factor of {before}. With {reduction_factor}, tenants with adapters of "
            f"that width could not be served any more: give --reduction-factor {before} to keep the width, or "
            f"--reduction-factor {reduction_factor} to make the slots narrower"
        )


def _registry_of(folder: Path, store: Store) -> str:
    """Return the registry of an exported model if it serves the same store, so that its address need not be given again."""
    path = folder / "1" / "settings.json"
    if not path.exists():
        return ""
    before = load_settings(LookupSettings, path)
    return before.registry if (path.parent / before.store).resolve() == store.root.resolve() else ""


def _instances_of(folder: Path) -> int:
    """Return the number of processes of an exported model, 1 if there is none. Raises ConfigError if it cannot be read."""
    path = folder / "config.pbtxt"
    if not path.exists():
        return 1
    if (count := instances_in(path.read_text())) is None:
        option = "--instances" if folder.name == ENCODE.name else "--look-up-instances"
        raise ConfigError(
            f"{path}: instance_group was edited, so its number cannot be read; give the number with {option}"
        )
    return count


def _with_kept_settings(folder: Path, settings: Settings, keep: Collection[str]) -> Settings:
    """Return `settings` with the values that the model in `folder` has under the names in `keep`."""
    path = folder / "1" / "settings.json"
    if not keep or not path.exists():
        return settings
    # `load_settings` refuses a setting that this version does not know, so none is dropped silently.
    before = vars(load_settings(type(settings), path))
    return replace(settings, **{key: value for key, value in before.items() if key in keep})
