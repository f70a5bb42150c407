"""Loads policies by name: those of hplm, and others from the entry point group `hplm.policies`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from hplm.errors import ConfigError
from hplm.scheduling.policies import Das, Edf, Fcfs, Sjf, SlottedDas
from hplm.scheduling.policy import Policy

GROUP = "hplm.policies"
BUILT_IN: dict[str, Callable[..., Policy]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "edf": Edf,
    "das": Das,
    "slotted_das": SlottedDas,
}


def load_policy(name: str, settings: Mapping[str, Any]) -> Policy:
    """Make a policy with its settings. Raises ConfigError for an unknown policy or settings that do not fit."""
    added = {point.name: point for point in entry_points(group=GROUP)}
    if name in BUILT_IN:
        make = BUILT_IN[name]
    elif name in added:
        try:
            make = added[name].load()
        except Exception as error:
            raise ConfigError(f"policy {name!r} ({added[name].value}) cannot be imported: {error}") from error
    else:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join([*BUILT_IN, *sorted(added)])}")
    try:
        policy = make(**settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"policy_settings of {name!r}: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "select", None)):
        raise ConfigError(f"policy {name!r} has no select(waiting, now_s, budget)")
    return policy
