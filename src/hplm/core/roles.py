"""The catalogue of roles: the Triton models of a repository, and what each of them needs.

A repository serves one or more bases. Clients call a base by NAME. NAME is an ensemble of two further models, NAME_plot and
NAME_upper. NAME_dispatch, a level of a cascade, is another ensemble of both. NAME_upper_1, NAME_upper_2 and so on take the
place of NAME_upper if the encode stage is cut into several stages; then there is no NAME_dispatch. The models for manage
requests are there once, for all bases, and only in a repository that is managed while it serves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hplm.core.names import check_name_of
from hplm.core.settings import (
    CascadeSettings,
    EncodeSettings,
    LookupSettings,
    ManagerSettings,
    RouteSettings,
    load_settings,
)
from hplm.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """A Triton model, in a folder of its name.

    `backend` is its folder in `backends/`; None for an ensemble. `settings` is the class of its settings file; None for an
    ensemble. `needs` are the names of the models that an ensemble calls. `template` is its folder in `model_repository/`,
    which is named as the model if it is empty. An encode stage is number `stage` of the base's `stages` encode stages.
    """

    name: str
    backend: str | None = None
    settings: type[Any] | None = None
    needs: tuple[str, ...] = ()
    template: str = ""
    stage: int = 1
    stages: int = 1


class BaseRoles(NamedTuple):
    """The models that serve one base, in loading order. The models that an ensemble calls stand before the ensemble."""

    look_up: Role
    encode: Role
    ensemble: Role
    dispatch: Role


# The name by which clients call a base if the export names none.
DEFAULT_NAME = "hbert"
LOOK_UP_SUFFIX, ENCODE_SUFFIX, DISPATCH_SUFFIX = "_plot", "_upper", "_dispatch"
# Backends whose processes compute layers of bases. `layers` is an encode stage before the last.
ENCODE_BACKENDS = ("layers", "upper")


def base_roles(name: str = DEFAULT_NAME) -> BaseRoles:
    """Return the models of a base that clients call by `name`."""
    look_up = Role(f"{name}{LOOK_UP_SUFFIX}", "plot", LookupSettings, template=f"{DEFAULT_NAME}{LOOK_UP_SUFFIX}")
    encode = Role(f"{name}{ENCODE_SUFFIX}", "upper", EncodeSettings, template=f"{DEFAULT_NAME}{ENCODE_SUFFIX}")
    needs = (look_up.name, encode.name)
    dispatch = Role(dispatch_name(name), needs=needs, template=f"{DEFAULT_NAME}{DISPATCH_SUFFIX}")
    return BaseRoles(look_up, encode, Role(name, needs=needs, template=DEFAULT_NAME), dispatch)


def staged_roles(name: str, stages: int) -> tuple[Role, ...]:
    """Return the models of a base with `stages` encode stages, two or more, that clients call by `name`, in loading order.

    An encode stage of several has the importance of tokens in its own layers alone. So such a base is no level of a cascade.
    """
    look_up, encode, ensemble, _ = base_roles(name)
    parts = []
    for stage in range(1, stages + 1):
        backend, which = ("layers", "first" if stage == 1 else "middle") if stage < stages else ("upper", "last")
        part = replace(encode, name=f"{encode.name}_{stage}", backend=backend, template=f"{encode.template}_{which}")
        parts.append(replace(part, stage=stage, stages=stages))
    return (look_up, *parts, replace(ensemble, needs=(look_up.name, *names(parts))))


def dispatch_name(name: str = DEFAULT_NAME) -> str:
    """Return the model that is a level of a cascade, of a base of two stages that clients call by `name`."""
    return f"{name}{DISPATCH_SUFFIX}"


MANAGER = Role("manager", "manager", ManagerSettings)
# The model that routes a request to the base of its tenant.
ROUTE_NAME = "hplm"
# The model that does the same, and answers a tenant with a plan by several bases.
CASCADE_NAME = "cascade"
# The models that call the models of bases. They are loaded last and unloaded first.
CALLING = (ROUTE_NAME, CASCADE_NAME)
# Names of models that a repository has once, for all bases.
RESERVED = frozenset({MANAGER.name, *CALLING})
_STAGE = re.compile(f".*({LOOK_UP_SUFFIX}|{ENCODE_SUFFIX}(_[0-9]+)?)")
_PART = re.compile(f"{_STAGE.pattern}|.*{DISPATCH_SUFFIX}")


def route_role() -> Role:
    """Return the model that routes a request to the base of its tenant."""
    return Role(ROUTE_NAME, "route", RouteSettings)


def cascade_role() -> Role:
    """Return the model that answers a request by the levels of its tenant."""
    return Role(CASCADE_NAME, "cascade", CascadeSettings)


def of_whole_base(role: Role) -> Role:
    """Return a role as it serves a whole base: the stages send each other ids and types of tokens, not hidden states.

    Encode stages behind the first have no such tensor, so they are the same for both kinds of bases.
    """
    return role if role.stage > 1 else replace(role, template=f"{role.template or role.name}_whole")


def names(roles: Iterable[Role]) -> tuple[str, ...]:
    """Return the names of models."""
    return tuple(role.name for role in roles)


def settings_path(models: Path, role: Role) -> Path:
    """Return the settings file of a role's model in a repository."""
    return models / role.name / "1" / "settings.json"


