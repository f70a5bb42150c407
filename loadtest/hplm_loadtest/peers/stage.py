"""The stage of a peer: takes requests as bytes and answers with labels when they are computed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from hplm_loadtest.peers.engines import ENGINES
from hplm_loadtest.peers.model_swapping import SwapWorker
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.whole_model import PeerRequest, whole_config


@dataclass(frozen=True)
class PeerAnswer:
    """The labels of one text, and the `logits` float32 `[1 or T, labels]` behind the labels."""

    spans: list[LabelledSpan]
    logits: npt.NDArray[np.float32]
    truncated: bool


Reply = Callable[[PeerAnswer | HplmError], None]


class _PendingRequest(NamedTuple):
    request: PeerRequest
    encoded: EncodedText
    reply: Reply


class PeerStage:
    """A stage that tokenises in the caller's thread and computes in a thread of its own.

    The constructor raises ArtifactError or ConfigError.
    """

    def __init__(self, settings: PeerSettings, folder: Path) -> None:
        # The same process settings as in hBERT's stages, for a fair comparison.
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
        self._engine = ENGINES[settings.system](settings, whole_config(base.config), dtype, weights, device)
        self._tenants: HostCache[ServedTenant, Tenant] = HostCache(
            lambda key: self._engine.keep(self._bank.load(key)),
            lambda tenant: tenant.num_bytes,
            capacity=settings.host_cache_mb * 1_000_000,
        )
        self._answers = ThreadPoolExecutor(2, thread_name_prefix="peer-answer")
        self.worker: SwapWorker[_PendingRequest] = SwapWorker(
            self._engine.num_places,
            self._engine.load,
            self._run,
            self._fail,
            batch_requests=settings.batch_requests,
            nice=settings.compute_nice,
        )
        freeze_garbage_collection()

    def submit(self, requests: Sequence[tuple[bytes, bytes, Reply]]) -> None:
        """Queue requests `(text, tenant, reply)`. Each reply is called once, from another thread."""
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
        pending: list[tuple[str, _PendingRequest]] = []
        for future, result, reply in loading:
            try:
                loaded = future.result()
                request = _PendingRequest(PeerRequest(loaded, result.ids), result, reply)
                pending.append((self._engine.model_of(loaded), request))
            except ArtifactError as error:
                logging.getLogger(__name__).error("%s", error)
                self._answers.submit(reply, type(error)("this tenant's model cannot be loaded; the log says why"))
            except HplmError as error:
                self._answers.submit(reply, error)
        self.worker.add(pending)

    def stop(self) -> None:
        """Finish the running batch and send all answers."""
        self.worker.stop()
        self._tenants.close()
        self._catalog.close()
        self._answers.shutdown(wait=True)

    def _run(self, place: int, batch: list[_PendingRequest]) -> None:
        logits = self._engine.run(place, [pending.request for pending in batch])
        self._answers.submit(_reply_all, batch, logits)

    def _fail(self, batch: list[_PendingRequest], error: Exception) -> None:
        logging.getLogger(__name__).error("a batch failed", exc_info=error)
        for pending in batch:
            self._answers.submit(pending.reply, InternalError("the server failed on this batch; its log says why"))


def _reply_all(batch: list[_PendingRequest], logits: list[Logits]) -> None:
    for (request, encoded, reply), text_logits in zip(batch, logits, strict=True):
        card, transitions = request.tenant.card, request.tenant.head.transitions
        spans, label_logits = task_named(card.task).decode(text_logits, card.labels, encoded.tokens, transitions)
        reply(PeerAnswer(spans, label_logits, encoded.truncated))
