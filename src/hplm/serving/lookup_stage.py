"""The look-up stage, the first of hBERT's two: requests' bytes -> hidden states, in batches, first come, first served.

For a whole base it only tokenises: in place of hidden states, the ids and types of tokens leave.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hplm.access.gate import NO_PROOF, SERVER
from hplm.access.quotas import Charge, estimated_tokens
from hplm.adapters.bank import TenantBank
from hplm.adapters.host_cache import HostCache
from hplm.adapters.tenant import TenantCard
from hplm.core import wire
from hplm.core.settings import BaseConfig, LookupSettings
from hplm.core.text import (
    EncodedText,
    TextOrPair,
    check_not_empty,
    check_text_count,
    decode_texts,
    tokenise_in_one_thread,
)
from hplm.engine.open_domain import Domain
from hplm.engine.open_domains import OpenDomains
from hplm.engine.token_domain import Features, TokenDomains
from hplm.errors import CorruptArtifactError, DeadlineError, HplmError, InternalError
from hplm.models.base import Base
from hplm.models.device import is_device_lost
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import PipelineAdmission
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import ONE_STUDENT, Batch, Budget, StudentRange
from hplm.serving.backlog_file import BacklogFile
from hplm.serving.batch_loop import Results
from hplm.serving.request import NOT_CHARGED, Request
from hplm.serving.stage import Admission, Admitted, Load, Stage, Times
from hplm.store.layout import Store

# Bytes of a request: a text, or a pair of texts.
RawTexts = tuple[bytes, ...]
# Cards that are remembered: two numbers for each tenant's version, until the version is forgotten.
MOST_CARDS = 1_000_000


@dataclass(frozen=True)
class LookupAnswer:
    """The answer to one text or pair: `features`, `tokens` int32 `[T, 3]`, and the tenant's version used.

    `features` are hidden states `[T, H]`, or of a whole base ids and types `[T, 2]`, see `hplm.engine.token_domain`. `proof` is
    for the encode stage: that the key was checked, see `hplm.access.gate`.
    """

    features: Features
    tokens: npt.NDArray[np.int32]
    truncated: bool
    version_id: int
    proof: bytes = NO_PROOF


@dataclass(frozen=True)
class LookupItem:
    """A request for a batch: its tenant is known and its domain is open. `tokens` is an estimate; `key_id`, `is_inner` and
    `charge` as in Request.
    """

    tenant: ServedTenant
    text: TextOrPair
    domain: Domain
    tokens: int
    arrived_s: float
    waits_for_others: bool
    students: StudentRange = ONE_STUDENT
    key_id: str = ""
    is_inner: bool = False
    charge: Charge = NOT_CHARGED


class TextLookup:
    """Raw texts of tenants -> hidden states: what a stage needs to admit texts, and to look them up.

    A tenant's card is read, and its domain opened, at the first request for them. Not safe to use from several threads, but
    `admit` may run beside `look_up`. Raises ArtifactError or ConfigError if the store is not sound.
    """

    def __init__(
        self,
        settings: LookupSettings,
        store: Store,
        base: Base,
        catalog: Catalog,
        bank: TenantBank,
        downstream: PipelineAdmission,
        device_index: int = 0,
    ) -> None:
        """`downstream` knows the requests that wait for encode stages. `device_index`: see `OpenDomains`."""
        tokenise_in_one_thread()
        self._settings = settings
        self._catalog = catalog
        self._bank = bank
        self._downstream = downstream
        self._max_tokens = base.config.max_tokens
        self._encoder = base.load_text_encoder()
        if (highest := self._encoder.highest_id) >= base.config.vocab_size:
            raise CorruptArtifactError(
                f"{base.tokenizer_path} gives token ids up to {highest}, this base has embeddings below "
                f"{base.config.vocab_size} only; convert it again with the tokenizer that belongs to it"
            )
        # What the cards say.
        self._cards: HostCache[ServedTenant, _OfCard] = HostCache(
            lambda tenant: _OfCard.read(bank.card(tenant)), lambda _: 1, capacity=MOST_CARDS
        )
        self.domains: OpenDomains | TokenDomains
        if base.config.is_whole:
            self.domains = TokenDomains(base.config)
        else:
            self.domains = OpenDomains(store, base, settings, device_index)
        # A root is in every lineage of its domains: a broken one shows at the start.
        roots = {served.lineage[-1:] for served in catalog.served()}
        for root in roots | {catalog.lineage(settings.table)[-1:]}:
            self.domains.fetch(root).result().warm_up()

    def close(self) -> None:
        """End the threads. No text is looked up any more."""
        self._cards.close()
        self.domains.close()

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        """Free what is kept of tenants' versions that no request can ask for any more."""
        self._cards.drop(versions)
        still_served = {served.lineage for served in self._catalog.retained()}
        self.domains.forget((old.lineage for old in versions), still_served)

    def due_s(self, request: Request[RawTexts, Any]) -> float:
        """Return by when the client must have its answer."""
        whole_s = self._settings.default_deadline_s if request.deadline_s is None else request.deadline_s
        return request.arrived_s + whole_s

    def admit(self, request: Request[RawTexts, Any]) -> Generator[Load, Any, LookupItem]:
        """Find what the tenant's card says and its domain, see `Stage.admit`.

        Raises DeadlineError if the encoder has too much to compute before this request.
        """
        raw, tenant = request.item, self._bank.resolve(request.tenant)
        text = decode_texts(raw, self._settings.max_text_bytes)
        if (card := self._cards.get(tenant)) is None:
            card = yield Load(partial(self._cards.fetch, tenant), tenant.name)
        if (domain := self.domains.get(tenant.lineage)) is None:
            domain = yield Load(partial(self.domains.fetch, tenant.lineage), tenant.name)
        text = check_text_count(text, card.texts)
        students = students_of(tenant, card.students)
        tokens = estimated_tokens(raw, self._max_tokens)
        waits_for_others = request.client.waits_for_others
        if self._downstream.would_be_late(
            tenant.name,
            tokens * students.least,
            self.due_s(request),
            time.monotonic(),
            waits_for_others=waits_for_others,
        ):
            raise DeadlineError("the deadline cannot be met; it was not computed")
        return LookupItem(
            tenant,
            text,
            domain,
            tokens,
            request.arrived_s,
            waits_for_others,
            students,
            request.key_id,
            request.is_inner,
            request.charge,
        )

    def look_up(self, items: Sequence[LookupItem]) -> Results[LookupAnswer]:
        """Tokenise all texts together, then look them up domain by domain. One text's failure fails its own request only."""
        encoded = self._encode([item.text for item in items])
        by_domain: dict[int, list[tuple[int, EncodedText]]] = {}
        for index, (item, result) in enumerate(zip(items, encoded, strict=True)):
            if isinstance(result, HplmError):
                yield [index], [result]
            else:
                by_domain.setdefault(id(item.domain), []).append((index, result))
        for pairs in by_domain.values():
            indices, texts = zip(*pairs, strict=True)
            looked_up = self._look_up(items[indices[0]].domain, texts)
            yield (
                indices,
                [
                    features
                    if isinstance(features, HplmError)
                    else LookupAnswer(features, text.tokens, text.truncated, items[i].tenant.version_id)
                    for (i, text), features in zip(pairs, looked_up, strict=True)
                ],
            )

    def _look_up(self, domain: Domain, texts: Sequence[EncodedText]) -> Sequence[Features | HplmError]:
        """Return the features of each text. If looking them all up together fails, look them up one by one."""
        try:
            return domain.features(texts)
        except Exception as error:
            if is_device_lost(error, self.domains.device):
                # No text can be looked up any more: the batch loop ends this process.
                raise
            # If each text alone succeeds, nothing else says why the texts failed together.
            several = "of several texts failed; each alone" if len(texts) > 1 else "failed"
            log_rate_limited(f"a look-up {several} ({type(error).__name__})", error)
        if len(texts) == 1:
            return [InternalError("the look-up of this text failed; the server's log says why")]
        # Outside the `except`: the error keeps what was computed of all texts, on a GPU that may be full.
        return [result for text in texts for result in self._look_up(domain, [text])]

    def _encode(self, texts: Sequence[TextOrPair]) -> list[EncodedText | HplmError]:
        """Tokenise texts. If that fails for all together, tokenise them one by one.

        The tokenizer may panic, which is no Exception.
        """
        try:
            encoded = self._encoder.encode(texts)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if len(texts) > 1:
                log_rate_limited(f"texts could not be tokenised together; each alone ({type(error).__name__})", error)
                return [result for text in texts for result in self._encode([text])]
            log_rate_limited(f"a text could not be tokenised ({type(error).__name__})", error)
            return [InternalError("the server failed on this text; its log says why")]
        return [_checked(text) for text in encoded]


