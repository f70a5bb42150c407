"""Writing Triton model folders: a copy of each role in `model_repository/`, with its settings beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from hplm.core.roles import (
    DEFAULT_NAME,
    ENCODE_BACKENDS,
    LOOK_UP_SUFFIX,
    MANAGER,
    RESERVED,
    ROUTE_NAME,
    Role,
    ServedBase,
    base_roles,
    cascade_role,
    check_model_name,
    dispatch_name,
    name_order,
    names,
    of_whole_base,
    route_role,
    served_base,
    served_bases,
    settings_path,
    staged_roles,
)
from hplm.core.settings import (
    EncodeSettings,
    LookupSettings,
    ManagedBase,
    ManagerSettings,
    RouteSettings,
    load_settings,
)
from hplm.errors import (
    ConfigError,
    DataError,
    MissingArtifactError,
    MissingRegistryError,
    RegistryError,
    RegistryUnavailableError,
    UnknownDomainError,
    WrongBaseError,
)
from hplm.housekeeping.removal_plan import DEFAULT_ROOT
from hplm.manage.base_survey import count_and_names, tenants_of, tenants_over
from hplm.models import base_folder
from hplm.plot import table as tables
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.backend_folder import assemble_backends, share_folder
from hplm.triton.launcher.install import TritonInstall
from hplm.triton.launcher.instances import gpus_in, instances_in
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.workarounds.shell_paths import check_path
from hplm_builder.export.stage_cut import Devices, check_can_be_cut, choose_cut

Settings = TypeVar("Settings", LookupSettings, EncodeSettings, ManagerSettings)
# All settings but the place of the store and of its registry, and the number of an encode stage.
KEEPABLE_SETTINGS = frozenset(
    field.name for kind in (LookupSettings, EncodeSettings, ManagerSettings) for field in fields(kind)
) - {"store", "registry", "stage"}


def export(
    store: Store,
    target: Path,
    plot: LookupSettings,
    upper: EncodeSettings,
    manager: ManagerSettings | None = None,
    *,
    name: str = DEFAULT_NAME,
    keep: Collection[str] = (),
    instances: int | None = None,
    look_up_instances: int | None = None,
    route: bool = False,
    gpus: Devices | None = None,
) -> None:
    """Write the models of a base, which clients call by `name`, to the repository `target` atomically.

    Earlier models of that name are replaced, and other bases stay as they are. Any other folder is refused. If `keep` names
    settings, they stay as in the earlier models of that name. So does the registry, if it is of the same store and
    `store` names none. `instances` and `look_up_instances` are the numbers of processes of the upper and look-up stages. None
    means as in the earlier models if settings are kept, else 1. If `upper` has `stage_layers`, there are as many encode
    stages, each with `instances` processes. `gpus` are those of each encode stage; None means as in the earlier models if
    settings are kept, else Triton chooses. Without `manager`, the models that create and update tenants are left out. If
    there are other bases, an earlier manager's limits are kept.

    The models that call the models of bases are written beside other bases, with `route`, or if the repository had them. They
    are the model that routes each request to its tenant's base, and the model for cascades. Their earlier limits are kept.

    The function itself sets `store` and `registry` in all settings, and what the manager's settings say about the bases. The
    path of the store is relative to the settings' folder, so that store and models can be moved together.
    Raises MissingArtifactError if the store lacks what the settings name, WrongBaseError if registry or tables do not fit the
    base, and DataError if `target` holds anything but model folders of hplm. Raises ConfigError if kept settings cannot be
    read, if the base cannot be cut as `upper` says, or if the base does not fit the bases that are there.
    """
    target = target.resolve()
    if target == share_folder("model_repository").resolve():
        raise DataError(f"{target} holds the templates of the model folders; choose another folder")
    check_model_name(name)
    there = served_bases(target)
    others = [base for base in there if base.name != name]
    _check_only_models(target, name, there)
    before = next((base for base in there if base.name == name), None)
    kept = before if keep else None
    registry = store.registry
    if kept is not None:
        look_up, encode, _ = kept.settings
        plot, upper = _with_kept(plot, look_up, keep), _with_kept(upper, encode, keep)
        if kept.store_root == store.root.resolve():
            registry = registry or look_up.registry
    registry = _shared_registry(store, registry, plot.base, others)
    is_whole = _check_store_has(replace(store, registry=registry), plot)
    folder = base_folder.read(store.base(plot.base), verify=False)
    if upper.stage_layers:
        choose_cut(store, folder, None, upper.stage_layers)
        check_can_be_cut(replace(store, registry=registry), folder)
    plot = replace(plot, stage_layers=upper.stage_layers)
    _check_weights(replace(store, registry=registry), plot.base, "" if is_whole else plot.table)

    def count_of(role: Role, wanted: int | None) -> int:
        return wanted or (_instances_of(target / role.name) if kept is not None else 1)

    # The earlier models that computed layers.
    earlier_encode = [role for role in kept.roles if role.backend in ENCODE_BACKENDS] if kept is not None else []
    # The kept number of `instances` is that of the first of them.
    computing = earlier_encode[0] if earlier_encode else base_roles(name).encode
    encode_roles = _encode_roles(name, upper.encode_stages)
    if gpus is None:
        # Kept GPUs would not fit another number of stages.
        is_same = len(earlier_encode) == len(encode_roles)
        gpus = tuple(_gpus_of(target / role.name) for role in earlier_encode) if is_same else ()
    if gpus and len(gpus) != len(encode_roles):
        raise ConfigError(
            f"GPUs of each of {len(encode_roles)} encode stages were expected, got those of {len(gpus)}: give --gpus"
        )
    gpus_of = dict(zip(names(encode_roles), gpus, strict=False))
    # The number of processes and the settings of each model.
    models: dict[Role, tuple[int | None, LookupSettings | EncodeSettings | ManagerSettings | RouteSettings | None]]
    processes = count_of(computing, instances)
    look_up_role, *others_of_base = _roles_of(name, upper.encode_stages)
    models = {look_up_role: (count_of(look_up_role, look_up_instances), plot)}
    for role in others_of_base:
        is_encode = role.backend in ENCODE_BACKENDS
        models[role] = (processes, replace(upper, stage=role.stage)) if is_encode else (None, None)
    if is_whole:
        models = {of_whole_base(role): value for role, value in models.items()}
    if manager is not None:
        earlier = _earlier_manager(target) if keep or others else None
        # Tenants are trained as they will be served: with the same misses, and adapters that fit the slots.
        own = ManagedBase(plot.table, plot.miss, upper.reduction_factor)
        if earlier is not None:
            # With other bases the limits are kept, because they are the other bases' limits too.
            manager = _with_kept(manager, earlier, KEEPABLE_SETTINGS if others else keep)
            if "domain" in keep and plot.base in earlier.managed:
                own = replace(own, domain=earlier.managed[plot.base].domain)
        managed = {base.name: (base.base, _managed(base, earlier)) for base in others}
        manager = _of_bases(manager, {**managed, name: (plot.base, own)})
        models[MANAGER] = (None, manager)
    if others or route or (target / ROUTE_NAME).is_dir():
        served = {base.base: base.name for base in others} | {plot.base: name}
        levels = _levels(others)
        if not upper.stage_layers:
            levels[plot.base] = dispatch_name(name)
        models |= {role: (None, settings) for role, settings in _calling(target, served, levels).items()}
    with artifact.replacing(target) as partial:
        _copy_models(others, partial)
        for role, (count, settings) in models.items():
            values: dict[str, Any] = {} if settings is None else asdict(settings)
            values["store"] = os.path.relpath(store.root.resolve(), target / role.name / "1")
            values["registry"] = registry
            write_model(partial, role, values, count, gpus_of.get(role.name, ()))


def _roles_of(name: str, encode_stages: int) -> Sequence[Role]:
    """Return the models of a base, the look-up stage first."""
    return staged_roles(name, encode_stages) if encode_stages > 1 else base_roles(name)


def _encode_roles(name: str, encode_stages: int) -> list[Role]:
    return [role for role in _roles_of(name, encode_stages) if role.backend in ENCODE_BACKENDS]


def delete_base(target: Path, name: str) -> None:
    """Take the models of a base out of a repository. Its artifacts stay in the store.

    Raises ConfigError if there is no such model of a base, or if it is the default base.
    """
    target = target.resolve()
    check_deletable(target, name)
    kept = [base for base in served_bases(target) if base.name != name]
    earlier = _earlier_manager(target)
    with artifact.replacing(target) as partial:
        _copy_models(kept, partial)
        if earlier is not None:
            manager = _of_bases(earlier, {base.name: (base.base, _managed(base, earlier)) for base in kept})
            write_model(partial, MANAGER, asdict(manager))
        served = {base.base: base.name for base in kept}
        for role, settings in _calling(target, served, _levels(kept)).items():
            if (target / role.name).is_dir():
                write_model(partial, role, asdict(settings))


def check_deletable(target: Path, name: str) -> None:
    """Raise ConfigError if a repository has no model `name` of a base, or if it is the default base."""
    removed, (default, *_) = served_base(target, name), served_bases(target)
    if removed == default:
        raise ConfigError(
            f"{name!r} is the default base of {target}, by which requests are answered that name no base: export another "
            f"base under this name, `hplm build export --models {target} --name {name} --base BASE --replace`, or remove the "
            "repository"
        )


def _levels(bases: Sequence[ServedBase]) -> dict[str, str]:
    """Return the model of each base that decides whether a text is re-routed. A base of several encode stages has none."""
    return {base.base: dispatch_name(base.name) for base in bases if base.encode_stages == 1}


def _calling(target: Path, served: Mapping[str, str], levels: Mapping[str, str]) -> dict[Role, RouteSettings]:
    """Return the settings of the models that call the models of bases; their limits stay as they were in `target`."""
    bases: dict[Role, dict[str, Any]] = {
        route_role(): {"models": dict(served)},
        cascade_role(): {"models": dict(served), "levels": dict(levels)},
    }
    made: dict[Role, RouteSettings] = {}
    for role, values in bases.items():
        assert role.settings is not None
        is_there = (target / role.name).is_dir()
        earlier = load_settings(role.settings, settings_path(target, role)) if is_there else None
        made[role] = role.settings(store="", **values) if earlier is None else replace(earlier, **values)
    return made


def _copy_models(bases: Sequence[ServedBase], target: Path) -> None:
    for base in bases:
        for role in base.roles:
            shutil.copytree(base.models / role.name, target / role.name)


def _earlier_manager(target: Path) -> ManagerSettings | None:
    """Return the settings of a repository's manager, None if it has none. Raises ConfigError."""
    if not (target / MANAGER.name).is_dir():
        return None
    return load_settings(ManagerSettings, settings_path(target, MANAGER))


