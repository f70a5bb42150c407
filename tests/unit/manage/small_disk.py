"""`python -m tests.unit.manage.small_disk DISK STORE` in a mount namespace of its own: what a store does on a disk of a few MB.

Mounts a disk at DISK, copies STORE (a tenant `acme` over a domain `law`) onto it, fills it, and makes it read-only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.job_report import LeaseTimes
from hplm_builder.worker import Worker

from hplm.adapters.bank import TenantBank
from hplm.errors import RegistryError, StoreUnavailableError
from hplm.nn import base as bases
from hplm.store import caretaker
from hplm.store.catalog import Catalog
from hplm.store.layout import Store
from hplm.store.registry import Registry
from tests.unit.manage.making import QUICK, ask, colours, create_tenant, make_service, upload
from tests.waiting import until

ROOM = 4 << 20
REFUSALS = (StoreUnavailableError, RegistryError)
TIMES = LeaseTimes(lease_s=1.0, beat_s=0.2, tell_s=0.1)


def mount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not a byte is left."""
    with (disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    (disk / "fill").unlink()


def main(disk: Path, grown: Path) -> None:
    used = sum(path.stat().st_size for path in grown.rglob("*") if path.is_file())
    mount(disk, f"size={used + ROOM}")
    store = Store(disk / "store")
    shutil.copytree(grown, store.root)
    base = bases.load(store.base("tiny"))

    def serve(catalog: Catalog) -> bytes:
        catalog.refresh()
        bank = TenantBank(store, catalog, base.fingerprint)
        return bank.load(bank.resolve(b"acme")).packed.weights.tobytes()

    with closing(Catalog(store, "tiny")) as catalog, closing(make_service(store)) as service:
        before = serve(catalog)
        with closing(Registry.open(store)) as registry:
            with full(disk):
                with pytest.raises(REFUSALS):
                    upload(service, colours(5000))
                with pytest.raises(REFUSALS):
                    ask(service, "tenant.delete", tenant="acme")
                assert serve(catalog) == before
            data = {"train": {"upload": upload(service, colours(100))}}
            settings = {**QUICK, "epochs": 40, "patience": 40}
            job = str(ask(service, "tenant.update", tenant="acme", data=data, settings=settings)["job"])
            worker = Worker(store, "w", times=TIMES)
            thread = threading.Thread(target=worker.run, daemon=True)
            thread.start()
            until(lambda: registry.job(job).progress > 0)
            with full(disk):
                time.sleep(2)
                assert registry.job(job).state != "done"
                assert serve(catalog) == before
            # The same worker, when there is room.
            until(lambda: registry.job(job).state == "done")
            assert registry.tenant("acme").current.number == 2
            create_tenant(service, "new")
            until(lambda: registry.tenant_count() == 2)
            worker.stop.set()
            thread.join()
            assert caretaker.verify(store, registry, time.time()).problems == ()
            caretaker.collect(store, registry, time.time() + 200_000.0)
            assert caretaker.verify(store, registry, time.time() + 200_000.0) == caretaker.Verdict((), ())
    mount(disk, "remount,ro")
    with closing(Catalog(store, "tiny")) as catalog, closing(make_service(store)) as service:
        after = serve(catalog)
        assert np.frombuffer(after, np.uint8).any()
        for request in ({"action": "tenant.delete", "tenant": "acme"}, {"action": "tenant.rollback", "tenant": "acme"}):
            with pytest.raises(REFUSALS):
                ask(service, **request)
        with pytest.raises(REFUSALS):
            upload(service, colours())
        assert serve(catalog) == after


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
