"""A store to manage, and a service over it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.manage.making import make_service, make_store
from tests.unit.hplm.manage.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with closing(Nursery()) as opened:
        yield opened


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `store` is a copy of."""
    return make_store(tmp_path_factory.mktemp("made") / "store").root


@pytest.fixture
def store(made_store: Path, tmp_path: Path) -> Store:
    """A base `tiny` with its root `general`, registered; nothing else."""
    shutil.copytree(made_store, tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For several that write at once on a busy machine: of a registry that is opened after this."""
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 60.0)


@pytest.fixture
def service(store: Store) -> Iterator[ManageService]:
    with closing(make_service(store)) as opened:
        yield opened


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store)) as opened:
        yield opened