def _managed(base: ServedBase, manager: ManagerSettings | None) -> ManagedBase:
    """Return how a manager trains for a base that a repository serves; its domain stays as the manager has it."""
    look_up, encode, _ = base.settings
    known = manager.managed.get(base.base) if manager is not None else None
    return ManagedBase(known.domain if known else look_up.table, look_up.miss, encode.reduction_factor)


def _of_bases(manager: ManagerSettings, managed: Mapping[str, tuple[str, ManagedBase]]) -> ManagerSettings:
    """Return a manager's settings for bases, given by the name of their model."""
    (base, default), *further = (managed[name] for name in sorted(managed, key=name_order))
    return replace(manager, base=base, **asdict(default), bases={base: asdict(settings) for base, settings in further})


def _check_only_models(target: Path, name: str, there: Sequence[ServedBase]) -> None:
    """Raise DataError if a repository holds anything but models of a base `name`, of the bases `there` and of all bases."""
    known = {*names(base_roles(name)), *RESERVED, *(role.name for base in there for role in base.roles)}
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - known):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is not a model of hplm; choose an empty folder")


def _shared_registry(store: Store, registry: str, base: str, others: Sequence[ServedBase]) -> str:
    """Return the registry of a base beside other bases, by default theirs. Raises ConfigError if the base does not fit."""
    for other in others:
        there = other.settings.encode
        if (root := other.store_root) != store.root.resolve():
            raise ConfigError(
                f"the bases of a repository share a store, and that of {other.name!r} is {root}: give --store {root}, or "
                "another folder with --models"
            )
        if other.base == base:
            raise ConfigError(
                f"base {base!r} is served as {other.name!r}: give --name {other.name} to change it, or another --base"
            )
        if registry and registry != there.registry:
            raise ConfigError(
                f"the bases of a repository share a registry, and {other.name!r} has another than HPLM_REGISTRY names: export "
                "without the variable, or to another folder with --models"
            )
        registry = there.registry
    return registry


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
    return (target / MANAGER.name).is_dir() or not served_bases(target)


