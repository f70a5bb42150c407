"""A store of tenants for the tests of this folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hplm.adapters.bank import TenantBank
from hplm.adapters.tenant import Tenant
from hplm.models.base import Base
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.store.layout import Store
from tests import tiny


@dataclass(frozen=True)
class Place:
    """A bank over a catalog that the test refreshes. `forgotten` are the tenant versions that the catalog dropped."""

    catalog: Catalog
    bank: TenantBank
    forgotten: list[ServedTenant]

    def load(self, name: str) -> Tenant:
        self.catalog.refresh()
        return self.bank.load(self.bank.resolve(name.encode()))


def pack_all(store: Store, base: Base) -> Path:
    """Move all tenants of the store into a bank file."""
    members = [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)]
    folder = tiny.make_bank(store, base, members)
    shutil.rmtree(store.root / "tenants")
    return folder
