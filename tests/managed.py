"""A real server that is managed: a tiny base, a registry, labelled rows, a worker when one is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm_builder.worker import Worker

from hplm.store.layout import Store
from hplm.triton.server import TritonServer, free_ports
from tests import tiny

# Of a tenant's job, so that it takes a second.
FAST = {"epochs": 2, "learning_rates": [0.003]}


@dataclass(frozen=True)
class Place:
    """A server, its store, a file of labelled rows."""

    server: TritonServer
    store: Store
    rows: Path

    def url(self, protocol: str) -> str:
        """`http` or `grpc`."""
        return self.server.ports.http_url if protocol == "http" else self.server.ports.grpc_url

    @contextmanager
    def working(self) -> Iterator[None]:
        """A worker in a thread, until the end."""
        worker = Worker(self.store, "test-worker")
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield
        finally:
            worker.stop.set()
            thread.join(30)


@contextmanager
def serving(folder: Path) -> Iterator[Place]:
    """Chunks are small, so that every upload has several."""
    models = tiny.make_repository(folder, manager_settings={"upload_chunk_bytes": 1000})
    rows = folder / "rows.csv"
    words = tiny.sentences(60, words=(3, 8))
    rows.write_text("text,label\n" + "".join(f"{text},{'cat' if 'cat' in text else 'none'}\n" for text in words))
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        yield Place(server, Store(folder / "store"), rows)
