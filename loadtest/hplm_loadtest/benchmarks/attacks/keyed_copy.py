"""Serves a copy of a repository and its store with keys: attacks change tenants and keys, and must not change the original."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hplm.core.roles import MANAGER, Role, cascade_role, dispatch_name, route_role, served_bases, settings_path
from hplm.core.settings import ManagerSettings, load_settings
from hplm.errors import ConfigError
from hplm.store.layout import Store
from hplm.triton.launcher.model_folder import write_model
from hplm_loadtest.benchmarks.attacks.target import Target
from hplm_loadtest.benchmarks.serve_process import serving

REGISTRY = "registry.sqlite"


@contextmanager
def keyed_copy(models: Path) -> Iterator[Target]:
    """Run `hplm serve --keys` over a copy of a repository and its store, with all models that clients may call.

    Models for manage requests and for routing are added if the repository has none. Raises ConfigError or StartError.
    """
    with tempfile.TemporaryDirectory(prefix="hplm-attacks-") as folder:
        copy, store = copy_with_store(models, Path(folder))
        with serving(copy, Path(folder), ["--keys", "--drain-timeout=0"]) as served:
            logs = [served.folder / "triton.log", served.folder / "serve.log"]
            yield Target.prepare(served.ports, copy, store, logs)


def copy_with_store(models: Path, folder: Path) -> tuple[Path, Store]:
    """Copy a repository of one base and its store to `folder`. Return the folder of the models, and the store.

    Model folders are written anew, so that an export of an earlier hplm gets the inputs for keys. Raises ConfigError.
    """
    copy, store = folder / "models", folder / "store"
    bases = served_bases(models)
    if len(bases) != 1 or bases[0].settings.encode.registry:
        raise ConfigError(f"attacks need a repository of one base with a registry.sqlite; {models} is another")
    (base,) = bases
    original = base.store_root
    shutil.copytree(original, store, ignore=lambda _, names: [name for name in names if name.startswith(REGISTRY)])
    with closing(sqlite3.connect(original / REGISTRY)) as source, closing(sqlite3.connect(store / REGISTRY)) as target:
        source.backup(target)
    place: dict[str, Any] = {"store": str(store), "registry": ""}
    for role in base.roles:
        settings = {} if role.settings is None else json.loads(settings_path(models, role).read_text())
        write_model(copy, role, {**settings, **place})
    called = {base.base: base.name}
    levels = {base.base: dispatch_name(base.name)}
    manager = ManagerSettings(str(store), base.base, base.settings.look_up.table)
    _write_all(copy, manager, {**place, "models": called}, {**place, "models": called, "levels": levels})
    return copy, Store(store)


def _write_all(copy: Path, manager: ManagerSettings, route: dict[str, Any], cascade: dict[str, Any]) -> None:
    further: list[tuple[Role, dict[str, Any]]] = [(MANAGER, asdict(manager))]
    for role, settings in (*further, (route_role(), route), (cascade_role(), cascade)):
        write_model(copy, role, settings)
        if role.settings is not None:
            load_settings(role.settings, settings_path(copy, role))
