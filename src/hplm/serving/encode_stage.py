"""The encode stage, the second of hBERT's two: hidden states of many tenants' texts -> labels, in batches of a policy.

For a whole base it reads ids and types of tokens in place of hidden states, and computes all layers. The encode stage may be
cut into several stages of some layers each. All but the last give hidden states to the next.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.host_cache import HostCache
from hplm.adapters.packed import PackedAdapter, packed_width
from hplm.adapters.tenant import Tenant
from hplm.cascade.dispatch import DispatchAnswer, DispatchInput, word_importances
from hplm.core import wire
from hplm.core.settings import EncodeSettings
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import EncodedTexts, EngineRequest
from hplm.engine.served_engine import conditions_of, make_engine
from hplm.engine.starting_cost import starting_cost
from hplm.engine.token_domain import Features
from hplm.errors import BadInputError, ConfigError, CorruptArtifactError, HiddenStatesError, HplmError, InternalError
from hplm.models.device import choose_device, choose_threads, count_cores
from hplm.registry.records import ServedTenant
from hplm.runtime.process import pin_to_cores
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.scheduling.downstream_admission import Backlog, reserved_s
from hplm.scheduling.policy import Batch, Budget
from hplm.scheduling.policy_loader import load_policy
from hplm.scheduling.student_number import StudentNumber, StudentRules
from hplm.serving.backlog_file import BacklogFile
from hplm.serving.batch_loop import Results
from hplm.serving.counts import Counts
from hplm.serving.lookup_stage import output_tensor, students_of
from hplm.serving.request import Answer, Item, Request
from hplm.serving.stage import Admission, Admitted, Input, Load, Stage, Times
from hplm.tasks.task_loader import task_named

# The share of a request's time, and the most seconds, that are kept for the request's way to the stages and the answer's way
# back: under overload a batch ends just in time.
WAY_BACK = 0.05
MOST_WAY_BACK_S = 0.1
# Priority of the computing thread while more waits than can be computed soon. At -20 no other thread would admit and refuse
# requests, so that most would wait before the stages until it is too late for all of them.
CROWDED_NICE = -5
# A client of this stage may claim any time of arrival. Claims of more seconds ago than this are ignored.
MOST_CLAIMED_S = 3600
# The largest number in hidden states, that of float16.
LARGEST_STATE = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class EncodeInput:
    """One text after the look-up: `features` as in LookupAnswer, `tokens` int32 `[T, 3]`.

    Behind another encode stage `features` are that stage's hidden states, float32 `[T, H]`. `version_id`: the tenant's version
    that the features are for, None for the current one. `dispatch`: how this level of a cascade decides on the text, None
    outside of a cascade.
    """

    features: Features | npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    version_id: int | None = None
    dispatch: DispatchInput | None = None


@dataclass(frozen=True)
class EncodeAnswer:
    """Labels of one text, and the `logits` float32 `[1 or T, labels]` that they come from.

    `dispatch` is what this level of a cascade has decided, None outside of a cascade. `students`: how many students of the
    tenant have answered, 1 if the tenant has no students.
    """

    spans: list[LabelledSpan]
    logits: npt.NDArray[np.float32]
    dispatch: DispatchAnswer | None = None
    students: int = 1


@dataclass(frozen=True)
class StatesAnswer:
    """The hidden states of one text after the layers of this stage, float32 `[T, H]`, for the next stage."""

    states: npt.NDArray[np.float32]


@dataclass(frozen=True)
class EncodeItem:
    """A request for a batch: its tenant is in host memory."""

    request: EngineRequest
    tokens: npt.NDArray[np.int32]
    dispatch: DispatchInput | None = None


class EngineStage(Stage[Input, Item, Answer]):
    """A stage that computes upper layers and heads, with tenants' weights in host memory. `name` is the stage's in the metrics.

    Raises RegistryError, ArtifactError or ConfigError if the store is not sound.
    """

    work: ClassVar[str] = "compute"
    name: str = "upper"

    def __init__(
        self,
        settings: EncodeSettings,
        folder: Path,
        device_index: int = 0,
        instances: int = 1,
        all_processes: int | None = None,
    ) -> None:
        """`instances`: how many processes of this stage one server runs.

        `all_processes`: how many processes of all bases of the server compute upper layers; None: `instances`.
        """
        all_processes = all_processes or instances
        if settings.cores:
            pin_to_cores(settings.cores)
            # The cores are this stage's own, so none is left to other processes.
            threads = settings.num_threads or max(1, count_cores() // instances)
        else:
            threads = choose_threads(settings.num_threads, all_processes)
        super().__init__(self.name, settings, folder, threads=threads)
        self._settings = settings
        self._config = self._base.config
        device = choose_device(settings.device, device_index)
        # Answers of tenants with students, by the number of students.
        self._answered_by = Counts()
        self._cache: HostCache[ServedTenant, Tenant] = HostCache(
            self._load, lambda tenant: tenant.num_bytes, capacity=settings.host_cache_mb * 1_000_000
        )
        self.engine = make_engine(
            self._base, settings, device, instances=all_processes, layers=settings.layers, tracer=self._tracer
        )
        cost, origin = starting_cost(
            self.engine, self._store, settings.base, conditions_of(self._base, settings, device, threads)
        )
        # If this stage computes on every core, a higher priority would let no request in and no answer out. Stages of other
        # bases do not count: two bases of one thread each on two cores answered more with the priority (docs/decisions.md).
        nice = settings.compute_nice if threads * instances < count_cores() else 0
        self._open_queue(
            settings,
            load_policy(settings.policy, settings.policy_settings),
            budget_of(settings, self.engine.slots.num_slots),
            cost,
            device=device,
            starve_after_s=settings.starve_after_s,
            students=StudentRules(
                settings.students_fall_batches, settings.students_quiet_s, settings.students_rise_share
            ),
            upcoming=self.look_ahead if looks_ahead(settings, device) else None,
            publish=self.publish,
            nice=nice,
            # Threads that torch has started would keep their priority, and the computing thread waits for them.
            crowded_nice=max(nice, CROWDED_NICE) if threads == 1 else None,
        )
        count = "1 thread" if threads == 1 else f"{threads} threads"
        products = ", layers' matrices in int8" if settings.quantization == "int8" else ""
        layers = self.engine.layers
        part = (
            ""
            if self.engine.has_all_layers
            else f"layers {layers.start + 1} to {layers.stop} of {self._config.upper_layers} "
        )
        pinned = f" on cores {', '.join(map(str, settings.cores))}" if settings.cores else ""
        slots = "" if device.type == "cpu" else f", {self.engine.slots.num_slots:,} slots"
        # Words for the log: where and how the stage computes.
        dtype = str(self.engine.dtype).removeprefix("torch.")
        self.about = f"{part}on {device} in {dtype} with {count}{pinned}{products}{slots}; {origin}"

    def close(self) -> None:
        self._cache.close()
        self.engine.close()

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        self._cache.drop(versions)
        super().forget(versions)

    @abstractmethod
    def look_ahead(self, items: list[Item]) -> None:
        """Prepare what the policy would run next, beside the batch that runs, if `looks_ahead`."""

    @abstractmethod
    def publish(self, backlog: Backlog) -> None:
        """Take what waits, about ten times a second."""

    @property
    def counts(self) -> Counter[str]:
        """Counts of every stage, tokens with their padding, adapters loaded from disk, adapters copied into slots."""
        return super().counts + Counter(
            computed_tokens=self.engine.computed_tokens,
            host_loads=self._cache.loads,
            slot_loads=self.engine.slots.loads,
        )

    @property
    def students(self) -> StudentNumber:
        """The cap on students, and how often it fell and rose."""
        return self._batch_loop.students

    @property
    def answered_by(self) -> Counter[str]:
        """Counts of answers by the number of students, of tenants that have students."""
        return self._answered_by.read()

    def times_of(self, request: Request[Input, Answer]) -> Times:
        """Leave time for the answer's way back. Claims of a client that calls this stage directly are bounded."""
        now_s = time.monotonic()
        arrived_s = request.arrived_s if 0 <= now_s - request.arrived_s < MOST_CLAIMED_S else now_s
        whole_s = self._settings.default_deadline_s if request.deadline_s is None else request.deadline_s
        deadline_s = arrived_s + whole_s - min(WAY_BACK * whole_s, MOST_WAY_BACK_S)
        # With a long timeout of its own, a request has time left whatever arrival it claims. It must not go before all others.
        return Times(max(arrived_s, now_s - self._settings.default_deadline_s), deadline_s)

    def weights_of(self, served: ServedTenant, dispatch: DispatchInput | None) -> Generator[Load, Any, Tenant]:
        """Return a tenant in host memory, see `Stage.admit`. Raises BadInputError if its answers have no confidence."""
        if (tenant := self._cache.get(served)) is None:
            tenant = yield Load(partial(self._cache.fetch, served), served.name)
        if dispatch is not None and not task_named(tenant.card.task).has_confidence:
            raise BadInputError(
                f"tenant {served.name}: answers of a {tenant.card.task} have no confidence: leave out DISPATCH"
            )
        return tenant

    def encode(
        self, items: Sequence[EncodeItem], students: Sequence[int], slot_tokens: int | None
    ) -> Results[EncodeAnswer]:
        """Compute the upper layers and heads, decode the logits, and decide which texts of a cascade are re-routed.

        `students` are the numbers of students that answer each text.
        """
        requests = [replace(item.request, students=number) for item, number in zip(items, students, strict=True)]
        for part in self.engine.run_each(requests, slot_tokens):
            answers = self._answers([items[i] for i in part.texts], part)
            texts = part.texts
            # The answers leave before the next part is computed; the queries and keys must not stay meanwhile.
            del part
            yield texts, answers

    def prefetch(self, tenants: Sequence[Tenant]) -> None:
        """Fill slots with the tenants' adapters, of as many students as the cap allows. Own layers are filled with a batch."""
        cap = self.students.cap
        shared = (tenant for tenant in tenants if tenant.adapters)
        self.engine.slots.prefetch([member for tenant in shared for member in tenant.members[:cap]])

    def _answers(self, items: Sequence[EncodeItem], part: EncodedTexts) -> list[EncodeAnswer | HplmError]:
        """Return the answers of a part's texts, with the importances of those that are re-routed."""
        answers = [
            _answer(item, number, logits)
            for item, number, logits in zip(items, part.students, part.outputs, strict=True)
        ]
        for item, number in zip(items, part.students, strict=True):
            if item.request.tenant.card.students > 1:
                self._answered_by.add(str(number))
        pruned = [
            (place, answer, answer.dispatch)
            for place, (item, answer) in enumerate(zip(items, answers, strict=True))
            if item.request.keeps_attention
            and isinstance(answer, EncodeAnswer)
            and answer.dispatch is not None
            and answer.dispatch.is_rerouted
        ]
        if pruned and part.attention is not None:
            with self._tracer.span("importance", texts=len(pruned)):
                found = part.attention.importances([place for place, _, _ in pruned])
            for (place, answer, decided), importance in zip(pruned, found, strict=True):
                words = word_importances(importance, items[place].tokens)
                answers[place] = replace(answer, dispatch=replace(decided, importance=words))
        return answers

    def _load(self, served: ServedTenant) -> Tenant:
        """Load a tenant from disk to host memory, in the shape of a slot. Raises an ArtifactError."""
        with self._tracer.span("load", tenant=served.name):
            tenant, slots = self._bank.load(served), self.engine.slots
            try:
                self.engine.check(tenant)
                for packed in tenant.adapters:
                    self._check_adapter(packed)
                adapters = [slots.in_layers(slots.fitted(packed)) for packed in tenant.adapters]
            except ConfigError as error:
                # The fault is the operator's, of `reduction_factor`, `num_slots` or `batching`, not the client's request.
                raise CorruptArtifactError(str(error)) from error
            # Serving needs nothing that a card says about the training: curve and confusion can outweigh the weights.
            card = replace(tenant.card, about={})
            return replace(tenant.with_adapters([slots.staged(packed) for packed in adapters]), card=card)

    def _check_adapter(self, packed: PackedAdapter) -> None:
        shape = (self._config.adapted_layers, packed_width(self._config.hidden_size, packed.reduced_size))
        if packed.weights.shape != shape:
            # In a slot it would fail the whole batch, with the requests of other tenants.
            raise CorruptArtifactError(f"adapter of shape {packed.weights.shape}, the base's have {shape}")


