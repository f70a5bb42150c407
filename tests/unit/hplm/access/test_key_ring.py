"""The keys that serving follows."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from hplm.access.key_ring import KeyRing
from hplm.access.keys import Key, new_key
from hplm.errors import ForbiddenError, MissingRegistryError
from hplm.registry.access.keys import AccessKey
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.registry import Registry
from hplm.store.layout import Store

NOW_S = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(store: Store, registry: Registry, clock: Clock) -> Iterator[KeyRing]:
    with closing(KeyRing(store, unix_clock=clock)) as opened:
        yield opened


def add(registry: Registry, tenant: str | None, role: str = "infer", expires_s: float | None = None) -> Key:
    key = new_key()
    registry.add_key(AccessKey(key.id, tenant, role, key.sha256(), NOW_S, expires_s))
    return key


def raw(key: Key) -> bytes:
    return key.text().encode()


def test_a_key_opens_its_own_tenant(ring: KeyRing, registry: Registry) -> None:
    key = add(registry, "films")
    ring.refresh()
    assert ring.check(raw(key), "films") == key.id
    assert ring.check(b" " + raw(key) + b"\n", "films") == key.id


def test_every_wrong_key_is_refused_with_the_same_words(ring: KeyRing, registry: Registry, clock: Clock) -> None:
    good = add(registry, "films")
    revoked, expired = add(registry, "films"), add(registry, "films", expires_s=NOW_S + 60)
    operator = add(registry, None, "admin")
    registry.revoke_key(revoked.id, NOW_S)
    ring.refresh()
    clock.now_s += 60
    wrong_secret = Key(good.id, new_key().secret)
    attempts = [
        (raw(good), "news"),
        (raw(good), "nobody"),
        (raw(wrong_secret), "films"),
        (raw(new_key()), "films"),
        (raw(revoked), "films"),
        (raw(expired), "films"),
        (raw(operator), "films"),
        (b"", "films"),
        (raw(good)[:-1], "films"),
        (b"\xff" * 65, "films"),
    ]
    said = set()
    for key, tenant in attempts:
        with pytest.raises(ForbiddenError) as caught:
            ring.check(key, tenant)
        said.add(caught.value.wire())
    assert said == {"FORBIDDEN: the key is missing, or is not valid for this tenant"}


def test_no_secret_is_in_an_error_a_traceback_or_what_python_prints(ring: KeyRing, registry: Registry) -> None:
    key = add(registry, "films")
    ring.refresh()
    shown = f"{ring!r} {ring}" + repr(registry.key(key.id))
    try:
        ring.check(raw(key), "news")
    except ForbiddenError as error:
        shown += "".join(traceback.format_exception(error))
    assert key.secret.decode() not in shown
    assert key.sha256().hex() not in shown
    assert repr(key.sha256()) not in shown


def test_a_key_expires_at_its_time(ring: KeyRing, registry: Registry, clock: Clock) -> None:
    key = add(registry, "films", expires_s=NOW_S + 60)
    ring.refresh()
    clock.now_s += 59.9
    ring.check(raw(key), "films")
    clock.now_s += 0.1
    with pytest.raises(ForbiddenError):
        ring.check(raw(key), "films")


def test_a_manage_key_also_infers_and_an_infer_key_does_not_manage(ring: KeyRing, registry: Registry) -> None:
    infer, manage = add(registry, "films"), add(registry, "films", "manage")
    ring.refresh()
    ring.check(raw(manage), "films", "infer")
    ring.check(raw(manage), "films", "manage")
    with pytest.raises(ForbiddenError):
        ring.check(raw(infer), "films", "manage")


def test_the_holder_of_a_key_is_found_whatever_the_key_is_for(ring: KeyRing, registry: Registry) -> None:
    operator, tenant = add(registry, None, "read"), add(registry, "films")
    ring.refresh()
    assert (ring.holder(raw(operator)).role, ring.holder(raw(operator)).tenant) == ("read", None)
    assert ring.holder(raw(tenant)).tenant == "films"
    with pytest.raises(ForbiddenError, match="not valid for this action"):
        ring.holder(raw(new_key()))


def test_the_keys_of_a_deleted_tenant_do_not_open_a_later_tenant_of_its_name(ring: KeyRing, registry: Registry) -> None:
    key = add(registry, "films")
    ring.refresh()
    ring.check(raw(key), "films")
    version = registry.tenant("films").current
    domain = registry.current_domain("b", "general")
    registry.delete_tenant("films", NOW_S)
    registry.publish_tenant("films", domain.id, version.path, NOW_S, about={}, number=2, expected=None)
    ring.refresh()
    with pytest.raises(ForbiddenError):
        ring.check(raw(key), "films")


def test_two_servers_hear_of_a_revocation_by_their_next_poll(store: Store, registry: Registry) -> None:
    key = add(registry, "films")
    with closing(KeyRing(store)) as first, closing(KeyRing(store)) as second:
        for ring in (first, second):
            ring.start()
            ring.check(raw(key), "films")
        registry.revoke_key(key.id, NOW_S)
        for ring in (first, second):
            wait_until(lambda ring=ring: is_refused(ring, key))  # type: ignore[misc]


def is_refused(ring: KeyRing, key: Key) -> bool:
    try:
        ring.check(raw(key), "films")
    except ForbiddenError:
        return True
    return False


def wait_until(is_true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(POLL_EVERY_S / 4)


def test_a_registry_that_cannot_be_read_leaves_the_known_keys_valid(store: Store, registry: Registry) -> None:
    key = add(registry, "films")
    with closing(KeyRing(store)) as ring:
        path = store.root / "registry.sqlite"
        path.rename(path.with_suffix(".away"))
        ring.start()
        wait_until(lambda: ring.failures > 0)
        ring.check(raw(key), "films")
        path.with_suffix(".away").rename(path)
        registry.revoke_key(key.id, NOW_S)
        wait_until(lambda: is_refused(ring, key))


def test_a_registry_made_anew_without_keys_leaves_the_known_keys_valid(store: Store, registry: Registry) -> None:
    key = add(registry, "films")
    with closing(KeyRing(store)) as ring:
        (store.root / "registry.sqlite").rename(store.root / "old")
        for ending in ("-wal", "-shm"):
            (store.root / f"registry.sqlite{ending}").unlink(missing_ok=True)
        with closing(Registry.open(store, create=True)):
            ring.start()
            wait_until(lambda: ring.failures > 0)
            ring.check(raw(key), "films")


def test_without_a_registry_there_is_no_key_ring(store: Store) -> None:
    with pytest.raises(MissingRegistryError):
        KeyRing(store)


def test_a_key_that_another_process_accepted_is_gone_once_it_is_revoked_or_expired(
    ring: KeyRing, registry: Registry, clock: Clock
) -> None:
    revoked, expiring = add(registry, "films"), add(registry, "films", expires_s=NOW_S + 60)
    assert not ring.is_gone(revoked.id, clock.now_s)  # the ring has not heard of it yet
    clock.now_s += 1
    ring.refresh()
    assert not ring.is_gone(revoked.id, clock.now_s)
    accepted_s = clock.now_s
    registry.revoke_key(revoked.id, NOW_S)
    clock.now_s += 59
    ring.refresh()
    assert ring.is_gone(revoked.id, accepted_s)
    assert ring.is_gone(expiring.id, accepted_s)


def test_last_uses_are_taken_once_and_refused_keys_are_not_among_them(
    ring: KeyRing, registry: Registry, clock: Clock
) -> None:
    used, refused = add(registry, "films"), add(registry, "news")
    ring.refresh()
    clock.now_s += 5
    ring.check(raw(used), "films")
    with pytest.raises(ForbiddenError):
        ring.check(raw(refused), "films")
    assert ring.take_last_uses() == {used.id: NOW_S + 5}
    assert ring.take_last_uses() == {}


def test_checks_from_several_threads_while_keys_change(ring: KeyRing, registry: Registry) -> None:
    kept = add(registry, "films")
    ring.refresh()
    refused = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                ring.check(raw(kept), "films")
            except ForbiddenError as error:
                refused.append(error)
            ring.take_last_uses()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        other = add(registry, "films")
        ring.refresh()
        registry.revoke_key(other.id, NOW_S)
        ring.refresh()
    is_over.set()
    for thread in threads:
        thread.join()
    assert refused == []
