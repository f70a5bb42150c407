"""What a benchmark of one stage needs of a model repository."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hplm import config
from hplm.adapters.bank import TenantBank, is_banked
from hplm.adapters.tenant import Tenant
from hplm.config import PlotSettings
from hplm.errors import ArtifactError, ConfigError
from hplm.nn import base as bases
from hplm.nn.base import Base
from hplm.store.catalog import Catalog
from hplm.store.layout import Store
from hplm.store.records import ServedTenant

DEMO = Path("build/demo/models")


@dataclass(frozen=True)
class Served:
    """The store, base, PLOT and tenants behind a repository."""

    store: Store
    base: Base
    plot: PlotSettings

    def published(self) -> list[ServedTenant]:
        """All tenants that a server over this repository answers for, sorted by name."""
        with closing(Catalog(self.store, self.plot.base)) as catalog:
            return sorted(catalog.served(), key=lambda one: one.name)

    def some(self, count: int) -> list[Tenant]:
        """The first tenants of single texts with their weights, those with a folder of their own before those in a bank.

        Raises ConfigError where all are of pairs.
        """
        with closing(Catalog(self.store, self.plot.base)) as catalog:
            bank = TenantBank(self.store, catalog, self.base.fingerprint)
            found = sorted(self.published(), key=lambda one: is_banked(self.store, self.store.path(one.path)))
            of_single_texts = (one for one in found if not _is_of_pairs(bank, one))
            members = [bank.load(one) for one in islice(of_single_texts, count)]
        if found and not members:
            raise _all_of_pairs(self.store.root)
        return members

    def tenants(self) -> list[Tenant]:
        """Those that have a folder of their own, with their weights."""
        with closing(Catalog(self.store, self.plot.base)) as catalog:
            bank = TenantBank(self.store, catalog, self.base.fingerprint)
            own = [one for one in self.published() if not is_banked(self.store, self.store.path(one.path))]
            return [bank.load(one) for one in own]


def read(models: Path) -> Served:
    """Raises ConfigError, MissingArtifactError or CorruptArtifactError."""
    folder = models / "hbert_plot" / "1"
    settings = config.load(PlotSettings, folder / "settings.json")
    store = Store((folder / settings.store).resolve(), settings.registry)
    return Served(store, bases.load(store.base(settings.base)), settings)


def served_names(models: Path) -> list[str]:
    """Names of the tenants that a server over this repository answers single texts for, sorted.

    Loads are of single texts: tenants of pairs, which would refuse them, are left out, with a warning. Raises ConfigError
    where there are no others.
    """
    served = read(models)
    published = served.published()
    with closing(Catalog(served.store, served.plot.base)) as catalog:
        bank = TenantBank(served.store, catalog, served.base.fingerprint)
        names = [one.name for one in published if not _is_of_pairs(bank, one)]
    if published and not names:
        raise _all_of_pairs(models)
    if left_out := len(published) - len(names):
        logging.getLogger(__name__).warning("%d tenants of pairs get no requests: loads are of single texts", left_out)
    return names


def _all_of_pairs(where: Path) -> ConfigError:
    return ConfigError(f"all tenants of {where} are of pairs, and loads are of single texts")


def _is_of_pairs(bank: TenantBank, tenant: ServedTenant) -> bool:
    try:
        return bank.card(tenant).texts == 2
    except ArtifactError:
        # Its requests will say what is wrong with it.
        return False


def examples(models: Path) -> list[str]:
    """The example texts of the tenants that have a folder of their own, each once."""
    return sorted({tenant.card.example for tenant in read(models).tenants()} - {""})