class FeaturesStage(EngineStage[EncodeInput, EncodeItem, Answer]):
    """A stage of a process of its own, which reads the features of texts or the hidden states of an earlier encode stage.

    `input` is the name of the tensor that the stage reads.
    """

    def __init__(
        self,
        settings: EncodeSettings,
        folder: Path,
        device_index: int = 0,
        instances: int = 1,
        all_processes: int | None = None,
    ) -> None:
        """`instances`: how many processes of this stage one server runs.

        `all_processes`: how many processes of all bases of the server compute upper layers; None: `instances`.
        """
        super().__init__(settings, folder, device_index, instances, all_processes)
        self.input = wire.STATES if self.engine.reads_states else output_tensor(self._config)
        self.no_features = self.engine.no_features(1)
        self._backlog = BacklogFile(self._store.root, settings.base, stage=settings.stage)
        # Versions that only the registry may know, which may hang. Once found, a version is in the catalog.
        self._versions: HostCache[tuple[bytes, int | None], ServedTenant] = HostCache(
            lambda version: self._bank.resolve(*version), lambda _: 1, capacity=1
        )

    def close(self) -> None:
        self._backlog.remove()
        self._versions.close()
        super().close()

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        self._versions.drop((old.name.encode(), old.version_id) for old in versions)
        super().forget(versions)

    def publish(self, backlog: Backlog) -> None:
        self._backlog.publish(backlog)

    def admit(self, request: Request[EncodeInput, Answer]) -> Admission[EncodeItem]:
        """Find the tenant's version and its weights in host memory."""
        text = request.item
        self._check(text)
        served = self._bank.known(request.tenant, text.version_id)
        if served is None:
            # Such requests share the permits of one tenant: invented names must not take the permits of real tenants.
            served = yield Load(partial(self._versions.fetch, (request.tenant, text.version_id)), tenant="")
        tenant = yield from self.weights_of(served, text.dispatch)
        item = encode_item(tenant, text.features, text.tokens, text.dispatch)
        students = students_of(served, tenant.card.students, of_cascade=text.dispatch is not None)
        return Admitted(item, tenant.card.name, len(text.features), students)

    def look_ahead(self, items: list[EncodeItem]) -> None:
        self.prefetch([item.request.tenant for item in items])

    def _check(self, text: EncodeInput) -> None:
        """Refuse wrong tensors. Only a client that calls this stage directly can send them."""
        config = self._config
        length, width = text.features.shape
        reads_ids = self.input == wire.IDS
        what, wanted = ("ids and types of tokens", 2) if reads_ids else ("hidden states", config.hidden_size)
        if width != wanted:
            raise HiddenStatesError(f"{what} are {width} wide, this base's are {wanted}")
        if not 1 <= length <= config.max_tokens:
            raise HiddenStatesError(f"{length} tokens came, 1 to {config.max_tokens} are accepted")
        if text.tokens.shape != (length, 3):
            raise HiddenStatesError(f"tokens have shape {text.tokens.shape}, ({length}, 3) was expected")
        if reads_ids:
            self._check_ids(text.features)
        elif not all_usable_states(text.features):
            raise HiddenStatesError(f"hidden states hold NaN, or numbers beyond {LARGEST_STATE:.0f}")

    def _check_ids(self, features: npt.NDArray[Any]) -> None:
        """Refuse ids and types `[T, 2]` without an embedding. Looking up such an id would end the process on a GPU."""
        most = (self._config.vocab_size, max(1, self._config.token_types))
        if features.min() < 0 or (features.max(0) >= most).any():
            raise HiddenStatesError(
                f"ids of tokens must be 0 to {most[0] - 1}, and their types 0 to {most[1] - 1}; "
                f"{features.max(0).tolist()} came as the largest, {features.min(0).tolist()} as the least"
            )


