"""The catalogue of roles: the Triton models of a repository, and what each of them needs.

A base is served by three models that are named after it: NAME_plot, NAME_upper and the ensemble NAME that clients call.
The models for manage requests are there once, and only in a repository that is managed while it serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings


@dataclass(frozen=True)
class Role:
    """A Triton model, in a folder of its name.

    `backend` is its folder in `backends/`; None for an ensemble. `settings` is the class of its settings file; None for an
    ensemble. `needs` are the names of the models that an ensemble calls.
    """

    name: str
    backend: str | None = None
    settings: type[Any] | None = None
    needs: tuple[str, ...] = ()


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
MANAGER = Role("manager", "manager", ManagerSettings)
# Triton answers a decoupled model over gRPC streaming only, so watching a job is a model of its own.
MANAGER_WATCH = Role("manager_watch", "manager", ManagerSettings)
MANAGING = (MANAGER, MANAGER_WATCH)


def names(roles: Iterable[Role]) -> tuple[str, ...]:
    """Return the names of models."""
    return tuple(role.name for role in roles)
