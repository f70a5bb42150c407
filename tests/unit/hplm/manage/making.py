"""A small store that is managed: a tiny base with its root, files to learn from, a service that answers."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from hplm_builder.data.labelled_files import read_data
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.jobs.handlers import load_handlers
from hplm_builder.jobs.local_builds import build_domain, build_tenant
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.finetune import TrainSettings
from rich.progress import Progress

from hplm.core.settings import ManagerSettings
from hplm.jobs.lease import JobTimings
from hplm.jobs.worker_loop import Worker
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny

NOW_S = 1_000_000.0
QUICK = {"epochs": 1}
# So long that an update of `colours` learns what is `swapped`.
LEARNING = {"epochs": 3, "learning_rates": [0.05]}
QUICK_DOMAIN = {"tokens": 400, "warmup_tokens": 400, "top_percent": 20.0}
SETTINGS: dict[str, Any] = {"store": "", "base": "tiny", "domain": "general", "min_corpus_tokens": 300}


def make_store(root: Path) -> Store:
    """A store with base `tiny` and its root `general`, both registered."""
    store = Store(root)
    base = tiny.make_base(store, tiny.config())
    build_plot(store, "tiny", "general", tiny.sentences(30), 30.0, Progress(disable=True), dtype="float32")
    with closing(Registry.open(store, create=True)) as registry:
        registry.publish_base("tiny", base.fingerprint, "bases/tiny", NOW_S)
        registry.publish_domain("tiny", "general", "plots/general", NOW_S, parent_id=None, about={}, expected=None)
    return store


def make_service(store: Store, **settings: Any) -> ManageService:
    made = ManagerSettings(**{**SETTINGS, **settings})
    return ManageService(store, lambda: made)


def ask(service: ManageService, action: str, **values: Any) -> dict[str, Any]:
    """The answer to one request, through JSON as on the wire."""
    answer = service.handle(json.dumps({"action": action, **values}).encode())
    return dict(json.loads(json.dumps(answer, allow_nan=False)))


def upload(service: ManageService, content: str | bytes, name: str = "train.csv") -> str:
    """Send a file; returns the upload's id."""
    raw = content.encode() if isinstance(content, str) else content
    started = ask(service, "upload.start", bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest(), name=name)
    size = started["chunk_bytes"]
    for start in range(0, len(raw), size):
        data = base64.b64encode(raw[start : start + size]).decode()
        ask(service, "upload.chunk", upload=started["upload"], offset=start, data=data)
    ask(service, "upload.finish", upload=started["upload"])
    return str(started["upload"])


def colours(
    count: int = 40, labels: Iterable[str] = ("red", "blue"), seed: int = 0, *, is_swapped: bool = False
) -> str:
    """Labelled rows: the class is the colour that the text names, of two `is_swapped` the other."""
    rng, names = np.random.default_rng(seed), list(labels)
    rows = ["text,label"]
    for number in range(count):
        words = list(rng.choice(["the", "cat", "runs", "fast"], 3))
        label = names[number % len(names)]
        rows.append(f"{' '.join([*words, label])},{names[(number + is_swapped) % len(names)]}")
    return "\n".join(rows) + "\n"


def corpus(documents: int = 60, seed: int = 1) -> str:
    """Plain text, a document a line."""
    return "\n".join(tiny.sentences(documents, seed=seed, words=(8, 20))) + "\n"


def names() -> str:
    """Texts with names of twenty kinds, as `.jsonl`."""
    entities = [{"label": f"KIND{i}", "start": 0, "end": 4} for i in range(20)]
    rows = [{"text": f"Anna sings {i}", "entities": [entities[i % 20]]} for i in range(200)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def create_tenant(
    service: ManageService, name: str = "acme", content: str | None = None, *, file: str = "train.csv", **values: Any
) -> str:
    """Ask for a tenant; returns the job's id."""
    data = {"train": {"upload": upload(service, content or colours(), file)}}
    return str(ask(service, "tenant.create", tenant=name, data=data, **{"settings": QUICK, **values})["job"])


def update(service: ManageService, name: str, content: str, *, file: str = "train.csv", **values: Any) -> str:
    """Ask for a tenant's next version; returns the job's id. There is one only where it is better on dev."""
    data = {"train": {"upload": upload(service, content, file)}}
    return str(ask(service, "tenant.update", tenant=name, data=data, **{"settings": LEARNING, **values})["job"])


def create_domain(service: ManageService, name: str = "law", content: str | None = None, **values: Any) -> str:
    """Ask for a domain; returns the job's id."""
    source = {"upload": upload(service, content or corpus(), "corpus.txt")}
    return str(ask(service, "domain.create", domain=name, corpus=source, settings=QUICK_DOMAIN, **values)["job"])


def work(store: Store, later_s: float = 0.0, *, ends_on_sigterm: bool = False) -> None:
    """A worker does all there is to do; its clock is `later_s` ahead, and it takes a lease that is over at once."""
    timings = JobTimings(watch_s=0.0, serve_wait_s=0.0)
    worker = Worker(store, "w", load_handlers, timings=timings, clock=lambda: time.time() + later_s)
    if ends_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: worker.stop.set())
    worker.run(until_idle=True)


def build(store: Store, change: str) -> None:
    """Build what a change of `test_crashes` makes, as `hplm build tenant` and `hplm build domain` do."""
    kind, name = {
        "create-tenant": ("tenant", "new"),
        "update-tenant": ("tenant", "acme"),
        "create-domain": ("domain", "new"),
        "update-domain": ("domain", "law"),
    }[change]
    bars, source = Progress(disable=True), store.root.parent / ("train.csv" if kind == "tenant" else "corpus.txt")
    if kind == "tenant":
        source.write_text(colours(is_swapped=True))
        build_tenant(store, "tiny", "law", name, read_data(source), TrainSettings(epochs=1), bars)
    else:
        source.write_text(corpus(seed=2))
        settings = DomainSettings(total_tokens=400, warmup_tokens=400, top_percent=20.0, min_corpus_tokens=300)
        build_domain(store, "tiny", None if name == "law" else "law", name, source, settings, bars, device="cpu")
    assert source.exists()


def failure(registry: Registry, job: str, code: str) -> str:
    """Why a job has failed, as it must with this code."""
    failed = registry.job(job)
    assert failed.error is not None
    assert (failed.state, failed.error["code"]) == ("failed", code)
    return failed.error["message"]


def files_below(store: Store) -> set[str]:
    """Every file of the store but the registry's."""
    found = (path for path in store.root.rglob("*") if path.is_file() and not path.name.startswith("registry.sqlite"))
    return {path.relative_to(store.root).as_posix() for path in found}
