"""`hplm worker`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from typing import Annotated, Literal

import typer

from hplm.errors import MissingArtifactError
from hplm.runtime.process import end_with_parent, give_way_for_memory
from hplm.store.layout import Store
from hplm_cli.options import DEFAULT_STORE, RegistryOption, StoreOption

# A step that hears nothing for this long is given up.
STOP_S = 5.0


def worker(
    store: StoreOption = DEFAULT_STORE,
    registry: RegistryOption = "",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; serving wants the others.")] = 1,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where domains are pretrained.")] = "cpu",
    once: Annotated[bool, typer.Option("--once", help="End when there is no job that it can take.")] = False,
    parent: Annotated[int, typer.Option(hidden=True, help="End when this process does.")] = 0,
) -> None:
    """Do the jobs that manage requests queue: fine-tune tenants, pretrain domains, remove what nobody uses any more.

    Runs at the lowest priority, and is the first to go where memory runs out. `hplm serve` starts one; on other
    machines that share the store and the registry more can run. SIGTERM gives the job back to the queue.

    Examples:

      hplm worker --store build/demo/store

      hplm worker --store /srv/hplm/store --registry postgresql+psycopg://hplm@db/hplm --threads 4
    """
    if not store.is_dir():
        raise MissingArtifactError(f"there is no folder {store}: give --store")
    if parent:
        end_with_parent(parent)
    os.nice(19)
    give_way_for_memory()
    # Before anything that starts threads of its own.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    # In UTC, as Triton's log has it.
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(level=logging.INFO, format="%(asctime)sZ %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from hplm_builder.jobs.worker import Worker

    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    found = Worker(Store(store.resolve(), registry), name, device=device)

    told, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno())

    def wait_for_the_end() -> None:
        # In a thread of its own: a handler would wait for the end of whatever the job is computing, and for its locks.
        told.recv(1)
        found.stop.set()
        # Whatever giving back may hang in.
        last = threading.Timer(2 * STOP_S, os._exit, (143,))
        last.daemon = True
        last.start()
        time.sleep(STOP_S)
        try:
            found.give_back()
        finally:
            os._exit(143)

    threading.Thread(target=wait_for_the_end, name="ending", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    logging.info("worker %s takes jobs of %s", name, store)
    found.run(until_idle=once)
