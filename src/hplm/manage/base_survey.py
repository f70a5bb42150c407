"""A survey of the bases of a repository: models, tenants, memory of the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hplm.core.roles import names, served_bases
from hplm.models.base_folder import read as read_base
from hplm.registry.registry import Registry
from hplm.runtime.memory import count_process_memory
from hplm.store.layout import Store


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
