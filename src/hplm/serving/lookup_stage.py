"""First stage of hBERT: requests' bytes -> hidden states, in batches, first come, first served."""

from __future__ import annotations

import errno
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.bank import TenantBank
from hplm.adapters.host_cache import HostCache
from hplm.core.settings import LookupSettings
from hplm.core.text import (
    EncodedText,
    TextOrPair,
    check_not_empty,
    check_text_count,
    decode_texts,
    tokenise_in_one_thread,
)
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.open_domain import FilesState, Helpers, OpenDomain, files_state, open_lineage, verify_domain
from hplm.errors import (
    CorruptArtifactError,
    DeadlineError,
    HplmError,
    InternalError,
    QueueFullError,
    StoreUnavailableError,
    unusable,
)
from hplm.models import base as bases
from hplm.models.device import CPU, choose_device, choose_dtype, is_device_lost, use_threads
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.process import is_told_to_stop
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S, ExclusiveLock
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import DownstreamAdmission
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget
from hplm.scheduling.queue import RequestQueue
from hplm.serving.backlog_file import SERVER, BacklogFile
from hplm.serving.batch_loop import BatchLoop
from hplm.serving.load_permits import LoadPermits
from hplm.serving.pending_requests import PendingRequest, check_time_left, resolve_future
from hplm.serving.refusal import for_the_wire
from hplm.serving.replies import Job, never
from hplm.store.layout import Store


@dataclass(frozen=True)
class LookupAnswer:
    """Of one text or pair: `hidden` float16 `[T, H]`, `tokens` int32 `[T, 3]`, and the tenant's version it is for."""

    hidden: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    truncated: bool
    version_id: int


@dataclass(frozen=True)
class LookupRequest:
    """A text or pair as it came; `deadline_s`: seconds it may take in all, None for the settings' default.

    `is_together`: its request has others, which are answered with it.
    """

    texts: tuple[bytes, ...]
    tenant: bytes
    deadline_s: float | None = None
    arrived_s: float = 0.0
    is_together: bool = False


@dataclass(frozen=True)
class _Ready:
    """A request whose tenant is known and whose domain is open."""

    tenant: ServedTenant
    text: TextOrPair
    lookup: OpenDomain
    arrived_s: float
    is_together: bool


Reply = Callable[[LookupAnswer | HplmError], None]


@dataclass(frozen=True)
class _Asked:
    """A request whose tenant is known, but perhaps not yet its card and its domain."""

    given: LookupRequest
    tenant: ServedTenant
    text: TextOrPair


# Folders of a domain version and those above it: ids would mean others in a registry that was made anew.
Lineage = tuple[str, ...]
# A domain whose files are broken is looked at again after this time: checking gigabytes takes seconds.
BROKEN_FOR_S = 10.0
# Of each tenant one number is kept, until the tenant's version is forgotten.
MOST_CARDS = 1_000_000
# Of English text. The number is known after tokenising only; the queue shares out by this estimate.
BYTES_PER_TOKEN = 4


