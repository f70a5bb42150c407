"""Triton backend `plot`, the look-up stage: TEXT, TENANT -> HIDDEN, TOKENS, TRUNCATED, REQUEST_META."""

import json
import time

import numpy as np

from hplm.core import wire
from hplm.core.settings import LookupSettings, load_settings
from hplm.serving.lookup_stage import LookupStage
from hplm.serving.multi_text import pack
from hplm.serving.request import Request
from hplm.serving.triton_queue_time import TritonQueueTime
from hplm.triton.bridge import metrics, translate
from hplm.triton.stages.stage_model import StageModel

# Seconds that the look-up of one call takes if the tables know its text.
LOOK_UP_S = 0.003
# The most seconds that a call is held: requests that come meanwhile wait so much longer until they are admitted or refused.
MOST_HOLD_S = 0.015


class TritonPythonModel(StageModel):
    def initialize(self, args):
        translate.check_tensors(args, [wire.REQUEST_META])
        folder, instances = translate.version_folder(args), translate.instances(args)
        settings = load_settings(LookupSettings, folder / "settings.json")
        stage = LookupStage(settings, folder, instances)
        max_batch_size = json.loads(args["model_config"])["max_batch_size"]
        self._queue_time = TritonQueueTime(max_batch_size, translate.queue_size(args), instances)
        translate.log(f"{args['model_name']}: what no table has is {stage.domains.how_misses_are_computed}")
        nothing = np.array([[b""]], dtype=np.object_)
        windows = metrics.MetricFamily(
            "hplm_plot_windows_total", "Windows looked up, by the level that answered", "level"
        )
        tenants = metrics.MetricFamily("hplm_plot_tenants", "Tenants there are", "")
        self.begin(
            args,
            stage,
            hold_s=min(settings.batch_every_ms / 1000 + LOOK_UP_S, MOST_HOLD_S),
            no_op={wire.TEXT: nothing, wire.TENANT: nothing},
            events="Answers by outcome, batches, tokens looked up",
            waiting="Requests that wait to be looked up or for files",
            counters={windows: lambda: stage.domains.windows_by_level},
            gauges={tenants: lambda: {"": stage.tenants}},
        )

    def execute(self, requests):
        now_s = time.monotonic()
        self._arrived_s = now_s - self._queue_time.waited_s(len(requests), now_s, self._wakeup.oldest_s)
        responses = super().execute(requests)
        self._queue_time.returned(time.monotonic())
        return responses

    def read(self, request):
        inputs, deadline_s = translate.inputs(request), translate.deadline_s(request)
        texts, tenants = translate.texts(inputs, wire.TEXT), translate.texts(inputs, wire.TENANT)
        return [
            Request(tuple(text), tenant, deadline_s, self._arrived_s)
            for text, (tenant,) in zip(texts, tenants, strict=True)
        ]

    def writer(self, request):
        arrived_ns = int(self._arrived_s * 1e9)

        def write(answers):
            return translate.respond(
                HIDDEN=pack([answer.hidden for answer in answers]),
                TOKENS=pack([answer.tokens for answer in answers]),
                TRUNCATED=np.array([[answer.truncated] for answer in answers], dtype=bool),
                REQUEST_META=np.array(
                    [(len(answer.tokens), answer.version_id, arrived_ns) for answer in answers], np.int64
                ),
            )

        return write
