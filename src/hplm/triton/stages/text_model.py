"""The part of a Triton model that the stages share which read texts: TEXT and TENANT in."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hplm.access.gate import SERVER
from hplm.access.quotas import Charge, Held, TextCost, estimated_tokens
from hplm.core import wire
from hplm.serving.request import Request
from hplm.serving.triton_queue_time import TritonQueueTime
from hplm.triton.bridge import credentials, translate
from hplm.triton.stages.stage_model import AnyStage, Counters, Gauges, StageModel


class TextModel(StageModel):
    """A Triton model over a stage of texts. It estimates how long requests have queued inside Triton."""

    def begin_texts(
        self,
        args: dict[str, str],
        stage: AnyStage,
        *,
        hold_s: float,
        events: str,
        waiting: str,
        counters: Counters = MappingProxyType({}),
        gauges: Gauges = MappingProxyType({}),
    ) -> None:
        """Start the stage and its metrics, see `StageModel.begin`."""
        max_batch_size = json.loads(args["model_config"])["max_batch_size"]
        self._queue_time = TritonQueueTime(max_batch_size, translate.queue_size(args), translate.instances(args))
        nothing = np.array([[b""]], dtype=np.object_)
        self.begin(
            args,
            stage,
            hold_s=hold_s,
            no_op={wire.TEXT: nothing, wire.TENANT: nothing},
            events=events,
            waiting=waiting,
            counters=counters,
            gauges=gauges,
        )

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Submit the requests of a call, which arrived before it, and return the responses that are ready in time."""
        now_s = time.monotonic()
        self._arrived_s = now_s - self._queue_time.waited_s(len(requests), now_s, self._wakeup.oldest_s)
        responses = super().execute(requests)
        self._queue_time.returned(time.monotonic())
        return responses

    def take(self, texts: Sequence[Request[Any, Any]]) -> Held | None:
        """Take texts that a client sent. What another model of this server asks was taken there."""
        if texts[0].is_inner or texts[0].key_id == SERVER:
            return None
        named = ((text.tenant.decode("utf-8", "replace"), text.charge.tokens) for text in texts)
        # An invented name must not take a record of the quotas.
        costs = [TextCost(name, tokens) for name, tokens in named if self.stage.has_tenant(name)]
        return self.stage.quotas.take(costs)

    def read(self, request: Any) -> Sequence[Request[Any, Any]]:
        """Read a Triton request: one request to the stage for each text or pair. Its item is the tuple of raw texts."""
        inputs, deadline_s = translate.inputs(request), translate.deadline_s(request)
        tenants = [tenant for (tenant,) in translate.texts(inputs, wire.TENANT)]
        # Before anything else is read: a request without its keys costs as little as possible.
        key_ids = credentials.admit(self.stage.gate, request, inputs, tenants)
        inner = credentials.inner_charges(self.stage.gate, request, inputs, len(tenants))
        texts = translate.texts(inputs, wire.TEXT)
        charges = [Charge(estimated_tokens(text, self.stage.most_tokens)) for text in texts] if inner is None else inner
        return [
            Request(
                tuple(text),
                tenant,
                deadline_s,
                self._arrived_s,
                key_id=key_id,
                is_inner=inner is not None,
                charge=charge,
            )
            for text, tenant, key_id, charge in zip(texts, tenants, key_ids, charges, strict=True)
        ]
