"""The part of a Triton model that encode stages share: features of texts in, or hidden states of an earlier encode stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hplm.access.gate import SERVER
from hplm.access.quotas import Held
from hplm.cascade.dispatch import parse_dispatch
from hplm.core import wire
from hplm.core.settings import EncodeSettings, load_settings
from hplm.serving.encode_stage import EncodeInput, FeaturesStage
from hplm.serving.multi_text import unpack
from hplm.serving.request import Request
from hplm.triton.bridge import credentials, translate
from hplm.triton.launcher.instances import count_sharing_processes
from hplm.triton.stages.stage_model import Counters, StageModel
from hplm.triton.stages.student_metrics import student_counters, student_gauges

# The most seconds that a call is held, so that what the stage before sends together comes in few calls. Requests that come
# meanwhile may miss a batch that begins.
HOLD_S = 0.005


class EncodeModel(StageModel):
    """A Triton model over an encode stage."""

    stage: FeaturesStage[Any]

    def begin_encode(self, args: dict[str, str], stage_class: type[FeaturesStage[Any]], tensors: Sequence[str]) -> None:
        """Make the stage, and start it and its metrics. The model's config must have `tensors`."""
        folder = translate.version_folder(args)
        settings = load_settings(EncodeSettings, folder / "settings.json")
        # A stage of several is no level of a cascade.
        translate.check_tensors(args, tensors if settings.stage_layers else [*tensors, wire.DISPATCH])
        device_index, instances = int(args["model_instance_device_id"]), translate.instances(args)
        stage = stage_class(settings, folder, device_index, instances, count_sharing_processes(folder, instances))
        # The log says what `auto` has chosen: a GPU that torch does not see is no error.
        translate.log(f"{args['model_name']}: computing {stage.about}")
        has_students = stage.engine.has_all_layers
        nothing: Counters = MappingProxyType({})
        self.begin(
            args,
            stage,
            # A GPU computes a batch in less time, and a held call would leave requests unread.
            hold_s=HOLD_S if stage.engine.device.type == "cpu" else 0.0,
            no_op={
                stage.input: stage.no_features[None],
                wire.TOKENS: np.zeros((1, 1, 3), np.int32),
                wire.TENANT: np.array([[b""]], dtype=np.object_),
            },
            events="Answers by outcome, batches, tokens, loads",
            waiting="Requests that wait for a batch or for weights",
            counters=student_counters(stage) if has_students else nothing,
            gauges=student_gauges(stage) if has_students else MappingProxyType({}),
        )

    def read(self, request: Any) -> Sequence[Request[Any, Any]]:
        inputs, deadline_s, now_s = translate.inputs(request), translate.deadline_s(request), time.monotonic()
        is_inner = translate.is_inner(request)
        tenants = [tenant for (tenant,) in translate.texts(inputs, wire.TENANT)]
        meta = translate.optional(inputs, wire.REQUEST_META)
        # Each text's version of its tenant, and when it arrived; -1 if the client does not know.
        known = [(-1, -1)] * len(tenants) if meta is None else meta[:, 1:].tolist()
        versions = [version for version, _ in known]
        key_ids = credentials.admit_inner(self.stage.gate, request, inputs, tenants, versions)
        lengths = None if meta is None else meta[:, 0].tolist()
        features = unpack(translate.tensor(inputs, self.stage.input), lengths)
        tokens = unpack(translate.tensor(inputs, wire.TOKENS), lengths)
        dispatches = parse_dispatch(translate.optional(inputs, wire.DISPATCH), len(tenants))
        return [
            Request(
                EncodeInput(text_features, text_tokens, version if version >= 0 else None, dispatch),
                tenant,
                deadline_s,
                arrived_ns / 1e9 if arrived_ns >= 0 else now_s,
                key_id=key_id,
                is_inner=is_inner,
            )
            for text_features, text_tokens, tenant, key_id, (version, arrived_ns), dispatch in zip(
                features, tokens, tenants, key_ids, known, dispatches, strict=True
            )
        ]

    def take(self, texts: Sequence[Request[Any, Any]]) -> Held | None:
        """Take the texts over from the stage before, which has taken the request and has handed it on."""
        if texts[0].is_inner or texts[0].key_id == SERVER:
            return None
        tokens: Counter[str] = Counter()
        for text in texts:
            tokens[text.tenant.decode("utf-8", "replace")] += len(text.item.tokens)
        return self.stage.quotas.take_over({name: n for name, n in tokens.items() if self.stage.has_tenant(name)})
