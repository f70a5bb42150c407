"""Second stage of hBERT: hidden states of many tenants' texts -> labels, in batches that a policy chooses."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.bank import TenantBank
from hplm.adapters.host_cache import HostCache
from hplm.adapters.packed import PackedAdapter, packed_width
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.settings import EncodeSettings
from hplm.core.wire import LabelledSpan
from hplm.engine.adapter_slots import choose_slots
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.kernels.int8 import Ranges, check_int8
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.errors import (
    ConfigError,
    CorruptArtifactError,
    HiddenStatesError,
    HplmError,
    InternalError,
    QueueFullError,
)
from hplm.models import base as bases
from hplm.models.device import choose_device, choose_dtype, choose_threads, count_cores, is_device_lost, use_threads
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.process import is_told_to_stop
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S, ExclusiveLock
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Batch, Budget
from hplm.scheduling.policy_loader import load_policy
from hplm.scheduling.queue import RequestQueue
from hplm.serving.backlog_file import SERVER, BacklogFile
from hplm.serving.batch_loop import BatchLoop
from hplm.serving.load_permits import LoadPermits
from hplm.serving.pending_requests import PendingRequest, check_time_left, resolve_future
from hplm.serving.refusal import for_the_wire
from hplm.serving.replies import Job, never
from hplm.store.layout import Store
from hplm.tasks.decode import answer_of

# Of a request's time so much, and no more seconds than that, is kept for its way to the stages and back: under overload
# answers end just in time.
WAY_BACK = 0.05
MOST_WAY_BACK_S = 0.1
# Of the computing thread while more waits than can be answered soon: at -20 nobody else lets in and refuses the others, so
# most wait before the stages until it is too late for all of them.
CROWDED_NICE = -5


@dataclass(frozen=True)
class EncodeRequest:
    """One request: `hidden` float16 `[T, H]`, `tokens` int32 `[T, 3]`, `tenant` as it came.

    `deadline_s`: seconds it may take, None for the settings' default; `arrived_s`: when it reached the server, by this
    machine's monotonic clock, None for now; `version_id`: for which of the tenant's versions the hidden states are, None
    for the one that is current.
    """

    hidden: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    tenant: bytes
    deadline_s: float | None = None
    arrived_s: float | None = None
    version_id: int | None = None


@dataclass(frozen=True)
class EncodeAnswer:
    """Labels of one text, and the `logits` float32 `[1 or T, labels]` they come from."""

    spans: list[LabelledSpan]
    logits: npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Ready:
    """A request whose tenant is in host memory."""

    request: EngineRequest
    tokens: npt.NDArray[np.int32]


Reply = Callable[[EncodeAnswer | HplmError], None]
# With its times, see `_times_of`.
_Asked = tuple[EncodeRequest, tuple[float, float]]


class EncodeStage:
    """Check, queue, run, decode. Raises RegistryError, ArtifactError or ConfigError where the store is not sound."""

    def __init__(self, settings: EncodeSettings, folder: Path, device_index: int = 0, instances: int = 1) -> None:
        """`instances`: processes of this stage that one server runs beside each other."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threads = choose_threads(settings.num_threads, instances)
        use_threads(threads)
        store = Store((folder / settings.store).resolve(), settings.registry)
        base = bases.load(store.base(settings.base), verify=settings.verify)
        device = choose_device(settings.device, device_index)
        self._settings = settings
        self._config = base.config
        self._catalog = Catalog(store, settings.base, on_forgotten=self._forget)
        self._bank = TenantBank(store, self._catalog, base.fingerprint, verify=settings.verify)
        self._cache: HostCache[ServedTenant, Tenant] = HostCache(
            self._load, lambda tenant: tenant.num_bytes, capacity=settings.host_cache_mb * 1_000_000
        )
        # Versions that the registry has to be asked for, which may hang. Once they are found the catalog knows them.
        self._asked: HostCache[tuple[bytes, int | None], ServedTenant] = HostCache(
            lambda asked: self._bank.resolve(*asked), lambda _: 1, capacity=1
        )
        self._tracer = Tracer(Path(settings.trace) if settings.trace else None, "upper")
        upper = base.load_upper()
        dtype = choose_dtype(settings.dtype, device, settings.quantization)
        int8: list[Ranges] = []
        if settings.quantization == "int8":
            check_int8(device)
            int8 = measure_ranges(base, upper)
        reduced_size = base.config.reduced_size(settings.reduction_factor)
        self.engine = EncodeEngine(
            base.config,
            upper,
            num_slots=choose_slots(settings.num_slots, base.config, reduced_size, device, dtype, instances),
            reduced_size=reduced_size,
            device=device,
            dtype=dtype,
            batching=settings.batching,
            row_tokens=settings.row_tokens,
            pad_to=settings.pad_to,
            fine_prefetch=settings.fine_prefetch,
            int8=int8,
            tracer=self._tracer,
        )
        # Computing first on every core would let no request in or out.
        nice = settings.compute_nice if threads * instances < count_cores() else 0
        self._backlog = BacklogFile(store.root, settings.base)
        self._batch_loop: BatchLoop[_Ready, EncodeAnswer] = BatchLoop(
            "upper",
            RequestQueue(
                load_policy(settings.policy, settings.policy_settings),
                budget_of(settings, self.engine.slots.num_slots),
                measured_cost(self.engine),
                capacity=settings.queue_capacity,
                weights=settings.tenant_weights,
                starve_after_s=settings.starve_after_s,
            ),
            self._run,
            tracer=self._tracer,
            upcoming=self._prefetch if looks_ahead(settings, device) else None,
            publish=self._backlog.publish,
            is_told_to_stop=partial(is_told_to_stop, SERVER),
            is_fatal=partial(is_device_lost, device=device),
            exclusive=ExclusiveLock(settings.exclusive_lock) if settings.exclusive_lock else None,
            nice=nice,
            # Threads that torch has started would stay as they are, and wait for this one.
            crowded_nice=max(nice, CROWDED_NICE) if threads == 1 else None,
        )
        self._loads = LoadPermits(settings.queue_capacity)
        count = "1 thread" if threads == 1 else f"{threads} threads"
        products = ", layers' matrices in int8" if int8 else ""
        # Where and how it computes, in words.
        slots = "" if device.type == "cpu" else f", {self.engine.slots.num_slots:,} slots"
        self.about = f"on {device} in {str(dtype).removeprefix('torch.')} with {count}{products}{slots}"

    def start(self) -> None:
        """Begin to answer what is submitted."""
        freeze_garbage_collection()
        self._catalog.start()
        self._batch_loop.start()

    def stop(self) -> None:
        """Refuse what waits, let the running batch end, end all threads."""
        self._batch_loop.stop()
        self._backlog.remove()
        self._asked.close()
        self._cache.close()
        self._catalog.close()
        self.engine.close()
        self._tracer.close()

    def _forget(self, versions: Sequence[ServedTenant]) -> None:
        """Let go of versions that nobody can ask for any more."""
        self._cache.drop(versions)
        self._asked.drop((one.name.encode(), one.version_id) for one in versions)
        self._bank.drop({one.path for one in versions} - {one.path for one in self._catalog.found()})

    @property
    def counts(self) -> Counter[str]:
        """What the worker counts, tokens with their padding, adapters loaded from disk to the host and from there to slots."""
        return self._batch_loop.counts + Counter(
            computed_tokens=self.engine.computed_tokens,
            host_loads=self._cache.loads,
            slot_loads=self.engine.slots.loads,
            failed_registry_looks=self._catalog.failures,
        )

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch, for their tenant's weights, or for what the registry says of its version."""
        return self._batch_loop.waiting

    def submit(
        self,
        given: EncodeRequest,
        reply: Reply,
        is_cancelled: Callable[[], bool] = never,
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Queue a request and return at once; `reply` is called exactly once, from another thread or from this one.

        Raises the error of a request that is refused at once: there is no reply then.
        """
        try:
            self._check(given)
            key, times = self._bank.known(given.tenant, given.version_id), self._times_of(given)
            job: Job[_Asked, EncodeAnswer] = Job((given, times), reply, is_cancelled, is_over)
            if key is not None and (tenant := self._cache.get(key)) is not None:
                self._queue(job, tenant)
                return
            check_time_left(times[1])
            # Names that no tenant has count as one: each would have places of its own, and leave none to those that are.
            name = given.tenant.decode() if key is not None else ""
            if not self._loads.take(name):
                raise QueueFullError("too many requests wait for their tenants' weights; try again later")
        except HplmError as error:
            raise self._batch_loop.count_refused(for_the_wire(error, given.tenant)) from None
        held = self._batch_loop.hold(job, times[1])
        if key is not None:
            self._cache.fetch(key).add_done_callback(partial(self._loaded, held, name))
        else:
            self._asked.fetch((given.tenant, given.version_id)).add_done_callback(partial(self._found, held, name))

    def count_refused(self, error: HplmError) -> None:
        """Of a request that could not even be submitted."""
        self._batch_loop.count_refused(error)

    def _found(self, held: PendingRequest, name: str, found: Future[ServedTenant]) -> None:
        """The tenant's version is known, or there is none, or the registry cannot say; `name` has the place."""

        def load(key: ServedTenant) -> None:
            self._cache.fetch(key).add_done_callback(partial(self._loaded, held, name))

        if (error := resolve_future(found, load)) is not None:
            self._loads.leave(name)
            if (job := held.release()) is not None:
                self._batch_loop.refuse(job.reply, for_the_wire(error, job.item[0].tenant))

    def _loaded(self, held: PendingRequest, name: str, loaded: Future[Tenant]) -> None:
        """The tenant is in host memory, or cannot be; `name` has the place."""
        self._loads.leave(name)
        if (job := held.release()) is None:
            return
        if (error := resolve_future(loaded, partial(self._queue, job))) is not None:
            self._batch_loop.refuse(job.reply, for_the_wire(error, job.item[0].tenant))

    def _times_of(self, given: EncodeRequest) -> tuple[float, float]:
        """When a request arrived, as far as that counts for its place, and by when it must be computed."""
        now = time.monotonic()
        # A client that calls this stage itself may claim any time of arrival: only a sound one counts.
        arrived_s = given.arrived_s if given.arrived_s is not None and 0 <= now - given.arrived_s < 3600 else now
        whole_s = self._settings.default_deadline_s if given.deadline_s is None else given.deadline_s
        deadline_s = arrived_s + whole_s - min(WAY_BACK * whole_s, MOST_WAY_BACK_S)
        # Nor does a long timeout of its own, with which it has time left whatever it claims, take it before all who wait.
        return max(arrived_s, now - self._settings.default_deadline_s), deadline_s

    def _queue(self, job: Job[_Asked, EncodeAnswer], tenant: Tenant) -> None:
        given, (arrived_s, deadline_s) = job.item
        self._batch_loop.submit(
            job.with_item(_Ready(EngineRequest(tenant, given.hidden), given.tokens)),
            tenant=tenant.card.name,
            tokens=len(given.hidden),
            arrived_s=arrived_s,
            deadline_s=deadline_s,
        )

    def _run(
        self, ready: list[_Ready], batch: Batch
    ) -> Iterator[tuple[Sequence[int], Sequence[EncodeAnswer | HplmError]]]:
        for indices, logits in self.engine.run_each([one.request for one in ready], batch.slot_tokens):
            yield indices, [_answer(ready[i], found) for i, found in zip(indices, logits, strict=True)]

    def _prefetch(self, ready: list[_Ready]) -> None:
        self.engine.slots.prefetch([one.request.tenant for one in ready])

    def _load(self, key: ServedTenant) -> Tenant:
        """From disk to host memory, in the shape of a slot."""
        with self._tracer.span("load", tenant=key.name):
            tenant, slots = self._bank.load(key), self.engine.slots
            try:
                packed = slots.fitted(tenant.packed)
            except ConfigError as error:
                # Of `reduction_factor`, which is the operator's, not the client's.
                raise CorruptArtifactError(str(error)) from error
            shape = (self._config.upper_layers, packed_width(self._config.hidden_size, packed.reduced_size))
            if packed.weights.shape != shape:
                # In a slot it would fail the whole batch, others' requests too.
                raise CorruptArtifactError(f"adapter of shape {packed.weights.shape}, slots hold {shape}")
            # Nothing that is served asks what a card tells about the training: curve and confusion can outweigh the weights.
            card = replace(tenant.card, about={})
            return replace(tenant, card=card, packed=slots.staged(packed))

    def _check(self, given: EncodeRequest) -> None:
        """Only a client that calls this stage directly can fail here."""
        length, width = given.hidden.shape
        if width != self._config.hidden_size:
            raise HiddenStatesError(f"hidden states are {width} wide, this base's are {self._config.hidden_size}")
        if not 1 <= length <= self._config.max_tokens:
            raise HiddenStatesError(f"{length} tokens came, 1 to {self._config.max_tokens} are accepted")
        if given.tokens.shape != (length, 3):
            raise HiddenStatesError(f"tokens have shape {given.tokens.shape}, ({length}, 3) was expected")
        # `isfinite` without numpy's slow half floats: the exponent of NaN and infinity alone is all ones.
        if int((given.hidden.view(np.uint16) & 0x7FFF).max()) >= 0x7C00:
            raise HiddenStatesError("hidden states hold NaN or infinity")


def looks_ahead(settings: EncodeSettings, device: torch.device) -> bool:
    """Whether slots are filled ahead of the batch to come: on a processor copying wants a core as computing does."""
    return device.type == "cuda" if settings.coarse_prefetch is None else settings.coarse_prefetch


def _answer(one: _Ready, found: npt.NDArray[np.float32]) -> EncodeAnswer | HplmError:
    try:
        tenant = one.request.tenant
        return EncodeAnswer(
            *answer_of(tenant.card.task, found, tenant.card.labels, one.tokens, tenant.head.transitions)
        )
    except Exception as error:
        # One tenant's odd labels are not the batch's fault.
        log_rate_limited(f"tenant {one.request.tenant.card.name}: its answer cannot be decoded ({error!r})", error)
        return InternalError("this tenant's answer cannot be decoded; the server's log says why")


def budget_of(settings: EncodeSettings, num_slots: int) -> Budget:
    """What one batch may hold. Modes that need no rows have one row of the same number of tokens."""
    rows, row_tokens = settings.batch_rows, settings.row_tokens
    if settings.batching in ("packed", "naive", "turbo"):
        rows, row_tokens = 1, rows * row_tokens
    return Budget(
        rows=rows,
        row_tokens=row_tokens,
        max_requests=settings.batch_requests,
        max_tenants=num_slots - 1,
    )


def measured_cost(engine: EncodeEngine) -> CostModel:
    """Seconds of batches of a few sizes, measured now; what is served later goes on from there."""
    hidden, most = engine.config.hidden_size, engine.config.max_tokens
    samples = []
    for count, wanted in ((1, 4), (1, 4), (1, 32), (8, 16), (8, 32), (2, 128)):
        length = min(wanted, most)
        requests = [EngineRequest(_nobody(engine), np.zeros((length, hidden), np.float16)) for _ in range(count)]
        start = time.perf_counter()
        engine.run(requests)
        samples.append((count * length, count * length * length, time.perf_counter() - start))
    # Nobody asked for these.
    engine.computed_tokens = engine.slots.loads = 0
    # The first call pays for what the others find warm.
    return CostModel.fit(samples[1:])


def _nobody(engine: EncodeEngine) -> Tenant:
    """A tenant for measuring, of zeros."""
    hidden, reduced = engine.config.hidden_size, engine.slots.sizes[0]
    weights = np.zeros((engine.config.upper_layers, packed_width(hidden, reduced)), np.float32)
    head = Head(np.zeros((2, hidden), np.float32), np.zeros(2, np.float32))
    card = TenantCard("nobody", "classification", ("a", "b"), base="")
    return Tenant(card, PackedAdapter(weights, hidden, reduced), head, version="measuring")
