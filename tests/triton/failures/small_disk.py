"""`python -m tests.triton.failures.small_disk DISK` in a mount namespace of its own: a real server on a disk of a few MB.

Mounts a disk at DISK for the store, the models and Triton's log, fills it twice, then makes it read-only.
"""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient

from hplm.errors import RegistryError, StoreUnavailableError, UnknownTenantError
from hplm.housekeeping import garbage_collection
from hplm.jobs.lease import JobTimings
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import Ports, free_ports
from hplm.triton.launcher.server import TritonServer
from tests import managed, tiny
from tests.limits import full, mount
from tests.managed import FAST, swapped
from tests.waiting import until

DISK_BYTES = 64 << 20
REFUSALS = (StoreUnavailableError, RegistryError)
TIMINGS = JobTimings(lease_s=1.0, renew_every_s=0.2, report_every_s=0.1)
# Long enough for the disk to be full in the midst of it.
LONG = {"epochs": 300, "patience": 300, "learning_rates": [0.003]}
LATER_S = 200_000.0
TEXT = "the red cat runs to Paris"


class Users:
    """Who ask and manage one server, over HTTP and over gRPC."""

    def __init__(self, ports: Ports, stack: ExitStack) -> None:
        urls = (ports.http_url, ports.grpc_url)
        self.clients = [stack.enter_context(Client(url)) for url in urls]
        self.managers = [stack.enter_context(ManageClient(url)) for url in urls]

    def answers(self, *tenants: str) -> list[tuple[object, ...]]:
        found = [client.predict(tenant, TEXT) for client in self.clients for tenant in (*tiny.TASKS, *tenants)]
        return [(span.label, round(span.score, 4), span.start, span.end) for one in found for span in one.spans]

    def are_refused(self, rows: Path) -> None:
        """Whatever would write."""
        for manager in self.managers:
            with pytest.raises(REFUSALS):
                manager.upload(rows)
            with pytest.raises(REFUSALS):
                manager.delete_tenant("alpha")

    def is_served(self, tenant: str) -> bool:
        with suppress(UnknownTenantError):
            return all(client.predict(tenant, TEXT).label for client in self.clients)
        return False


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def fill_it(disk: Path, ports: Ports, store: Store, rows: Path) -> None:
    with ExitStack() as stack, closing(Registry.open(store)) as registry, managed.at_work(store, timings=TIMINGS):
        users = Users(ports, stack)
        manager = users.managers[0]
        before = users.answers()
        with full(disk):
            users.are_refused(rows)
            assert users.answers() == before
        manager.wait(manager.create_tenant("acme", train=manager.upload(rows), settings=FAST))
        until(lambda: users.is_served("acme"))
        before, other = users.answers("acme"), swapped(rows)
        job = manager.update_tenant("acme", train=manager.upload(other), settings=LONG)
        until(lambda: manager.show_job(job).progress > 0)
        with full(disk):
            time.sleep(2)
            assert registry.job(job).state != "done"
            assert users.answers("acme") == before
        # The same worker goes on when there is room.
        manager.wait(job)
        assert manager.show_tenant("acme").version == 2
        manager.wait(manager.create_tenant("late", train=manager.upload(rows), settings=FAST))
        until(lambda: users.is_served("late"))
    with closing(Registry.open(store)) as registry:
        assert garbage_collection.verify(store, registry, time.time()).problems == ()
        garbage_collection.collect(store, registry, time.time() + LATER_S)
        assert garbage_collection.verify(store, registry, time.time() + LATER_S) == garbage_collection.Verdict((), ())


def make_it_read_only(disk: Path, ports: Ports, rows: Path) -> None:
    with ExitStack() as stack:
        users = Users(ports, stack)
        answers, files = users.answers("acme"), digests(disk)
        users.are_refused(rows)
        for manager in users.managers:
            assert [tenant.name for tenant in manager.list_tenants("acme")] == ["acme"]
            with pytest.raises(REFUSALS):
                manager.rollback_tenant("acme")
            # What reads meanwhile must not spoil the next write.
            manager.show_tenant("acme")
        assert users.answers("acme") == answers
        assert digests(disk) == files
        mount(disk, "remount,rw")
        users.managers[0].delete_tenant("acme")
        until(lambda: not users.is_served("acme"))


def main(disk: Path) -> None:
    mount(disk, f"size={DISK_BYTES}")
    with managed.serving(disk) as place:
        fill_it(disk, place.server.ports, place.store, place.rows)
    # Killed stubs have Triton's log open until they are gone.
    until(lambda: mount(disk, "remount,ro", check=False))
    with TritonServer(disk / "models", free_ports(), log=disk.parent / "triton.log", tied=True) as server:
        server.wait_ready()
        make_it_read_only(disk, server.ports, place.rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