class LookupStage:
    """Tokenise, look up, merge. Raises RegistryError, ArtifactError or ConfigError where the store is not sound.

    Cards are read and domain versions opened when a tenant of theirs is first asked for, without keeping others waiting.
    """

    def __init__(self, settings: LookupSettings, folder: Path, instances: int = 1) -> None:
        """`instances`: processes of this stage that one server runs beside each other."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        use_threads(1)
        tokenise_in_one_thread()
        threads = settings.num_threads or 1
        self._device = device_of(settings)
        self._dtype = choose_dtype(settings.dtype, self._device)
        self._helpers: Helpers | None = None
        if threads > 1 and self._device == CPU:
            self._helpers = Helpers(ThreadPoolExecutor(threads - 1, "hplm-window"), threads - 1)
        if settings.quantization == "int8" and settings.miss == "compute":
            check_int8(self._device)
        self._store = Store((folder / settings.store).resolve(), settings.registry)
        self._base = bases.load(self._store.base(settings.base), verify=settings.verify)
        self._settings = settings
        self._catalog = Catalog(self._store, settings.base, on_forgotten=self._forget)
        self._bank = TenantBank(self._store, self._catalog, self._base.fingerprint, verify=settings.verify)
        self._encoder = self._base.load_text_encoder()
        if (highest := self._encoder.highest_id) >= self._base.config.vocab_size:
            raise CorruptArtifactError(
                f"{self._base.tokenizer_path} gives token ids up to {highest}, this base has embeddings below "
                f"{self._base.config.vocab_size} only; convert it again with the tokenizer that belongs to it"
            )
        self._lower = self._base.load_lower().to(self._device) if settings.miss == "compute" else None
        self._windows: Counter[str] = Counter()
        self._tokens = 0
        # Of each folder that was checked, the files as they were then.
        self._verified: dict[str, FilesState] = {}
        self._broken: dict[Lineage, tuple[float, HplmError]] = {}
        # Those that requests still hold, dropped from the cache or not: one more of the same would take its memory again.
        self._open_now: WeakValueDictionary[Lineage, OpenDomain] = WeakValueDictionary()
        self._domains: HostCache[Lineage, OpenDomain] = HostCache(
            self._open, lambda _: 1, capacity=settings.most_domains
        )
        # How many texts a request of a tenant has, as its card says.
        self._texts: HostCache[ServedTenant, int] = HostCache(
            lambda tenant: self._bank.card(tenant).texts,
            lambda _: 1,
            capacity=MOST_CARDS,
        )
        self._opening = LoadPermits(settings.queue_capacity)
        # A root is in every lineage: what is wrong with it shows now.
        for root in {one.lineage[-1:] for one in self._catalog.served()} | {self._catalog.lineage(settings.table)[-1:]}:
            self._domains.fetch(root).result().warm_up()
        self._tracer = Tracer(Path(settings.trace) if settings.trace else None, "plot")
        # What is done with windows that no table has, in words.
        if settings.miss == "compute":
            dtype = str(self._dtype).removeprefix("torch.")
            in_int8 = f"with layers' matrices in int8, the gate's in {dtype}"
            how = in_int8 if settings.quantization == "int8" else f"in {dtype}"
            self.about = f"computed on {self._device} {how}"
        else:
            self.about = "backed off"
            self.about += ", so quantization changes nothing" if settings.quantization == "int8" else ""
        self._ahead = DownstreamAdmission(
            BacklogFile(self._store.root, settings.base).read, settings.tenant_weights, instances
        )
        self._batch_loop: BatchLoop[_Ready, LookupAnswer] = BatchLoop(
            "plot",
            RequestQueue(
                Fcfs(),
                Budget(1, settings.batch_tokens, settings.batch_requests, settings.batch_requests),
                # What a batch costs depends on how much of its text was seen before: that may change from one to the next.
                CostModel(forgetting=0.8, is_linear=True),
                capacity=settings.queue_capacity,
                weights=settings.tenant_weights,
                starve_after_s=settings.default_deadline_s,
            ),
            self._run_and_pass_on,
            tracer=self._tracer,
            is_told_to_stop=partial(is_told_to_stop, SERVER),
            is_fatal=partial(is_device_lost, device=self._device),
            every_s=settings.batch_every_ms / 1000,
            exclusive=ExclusiveLock(settings.exclusive_lock) if settings.exclusive_lock else None,
        )

    def start(self) -> None:
        """Begin to answer what is submitted."""
        freeze_garbage_collection()
        self._catalog.start()
        self._batch_loop.start()

    def stop(self) -> None:
        """Refuse what waits, let the running batch end, end all threads."""
        self._batch_loop.stop()
        if self._helpers is not None:
            self._helpers.pool.shutdown()
        self._texts.close()
        self._domains.close()
        self._catalog.close()
        self._tracer.close()

    def _forget(self, versions: Sequence[ServedTenant]) -> None:
        """Let go of tenants' and domains' versions that nobody can ask for any more."""
        found = self._catalog.found()
        self._texts.drop(versions)
        self._bank.drop({one.path for one in versions} - {one.path for one in found})
        lineages = {one.lineage for one in versions} - {one.lineage for one in found}
        self._domains.drop(lineages)
        for lineage in lineages:
            self._broken.pop(lineage, None)
            self._open_now.pop(lineage, None)
        for path in {path for lineage in lineages for path in lineage}.difference(*(one.lineage for one in found)):
            self._verified.pop(path, None)

    @property
    def counts(self) -> Counter[str]:
        """What the worker counts, tokens that were looked up, and looks at the registry that failed."""
        counts = self._batch_loop.counts + Counter(failed_registry_looks=self._catalog.failures)
        # The worker knows a guess only, see BYTES_PER_TOKEN.
        counts["tokens"] = self._tokens
        return counts

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch."""
        return self._batch_loop.waiting

    @property
    def tenants(self) -> int:
        """How many there are now."""
        return len(self._catalog)

    def submit(
        self,
        given: LookupRequest,
        reply: Reply,
        is_cancelled: Callable[[], bool] = never,
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Queue a request and return at once; `reply` is called exactly once, from another thread or from this one.

        Raises the error of a request that is refused at once: there is no reply then.
        """
        try:
            tenant = self._bank.resolve(given.tenant)
            text = decode_texts(given.texts, self._settings.max_text_bytes)
            job: Job[_Asked, LookupAnswer] = Job(_Asked(given, tenant, text), reply, is_cancelled, is_over)
            texts, lookup = self._texts.get(tenant), self._domains.get(tenant.lineage)
            if texts is not None and lookup is not None:
                self._queue(job, texts, lookup)
                return
            check_time_left(self._deadline_of(given))
            if not self._opening.take(tenant.name):
                raise QueueFullError("too many requests wait for tenants and domains to be opened; try again later")
        except HplmError as error:
            raise self._batch_loop.count_refused(for_the_wire(error, given.tenant)) from None
        held = self._batch_loop.hold(job, self._deadline_of(given))
        self._texts.fetch(tenant).add_done_callback(partial(self._card_read, held, tenant))

    def _card_read(self, held: PendingRequest, tenant: ServedTenant, texts: Future[int]) -> None:
        """The tenant's card is known, or cannot be read."""

        def open_domain(count: int) -> None:
            self._domains.fetch(tenant.lineage).add_done_callback(partial(self._opened, held, tenant, count))

        if (error := resolve_future(texts, open_domain)) is not None:
            self._opening.leave(tenant.name)
            if (job := held.release()) is not None:
                self._batch_loop.refuse(job.reply, for_the_wire(error, job.item.given.tenant))

    def _opened(self, held: PendingRequest, tenant: ServedTenant, texts: int, lookup: Future[OpenDomain]) -> None:
        """The tenant's domain is open, or cannot be."""
        self._opening.leave(tenant.name)
        if (job := held.release()) is None:
            return
        if (error := resolve_future(lookup, partial(self._queue, job, texts))) is not None:
            self._batch_loop.refuse(job.reply, for_the_wire(error, job.item.given.tenant))
            self._batch_loop.end_if_fatal(error)

    def _queue(self, job: Job[_Asked, LookupAnswer], texts: int, lookup: OpenDomain) -> None:
        """Raises TextCountError, and DeadlineError where the upper stage has too much to do before it."""
        asked = job.item
        text = check_text_count(asked.text, texts)
        given = asked.given
        guess = sum(len(raw) // BYTES_PER_TOKEN + 1 for raw in given.texts) + 1
        tokens = min(guess, self._base.config.max_tokens)
        due_s, now_s = self._due_s(given), time.monotonic()
        if self._ahead.is_too_much(asked.tenant.name, tokens, due_s, now_s, is_together=given.is_together):
            raise DeadlineError("the deadline cannot be met; it was not computed")
        self._batch_loop.submit(
            job.with_item(_Ready(asked.tenant, text, lookup, given.arrived_s, given.is_together)),
            tenant=asked.tenant.name,
            tokens=tokens,
            arrived_s=given.arrived_s,
            deadline_s=self._deadline_of(given),
        )

    def _deadline_of(self, given: LookupRequest) -> float:
        """When it must have been looked up: under overload that is just in time, and the second stage needs some too."""
        due_s = self._due_s(given)
        return due_s - min((due_s - given.arrived_s) / 2, self._settings.reserve_s)

    def _due_s(self, given: LookupRequest) -> float:
        """When it must be answered."""
        return given.arrived_s + (self._settings.default_deadline_s if given.deadline_s is None else given.deadline_s)

    @property
    def windows_by_level(self) -> Counter[str]:
        """How many windows each level has answered since the start, of all domains."""
        return Counter(self._windows)

    def count_refused(self, error: HplmError) -> None:
        """Of a request that could not even be submitted."""
        self._batch_loop.count_refused(error)

    def _run_and_pass_on(
        self, ready: list[_Ready], batch: Batch
    ) -> Iterator[tuple[Sequence[int], Sequence[LookupAnswer | HplmError]]]:
        for indices, answers in self._run(ready, batch):
            now_s = time.monotonic()
            for index, answer in zip(indices, answers, strict=True):
                if isinstance(answer, LookupAnswer):
                    one = ready[index]
                    self._tokens += len(answer.hidden)
                    self._ahead.passed(one.tenant.name, len(answer.hidden), one.arrived_s, now_s)
            yield indices, answers

    def _run(self, ready: list[_Ready], _: Batch) -> Iterator[tuple[Sequence[int], Sequence[LookupAnswer | HplmError]]]:
        """All texts tokenised together, then domain by domain; what fails on one fails its own requests alone."""
        encoded = self._encode([one.text for one in ready])
        of_lookup: dict[int, list[tuple[int, EncodedText]]] = {}
        for index, (one, result) in enumerate(zip(ready, encoded, strict=True)):
            if isinstance(result, HplmError):
                yield [index], [result]
            else:
                of_lookup.setdefault(id(one.lookup), []).append((index, result))
        for pairs in of_lookup.values():
            indices, texts = zip(*pairs, strict=True)
            found = self._look_up(ready[indices[0]].lookup, texts)
            yield (
                indices,
                [
                    hidden
                    if isinstance(hidden, HplmError)
                    else LookupAnswer(
                        # One that waits for others must not keep those of its whole batch.
                        hidden.copy() if ready[i].is_together else hidden,
                        text.tokens,
                        text.truncated,
                        ready[i].tenant.version_id,
                    )
                    for (i, text), hidden in zip(pairs, found, strict=True)
                ],
            )

    def _look_up(
        self, lookup: OpenDomain, texts: Sequence[EncodedText]
    ) -> Sequence[npt.NDArray[np.float16] | HplmError]:
        """Hidden states `[T, H]` of each, all together, or one by one where one of them makes the look-up fail."""
        lengths = [len(text.ids) for text in texts]
        try:
            hidden = lookup.hidden_states(np.concatenate([text.ids for text in texts]), lengths)
            return np.split(hidden, np.cumsum(lengths)[:-1])
        except Exception as error:
            if is_device_lost(error, self._device):
                # No text could be looked up any more: the worker ends this process.
                raise
            # Alone they may all do well: then nothing else would say why.
            several = "of several texts failed; each alone" if len(texts) > 1 else "failed"
            log_rate_limited(f"a look-up {several} ({type(error).__name__})", error)
        if len(texts) == 1:
            return [InternalError("the look-up of this text failed; the server's log says why")]
        # Not while the error is at hand: it holds what was computed of all of them, on a GPU that may be full.
        return [one for text in texts for one in self._look_up(lookup, [text])]

    def _encode(self, texts: Sequence[TextOrPair]) -> list[EncodedText | HplmError]:
        """All together, or one by one where one of them makes the tokenizer fail, which may panic: that is no Exception."""
        try:
            encoded = self._encoder.encode(texts)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if len(texts) > 1:
                log_rate_limited(f"texts could not be tokenised together; each alone ({type(error).__name__})", error)
                return [one for text in texts for one in self._encode([text])]
            log_rate_limited(f"a text could not be tokenised ({type(error).__name__})", error)
            return [InternalError("the server failed on this text; its log says why")]
        return [_checked(one) for one in encoded]

    def _open(self, lineage: Lineage) -> OpenDomain:
        if (lookup := self._open_now.get(lineage)) is not None:
            return lookup
        since, known = self._broken.get(lineage, (0.0, None))
        if known is not None and time.monotonic() - since < BROKEN_FOR_S:
            # Another one each time: a traceback grows with each raise, and holds what was under way there.
            raise type(known)(*known.args)
        try:
            lookup = self._open_now[lineage] = self._open_lineage(lineage)
        except (HplmError, OSError) as error:
            found = unusable(f"{lineage[0]} cannot be read", error) if isinstance(error, OSError) else error
            # What the system lacks may be there for the next request. A disk that fails takes its time to say so.
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(found, StoreUnavailableError) or getattr(cause, "errno", None) == errno.EIO:
                self._broken[lineage] = time.monotonic(), type(found)(*found.args)
            raise found from cause
        return lookup

    def _open_lineage(self, lineage: Lineage) -> OpenDomain:
        if self._settings.verify:
            # Each folder once, and again where a file changed since: a root of gigabytes is in every lineage.
            for path in lineage:
                folder = self._store.path(path)
                if (state := files_state(folder)) != self._verified.get(path):
                    verify_domain(folder)
                    self._verified[path] = state
        lookup = open_lineage(
            self._store,
            self._base,
            lineage,
            miss=self._settings.miss,
            overlay_windows=self._settings.overlay_windows,
            dtype=self._dtype,
            verify=False,
            base_lower=self._lower,
            quantization=self._settings.quantization,
            device=self._device,
            helpers=self._helpers,
        )
        lookup.windows_by_level = self._windows
        return lookup


def device_of(settings: LookupSettings) -> torch.device:
    """Where windows are computed that no table has: of several GPUs the first. Raises ConfigError where it is not there."""
    device = choose_device(settings.device)
    is_on_cpu = settings.miss != "compute" or (settings.device == "auto" and settings.quantization == "int8")
    return CPU if is_on_cpu else device


def _checked(one: EncodedText) -> EncodedText | HplmError:
    try:
        return check_not_empty(one)
    except HplmError as error:
        return error
