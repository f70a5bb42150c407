"""A peer as a stage: requests' bytes in, labels out, answered whenever they are ready."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.adapters.bank import TenantBank
from hplm.adapters.host_cache import HostCache
from hplm.adapters.tenant import Tenant
from hplm.core.text import EncodedText, check_not_empty, decode_utf8, tokenise_in_one_thread
from hplm.core.wire import LabelledSpan
from hplm.errors import ArtifactError, HplmError, InternalError
from hplm.models import base as bases
from hplm.models.device import choose_device, choose_dtype, use_threads
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S
from hplm.store.layout import Store
from hplm.tasks.task import Logits
from hplm.tasks.task_loader import task_named
from hplm_loadtest.peers.bodies import BODIES
from hplm_loadtest.peers.plain import PeerRequest, whole
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.swap import SwapWorker


@dataclass(frozen=True)
class PeerAnswer:
    """Labels of one text, and the `logits` float32 `[1 or T, labels]` they come from."""

    spans: list[LabelledSpan]
    logits: npt.NDArray[np.float32]
    truncated: bool


Reply = Callable[[PeerAnswer | HplmError], None]


@dataclass(frozen=True)
class _Job:
    request: PeerRequest
    encoded: EncodedText
    reply: Reply


class PeerStage:
    """Tokenise in the caller's thread, compute in one of its own. Raises ArtifactError or ConfigError on construction."""

    def __init__(self, settings: PeerSettings, folder: Path) -> None:
        # What hBERT's stages do for themselves, its peers do too.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        use_threads(settings.num_threads)
        if settings.num_threads == 1:
            tokenise_in_one_thread()
        store = Store((folder / settings.store).resolve())
        base = bases.load(store.base(settings.base), verify=False)
        self._settings = settings
        self._encoder = base.load_text_encoder()
        self._catalog = Catalog(store, settings.base)
        self._bank = TenantBank(store, self._catalog, base.fingerprint, verify=False)
        device = choose_device(settings.device)
        dtype, weights = choose_dtype(settings.dtype, device), (folder / settings.weights).resolve()
        self._body = BODIES[settings.system](settings, whole(base.config), dtype, weights, device)
        self._tenants: HostCache[ServedTenant, Tenant] = HostCache(
            lambda key: self._body.keep(self._bank.load(key)),
            lambda tenant: tenant.num_bytes,
            capacity=settings.host_cache_mb * 1_000_000,
        )
        self._answers = ThreadPoolExecutor(2, thread_name_prefix="peer-answer")
        self.worker: SwapWorker[_Job] = SwapWorker(
            self._body.num_places,
            self._body.load,
            self._run,
            self._fail,
            batch_requests=settings.batch_requests,
            nice=settings.compute_nice,
        )
        freeze_garbage_collection()

    def submit(self, requests: Sequence[tuple[bytes, bytes, Reply]]) -> None:
        """Queue requests `(text, tenant, reply)`; each reply is called once, later, from another thread."""
        texts: list[tuple[str, bytes, Reply]] = []
        for text, tenant, reply in requests:
            try:
                texts.append((decode_utf8(text, self._settings.max_text_bytes), tenant, reply))
            except HplmError as error:
                self._answers.submit(reply, error)
        encoded = self._encoder.encode([text for text, _, _ in texts])
        loading = []
        for (_, tenant, reply), result in zip(texts, encoded, strict=True):
            try:
                loading.append((self._tenants.fetch(self._bank.resolve(tenant)), check_not_empty(result), reply))
            except HplmError as error:
                self._answers.submit(reply, error)
        jobs = []
        for future, result, reply in loading:
            try:
                found = future.result()
                jobs.append((self._body.model_of(found), _Job(PeerRequest(found, result.ids), result, reply)))
            except ArtifactError as error:
                logging.getLogger(__name__).error("%s", error)
                self._answers.submit(reply, type(error)("this tenant's model cannot be loaded; the log says why"))
            except HplmError as error:
                self._answers.submit(reply, error)
        self.worker.add(jobs)

    def stop(self) -> None:
        """Finish what runs and send all answers."""
        self.worker.stop()
        self._tenants.close()
        self._catalog.close()
        self._answers.shutdown(wait=True)

    def _run(self, place: int, jobs: list[_Job]) -> None:
        answers = self._body.run(place, [job.request for job in jobs])
        self._answers.submit(_reply_all, jobs, answers)

    def _fail(self, jobs: list[_Job], error: Exception) -> None:
        logging.getLogger(__name__).error("a batch failed", exc_info=error)
        for job in jobs:
            self._answers.submit(job.reply, InternalError("the server failed on this batch; its log says why"))


def _reply_all(jobs: list[_Job], answers: list[Logits]) -> None:
    for job, found in zip(jobs, answers, strict=True):
        tenant = job.request.tenant
        task = task_named(tenant.card.task)
        spans, logits = task.decode(found, tenant.card.labels, job.encoded.tokens, tenant.head.transitions)
        job.reply(PeerAnswer(spans, logits, job.encoded.truncated))
