"""`hplm worker`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import Annotated, Literal

import typer

from hplm.errors import MissingArtifactError
from hplm.runtime.process import end_with_parent, give_way_for_memory
from hplm.store.layout import Store
from hplm_cli.options import DEFAULT_STORE, RegistryOption, StoreOption

# A step that does not notice the end within this time is abandoned.
STOP_S = 5.0


def worker(
    store: StoreOption = DEFAULT_STORE,
    registry: RegistryOption = "",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; serving needs the others.")] = 1,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device on which domains are pretrained.")
    ] = "cpu",
    once: Annotated[bool, typer.Option("--once", help="End when there is no job that can start.")] = False,
    parent: Annotated[int, typer.Option(hidden=True, help="End when this process does.")] = 0,
) -> None:
    """Do the jobs that manage requests queue: fine-tune tenants, pretrain domains, remove files that are no longer used.

    Runs at the lowest priority, and is killed first if memory runs out. `hplm serve` starts a worker process; more can
    run on machines that share the store and the registry. SIGTERM gives the job back to the queue.

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
    # Set before any library starts threads.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    # In UTC, like Triton's log.
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(level=logging.INFO, format="%(asctime)sZ %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from hplm_builder.jobs.handlers import load_handlers

    from hplm.jobs.local import worker_name
    from hplm.jobs.worker_loop import Worker

    name = worker_name()
    loop = Worker(Store(store.resolve(), registry), name, load_handlers, device=device)

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno())

    def wait_for_the_end() -> None:
        # In a thread: a signal handler would wait for the end of the job's computation and for its locks.
        receiver.recv(1)
        loop.stop.set()
        # The process ends even if giving the job back hangs.
        timer = threading.Timer(2 * STOP_S, os._exit, (143,))
        timer.daemon = True
        timer.start()
        time.sleep(STOP_S)
        try:
            loop.give_back()
        finally:
            os._exit(143)

    threading.Thread(target=wait_for_the_end, name="ending", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    logging.info("worker %s takes jobs of %s", name, store)
    loop.run(until_idle=once)
