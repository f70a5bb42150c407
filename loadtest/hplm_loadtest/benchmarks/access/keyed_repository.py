"""A repository with a registry of its own for a benchmark of keys and quotas, and servers over it that need keys."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.access.keys import Key, new_key
from hplm.core.roles import served_base
from hplm.errors import ConfigError
from hplm.housekeeping.garbage_collection import adopt
from hplm.quotas.limits import Limits
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.instances import with_instances
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, copy_repository
from hplm_loadtest.benchmarks.page_cache import into_page_cache
from hplm_loadtest.benchmarks.serve_process import ServeProcess

# Seconds after a change of keys or limits at which every stage goes by it: two polls, and one that is late.
KNOWN_S = 1.0


@dataclass(frozen=True)
class KeyedRepository:
    """The models of a repository's first base over its store, with another registry. `model` is the model of the base."""

    models: Path
    store: Store
    model: str

    def new_keys(self, tenants: Sequence[str]) -> list[Key]:
        """Add a key of each tenant to the registry, and return the keys in order."""
        keys = [new_key() for _ in tenants]
        with closing(Registry.open(self.store)) as registry:
            for tenant, key in zip(tenants, keys, strict=True):
                registry.add_key(AccessKey(key.id, tenant, "infer", key.sha256(), time.time()))
        return keys

    def add_keys(self, tenants: Sequence[str]) -> dict[str, str]:
        """Add a key of each tenant; return their texts by tenant."""
        return {tenant: key.text() for tenant, key in zip(tenants, self.new_keys(tenants), strict=True)}

    def revoke(self, key: Key) -> None:
        """Revoke a key."""
        with closing(Registry.open(self.store)) as registry:
            registry.revoke_key(key.id, time.time())

    def limit(self, tenant: str, limits: Limits) -> None:
        """Set the limits of a tenant, or of all if `tenant` is empty."""
        with closing(Registry.open(self.store)) as registry:
            registry.set_limits(tenant, limits)

    @contextmanager
    def server(self, look_up_instances: int | None = None) -> Iterator[ServeProcess]:
        """Make a process of `hplm serve --keys` over a copy of the models. The caller starts it; the block's end stops it.

        None for `look_up_instances` means as the repository has it.
        """
        url = self.store.registry
        with tempfile.TemporaryDirectory(prefix="hplm-keyed-") as folder:
            copy = Path(folder) / "models"
            copy_repository(self.models, copy, StageSettings({"registry": url}, {"registry": url}))
            if look_up_instances is not None:
                config = copy / served_base(copy).roles[0].name / "config.pbtxt"
                config.write_text(with_instances(config.read_text(), look_up_instances))
            into_page_cache(self.store.root)
            served = ServeProcess(copy, Path(folder), ["--keys", "--drain-timeout=2"])
            try:
                yield served
            finally:
                served.stop()


@contextmanager
def keyed_repository(models: Path, registry: str = "") -> Iterator[KeyedRepository]:
    """Give a repository a registry of its own: by default a copy in a folder that is removed at the end.

    `registry` is the URL of an empty database, into which the newest version of everything in the store is registered.
    Raises ConfigError if that database is not empty, or if there is none and the repository's registry is not a file.
    """
    served = served_base(models)
    with tempfile.TemporaryDirectory(prefix="hplm-registry-") as folder:
        if registry:
            store = Store(served.store_root, registry)
            _fill(store)
        else:
            store = Store(served.store_root, copied_registry(models, Path(folder)))
        yield KeyedRepository(models, store, served.name)


def copied_registry(models: Path, folder: Path) -> str:
    """Copy the registry of a repository to `folder`; return the copy's URL. Raises ConfigError if it is not a file."""
    served = served_base(models)
    original = served.store_root / "registry.sqlite"
    if served.settings.encode.registry or not original.is_file():
        raise ConfigError(
            f"this benchmark copies the file of a registry, and {served.store_root} has no registry.sqlite"
        )
    copy = folder / "registry.sqlite"
    with closing(sqlite3.connect(original)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return f"sqlite:///{copy}"


def _fill(store: Store) -> None:
    with closing(Registry.open(store, create=True)) as opened:
        if opened.tenant_count():
            raise ConfigError("--registry: the database has tenants; give an empty database")
        adopt(store, opened, time.time())
