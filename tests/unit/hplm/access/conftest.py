"""A registry with two tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import publish, publish_root


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store, create=True)) as opened:
        root = publish_root(opened)
        for name in ("films", "news"):
            publish(opened, name, root)
        yield opened