class LookupStage(Stage[RawTexts, LookupItem, LookupAnswer]):
    """Tokenise, look up, merge. Raises RegistryError, ArtifactError or ConfigError if the store is not sound."""

    work: ClassVar[str] = "look_up"

    def __init__(self, settings: LookupSettings, folder: Path, instances: int = 1) -> None:
        """`instances`: how many processes of this stage one server runs."""
        super().__init__("plot", settings, folder, threads=1)
        self._settings = settings
        self._tokens = 0
        stages = range(1, settings.encode_stages + 1)
        self._downstream = PipelineAdmission(
            [BacklogFile(self._store.root, settings.base, stage=stage).read for stage in stages],
            settings.tenant_weights,
            instances,
        )
        self.lookup = TextLookup(settings, self._store, self._base, self._catalog, self._bank, self._downstream)
        self.domains = self.lookup.domains
        self.output = output_tensor(self._base.config)
        self._open_queue(
            settings,
            Fcfs(),
            Budget(1, settings.batch_tokens, settings.batch_requests, settings.batch_requests),
            # A batch costs less if much of its text was seen before, which may change from one batch to the next.
            CostModel(forgetting=0.8, is_linear=True),
            device=self.domains.device,
            starve_after_s=settings.default_deadline_s,
            every_s=settings.batch_every_ms / 1000,
        )

    def close(self) -> None:
        self.lookup.close()

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        self.lookup.forget(versions)
        super().forget(versions)

    @property
    def counts(self) -> Counter[str]:
        """Counts of every stage, and the tokens looked up: the batch loop counts an estimate only."""
        counts = super().counts
        counts["tokens"] = self._tokens
        return counts

    def times_of(self, request: Request[RawTexts, LookupAnswer]) -> Times:
        """Leave the encode stage a part of the request's time: under overload a batch ends just in time."""
        due_s = self.lookup.due_s(request)
        reserve_s = min((due_s - request.arrived_s) / 2, self._settings.reserve_s)
        return Times(request.arrived_s, due_s - reserve_s)

    def admit(self, request: Request[RawTexts, LookupAnswer]) -> Admission[LookupItem]:
        """Find what the look-up needs, see `TextLookup.admit`."""
        item = yield from self.lookup.admit(request)
        return Admitted(item, item.tenant.name, item.tokens)

    def run(self, items: list[LookupItem], batch: Batch) -> Results[LookupAnswer]:
        """Look a batch up, and note what leaves for the encode stage."""
        for indices, answers in self.lookup.look_up(items):
            now_s = time.monotonic()
            yield indices, [self._leaving(items[i], answer, now_s) for i, answer in zip(indices, answers, strict=True)]

    def _leaving(self, item: LookupItem, answer: LookupAnswer | HplmError, now_s: float) -> LookupAnswer | HplmError:
        if isinstance(answer, HplmError):
            return answer
        self._tokens += len(answer.features)
        if item.key_id != SERVER:
            if self._meter is not None:
                self._meter.note_tokens(item.tenant.name.encode(), len(answer.features))
            self.quotas.correct(item.tenant.name, item.charge, len(answer.features))
        tokens = len(answer.features) * item.students.least
        self._downstream.passed(item.tenant.name, tokens, item.arrived_s, now_s)
        # An answer that waits for other texts must not keep the hidden states of its whole batch in memory.
        features = answer.features.copy() if item.waits_for_others else answer.features
        proof = self.gate.sign(item.key_id, item.tenant.name, answer.version_id, is_inner=item.is_inner)
        return replace(answer, features=features, proof=proof)


class _OfCard(NamedTuple):
    """What a look-up needs of a tenant's card: the number of texts in a request, and of students."""

    texts: int
    students: int

    @classmethod
    def read(cls, card: TenantCard) -> _OfCard:
        return cls(card.texts, card.students)


def students_of(tenant: ServedTenant, count: int, *, of_cascade: bool = False) -> StudentRange:
    """Return how many of a version's `count` students may answer a text: at least as many as the tenant has set.

    All of them answer as a level of a cascade, because the plan's temperature, cut-off and proof are those of all students.
    """
    return StudentRange(count if of_cascade else min(tenant.least_students, count), count)


def output_tensor(config: BaseConfig) -> str:
    """Return the name of the tensor between the stages that holds a base's features."""
    return wire.IDS if config.is_whole else wire.HIDDEN


def _checked(text: EncodedText) -> EncodedText | HplmError:
    try:
        return check_not_empty(text)
    except HplmError as error:
        return error
