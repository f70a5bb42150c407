"""How an export cuts the encode stage into several stages, and on which cores or GPUs each of them computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from hplm.errors import ConfigError, MissingRegistryError, RegistryUnavailableError
from hplm.models.base_folder import BaseFolder
from hplm.placement.partition import balanced_cut, even_cut
from hplm.profiles.profile_store import read_profiles
from hplm.registry.registry import Registry
from hplm.store.layout import Store

# Cores or GPUs of each stage.
Devices = tuple[tuple[int, ...], ...]


def parse_cut(text: str) -> tuple[int, ...]:
    """Parse `--cut`: the number of layers of each stage, with commas between. Raises ConfigError."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ConfigError(
            f"--cut: the number of layers of each stage was expected, such as 3,3, got {text!r}"
        ) from None


def parse_devices(option: str, text: str) -> Devices:
    """Parse `--cores` or `--gpus`: numbers with commas within a stage and colons between stages. Raises ConfigError."""
    try:
        devices = tuple(tuple(map(int, stage.split(","))) for stage in text.split(":"))
    except ValueError:
        devices = ()
    if not devices or min(map(min, devices)) < 0:
        raise ConfigError(
            f"{option}: numbers with commas within a stage and colons between stages were expected, such as 0,1:2,3, got "
            f"{text!r}"
        )
    if len(set().union(*devices)) < sum(map(len, devices)):
        raise ConfigError(f"{option}: each number may be there once, because stages compute side by side, got {text!r}")
    return devices


def choose_cut(
    store: Store, base: BaseFolder, stages: int | None, cut: Sequence[int] | None
) -> tuple[tuple[int, ...], str]:
    """Return the number of layers of each of `stages` stages, and words that say where the cut comes from.

    A given `cut` counts. Else the newest profile of the base's weights decides, so that the slowest stage is as quick as
    possible. Without a profile the cut is even. The cut is empty for a single stage.
    Raises ConfigError if the base has too few layers, or if `cut` does not fit `stages` or the base.
    """
    name, layers = base.config.name, base.config.upper_layers
    if cut is not None:
        if stages is not None and stages != len(cut):
            raise ConfigError(f"--cut has {len(cut)} stages and --stages is {stages}: give one of them")
        stages = len(cut)
        if min(cut) < 1 or sum(cut) != layers:
            raise ConfigError(
                f"--cut: base {name} has {layers} layers that an encode stage computes, so stages of 1 layer or more with "
                f"{layers} in all were expected, got {','.join(map(str, cut))}"
            )
    if stages is None or stages == 1:
        return (), ""
    if stages > layers:
        raise ConfigError(
            f"--stages: base {name} has {layers} layers that an encode stage computes, so 1 to {layers} stages were "
            f"expected, got {stages}"
        )
    if cut is not None:
        return tuple(cut), "as --cut says"
    for profile in read_profiles(store, name):
        if profile.conditions.fingerprint == base.fingerprint and profile.layers:
            largest = max(profile.layers, key=lambda timing: timing.texts * timing.tokens)
            return balanced_cut(largest.ms, stages), f"by the layers' times in the profile of {profile.measured_at}"
    return even_cut(
        layers, stages
    ), "evenly, because there is no profile of the base: `hplm profile --models MODELS --name NAME` measures it"


def check_can_be_cut(store: Store, base: BaseFolder) -> None:
    """Refuse to cut the encode stage of a base that cannot have several. Raises ConfigError.

    Students want all layers in one process. So does a level of a cascade, which must know the importance of tokens.
    """
    name = base.config.name
    if base.is_trunk:
        raise ConfigError(
            f"base {name} is a trunk, whose students want all layers in one process: leave out --stages, or plan with "
            "--max-stages 1"
        )
    with suppress(MissingRegistryError, RegistryUnavailableError), closing(Registry.open_read_only(store)) as registry:
        plans = registry.changes_since(0).plans
        for tenant, plan in plans.items():
            if any(level.base == name for level in plan.levels):
                raise ConfigError(
                    f"base {name} is a level of the cascade of tenant {tenant!r}, and a level wants all layers in one process: "
                    "leave out --stages, or plan with --max-stages 1"
                )
