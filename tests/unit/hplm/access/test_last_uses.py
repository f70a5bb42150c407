"""Last uses of keys on their way from serving processes to the registry."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hplm.access.key_ring import KeyRing
from hplm.access.keys import new_key
from hplm.access.last_uses import WRITE_EVERY_S, LastUseCollector, LastUseWriter
from hplm.errors import ForbiddenError
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.waiting import until

NOW_S = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    return made


def add(registry: Registry) -> str:
    key = new_key()
    registry.add_key(AccessKey(key.id, "films", "infer", key.sha256(), NOW_S))
    return key.id


def test_what_a_process_writes_is_recorded_in_the_registry(folder: Path, store: Store, registry: Registry) -> None:
    key_id, clock = add(registry), Clock()
    writer, collector = LastUseWriter(folder, clock), LastUseCollector(folder, store)
    clock.now_s += WRITE_EVERY_S
    writer.add({key_id: NOW_S + 1})
    collector.collect()
    assert registry.key(key_id).last_used_s == NOW_S + 1
    assert list(folder.iterdir()) == []
    collector.close()


def test_a_file_that_was_not_taken_yet_is_not_overwritten_and_nothing_is_lost(
    folder: Path, store: Store, registry: Registry
) -> None:
    first, second, clock = add(registry), add(registry), Clock()
    writer = LastUseWriter(folder, clock)
    for key_id in (first, second):
        clock.now_s += WRITE_EVERY_S
        writer.add({key_id: NOW_S})
    with closing(LastUseCollector(folder, store)) as collector:
        collector.collect()
        assert [registry.key(key_id).last_used_s for key_id in (first, second)] == [NOW_S, None]
        clock.now_s += WRITE_EVERY_S
        writer.add({})
        collector.collect()
    assert registry.key(second).last_used_s == NOW_S


def test_a_process_writes_now_and_then_and_not_at_every_use(folder: Path) -> None:
    clock = Clock()
    writer = LastUseWriter(folder, clock)
    writer.add({"k": NOW_S})
    assert list(folder.iterdir()) == []


def test_a_damaged_file_is_removed_and_the_others_count(folder: Path, store: Store, registry: Registry) -> None:
    key_id, clock = add(registry), Clock()
    writer = LastUseWriter(folder, clock)
    clock.now_s += WRITE_EVERY_S
    writer.add({key_id: NOW_S})
    (folder / "1.uses").write_text("[")
    with closing(LastUseCollector(folder, store)) as collector:
        collector.collect()
    assert registry.key(key_id).last_used_s == NOW_S
    assert list(folder.iterdir()) == []


def test_a_key_ring_writes_the_uses_of_its_keys(
    folder: Path, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hplm.access.last_uses.WRITE_EVERY_S", 0.0)
    key, other = new_key(), new_key()
    for one in (key, other):
        registry.add_key(AccessKey(one.id, "films", "infer", one.sha256(), NOW_S))
    with closing(KeyRing(store, folder=folder)) as ring, closing(LastUseCollector(folder, store)) as collector:
        ring.start()
        ring.check(key.text().encode(), "films")
        with pytest.raises(ForbiddenError):
            ring.check(other.text().encode(), "news")

        def is_recorded() -> bool:
            collector.collect()
            return registry.key(key.id).last_used_s is not None

        until(is_recorded)
    assert registry.key(other.id).last_used_s is None
