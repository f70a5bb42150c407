"""What a benchmark of one stage needs of a model repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hplm import config
from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import Tenant
from hplm.config import PlotSettings
from hplm.nn import base as bases
from hplm.nn.base import Base
from hplm.store.layout import Store


@dataclass(frozen=True)
class Served:
    """The store, base, PLOT and tenants behind a repository."""

    store: Store
    base: Base
    plot: PlotSettings

    def tenants(self) -> list[Tenant]:
        """All tenants with their weights."""
        names = self.store.tenant_names()
        return [tenants.load(self.store.tenant(name), fingerprint=self.base.fingerprint) for name in names]


def read(models: Path) -> Served:
    """Raises ConfigError, MissingArtifactError or CorruptArtifactError."""
    folder = models / "hbert_plot" / "1"
    settings = config.load(PlotSettings, folder / "settings.json")
    store = Store((folder / settings.store).resolve())
    return Served(store, bases.load(store.base(settings.base)), settings)


def served_names(models: Path) -> list[str]:
    """Names of all tenants that a server over this repository answers for, sorted."""
    served = read(models)
    banked = [name for folder in served.store.banks() for name in BankFile(folder, served.base.fingerprint).names]
    return sorted({*served.store.tenant_names(), *banked})


def examples(models: Path) -> list[str]:
    """The example texts of the tenants that have a folder of their own, each once."""
    store = read(models).store
    return sorted({tenants.load_card(store.tenant(name)).example for name in store.tenant_names()} - {""})
