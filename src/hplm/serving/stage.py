"""The skeleton of a serving stage: admit requests, queue them, compute them in batches, answer them."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from hplm.access.gate import open_gate
from hplm.access.quotas import open_quotas
from hplm.adapters.bank import TenantBank
from hplm.core.settings import EncodeSettings, LookupSettings
from hplm.errors import (
    ArtifactError,
    DeadlineError,
    HplmError,
    InternalError,
    QueueFullError,
    RegistryError,
    RegistryUnavailableError,
)
from hplm.metering.text_meter import TextMeter, open_meter
from hplm.models import base as bases
from hplm.models.device import is_device_lost, use_threads
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.process import is_told_to_stop
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S, ExclusiveLock
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import Backlog
from hplm.scheduling.policy import ONE_STUDENT, Batch, Budget, Policy, StudentRange
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.student_number import StudentRules
from hplm.serving.backlog_file import SERVER
from hplm.serving.batch_loop import BatchLoop, Results
from hplm.serving.load_permits import LoadPermits
from hplm.serving.pending_requests import PendingRequest
from hplm.serving.request import Answer, Item, Request
from hplm.store.layout import Store

Input = TypeVar("Input")


class Load(NamedTuple):
    """Something that a request needs and that is not in memory. `tenant`: whose load permit the request takes."""

    start: Callable[[], Future[Any]]
    tenant: str


@dataclass
class Admitted(Generic[Item]):
    """A request that can be computed: its `item` for the batch, and the size in tokens that the queue plans with.

    `students`: how many of the tenant's students may answer the text.
    """

    item: Item
    tenant: str
    tokens: int
    students: StudentRange = ONE_STUDENT


class Times(NamedTuple):
    """When a request counts as arrived, and when its batch must have ended, by the monotonic clock."""

    arrived_s: float
    deadline_s: float


Admission = Generator[Load, Any, Admitted[Item]]


class Stage(ABC, Generic[Input, Item, Answer]):
    """A stage of serving. A subclass says what it needs for a request (`admit`) and how it computes a batch (`run`).

    The skeleton follows the registry, bounds and refuses requests, runs the queue and the batch loop, and counts.
    Raises RegistryError, ArtifactError or ConfigError on construction if the store is not sound. A subclass calls
    `_open_queue` at the end of its own constructor. `work` names the stage's work on a batch in the metrics of tenants.
    """

    work: ClassVar[str]

    def __init__(self, name: str, settings: LookupSettings | EncodeSettings, folder: Path, *, threads: int) -> None:
        """Open the store; `settings` come from `folder`. Torch computes with `threads`."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        use_threads(threads)
        self.name = name
        self._metering = settings.metering
        self._meter: TextMeter | None = None
        self._store = Store((folder / settings.store).resolve(), settings.registry)
        self._base = bases.load(self._store.base(settings.base), verify=settings.verify)
        self._catalog = Catalog(self._store, settings.base, on_forgotten=self.forget)
        self._bank = TenantBank(self._store, self._catalog, self._base.fingerprint, verify=settings.verify)
        self._tracer = Tracer(Path(settings.trace) if settings.trace else None, name)
        self._load_permits = LoadPermits(settings.queue_capacity)
        self.gate = open_gate(self._store)
        self.quotas = open_quotas(self._store, SERVER)

    def _open_queue(
        self,
        settings: LookupSettings | EncodeSettings,
        policy: Policy,
        budget: Budget,
        cost: CostModel,
        *,
        device: torch.device,
        starve_after_s: float,
        students: StudentRules | None = None,
        upcoming: Callable[[list[Item]], None] | None = None,
        publish: Callable[[Backlog], None] | None = None,
        every_s: float = 0.0,
        nice: int = 0,
        crowded_nice: int | None = None,
    ) -> None:
        """Make the queue and the batch loop. A lost `device` ends the process; see BatchLoop for the rest."""
        self._batch_loop: BatchLoop[Item, Answer] = BatchLoop(
            self.name,
            RequestQueue(
                policy,
                budget,
                cost,
                capacity=settings.queue_capacity,
                weights=settings.tenant_weights,
                starve_after_s=starve_after_s,
                students=students,
            ),
            self.run,
            tracer=self._tracer,
            upcoming=upcoming,
            publish=publish,
            is_told_to_stop=partial(is_told_to_stop, SERVER),
            is_fatal=partial(is_device_lost, device=device),
            exclusive=ExclusiveLock(settings.exclusive_lock) if settings.exclusive_lock else None,
            every_s=every_s,
            nice=nice,
            crowded_nice=crowded_nice,
        )

    @abstractmethod
    def times_of(self, request: Request[Input, Answer]) -> Times:
        """Return when a request counts as arrived, and when its batch must have ended."""

    @abstractmethod
    def admit(self, request: Request[Input, Answer]) -> Admission[Item]:
        """Check a request and get what it needs: yield a Load for each part that is not in memory, receive its value.

        Raises the HplmError of a request that cannot be admitted. An admission begins in the thread that submits the
        request. After a load it continues in the thread that has loaded.
        """

    @abstractmethod
    def run(self, items: list[Item], batch: Batch) -> Results[Answer]:
        """Compute a batch. Yield answers as soon as they are known."""

    @abstractmethod
    def close(self) -> None:
        """End what the subclass has started. No batch runs any more."""

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        """Free what is kept of tenants' versions that no request can ask for any more."""
        self._bank.drop({old.path for old in versions} - {served.path for served in self._catalog.retained()})

    def open_meter(self) -> TextMeter:
        """Return a meter of this stage's texts, which takes note of times from now on. The caller notes answers."""
        meter = self._meter = open_meter(self.name, self._metering, self._store.root, self._store.registry)
        work = self.work

        def note_times(request: Request[Any, Answer], waited_s: float, worked_s: float) -> None:
            meter.note_part(request.counted_for, "queue", waited_s)
            meter.note_part(request.counted_for, work, worked_s)

        self._batch_loop.note_times = note_times
        return meter

    def start(self) -> None:
        """Begin to answer requests."""
        freeze_garbage_collection()
        self._catalog.start()
        self.gate.start()
        self.quotas.start()
        self._batch_loop.start()

    def stop(self) -> None:
        """Refuse the requests that wait, answer the batch that runs, end all threads."""
        self._batch_loop.stop()
        self.close()
        self.gate.close()
        self.quotas.close()
        self._catalog.close()
        self._tracer.close()

    @property
    def most_tokens(self) -> int:
        """How many tokens of a text the base reads. Longer texts are cut."""
        return self._base.config.max_tokens

    @property
    def is_running(self) -> bool:
        """Whether the stage answers requests: it is started, and the server is not about to end."""
        return self._batch_loop.is_running

    @property
    def counts(self) -> Counter[str]:
        """Counts of the batch loop, and of failed polls of the registry."""
        return self._batch_loop.counts + Counter(failed_registry_looks=self._catalog.failures + self.gate.failures)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a batch or for a load."""
        return self._batch_loop.waiting

    def has_tenant(self, name: str) -> bool:
        """Return whether there is a tenant of this name, as far as the registry could be read."""
        return name in self._catalog

    @property
    def tenants(self) -> int:
        """The number of tenants in the registry now."""
        return len(self._catalog)

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._batch_loop.count_refused(error)

    def submit(self, request: Request[Input, Answer]) -> None:
        """Queue a request and return at once. The request gets exactly one reply, from any thread.

        Raises the error of a request that is refused at once; such a request gets no reply.
        """
        try:
            times, admission = self.times_of(request), self.admit(request)
            step = _advance(admission, None)
            if isinstance(step, Admitted):
                self._queue(request, step, times)
                return
            if times.deadline_s <= time.monotonic():
                raise DeadlineError("the deadline cannot be met; it was not computed")
            if not self._load_permits.take(step.tenant):
                raise QueueFullError("too many requests wait for files of tenants or domains; try again later")
        except HplmError as error:
            raise self._batch_loop.count_refused(for_the_wire(error, request.tenant)) from None
        pending = self._batch_loop.hold(request, admission, times.deadline_s)
        step.start().add_done_callback(partial(self._loaded, pending, times, step.tenant))

    def _loaded(self, pending: PendingRequest, times: Times, permit: str, loaded: Future[Any]) -> None:
        """Continue an admission after a load. `permit`: the tenant whose load permit the request holds."""
        step = _advance_after(pending.admission, loaded)
        if isinstance(step, Load):
            step.start().add_done_callback(partial(self._loaded, pending, times, permit))
            return
        self._load_permits.leave(permit)
        if (request := pending.release()) is None:
            return
        error = self._queued(request, step, times) if isinstance(step, Admitted) else step
        if error is not None:
            self._batch_loop.refuse(request, for_the_wire(error, request.tenant))
            self._batch_loop.end_if_fatal(error)

    def _queued(self, request: Request[Any, Answer], admitted: Admitted[Item], times: Times) -> BaseException | None:
        """Queue an admitted request. Returns the error if that fails: a future swallows what its callbacks raise."""
        try:
            self._queue(request, admitted, times)
        except BaseException as error:
            return error
        return None

    def _queue(self, request: Request[Any, Answer], admitted: Admitted[Item], times: Times) -> None:
        self._batch_loop.submit(
            request.with_item(admitted.item),
            tenant=admitted.tenant,
            tokens=admitted.tokens,
            students=admitted.students,
            arrived_s=times.arrived_s,
            deadline_s=times.deadline_s,
        )


def _advance(admission: Admission[Item], value: Any) -> Load | Admitted[Item]:
    """Run an admission until its next load or its end; `value` is what the last load gave."""
    try:
        return admission.send(value)
    except StopIteration as ended:
        admitted: Admitted[Item] = ended.value
        return admitted


def _advance_after(
    admission: Admission[Any] | None, loaded: Future[Any]
) -> Load | Admitted[Any] | BaseException | None:
    """Continue an admission with a load that has ended. Returns the error if either fails, None without an admission."""
    # The error is read, not raised: each raise would make the traceback longer that all waiting requests share.
    if (error := loaded.exception()) is not None:
        return error
    try:
        return None if admission is None else _advance(admission, loaded.result())
    except BaseException as unexpected:
        return unexpected


def for_the_wire(error: BaseException, tenant: bytes) -> HplmError:
    """Return an error as its client may read it.

    Faults of files, of the registry and of our code are for the operator's log: only the code of such an error is sent.
    """
    if not isinstance(error, HplmError):
        log_rate_limited(f"tenant {_printable(tenant)} or its domain could not be loaded ({error!r})", error)
        return InternalError("this tenant's model cannot be loaded; the server's log says why")
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # The tenant may not exist. The cause is logged once where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    log_rate_limited(f"tenant {_printable(tenant)}: {error}")
    return type(error)("this tenant's model cannot be loaded; the server's log says why")


def _printable(tenant: bytes) -> str:
    return tenant.decode("utf-8", "replace")
