"""A registry on each database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.postgres import PostgresServer
from tests.unit.hplm.registry.making import publish_root


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store whose registry is on either database, not made yet."""
    if request.param == "sqlite":
        return Store(tmp_path / "store")
    server: PostgresServer = request.getfixturevalue("postgres")
    server.clear()
    return Store(tmp_path / "store", server.url)


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For several that write at once on a busy machine: of a registry that is opened after this."""
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 60.0)
    monkeypatch.setattr("hplm.registry.database.POSTGRES_OPTIONS", "-c lock_timeout=60s -c timezone=UTC")


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store, create=True)) as opened:
        yield opened


@pytest.fixture
def root(registry: Registry) -> DomainVersion:
    """The root domain `general` of base `b`."""
    return publish_root(registry)
