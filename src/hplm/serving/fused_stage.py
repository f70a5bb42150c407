"""The fused stage: look-up and encoder in one process, over one queue. Texts go in, labels come out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.access.gate import SERVER
from hplm.adapters.tenant import Tenant
from hplm.cascade.dispatch import DispatchInput
from hplm.core.settings import FusedSettings
from hplm.errors import HplmError, InternalError
from hplm.registry.records import ServedTenant
from hplm.scheduling.downstream_admission import Backlog, PipelineAdmission, combine
from hplm.scheduling.policy import Batch
from hplm.serving.batch_loop import Results
from hplm.serving.encode_stage import EncodeAnswer, EncodeItem, EngineStage, encode_item
from hplm.serving.lookup_stage import LookupAnswer, LookupItem, RawTexts, TextLookup, students_of
from hplm.serving.request import Request
from hplm.serving.stage import Admission, Admitted


@dataclass(frozen=True)
class FusedInput:
    """The raw text or pair of a request, and how this level of a cascade decides on it; None outside of a cascade."""

    texts: RawTexts
    dispatch: DispatchInput | None = None


@dataclass(frozen=True, kw_only=True)
class FusedAnswer(EncodeAnswer):
    """Labels and logits of one text. `truncated`: the text was longer than the base's maximum and was cut."""

    truncated: bool


@dataclass
class FusedItem:
    """A request for a batch: its tenant is in host memory. `looked_up` is its result of the look-up, None before that."""

    tenant: Tenant
    text: LookupItem
    dispatch: DispatchInput | None = None
    looked_up: LookupAnswer | HplmError | None = None


class FusedStage(EngineStage[FusedInput, FusedItem, FusedAnswer]):
    """Tokenise, look up, run, decode: the work of both stages, without a copy of hidden states between processes.

    The policy plans with estimated tokens, because texts are tokenised in their batch.
    """

    def __init__(
        self,
        settings: FusedSettings,
        folder: Path,
        device_index: int = 0,
        instances: int = 1,
        all_processes: int | None = None,
    ) -> None:
        """`instances`: how many processes of this stage one server runs.

        `all_processes`: how many processes of all bases of the server compute upper layers; None: `instances`.
        """
        super().__init__(settings, folder, device_index, instances, all_processes)
        self._backlog: Backlog | None = None
        self._downstream = PipelineAdmission([lambda now_s: self._backlog], settings.tenant_weights)
        self.lookup = TextLookup(
            settings.look_up, self._store, self._base, self._catalog, self._bank, self._downstream, device_index
        )
        self._tokens = 0
        self._looking_up = threading.Lock()

    def close(self) -> None:
        self.lookup.close()
        super().close()

    def forget(self, versions: Sequence[ServedTenant]) -> None:
        self.lookup.forget(versions)
        super().forget(versions)

    @property
    def counts(self) -> Counter[str]:
        """Counts of every stage with an engine, and the tokens looked up: the batch loop counts an estimate only."""
        counts = super().counts
        counts["tokens"] = self._tokens
        return counts

    def publish(self, backlog: Backlog) -> None:
        # Admission reads the queue of its own process: None until a batch was planned.
        self._backlog = combine([backlog])

    def admit(self, request: Request[FusedInput, FusedAnswer]) -> Admission[FusedItem]:
        """Find what the look-up needs, then the tenant's weights in host memory."""
        dispatch = request.item.dispatch
        text = yield from self.lookup.admit(request.with_item(request.item.texts))
        tenant = yield from self.weights_of(text.tenant, dispatch)
        students = students_of(text.tenant, tenant.card.students, of_cascade=dispatch is not None)
        self._downstream.passed(text.tenant.name, text.tokens * students.least, request.arrived_s, time.monotonic())
        return Admitted(FusedItem(tenant, text, dispatch), text.tenant.name, text.tokens, students)

    def look_ahead(self, items: list[FusedItem]) -> None:
        """Fill adapter slots and look texts up for the next batch, while the batch that runs is computed."""
        self.prefetch([item.tenant for item in items])
        self._look_up(items)
        for item in items:
            if isinstance(item.looked_up, InternalError):
                # Only a head start is lost: beside the running batch there may have been too little memory.
                item.looked_up = None

    def run(self, items: list[FusedItem], batch: Batch) -> Results[FusedAnswer]:
        """Look up what is not looked up yet, and compute the rest of the way."""
        self._look_up(items)
        sound: list[int] = []
        encode_items: list[EncodeItem] = []
        truncated: list[bool] = []
        for index, item in enumerate(items):
            if isinstance(item.looked_up, LookupAnswer):
                sound.append(index)
                found = item.looked_up
                encode_items.append(encode_item(item.tenant, found.features, found.tokens, item.dispatch))
                truncated.append(item.looked_up.truncated)
                self._tokens += len(item.looked_up.tokens)
            elif item.looked_up is not None:
                yield [index], [item.looked_up]
        students = [batch.students[index] for index in sound]
        for indices, answers in self.encode(encode_items, students, batch.slot_tokens):
            yield (
                [sound[i] for i in indices],
                [
                    answer if isinstance(answer, HplmError) else FusedAnswer(**vars(answer), truncated=truncated[i])
                    for i, answer in zip(indices, answers, strict=True)
                ],
            )

    def _look_up(self, items: Sequence[FusedItem]) -> None:
        with self._looking_up:
            missing = [item for item in items if item.looked_up is None]
            begun_s = time.monotonic()
            for indices, answers in self.lookup.look_up([item.text for item in missing]):
                for index, answer in zip(indices, answers, strict=True):
                    missing[index].looked_up = answer
                    text = missing[index].text
                    if not isinstance(answer, LookupAnswer) or text.key_id == SERVER:
                        continue
                    self.quotas.correct(text.tenant.name, text.charge, len(answer.tokens))
                    if self._meter is not None:
                        tenant = text.tenant.name.encode()
                        self._meter.note_part(tenant, "look_up", time.monotonic() - begun_s)
                        self._meter.note_tokens(tenant, len(answer.tokens))
