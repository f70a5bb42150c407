"""The part of a Triton model that all stages of infer requests share. It loads no torch."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy.typing as npt

from hplm.access.gate import Gate
from hplm.access.quotas import Held, Quotas
from hplm.errors import HplmError
from hplm.metering.text_meter import TextMeter
from hplm.scheduling.batch_pacing import ReplyHold
from hplm.serving.multi_text import submit_texts
from hplm.serving.request import Client, Request
from hplm.triton.bridge import credentials, metrics, translate
from hplm.triton.stages.quota_client import QuotaClient
from hplm.triton.workarounds.kept_requests import TritonWakeup

Counters = Mapping[metrics.MetricFamily, Callable[[], Counter[str]]]
Gauges = Mapping[metrics.MetricFamily, Callable[[], Mapping[str, float]]]


class AnyStage(Protocol):
    """A stage as its Triton model uses it: `hplm.serving.stage.Stage`, or the stage that routes."""

    name: str
    gate: Gate
    quotas: Quotas

    @property
    def most_tokens(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def counts(self) -> Counter[str]: ...

    @property
    def waiting(self) -> int: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def submit(self, request: Request[Any, Any]) -> None: ...

    def count_refused(self, error: HplmError) -> None: ...

    def open_meter(self) -> TextMeter: ...

    def has_tenant(self, name: str) -> bool: ...


class StageModel:
    """A Triton model over a stage: calls, wake-ups, metrics. A subclass reads requests and writes answers."""

    stage: AnyStage
    # Whether an answer of the stage ends a text. Else another stage goes on with the text, and only errors end it here.
    ends_texts = True

    def begin(
        self,
        args: Mapping[str, str],
        stage: AnyStage,
        *,
        hold_s: float,
        no_op: Mapping[str, npt.NDArray[Any]],
        events: str,
        waiting: str,
        counters: Counters = MappingProxyType({}),
        gauges: Gauges = MappingProxyType({}),
    ) -> None:
        """Start the stage and its metrics.

        A call is held for up to `hold_s`, so that answers leave together. `no_op`: inputs of a wake-up request. `events` and
        `waiting` describe the metrics of these names; `counters` and `gauges` are further metrics.
        """
        self.stage = stage
        if stage.gate.needs_keys:
            credentials.check_model(args)
        self._hold = ReplyHold(hold_s, json.loads(args["model_config"])["max_batch_size"])
        self._wakeup = TritonWakeup(args, translate.queue_policy(args), no_op)
        event_family = metrics.MetricFamily(f"hplm_{stage.name}_events_total", events, "event")
        waiting_family = metrics.MetricFamily(f"hplm_{stage.name}_waiting", waiting, "")
        self._meter = stage.open_meter()
        self._metrics = metrics.MetricsPublisher(
            {**counters, event_family: lambda: stage.counts + self._wakeup.counts},
            {**gauges, waiting_family: lambda: {"": stage.waiting}},
            instance=args["model_instance_name"],
            series=self._meter.series,
        )
        stage.start()

    def read(self, request: Any) -> Sequence[Request[Any, Any]]:
        """Read a Triton request: one request to the stage for each text."""
        raise NotImplementedError

    def take(self, texts: Sequence[Request[Any, Any]]) -> Held | None:
        """Take a Triton request's texts out of the quotas of their tenants, None if nothing is limited. Raises QuotaError."""
        raise NotImplementedError

    def writer(self, request: Any) -> Callable[[Sequence[Any]], Any]:
        """Return what writes the answers of a Triton request's texts as its response."""
        raise NotImplementedError

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Submit the requests of a call, and return the responses that are ready in time."""
        self._wakeup.call_began()
        hold_s = self._hold.seconds(len(requests), time.monotonic())
        responses = translate.submit_all(
            requests,
            self.read,
            self._submit,
            self.writer,
            self._count_refused,
            hold_s=hold_s,
        )
        self._wakeup.call_ended(is_busy=hold_s > 0)
        return responses

    def is_ready(self) -> bool:
        """Return whether the stage answers requests. Triton from 26.03 on asks for it when a client asks for readiness."""
        return self.stage.is_running

    def finalize(self) -> None:
        """End the stage."""
        self._wakeup.stop()
        self.stage.stop()
        self._meter.stop()
        self._metrics.stop()

    def _submit(self, texts: Sequence[Request[Any, Any]], client: Client[Sequence[Any]]) -> None:
        """Submit the texts of a client's request, if the quotas of their tenants allow it. Raises an HplmError as counted."""
        try:
            held = self.take(texts)
        except HplmError as error:
            self.stage.count_refused(error)
            for text in texts:
                self._meter.note_answer(self._named(text.tenant), error, 0.0)
            raise
        if held is None:
            submit_texts(self.stage.submit, texts, client, self._note)
            return
        try:
            submit_texts(self.stage.submit, texts, QuotaClient(client, held, hands_on=not self.ends_texts), self._note)
        except HplmError as error:
            held.end(error)
            raise

    def _note(self, text: Request[Any, Any]) -> Callable[[object], None]:
        """Return what notes the one answer of a text. It keeps nothing else of the text in memory."""
        meter, ends_texts, named = self._meter, self.ends_texts, self._named
        tenant, arrived_s, is_inner = text.counted_for, text.arrived_s, text.is_inner

        def note_answer(answer: object) -> None:
            is_error = isinstance(answer, HplmError)
            if ends_texts or is_error:
                known = named(tenant) if is_error else tenant
                meter.note_answer(known, answer, time.monotonic() - arrived_s, is_inner=is_inner)

        return note_answer

    def _named(self, tenant: bytes) -> bytes:
        """Return a tenant's name, empty if there is no such tenant: an invented name must not take a record of the counts."""
        return tenant if self.stage.has_tenant(tenant.decode("utf-8", "replace")) else b""

    def _count_refused(self, error: HplmError) -> None:
        self.stage.count_refused(error)
        self._meter.note_answer(b"", error, 0.0)
