"""Reads what a model repository serves: its store, base, settings and tenants."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hplm.adapters.bank import TenantBank, is_banked
from hplm.adapters.tenant import Tenant
from hplm.core.roles import load_serving_settings
from hplm.core.settings import LookupSettings
from hplm.engine.encode import EncodeEngine
from hplm.errors import ArtifactError, ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import choose_dtype
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.store.layout import Store

DEMO = Path("build/demo/models")


@dataclass(frozen=True)
class ServedRepository:
    """The store, the base and the look-up settings behind a model repository."""

    store: Store
    base: Base
    plot: LookupSettings

    @contextmanager
    def open_tenants(self) -> Iterator[tuple[TenantBank, list[ServedTenant]]]:
        """Open the bank of tenants; yield it with all tenants that a server over this repository answers, sorted by name."""
        with closing(Catalog(self.store, self.plot.base)) as catalog:
            tenants = sorted(catalog.served(), key=lambda tenant: tenant.name)
            yield TenantBank(self.store, catalog, self.base.fingerprint), tenants

    def load_tenants(self, count: int) -> list[Tenant]:
        """Load the first `count` tenants of single texts; tenants with a folder of their own come before banked tenants.

        Raises ConfigError if all tenants take pairs of texts.
        """
        with self.open_tenants() as (bank, tenants):
            single = (tenant for tenant in sorted(tenants, key=self.is_banked) if not _takes_pairs(bank, tenant))
            loaded = [bank.load(tenant) for tenant in islice(single, count)]
        if tenants and not loaded:
            raise _all_take_pairs(self.store.root)
        return loaded

    def engine(self, tenants: Sequence[Tenant], device: torch.device, **settings: Any) -> EncodeEngine:
        """Make an engine of the upper layers with a slot for each of the tenants. `settings`: see `EncodeEngine`."""
        return EncodeEngine(
            self.base.config,
            self.base.load_upper(),
            reduced_size=max(tenant.packed.reduced_size for tenant in tenants),
            device=device,
            **{"num_slots": len(tenants) + 1, "dtype": choose_dtype("auto", device), **settings},
        )

    def is_banked(self, tenant: ServedTenant) -> bool:
        """Return whether a tenant is in a bank file and has no folder of its own."""
        return is_banked(self.store, self.store.path(tenant.path))


def read_repository(models: Path, name: str | None = None) -> ServedRepository:
    """Open the store and the base of a repository's model `name`, by default of its first base.

    Raises ConfigError, MissingArtifactError or CorruptArtifactError.
    """
    settings, _, folder = load_serving_settings(models, name)
    store = Store((folder / settings.store).resolve(), settings.registry)
    return ServedRepository(store, bases.load(store.base(settings.base)), settings)


def single_text_tenants(models: Path, name: str | None = None) -> list[str]:
    """Return the names of the tenants of single texts of a repository's model `name`, by default of its first base, sorted.

    Benchmarks send single texts. Tenants of pairs are left out with a warning, because they would refuse a single text. Raises
    ConfigError if there are only tenants of pairs.
    """
    single, pairs = tenants_by_texts(models, name)
    if pairs and not single:
        raise _all_take_pairs(models)
    if pairs:
        logging.getLogger(__name__).warning(
            "%d tenants of pairs get no requests: benchmarks are of single texts", len(pairs)
        )
    return single


def tenants_by_texts(models: Path, name: str | None = None) -> tuple[list[str], list[str]]:
    """Return the names of the tenants of a repository's base, sorted: those of single texts, and those of pairs."""
    names: tuple[list[str], list[str]] = [], []
    with read_repository(models, name).open_tenants() as (bank, tenants):
        for tenant in tenants:
            names[_takes_pairs(bank, tenant)].append(tenant.name)
    return names


def _all_take_pairs(place: Path) -> ConfigError:
    return ConfigError(f"all tenants of {place} are of pairs, and benchmarks are of single texts")


def _takes_pairs(bank: TenantBank, tenant: ServedTenant) -> bool:
    try:
        return bank.card(tenant).texts == 2
    except ArtifactError:
        # A damaged tenant counts as single: the answers to its requests name the fault.
        return False


def example_texts(models: Path) -> list[str]:
    """Return the different example texts of the tenants that have a folder of their own."""
    served = read_repository(models)
    with served.open_tenants() as (bank, tenants):
        return sorted({bank.card(tenant).example for tenant in tenants if not served.is_banked(tenant)} - {""})
