"""Starts the servers of a benchmark: real servers over a model repository with other settings."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from hplm.core.roles import Role, route_role, served_base, settings_path
from hplm.core.settings import LookupSettings
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.page_cache import into_page_cache

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class StageSettings:
    """Settings of the look-up stage and of the encode stage that differ from the repository's."""

    plot: Mapping[str, Any] = field(default_factory=dict)
    upper: Mapping[str, Any] = field(default_factory=dict)

    def of(self, role: Role) -> Mapping[str, Any]:
        """Return the settings of a role."""
        return self.plot if role.settings is LookupSettings else self.upper


AS_CONFIGURED = StageSettings()


def copy_repository(models: Path, copy: Path, settings: StageSettings) -> Path:
    """Copy the models of the first base, with changed settings; return the folder of the store, which is not copied."""
    for role in served_base(models).roles:
        shutil.copytree(models / role.name, copy / role.name)
        if role.settings is not None:
            values = json.loads((path := settings_path(copy, role)).read_text())
            store = (settings_path(models, role).parent / values["store"]).resolve()  # the same for both stages
            path.write_text(json.dumps({**values, "store": str(store), **settings.of(role)}, indent=2) + "\n")
    return store


@contextmanager
def benchmark_server(
    models: Path,
    settings: StageSettings = AS_CONFIGURED,
    *,
    log: str = "triton-bench.log",
    with_router: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[TritonServer]:
    """Start a server over a copy of `models` with changed settings, and wait until it is ready.

    `environment` is added to this process's environment for the server.

    The store's bank files are in the page cache. The server has no models for manage requests. `log` is a file beside `models`;
    servers that run at the same time need different logs. `with_router` adds the model that routes to the base's model.
    """
    with tempfile.TemporaryDirectory(prefix="hplm-variant-") as folder:
        copy = Path(folder) / "models"
        store = copy_repository(models, copy, settings)
        if with_router:
            served = served_base(copy)
            registry = served.settings.encode.registry
            write_model(
                copy, route_role(), {"store": str(store), "registry": registry, "models": {served.base: served.name}}
            )
        into_page_cache(store)
        with TritonServer(copy, free_ports(), log=models.parent / log, tied=True, environment=environment) as server:
            server.wait_ready()
            yield server


def on_each_server(
    models: Path,
    variants: Mapping[Name, StageSettings],
    rounds: int,
    progress: Progress,
    measure: Callable[[int, Name, TritonServer], None],
) -> None:
    """Start a fresh server for each variant, one after another, in each round, and call `measure(round, variant, server)`."""
    bar = progress.add_task("servers", total=rounds * len(variants))
    for turn in range(rounds):
        for name, settings in variants.items():
            with benchmark_server(models, settings) as server:
                measure(turn, name, server)
            progress.update(bar, advance=1)
