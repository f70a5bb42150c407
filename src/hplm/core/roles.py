"""The catalogue of roles: the Triton models of a repository, and what each of them needs.

Clients call a base by NAME. NAME is an ensemble of two further models, NAME_plot and NAME_upper, or one fused model.
The models for manage requests are there once, and only in a repository that is managed while it serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hplm.core.settings import EncodeSettings, FusedSettings, LookupSettings, ManagerSettings, load_settings


@dataclass(frozen=True)
class Role:
    """A Triton model, in a folder of its name.

    `backend` is its folder in `backends/`; None for an ensemble. `settings` is the class of its settings file; None for an
    ensemble. `needs` are the names of the models that an ensemble calls. `template` is its folder in `model_repository/`,
    which is named as the model if it is empty.
    """

    name: str
    backend: str | None = None
    settings: type[Any] | None = None
    needs: tuple[str, ...] = ()
    template: str = ""


class BaseRoles(NamedTuple):
    """The models that serve one base, in loading order. The models that an ensemble calls stand before the ensemble."""

    look_up: Role
    encode: Role
    ensemble: Role


def base_roles(name: str = "hbert") -> BaseRoles:
    """Return the models of a base that clients call by `name`."""
    look_up = Role(f"{name}_plot", "plot", LookupSettings)
    encode = Role(f"{name}_upper", "upper", EncodeSettings)
    return BaseRoles(look_up, encode, Role(name, needs=(look_up.name, encode.name)))


SERVING = base_roles()
LOOK_UP, ENCODE, ENSEMBLE = SERVING
# The other form of a base: clients call it by the same name.
FUSED = Role(ENSEMBLE.name, "fused", FusedSettings, template=f"{ENSEMBLE.name}_fused")
MANAGER = Role("manager", "manager", ManagerSettings)
# Triton answers a decoupled model over gRPC streaming only, so watching a job is a model of its own.
MANAGER_WATCH = Role("manager_watch", "manager", ManagerSettings)
MANAGING = (MANAGER, MANAGER_WATCH)


def names(roles: Iterable[Role]) -> tuple[str, ...]:
    """Return the names of models."""
    return tuple(role.name for role in roles)


def settings_path(models: Path, role: Role) -> Path:
    """Return the settings file of a role's model in a repository."""
    return models / role.name / "1" / "settings.json"


def is_fused(models: Path) -> bool:
    """Return whether a repository serves its base by one fused model. An ensemble has no settings."""
    return settings_path(models, FUSED).is_file()


def serving_roles(models: Path) -> tuple[Role, ...]:
    """Return the roles that serve the base of a repository, in loading order."""
    return (FUSED,) if is_fused(models) else SERVING


class ServingSettings(NamedTuple):
    """The settings by which a repository serves its base, and the folder that paths in them are relative to."""

    look_up: LookupSettings
    encode: EncodeSettings
    folder: Path


def load_serving_settings(models: Path) -> ServingSettings:
    """Read the settings of either form of a repository. Raises ConfigError."""
    if is_fused(models):
        path = settings_path(models, FUSED)
        fused = load_settings(FusedSettings, path)
        return ServingSettings(fused.look_up, fused, path.parent)
    path = settings_path(models, ENCODE)
    encode = load_settings(EncodeSettings, path)
    return ServingSettings(load_settings(LookupSettings, settings_path(models, LOOK_UP)), encode, path.parent)
