"""First stage of hBERT: requests' bytes -> hidden states, in batches, first come, first served."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.bank import TenantBank
from hplm.config import PlotSettings
from hplm.errors import HplmError
from hplm.nn import base as bases
from hplm.nn.dtype import choose_dtype
from hplm.nn.lookup import open_lookup
from hplm.nn.memory import keep_freed_memory
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget
from hplm.scheduling.queue import RequestQueue
from hplm.serving.refusal import for_the_wire
from hplm.serving.worker import SWITCH_INTERVAL_S, ExclusiveLock, Job, Worker
from hplm.store.layout import Store
from hplm.text import EncodedText, TextEncoder, check_not_empty, decode_utf8
from hplm.tracing import Tracer


@dataclass(frozen=True)
class LookedUp:
    """Of one text: `hidden` float16 `[T, H]`, `tokens` int32 `[T, 3]`."""

    hidden: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    truncated: bool


@dataclass(frozen=True)
class PlotInput:
    """One request as it came; `deadline_s`: seconds it may take in all, None for the settings' default."""

    text: bytes
    tenant: bytes
    deadline_s: float | None = None
    arrived_s: float = 0.0


Reply = Callable[[LookedUp | HplmError], None]
# Of English text. The number is known after tokenising only; the queue shares out by this estimate.
BYTES_PER_TOKEN = 4


class PlotStage:
    """Tokenise, look up, merge. Raises ArtifactError or ConfigError on construction where the store is not sound."""

    def __init__(self, settings: PlotSettings, folder: Path) -> None:
        keep_freed_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        torch.set_num_threads(settings.num_threads or 1)
        store = Store((folder / settings.store).resolve())
        base = bases.load(store.base(settings.base), verify=settings.verify)
        self._settings = settings
        self._bank = TenantBank(store, base.fingerprint, verify=settings.verify)
        self._encoder = TextEncoder(base.tokenizer_path, base.config.max_tokens)
        self._lookup = open_lookup(
            store,
            base,
            settings.table,
            miss=settings.miss,
            overlay_windows=settings.overlay_windows,
            dtype=choose_dtype(settings.dtype, torch.device("cpu")),
            verify=settings.verify,
        )

        self._tracer = Tracer(Path(settings.trace) if settings.trace else None, "plot")
        self._worker: Worker[PlotInput, LookedUp] = Worker(
            "plot",
            RequestQueue(
                Fcfs(),
                Budget(1, settings.batch_tokens, settings.batch_requests, settings.batch_requests),
                # Nothing is refused by prediction before batches were seen: what they cost depends on the text.
                CostModel.fit([(1, 1, 1e-6)]),
                capacity=settings.queue_capacity,
                weights={},
                starve_after_s=settings.default_deadline_s,
            ),
            self._run,
            tracer=self._tracer,
            exclusive=ExclusiveLock(settings.exclusive_lock) if settings.exclusive_lock else None,
        )

    def start(self) -> None:
        """Begin to answer what is submitted."""
        self._worker.start()

    def stop(self) -> None:
        """Refuse what waits, let the running batch end, end all threads."""
        self._worker.stop()
        self._tracer.close()

    @property
    def counts(self) -> Counter[str]:
        """What the worker counts: answers by outcome, batches, tokens."""
        return self._worker.counts

    def submit(self, given: PlotInput, reply: Reply, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Queue a request and return at once; `reply` is called exactly once, from another thread or from this one."""
        try:
            tenant = self._bank.resolve(given.tenant).name
            # Before it waits: what waits is bounded in bytes too.
            decode_utf8(given.text, self._settings.max_text_bytes)
        except HplmError as error:
            reply(for_the_wire(error, given.tenant))
            return
        deadline_s = self._settings.default_deadline_s if given.deadline_s is None else given.deadline_s
        self._worker.submit(
            Job(given, reply, is_cancelled),
            tenant=tenant,
            tokens=len(given.text) // BYTES_PER_TOKEN + 2,
            arrived_s=given.arrived_s,
            deadline_s=given.arrived_s + deadline_s,
        )

    def _run(self, given: list[PlotInput], _: Batch) -> Iterator[tuple[Sequence[int], Sequence[LookedUp | HplmError]]]:
        yield range(len(given)), self.run([(one.text, one.tenant) for one in given])

    @property
    def windows_by_level(self) -> Counter[str]:
        """How many windows each level has answered since the start."""
        return self._lookup.windows_by_level

    def run(self, requests: Sequence[tuple[bytes, bytes]]) -> list[LookedUp | HplmError]:
        """Answers to `(text, tenant)`, in order; what is wrong with one request is that request's answer alone."""
        answers: list[LookedUp | HplmError | None] = [None] * len(requests)
        texts: dict[int, str] = {}
        for index, (text, tenant) in enumerate(requests):
            try:
                self._bank.resolve(tenant)
                texts[index] = decode_utf8(text, self._settings.max_text_bytes)
            except HplmError as error:
                answers[index] = for_the_wire(error, tenant)
        encoded: dict[int, EncodedText] = {}
        for index, result in zip(texts, self._encoder.encode(list(texts.values())), strict=True):
            try:
                encoded[index] = check_not_empty(result)
            except HplmError as error:
                answers[index] = error
        if encoded:
            lengths = [len(result.ids) for result in encoded.values()]
            hidden = self._lookup.hidden_states(np.concatenate([e.ids for e in encoded.values()]), lengths)
            parts = np.split(hidden, np.cumsum(lengths)[:-1])
            for (index, result), part in zip(encoded.items(), parts, strict=True):
                answers[index] = LookedUp(part, result.tokens, result.truncated)
        return [answer for answer in answers if answer is not None]
