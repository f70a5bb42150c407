"""Keys in the registry, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.access.keys import Key, new_key
from hplm.errors import BadManageRequestError, UnknownKeyError, UnknownTenantError
from hplm.registry.access import keys as registry_keys
from hplm.registry.access.keys import KEEP_S, AccessKey
from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish


@pytest.fixture(autouse=True)
def tenants(registry: Registry, root: DomainVersion) -> None:
    for name in ("films", "news"):
        publish(registry, name, root)


def record(key: Key, tenant: str | None = "films", role: str = "infer", now_s: float = NOW_S) -> AccessKey:
    return AccessKey(key.id, tenant, role, key.sha256(), now_s)


def add(registry: Registry, tenant: str | None = "films", role: str = "infer", now_s: float = NOW_S) -> AccessKey:
    added = record(new_key(), tenant, role, now_s)
    registry.add_key(added)
    return added


def test_a_key_is_kept_as_it_was_added(registry: Registry) -> None:
    key = add(registry)
    assert registry.key(key.id) == key
    assert registry.access_keys() == [key]


def test_keys_are_listed_by_pages_and_by_tenant(registry: Registry) -> None:
    added = sorted((add(registry, tenant) for tenant in ("films", "news", "films", None)), key=lambda key: key.id)
    assert registry.access_keys(limit=2) == added[:2]
    assert registry.access_keys(after=added[1].id) == added[2:]
    assert registry.access_keys(tenant="films") == [key for key in added if key.tenant == "films"]


def test_no_secret_is_in_any_file_of_the_registry(tmp_path: Path) -> None:
    store = Store(tmp_path / "other")
    registry = Registry.open(store, create=True)
    key = new_key()
    registry.add_key(record(key, None, "admin"))
    registry.close()
    files = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert any(key.id.encode() in raw for raw in files)
    assert not any(key.secret in raw for raw in files)


def test_a_key_for_a_tenant_that_does_not_exist_is_refused(registry: Registry) -> None:
    with pytest.raises(UnknownTenantError):
        add(registry, "nobody")


def test_each_change_raises_the_generation_and_is_heard_of_once(registry: Registry) -> None:
    before = registry.generation()
    key = add(registry)
    changes = registry.keys_since(before)
    assert (changes.keys, changes.full) == ((key,), False)
    registry.revoke_key(key.id, NOW_S + 1)
    (revoked,) = registry.keys_since(changes.generation).keys
    assert (revoked.id, revoked.revoked_s) == (key.id, NOW_S + 1)
    assert registry.keys_since(registry.generation()).keys == ()


def test_another_registrys_generation_gets_all_keys(registry: Registry) -> None:
    key = add(registry)
    for generation in (0, 1, registry.generation() + 1):
        changes = registry.keys_since(generation)
        assert (changes.keys, changes.full) == ((key,), True)


def test_revoking_twice_keeps_the_first_time_and_an_unknown_key_is_said(registry: Registry) -> None:
    key = add(registry)
    assert registry.revoke_key(key.id, NOW_S + 1).revoked_s == NOW_S + 1
    generation = registry.generation()
    assert registry.revoke_key(key.id, NOW_S + 2).revoked_s == NOW_S + 1
    assert registry.generation() == generation
    with pytest.raises(UnknownKeyError, match="there is no key 'x'"):
        registry.revoke_key("x", NOW_S)
    with pytest.raises(UnknownKeyError):
        registry.key("x")


def test_the_keys_of_a_tenant_go_with_the_tenant_and_those_of_others_stay(registry: Registry) -> None:
    gone, kept, operator = add(registry, "films"), add(registry, "news"), add(registry, None, "admin")
    before = registry.generation()
    registry.delete_tenant("films", NOW_S + 5)
    assert registry.key(gone.id).revoked_s == NOW_S + 5
    assert registry.key(kept.id).revoked_s is None
    assert registry.key(operator.id).revoked_s is None
    assert [key.id for key in registry.keys_since(before).keys] == [gone.id]


def test_the_keys_of_a_tenant_that_leaves_one_of_its_bases_stay(registry: Registry) -> None:
    registry.publish_base("c", "print", "bases/c", NOW_S)
    root = registry.publish_domain("c", "general", "plots/c", NOW_S, parent_id=None, about={}, expected=None)
    number = registry.next_number("films")
    registry.publish_tenant("films", root.id, "p", NOW_S, about={}, number=number, expected=None)
    key = add(registry, "films")
    registry.delete_tenant("films", NOW_S, base="c")
    assert registry.key(key.id).revoked_s is None


def test_last_uses_are_recorded_and_never_go_back(registry: Registry) -> None:
    first, second = add(registry), add(registry)
    generation = registry.generation()
    registry.note_key_uses({first.id: NOW_S + 9, "unknown": NOW_S})
    registry.note_key_uses({first.id: NOW_S + 5, second.id: NOW_S + 7})
    registry.note_key_uses({})
    assert [registry.key(key.id).last_used_s for key in (first, second)] == [NOW_S + 9, NOW_S + 7]
    assert registry.generation() == generation


def test_a_tenant_has_a_bounded_number_of_keys(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_keys, "MOST_KEYS", 2)
    first, _ = add(registry), add(registry)
    with pytest.raises(BadManageRequestError, match="tenant 'films' has 2 keys already"):
        add(registry)
    add(registry, "news")
    registry.revoke_key(first.id, NOW_S)
    add(registry)


def test_a_key_that_was_revoked_or_expired_a_year_ago_is_forgotten(registry: Registry) -> None:
    revoked, kept = add(registry), add(registry)
    expired = new_key()
    registry.add_key(AccessKey(expired.id, None, "read", expired.sha256(), NOW_S, NOW_S + 1))
    registry.revoke_key(revoked.id, NOW_S)
    later = add(registry, now_s=NOW_S + KEEP_S + 2)
    assert {key.id for key in registry.access_keys()} == {kept.id, later.id}
