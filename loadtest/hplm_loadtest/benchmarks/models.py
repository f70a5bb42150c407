"""What a benchmark of one stage needs of a model repository."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hplm.adapters.bank import TenantBank, is_banked
from hplm.adapters.tenant import Tenant
from hplm.core.roles import LOOK_UP
from hplm.core.settings import LookupSettings, load_settings
from hplm.errors import ArtifactError, ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.store.layout import Store

DEMO = Path("build/demo/models")


@dataclass(frozen=True)
class Served:
    """The store, base, PLOT and tenants behind a repository."""

    store: Store
    base: Base
    plot: LookupSettings

    @contextmanager
    def opened(self) -> Iterator[tuple[TenantBank, list[ServedTenant]]]:
        """All tenants that a server over this repository answers for, sorted by name, and what reads them."""
        with closing(Catalog(self.store, self.plot.base)) as catalog:
            found = sorted(catalog.served(), key=lambda one: one.name)
            yield TenantBank(self.store, catalog, self.base.fingerprint), found

    def some(self, count: int) -> list[Tenant]:
        """The first tenants of single texts with their weights, those with a folder of their own before those in a bank.

        Raises ConfigError where all are of pairs.
        """
        with self.opened() as (bank, found):
            of_single_texts = (one for one in sorted(found, key=self.is_banked) if not _is_of_pairs(bank, one))
            members = [bank.load(one) for one in islice(of_single_texts, count)]
        if found and not members:
            raise _all_of_pairs(self.store.root)
        return members

    def is_banked(self, tenant: ServedTenant) -> bool:
        """Whether a tenant has no folder of its own."""
        return is_banked(self.store, self.store.path(tenant.path))


def read(models: Path) -> Served:
    """Raises ConfigError, MissingArtifactError or CorruptArtifactError."""
    folder = models / LOOK_UP.name / "1"
    settings = load_settings(LookupSettings, folder / "settings.json")
    store = Store((folder / settings.store).resolve(), settings.registry)
    return Served(store, bases.load(store.base(settings.base)), settings)


def served_names(models: Path) -> list[str]:
    """Names of the tenants that a server over this repository answers single texts for, sorted.

    Benchmarks are of single texts: tenants of pairs, which would refuse them, are left out, with a warning. Raises ConfigError
    where there are no others.
    """
    names, of_pairs = names_by_texts(models)
    if of_pairs and not names:
        raise _all_of_pairs(models)
    if of_pairs:
        logging.getLogger(__name__).warning(
            "%d tenants of pairs get no requests: benchmarks are of single texts", len(of_pairs)
        )
    return names


def names_by_texts(models: Path) -> tuple[list[str], list[str]]:
    """Names of the tenants that a server over this repository answers, sorted: those of single texts, those of pairs."""
    names: tuple[list[str], list[str]] = [], []
    with read(models).opened() as (bank, published):
        for one in published:
            names[_is_of_pairs(bank, one)].append(one.name)
    return names


def _all_of_pairs(where: Path) -> ConfigError:
    return ConfigError(f"all tenants of {where} are of pairs, and benchmarks are of single texts")


def _is_of_pairs(bank: TenantBank, tenant: ServedTenant) -> bool:
    try:
        return bank.card(tenant).texts == 2
    except ArtifactError:
        # Its requests will say what is wrong with it.
        return False


def examples(models: Path) -> list[str]:
    """The example texts of the tenants that have a folder of their own, each once."""
    served = read(models)
    with served.opened() as (bank, found):
        return sorted({bank.card(one).example for one in found if not served.is_banked(one)} - {""})
