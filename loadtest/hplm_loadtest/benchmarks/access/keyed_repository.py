"""A repository with a registry of its own for a benchmark of keys and quotas, and servers over it that need keys."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.access.keys import new_key
from hplm.core.roles import served_base
from hplm.errors import ConfigError
from hplm.quotas.limits import Limits
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.store.layout import Store
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

    def add_keys(self, tenants: Sequence[str]) -> dict[str, str]:
        """Add a key of each tenant to the registry; return the texts of the keys by tenant."""
        keys = {tenant: new_key() for tenant in tenants}
        with closing(Registry.open(self.store)) as registry:
            for tenant, key in keys.items():
                registry.add_key(AccessKey(key.id, tenant, "infer", key.sha256(), time.time()))
        return {tenant: key.text() for tenant, key in keys.items()}

    def limit(self, tenant: str, limits: Limits) -> None:
        """Set the limits of a tenant, or of all if `tenant` is empty."""
        with closing(Registry.open(self.store)) as registry:
            registry.set_limits(tenant, limits)

    @contextmanager
    def server(self) -> Iterator[ServeProcess]:
        """Make a process of `hplm serve --keys` over a copy of the models. The caller starts it; the block's end stops it."""
        url = self.store.registry
        with tempfile.TemporaryDirectory(prefix="hplm-keyed-") as folder:
            copy = Path(folder) / "models"
            copy_repository(self.models, copy, StageSettings({"registry": url}, {"registry": url}))
            into_page_cache(self.store.root)
            served = ServeProcess(copy, Path(folder), ["--keys", "--drain-timeout=2"])
            try:
                yield served
            finally:
                served.stop()


@contextmanager
def keyed_repository(models: Path) -> Iterator[KeyedRepository]:
    """Give a repository a registry of its own, a copy in a folder that is removed at the end.

    Raises ConfigError if the repository's registry is not a file.
    """
    served = served_base(models)
    with tempfile.TemporaryDirectory(prefix="hplm-registry-") as folder:
        yield KeyedRepository(models, Store(served.store_root, copied_registry(models, Path(folder))), served.name)


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