class EncodeStage(FeaturesStage[EncodeAnswer]):
    """The last encode stage, by default the only one: check, queue, run, decode."""

    def run(self, items: list[EncodeItem], batch: Batch) -> Results[EncodeAnswer]:
        return self.encode(items, batch.students, batch.slot_tokens)


class LayersStage(FeaturesStage[StatesAnswer]):
    """An encode stage before the last: its answers are hidden states for the next stage."""

    name = "layers"

    def __init__(
        self,
        settings: EncodeSettings,
        folder: Path,
        device_index: int = 0,
        instances: int = 1,
        all_processes: int | None = None,
    ) -> None:
        """See EngineStage."""
        super().__init__(settings, folder, device_index, instances, all_processes)
        later = range(settings.stage + 1, settings.encode_stages + 1)
        self._later = [BacklogFile(self._store.root, settings.base, stage=stage) for stage in later]

    def times_of(self, request: Request[EncodeInput, StatesAnswer]) -> Times:
        """Leave the later stages the time that they need, as their backlogs say."""
        times, now_s = super().times_of(request), time.monotonic()
        backlogs = [file.read(now_s) for file in self._later]
        kept_s = reserved_s(backlogs, len(request.item.features), times.deadline_s - times.arrived_s)
        return times._replace(deadline_s=times.deadline_s - kept_s)

    def run(self, items: list[EncodeItem], batch: Batch) -> Results[StatesAnswer]:
        for part in self.engine.run_each([item.request for item in items], batch.slot_tokens):
            # Copies, because an answer that waits for other texts must not keep the whole batch in memory.
            yield part.texts, [StatesAnswer(states.copy()) for states in part.outputs]