def _check_store_has(store: Store, settings: LookupSettings) -> bool:
    """Return whether the base is whole. Refuse a store that lacks the base, or has neither a PLOT nor a domain of that name.

    Raises MissingArtifactError. Raises ConfigError for settings that a whole base cannot have.
    """
    base, plot = settings.base, settings.table
    if not store.base(base).is_dir():
        raise MissingArtifactError(
            f"{store.root} has no base {base!r}, its bases are {', '.join(store.bases()) or 'none'}: give --base"
        )
    is_whole = base_folder.is_whole(store.base(base))
    if is_whole and settings.miss != "compute":
        raise ConfigError(
            f"base {base!r} is whole: it has no tables to back off to, so leave out --miss {settings.miss}"
        )
    if plot == DEFAULT_ROOT if is_whole else store.table(plot, "root").is_dir():
        return is_whole
    try:
        with closing(Registry.open_read_only(store)) as registry:
            registry.current_domain(base, plot)
            return is_whole
    except (MissingRegistryError, UnknownDomainError):
        if is_whole:
            raise MissingArtifactError(
                f"base {base!r} is whole, and its only domain is {DEFAULT_ROOT!r}: give --plot {DEFAULT_ROOT}"
            ) from None
        raise MissingArtifactError(
            f"{store.root} has no tables {plot!r}: give --plot, or make them with `hplm build plot --base {base} --plot {plot}`"
        ) from None


