"""A real server whose registry is locked for writing, gone, damaged or from tomorrow: it serves on, says so, recovers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient

from hplm import errors
from hplm.housekeeping import garbage_collection
from hplm.models import base as bases
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.registry import Registry
from tests import managed, tiny
from tests.managed import FAST, LEARNING, Place, swapped
from tests.waiting import until

pytestmark = pytest.mark.triton
SEEN_S = 2.5 * POLL_EVERY_S
DAY_S = 86_400.0
TEXT = "the red cat runs to Paris"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with managed.serving(tmp_path_factory.mktemp("damaged")) as made:
        yield made


def registry_files(place: Place) -> list[Path]:
    return sorted(place.store.root.glob("registry.sqlite*"))


@contextmanager
def locked(place: Place) -> Iterator[None]:
    with closing(sqlite3.connect(place.store.root / "registry.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


@contextmanager
def moved_away(place: Place, instead: bytes | None) -> Iterator[None]:
    """Its files elsewhere, and other bytes in their place where given."""
    aside = place.store.root.parent / "aside"
    aside.mkdir()
    names = [path.rename(aside / path.name).name for path in registry_files(place)]
    if instead is not None:
        (place.store.root / "registry.sqlite").write_bytes(instead)
    try:
        yield
    finally:
        for path in registry_files(place):
            path.unlink()
        # The database last: who opened it without its log would begin another.
        for name in reversed(names):
            (aside / name).rename(place.store.root / name)
        aside.rmdir()


def with_damaged_pages(place: Place, table: str = "") -> bytes:
    """The registry with every page but the first overwritten, or of those only the one where a table begins."""
    copy = place.store.root.parent / "copy.sqlite"
    with (
        closing(sqlite3.connect(place.store.root / "registry.sqlite")) as live,
        closing(sqlite3.connect(copy)) as other,
    ):
        live.backup(other)
        page_bytes = live.execute("PRAGMA page_size").fetchone()[0]
        first = live.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()[0] if table else 2
    whole = copy.read_bytes()
    copy.unlink()
    start = (first - 1) * page_bytes
    end = start + page_bytes if table else len(whole)
    return whole[:start] + b"\xff" * (end - start) + whole[end:]


DAMAGES: dict[str, tuple[Callable[[Place], AbstractContextManager[None]], type[errors.RegistryError]]] = {
    "locked": (locked, errors.RegistryUnavailableError),
    "gone": (lambda place: moved_away(place, None), errors.MissingRegistryError),
    "garbage": (lambda place: moved_away(place, b"not a database at all" * 1000), errors.CorruptRegistryError),
    # The first page is whole, so that it opens as a database.
    "pages": (lambda place: moved_away(place, with_damaged_pages(place)), errors.CorruptRegistryError),
    "a-page": (lambda place: moved_away(place, with_damaged_pages(place, "tenants")), errors.CorruptRegistryError),
}


def is_served(client: Client, name: str) -> bool:
    try:
        return client.predict(name, TEXT).label in ("yes", "no", "cat", "none")
    except (errors.UnknownTenantError, errors.RegistryUnavailableError):
        # Not seen yet, or by a stage that has not looked since the registry is back.
        return False


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_goes_on_with_what_it_has_says_so_and_recovers(place: Place, damage: str) -> None:
    make, error = DAMAGES[damage]
    with Client(place.url("grpc")) as client, ManageClient(place.url("grpc")) as manage:

        def answers() -> list[tuple[str, tuple[int, int]]]:
            found = [client.predict(name, TEXT) for name in tiny.TASKS]
            return [(span.label, (span.start, span.end)) for one in found for span in one.spans]

        before = answers()
        with make(place):
            time.sleep(SEEN_S)
            assert answers() == before
            with pytest.raises(error):
                manage.delete_tenant("alpha")
            assert answers() == before
        # Nothing was changed, and what is published now is served.
        made = tiny.tenant_of(bases.load(place.store.base("tiny")), f"after-{damage}", 9, like="alpha")
        tiny.publish(place.store, bases.load(place.store.base("tiny")), tiny.PLOT, made)
        until(lambda: is_served(client, f"after-{damage}"))
        assert answers() == before
        assert "alpha" in [tenant.name for tenant in manage.list_tenants()]
    with closing(Registry.open(place.store)) as registry:
        assert garbage_collection.verify(place.store, registry, time.time()).problems == ()


def test_after_a_clock_was_set_back_a_day_what_was_made_before_goes_on_and_what_is_made_after_is_served(
    place: Place,
) -> None:
    def tomorrow() -> float:
        return time.time() + DAY_S

    with Client(place.url("grpc")) as client, ManageClient(place.url("http")) as manage:
        # By path: what is uploaded today is thrown away by tomorrow's worker.
        rows = manage.on_server(place.rows.name)
        # The server's clock and the second worker's are right, which is as if the first one's were set back.
        with managed.at_work(place.store, "before", clock=tomorrow):
            manage.wait(manage.create_tenant("old", train=rows, settings=FAST))
            until(lambda: is_served(client, "old"))
        with closing(Registry.open(place.store)) as registry:
            held = manage.create_tenant("held", train=rows, settings=FAST)
            job = registry.claim_job("killed", tomorrow(), 30.0)
        assert job is not None
        assert job.id == held
        with managed.at_work(place.store, "after"):
            manage.wait(held)
            other = manage.on_server(swapped(place.rows).name)
            manage.wait(manage.update_tenant("old", train=other, settings=LEARNING))
        until(lambda: is_served(client, "held"))
        assert manage.rollback_tenant("old") == 1
        manage.delete_tenant("held")
        until(lambda: not is_served(client, "held"))
        assert is_served(client, "old")
    with closing(Registry.open(place.store)) as registry:
        assert garbage_collection.verify(place.store, registry, time.time()).problems == ()