def all_usable_states(states: npt.NDArray[Any]) -> bool:
    """Return whether hidden states, float16 or float32, hold neither NaN nor a number that float16 cannot hold.

    Larger numbers come out of no layer. In a batch their products could be infinite, and with `concat` spoil other texts.
    """
    if states.dtype == np.float32:
        # A comparison with NaN is false.
        return bool((np.abs(states) <= LARGEST_STATE).all())
    # `isfinite` without numpy's slow half floats: only NaN and infinity have an exponent of all ones.
    return int((states.view(np.uint16) & 0x7FFF).max()) < 0x7C00


def looks_ahead(settings: EncodeSettings, device: torch.device) -> bool:
    """Return whether slots are filled ahead for the next batch. On a CPU, copying takes a core from computing."""
    return device.type == "cuda" if settings.coarse_prefetch is None else settings.coarse_prefetch


def encode_item(
    tenant: Tenant,
    features: Features | npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    dispatch: DispatchInput | None,
) -> EncodeItem:
    """Return a text for a batch, which keeps attention if importances are wanted."""
    keeps_attention = dispatch is not None and dispatch.wants_importance
    return EncodeItem(EngineRequest(tenant, features, keeps_attention), tokens, dispatch)


def _answer(item: EncodeItem, students: int, logits: npt.NDArray[np.float32]) -> EncodeAnswer | HplmError:
    tenant, dispatch = item.request.tenant, item.dispatch
    try:
        task = task_named(tenant.card.task)
        read_from = (tenant.card.labels, item.tokens, tenant.head.transitions)
        answer = EncodeAnswer(*task.decode(logits, *read_from), students=students)
        if dispatch is None:
            return answer
        confidence = task.confidence(logits, *read_from, dispatch.temperature)
        return replace(answer, dispatch=DispatchAnswer(confidence, dispatch.is_rerouted(confidence)))
    except Exception as error:
        # One tenant's odd labels must not fail the batch.
        log_rate_limited(f"tenant {tenant.card.name}: its answer cannot be decoded ({error!r})", error)
        return InternalError("this tenant's answer cannot be decoded; the server's log says why")


def budget_of(settings: EncodeSettings, num_slots: int) -> Budget:
    """Return what one batch may hold. Batching modes without rows have one row of the same number of tokens."""
    rows, row_tokens = settings.batch_rows, settings.row_tokens
    if settings.batching in ("packed", "naive", "turbo"):
        rows, row_tokens = 1, rows * row_tokens
    return Budget(
        rows=rows,
        row_tokens=row_tokens,
        max_requests=settings.batch_requests,
        max_tenants=num_slots - 1,
    )