def check_model_name(name: str) -> None:
    """Check a name by which clients shall call a base. Raises ConfigError if it is invalid, or means another model."""
    check_name_of("--name", name)
    if name in RESERVED or _PART.fullmatch(name):
        endings = f"{LOOK_UP_SUFFIX}, {ENCODE_SUFFIX}, {ENCODE_SUFFIX}_NUMBER or {DISPATCH_SUFFIX}"
        raise ConfigError(
            f"--name: {name!r} cannot be the model of a base: {', '.join(sorted(RESERVED))} are other models, and names of "
            f"a base's further models end with {endings}; choose another name"
        )


class ServingSettings(NamedTuple):
    """The settings by which a repository serves a base, and the folder that paths in them are relative to.

    `encode` are those of the first encode stage. Those of further encode stages differ in `stage` alone.
    """

    look_up: LookupSettings
    encode: EncodeSettings
    folder: Path


@dataclass(frozen=True)
class ServedBase:
    """A base that a repository serves: the name of the model that clients call, and its roles in loading order."""

    models: Path
    name: str
    roles: tuple[Role, ...]

    @property
    def encode_stages(self) -> int:
        """The number of encode stages that a text passes one after another."""
        return max(role.stages for role in self.roles)

    @cached_property
    def settings(self) -> ServingSettings:
        """The settings of the base's models, read when they are first needed. Raises ConfigError."""
        look_up, encode = self.roles[:2]
        path = settings_path(self.models, encode)
        settings = load_settings(EncodeSettings, path)
        return ServingSettings(
            load_settings(LookupSettings, settings_path(self.models, look_up)), settings, path.parent
        )

    @property
    def base(self) -> str:
        """The name of the base in its store. Raises ConfigError."""
        return self.settings.encode.base

    @property
    def store_root(self) -> Path:
        """The folder of the store. Raises ConfigError."""
        return (self.settings.folder / self.settings.encode.store).resolve()


def name_order(name: str) -> tuple[bool, str]:
    """Return the sort key of names of bases' models: `hbert` first, then by name."""
    return name != DEFAULT_NAME, name


def served_bases(models: Path) -> tuple[ServedBase, ...]:
    """Return the bases of a repository by the name of their model, `hbert` first. The first is the default base.

    Reads which folders there are, and no settings. A folder that holds no model of a base is left out.
    """
    try:
        folders = {path.name for path in models.iterdir()}
    except OSError:
        return ()
    found = []
    for name in sorted(folders - RESERVED, key=name_order):
        stages = base_roles(name)
        if folders.issuperset(names(stages[:3])):
            # An export of an earlier hplm has no `dispatch`. Its encode stage says so when it is loaded.
            found.append(ServedBase(models, name, tuple(role for role in stages if role.name in folders)))
        elif folders.issuperset(names(staged_roles(name, 2))):
            parts = {
                int(part[1])
                for each in folders
                if (part := re.fullmatch(f"{re.escape(name + ENCODE_SUFFIX)}_([0-9]+)", each))
            }
            found.append(ServedBase(models, name, staged_roles(name, max(parts))))
    return tuple(found)


def served_base(models: Path, name: str | None = None) -> ServedBase:
    """Return the base that clients call by `name`, by default the first. Raises ConfigError, which names the bases there."""
    found = served_bases(models)
    for base in found:
        if name in (None, base.name):
            return base
    if name is None:
        raise ConfigError(f"{models} has no models of a base: `hplm build export --models {models}` writes them")
    there = ", ".join(base.name for base in found) or "none"
    raise ConfigError(f"{models} has no model {name!r} of a base; its models of bases are: {there}")


def load_serving_settings(models: Path, name: str | None = None) -> ServingSettings:
    """Read the settings of a base of a repository, by default of the first. Raises ConfigError."""
    return served_base(models, name).settings


def models_of(repository: Path) -> tuple[str, ...]:
    """Return the models of a repository of hplm, in the order to load them."""
    serving = [role.name for base in served_bases(repository) for role in base.roles]
    return (*serving, *(name for name in (MANAGER.name, *CALLING) if (repository / name).is_dir()))


def unload_order(models: Collection[str]) -> tuple[set[str], set[str], set[str]]:
    """Return loaded models in three groups. A model may call models of later groups, so it is unloaded before them."""
    calling = set(CALLING).intersection(models)
    stages = {name for name in models if _STAGE.fullmatch(name)}
    return calling, set(models) - calling - stages, stages
