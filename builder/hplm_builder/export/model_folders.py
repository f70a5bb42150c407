"""Writing Triton model folders: a copy of each role in `model_repository/`, with its settings beside it."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from hplm.core.roles import (
    ENCODE,
    ENSEMBLE,
    FUSED,
    LOOK_UP,
    MANAGER,
    MANAGING,
    SERVING,
    Role,
    load_serving_settings,
    names,
    serving_roles,
    settings_path,
)
from hplm.core.settings import (
    EncodeSettings,
    FusedSettings,
    LookupSettings,
    ManagerSettings,
    fused_values,
    load_settings,
)
from hplm.errors import ConfigError, DataError, MissingArtifactError, MissingRegistryError, UnknownDomainError
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.backend_folder import assemble_backends, share_folder
from hplm.triton.launcher.install import TritonInstall
from hplm.triton.launcher.instances import instances_in
from hplm.triton.launcher.model_folder import write_model
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
    fused: bool | None = None,
) -> None:
    """Write the model folders to `target` atomically. Earlier model folders are replaced, anything else there is refused.

    If `keep` names settings, they stay as in the earlier folders. So does the registry, if it is of the same store and
    `store` names none. `instances` and `look_up_instances` are the numbers of processes of the upper and look-up stages. If
    `fused`, one model does the work of both stages in `instances` processes; its settings are those of `upper`, and those of
    `plot` that FusedSettings has besides. None for these three means as in the earlier folders if settings are kept, else one
    process of each of two stages. Without `manager`, the models that create and update tenants are left out.

    The function itself sets `store` and `registry` in all settings, and `miss` and `reduction_factor` in the manager's. The
    path of the store is relative to the settings' folder, so that store and models can be moved together.
    Raises MissingArtifactError if the store lacks what the settings name, ConfigError if kept settings cannot be read or a
    fused model should have look-up processes, and DataError if `target` holds anything but model folders of hplm.
    """
    target = target.resolve()
    if target == share_folder("model_repository").resolve():
        raise DataError(f"{target} holds the templates of the model folders; choose another folder")
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - {*names(SERVING), *names(MANAGING)}):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is not a model of hplm; choose an empty folder")
    before = serving_roles(target)
    is_kept = bool(keep) and (target / ENSEMBLE.name).is_dir()
    if fused is None:
        fused = is_kept and FUSED in before
    if fused and look_up_instances is not None:
        raise ConfigError("a fused model has no processes that only look up: leave out --look-up-instances")
    registry = store.registry
    if is_kept:
        kept = load_serving_settings(target)
        plot, upper = _with_kept(plot, kept.look_up, keep), _with_kept(upper, kept.encode, keep)
        if (kept.folder / kept.look_up.store).resolve() == store.root.resolve():
            registry = registry or kept.look_up.registry
    _check_store_has(replace(store, registry=registry), plot.base, plot.table)

    def count_of(role: Role, wanted: int | None) -> int:
        return wanted or (_instances_of(target / role.name) if is_kept else 1)

    # The number of processes and the settings of each model.
    models: dict[Role, tuple[int | None, LookupSettings | EncodeSettings | ManagerSettings | None]]
    if fused:
        of_both = FusedSettings(**fused_values(vars(plot), vars(upper)))
        models = {FUSED: (count_of(FUSED if FUSED in before else ENCODE, instances), of_both)}
    else:
        models = {
            LOOK_UP: (count_of(LOOK_UP, look_up_instances), plot),
            ENCODE: (count_of(FUSED if FUSED in before else ENCODE, instances), upper),
            ENSEMBLE: (None, None),
        }
    if manager is not None:
        if keep and not (target / MANAGER.name).is_dir():
            manager = replace(manager, base=plot.base, domain=plot.table)
        elif keep:
            manager = _with_kept(manager, load_settings(ManagerSettings, settings_path(target, MANAGER)), keep)
        # Tenants are trained as they will be served: with the same misses, and adapters that fit the slots.
        manager = replace(manager, miss=plot.miss, reduction_factor=upper.reduction_factor)
        models |= dict.fromkeys(MANAGING, (None, manager))
    with artifact.replacing(target) as partial:
        for role, (count, settings) in models.items():
            values: dict[str, Any] = {} if settings is None else asdict(settings)
            values["store"] = os.path.relpath(store.root.resolve(), target / role.name / "1")
            values["registry"] = registry
            write_model(partial, role, values, count)


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
    return (target / MANAGER.name).is_dir() or not (target / ENSEMBLE.name).is_dir()


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
    try:
        before = load_serving_settings(target).encode.reduction_factor
    except ConfigError:
        # No earlier settings, or unreadable ones: there is nothing to compare, and the export replaces them.
        return
    if before < reduction_factor:
        raise ConfigError(
            f"{target} has adapter slots for a reduction factor of {before}. With {reduction_factor}, tenants with adapters of "
            f"that width could not be served any more: give --reduction-factor {before} to keep the width, or "
            f"--reduction-factor {reduction_factor} to make the slots narrower"
        )


def _instances_of(folder: Path) -> int:
    """Return the number of processes of an exported model, 1 if there is none. Raises ConfigError if it cannot be read."""
    path = folder / "config.pbtxt"
    if not path.exists():
        return 1
    if (count := instances_in(path.read_text())) is None:
        option = "--look-up-instances" if folder.name == LOOK_UP.name else "--instances"
        raise ConfigError(
            f"{path}: instance_group was edited, so its number cannot be read; give the number with {option}"
        )
    return count


def _with_kept(
    settings: Settings, before: LookupSettings | EncodeSettings | ManagerSettings, keep: Collection[str]
) -> Settings:
    """Return `settings` with the values that `before` has under the names in `keep`. `before` may be of another form."""
    known = vars(settings).keys() & set(keep)
    return replace(settings, **{key: value for key, value in vars(before).items() if key in known})
