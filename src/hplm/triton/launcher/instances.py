"""How many processes (instances) of a model run side by side, in a config.pbtxt that hplm wrote, and in a repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hplm.core.roles import ENCODE_BACKENDS, served_bases
from hplm.errors import ConfigError

_COUNT = re.compile(r"\bcount: (\d+) kind")
_GPUS = re.compile(r"\bkind: KIND_GPU gpus: \[([ 0-9,]+)\]")


def with_instances(config: str, count: int) -> str:
    """Return the text of a config.pbtxt with `count` instances. Raises ConfigError if hplm did not write its groups."""
    changed, groups = _COUNT.subn(f"count: {count} kind", config)
    if groups != 1:
        raise ConfigError(
            f"config.pbtxt should have one instance group as hplm writes it, and has {groups}: write it again with "
            "`hplm build export --models MODELS --keep-settings --name NAME`"
        )
    return changed


def with_gpus(config: str, gpus: Sequence[int]) -> str:
    """Return the text of a config.pbtxt with its instances on each of these GPUs; none: on each GPU, or without one."""
    return (
        config.replace("kind: KIND_AUTO", f"kind: KIND_GPU gpus: [ {', '.join(map(str, gpus))} ]") if gpus else config
    )


def gpus_in(config: str) -> tuple[int, ...]:
    """Return the GPUs that a config.pbtxt names, none if it does not say."""
    named = _GPUS.search(config)
    return () if named is None else tuple(map(int, named[1].split(",")))


def instances_in(config: str) -> int | None:
    """Return the number of instances in a config.pbtxt, None if its groups were changed by hand."""
    counts = _COUNT.findall(config)
    return int(counts[0]) if len(counts) == 1 else None


def count_encode_processes(models: Path) -> int:
    """Return how many processes of a repository compute upper layers: those of all its bases together.

    A model whose groups were changed by hand counts as one process.
    """
    computing = [role for base in served_bases(models) for role in base.roles if role.backend in ENCODE_BACKENDS]
    return sum(instances_in((models / role.name / "config.pbtxt").read_text()) or 1 for role in computing)


def count_sharing_processes(version_folder: Path, instances: int) -> int:
    """Return how many processes share a server's cores with a model of an encode stage, its own `instances` included.

    They are those of every base of its repository; `version_folder` is MODELS/MODEL/VERSION. A base that comes later does not
    change the share of processes that run already.
    """
    return max(instances, count_encode_processes(version_folder.parents[1]))