def _check_weights(store: Store, base: str, plot: str) -> None:
    """Refuse a base if the registry or the tables called `plot` are of other weights. Raises WrongBaseError.

    `plot` is "" for a whole base, which has no tables.
    """
    fingerprint = base_folder.read(store.base(base), verify=False).fingerprint
    registered = fingerprint
    # The registry may be away while models are exported. Each tenant's own files are checked when they are loaded.
    nothing = (MissingRegistryError, RegistryUnavailableError, UnknownDomainError)
    with suppress(*nothing), closing(Registry.open_read_only(store)) as registry:
        registered = registry.base(base).fingerprint
    if registered != fingerprint:
        raise WrongBaseError(
            f"base {base!r} in {store.root} has other weights than those that its tenants and domains were made for: put the "
            "earlier base back, or convert the other one under another name (`hplm build base --name`)"
        )
    folder = store.table(plot, "root")
    if plot and folder.is_dir() and artifact.read(folder, tables.KIND).meta.get("base") != fingerprint:
        raise WrongBaseError(
            f"PLOT {plot!r} was built for another base than {base!r}: give --plot with a PLOT of this base, "
            f"`hplm build plot --base {base} --plot NAME` makes it"
        )


def check_adapter_width(target: Path, reduction_factor: int, name: str = DEFAULT_NAME) -> None:
    """Refuse a `reduction_factor` with narrower adapter slots than the base `name` of `target` has. Raises ConfigError."""
    try:
        before = served_base(target, name).settings.encode.reduction_factor
    except ConfigError:
        # No earlier settings, or unreadable ones: there is nothing to compare, and the export replaces them.
        return
    if before < reduction_factor:
        raise ConfigError(
            f"{target} has adapter slots for a reduction factor of {before}. With {reduction_factor}, tenants with adapters of "
            f"that width could not be served any more: give --reduction-factor {before} to keep the width, or "
            f"--reduction-factor {reduction_factor} to make the slots narrower"
        )


def check_replaced(target: Path, name: str, store: Store, base: str) -> None:
    """Refuse to export `base` as the model `name` of `target` if tenants would lose service. Raises ConfigError.

    Tenants lose service if the model serves another base, or if `store` lacks tenants that the model answers.
    """
    served = next((served for served in served_bases(target) if served.name == name), None)
    if served is None or not store.base(base).is_dir():
        return  # `export` says which bases the store has
    try:
        registry = served.settings.encode.registry
    except ConfigError:
        return  # without sound settings the model answers nobody
    is_same_store = served.store_root == store.root.resolve() and store.registry in ("", registry)
    is_same_base = served.base == base
    if is_same_base and is_same_store:
        return
    try:
        lost = set(tenants_of(served)).difference(tenants_over(store, base) if is_same_base else ())
        of_whom = count_and_names(sorted(lost))
    except RegistryError as error:
        lost, of_whom = set(), f"tenants that cannot be read ({error.code})"
    if is_same_base and not lost:
        return
    raise ConfigError(
        f"model {name!r} of {target} serves base {served.base!r} of the store {served.store_root}, and this export would "
        f"replace it and take service from {of_whom}: give --name {'NEW' if is_same_base else base} to serve base "
        f"{base!r} beside it, or --replace to take the earlier base out"
    )


def _instances_of(folder: Path) -> int:
    """Return the number of processes of an exported model, 1 if there is none. Raises ConfigError if it cannot be read."""
    path = folder / "config.pbtxt"
    if not path.exists():
        return 1
    if (count := instances_in(path.read_text())) is None:
        option = "--look-up-instances" if folder.name.endswith(LOOK_UP_SUFFIX) else "--instances"
        raise ConfigError(
            f"{path}: instance_group was edited, so its number cannot be read; give the number with {option}"
        )
    return count


def _gpus_of(folder: Path) -> tuple[int, ...]:
    """Return the GPUs that an exported model names, none if Triton chooses."""
    return gpus_in((folder / "config.pbtxt").read_text())


def _with_kept(
    settings: Settings, before: LookupSettings | EncodeSettings | ManagerSettings, keep: Collection[str]
) -> Settings:
    """Return `settings` with the values that `before` has under the names in `keep`. `before` may be of another form."""
    known = vars(settings).keys() & set(keep)
    return replace(settings, **{key: value for key, value in vars(before).items() if key in known})
