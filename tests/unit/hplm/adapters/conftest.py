"""A store with the tiny tenants, and a bank over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.adapters.bank import TenantBank
from hplm.models.base import Base
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.adapters.place import Place


@pytest.fixture
def store(tmp_path: Path, tiny_base: Base) -> Store:
    made = Store(tmp_path)
    tiny.name_root(made, tiny_base)
    for seed, name in enumerate(tiny.TASKS, 1):
        tiny.make_tenant(made, tiny_base, name, seed)
    return made


@pytest.fixture
def place(store: Store, tiny_base: Base) -> Iterator[Place]:
    forgotten: list[ServedTenant] = []
    with closing(Catalog(store, "tiny", on_forgotten=forgotten.extend)) as catalog:
        yield Place(catalog, TenantBank(store, catalog, tiny_base.fingerprint), forgotten)
