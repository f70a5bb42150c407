"""A real server that is managed: a tiny base, a registry, labelled rows, a worker when one is wanted."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hplm_builder.jobs.handlers import load_handlers
from hplm_client import Client

from hplm.core import wire
from hplm.core.text import TextOrPair
from hplm.engine import reference
from hplm.errors import UnknownTenantError
from hplm.jobs.lease import JobTimings
from hplm.jobs.worker_loop import Worker
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.waiting import until

# Of a tenant's job, so that it takes a second.
FAST = {"epochs": 2, "learning_rates": [0.003]}
# So long that an update learns what is `swapped`: one that is no better on dev publishes nothing.
LEARNING = {"epochs": 3, "learning_rates": [0.05]}


@dataclass(frozen=True)
class Place:
    """A server, its store, a file of labelled rows."""

    server: TritonServer
    store: Store
    rows: Path

    def url(self, protocol: str) -> str:
        """`http` or `grpc`."""
        return self.server.ports.http_url if protocol == "http" else self.server.ports.grpc_url

    def working(self) -> AbstractContextManager[None]:
        """A worker in a thread, until the end."""
        return at_work(self.store)

    def await_seen(self) -> None:
        """As `await_seen` below, of a tiny server."""
        await_seen(self.server, self.store, bases.load(self.store.base("tiny")))


def await_seen(server: TritonServer, store: Store, base: Base) -> None:
    """As `await_seen_at`, of a server of one base."""
    await_seen_at(server.ports.grpc_url, store, base)


def await_seen_at(grpc_url: str, store: Store, base: Base, domain: str = tiny.PLOT, model: str = wire.MODEL) -> None:
    """Until the model of a base has seen whatever was changed before: a tenant that is published now answers.

    A look takes in all changes up to it. It is the first stage that looks, the other asks for a version that it does not know.
    """
    name = f"seen-{uuid.uuid4().hex}"
    tiny.make_tenant(store, base, name, 0, like="alpha", domain=domain)
    with Client(grpc_url, model=model) as client:

        def is_known() -> bool:
            try:
                return client.predict(name, "the red cat").label is not None
            except UnknownTenantError:
                return False

        until(is_known)


@contextmanager
def at_work(
    store: Store,
    name: str = "w",
    *,
    device: str = "cpu",
    timings: JobTimings | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[None]:
    """A worker in a thread; at the end it is told to stop, and has."""
    worker = Worker(store, name, load_handlers, device=device, timings=timings, clock=clock)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop.set()
        thread.join()


def expected_logits(
    store: Store, base: Base, tenant: str, text: TextOrPair, domain: str | None = None
) -> npt.NDArray[np.float32]:
    """What the slow reference gives over the tenant's own lineage, or a domain's as it is now; every miss computed."""
    with closing(Registry.open(store)) as registry:
        own = registry.tenant(tenant).current.domain_version_id
        version_id = own if domain is None else registry.current_domain(base.config.name, domain).id
        folders = [one.path for one in registry.lineage(version_id)]
    levels, lower = reference.lineage(store, base, folders, "compute")
    encoder = base.load_text_encoder()
    encoded = encoder.encode([text])[0]
    merged = reference.merged(encoded.ids.tolist(), base.config, levels, lower)
    return reference.answered(base.load_upper(), merged, tiny.load_tenant(store, base, tenant), encoded.tokens)


def write_rows(path: Path) -> Path:
    """A file of labelled rows: the class is whether the text names a cat."""
    words = tiny.sentences(60, words=(3, 8))
    path.write_text("text,label\n" + "".join(f"{text},{'cat' if 'cat' in text else 'none'}\n" for text in words))
    return path


def write_colours(path: Path, count: int = 160, *, seed: int, is_swapped: bool = False) -> Path:
    """A file of distinct labelled rows: the class is the colour that a text names, of two `is_swapped` the other."""
    rng, colours = np.random.default_rng(seed), ("red", "blue")
    words = [word for word in tiny.WORDS if word not in colours]
    rows = [
        f"{' '.join(rng.choice(words, 6))} {colours[number % 2]},{colours[(number + is_swapped) % 2]}"
        for number in range(count)
    ]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def swapped(rows: Path) -> Path:
    """The same rows with the other class each, in a file beside them."""
    text = rows.read_text().replace(",cat\n", ",dog\n").replace(",none\n", ",cat\n").replace(",dog\n", ",none\n")
    path = rows.with_stem(f"{rows.stem}-swapped")
    path.write_text(text)
    return path


@contextmanager
def serving(folder: Path, registry: str = "", flags: Sequence[str] = ()) -> Iterator[Place]:
    """`flags` are Triton's. Chunks are small, so that every upload has several; the rows may also be named by their path."""
    files = folder / "files"
    files.mkdir()
    settings = {"upload_chunk_bytes": 1000, "min_corpus_tokens": 300, "allow_paths": True, "data_root": str(files)}
    # A file of a gigabyte is refused for what is in it, and a bomb is a bomb from 16 MiB on.
    bounds = {"max_data_bytes": 2 << 30, "max_upload_bytes": 16 << 20}
    models = tiny.make_repository(folder, manager_settings={**settings, **bounds}, registry=registry)
    rows = write_rows(files / "rows.csv")
    with TritonServer(models, free_ports(), flags=flags, log=folder / "triton.log", tied=True) as server:
        server.wait_ready()
        yield Place(server, Store(folder / "store", registry), rows)
