"""A store whose registry is SQLite, with a base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, put_base, put_plot


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store, create=True)) as opened:
        yield opened


@pytest.fixture
def base(store: Store) -> str:
    """Fingerprint of base `b`, which has the PLOT `general`."""
    fingerprint = put_base(store)
    put_plot(store, "general", fingerprint)
    return fingerprint


@pytest.fixture
def root(store: Store, registry: Registry, base: str) -> DomainVersion:
    registry.publish_base("b", base, "bases/b", NOW_S)
    return registry.publish_domain("b", "general", "plots/general", NOW_S, parent_id=None, about={}, expected=None)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers wait long for each other, because several write at once on a busy machine."""
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 60.0)
