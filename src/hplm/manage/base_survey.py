"""A survey of the bases of a repository: models, tenants, memory of the processes, and tenants that lose service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hplm.core.roles import ServedBase, names, served_bases
from hplm.errors import MissingRegistryError
from hplm.models.base_folder import read as read_base
from hplm.registry.registry import Registry
from hplm.runtime.memory import count_process_memory
from hplm.store.layout import Store

# Names of tenants that a message shows at most.
SHOWN_NAMES = 5


def survey_bases(models: Path, store: Store, registry: Registry, processes: Mapping[str, Sequence[int]]) -> list[Any]:
    """Return the bases of the repository `models` as plain values, the default base first.

    `processes` are the numbers of the processes of each model. Raises ConfigError, MissingArtifactError or RegistryError.
    """
    tenants: Counter[str] = Counter()
    for (base, _), count in registry.tenants_by_domain().items():
        tenants[base] += count
    survey = []
    for served in served_bases(models):
        folder = read_base(store.base(served.base), verify=False)
        survey.append(
            {
                "model": served.name,
                "base": served.base,
                "kind": folder.kind,
                "tenants": tenants[served.base],
                "process_bytes": {
                    model: sum(map(count_process_memory, processes[model]))
                    for model in names(served.roles)
                    if model in processes
                },
                "trunk_of": folder.trunk_of,
            }
        )
    return survey


def tenants_of(served: ServedBase) -> list[str]:
    """Return the sorted names of the tenants that a base of a repository answers. Raises ConfigError or RegistryError."""
    return tenants_over(Store(served.store_root, served.settings.encode.registry), served.base)


def tenants_over(store: Store, base: str) -> list[str]:
    """Return the sorted names of the tenants that a store has over a base, none without a registry. Raises RegistryError."""
    with suppress(MissingRegistryError), closing(Registry.open_read_only(store)) as registry:
        return sorted(tenant.name for tenant in registry.changes_since(0).published if tenant.base == base)
    return []


def count_and_names(tenants: Sequence[str]) -> str:
    """Return the number of tenants and the first names, in words."""
    shown = ", ".join(tenants[:SHOWN_NAMES])
    more = f" and {len(tenants) - SHOWN_NAMES:,} more" if len(tenants) > SHOWN_NAMES else ""
    return (
        f"{len(tenants):,} {'tenant' if len(tenants) == 1 else 'tenants'} ({shown}{more})" if tenants else "no tenant"
    )


def unserved_bases(models: Path) -> list[str]:
    """Return a line for each base of a repository's store that has tenants and no model: the cause, and what to do.

    Raises ConfigError or RegistryError.
    """
    bases = served_bases(models)
    if not bases:
        return []
    root, served = bases[0].store_root, {each.base for each in bases}
    counts: Counter[str] = Counter()
    with closing(Registry.open_read_only(Store(root, bases[0].settings.encode.registry))) as registry:
        for (base, _), count in registry.tenants_by_domain().items():
            counts[base] += count
        tables = {domain.base: domain.name for domain in registry.domains() if domain.parent is None}
    return [
        f"{count:,} tenants of base {base!r} have no model in {models}, so a server that starts over it answers them with "
        f"UNKNOWN_TENANT: `hplm build export --base {base} --plot {tables[base]} --name {base} --store {root} "
        f"--models {models}` serves the base beside the others"
        for base, count in sorted(counts.items())
        if count and base not in served
    ]
