"""Triton backend `plot`: TEXT, TENANT -> HIDDEN, TOKENS, TRUNCATED, REQUEST_META."""

import json
import time
from functools import partial

import numpy as np

from hplm.core import wire
from hplm.core.settings import LookupSettings, load_settings
from hplm.scheduling.batch_pacing import ReplyHold
from hplm.serving.lookup_stage import LookupRequest, LookupStage
from hplm.serving.multi_text import pack, submit_together
from hplm.serving.triton_queue_time import TritonQueueTime
from hplm.triton.bridge import metrics, translate
from hplm.triton.workarounds.kept_requests import TritonWakeup

# What a look-up of a call takes where the tables know its text.
LOOK_UP_S = 0.003
# Whoever comes meanwhile waits so much longer to be let in, or refused.
MOST_HOLD_S = 0.015


class TritonPythonModel:
    def initialize(self, args):
        translate.check_tensors(args, [wire.REQUEST_META])
        folder = translate.version_folder(args)
        settings = load_settings(LookupSettings, folder / "settings.json")
        instances = translate.instances(args)
        self._stage = LookupStage(settings, folder, instances)
        most = json.loads(args["model_config"])["max_batch_size"]
        self._intake = TritonQueueTime(most, translate.queue_size(args), instances)
        self._hold = ReplyHold(min(settings.batch_every_ms / 1000 + LOOK_UP_S, MOST_HOLD_S), most)
        nothing = np.array([[b""]], dtype=np.object_)
        self._waker = TritonWakeup(args, translate.queue_policy(args), {wire.TEXT: nothing, wire.TENANT: nothing})
        translate.log(f"{args['model_name']}: what no table has is {self._stage.about}")
        self._metrics = metrics.MetricsPublisher(
            counters={
                metrics.MetricFamily(
                    "hplm_plot_windows_total", "Windows looked up, by the level that answered", "level"
                ): (lambda: self._stage.windows_by_level),
                metrics.MetricFamily(
                    "hplm_plot_events_total", "Answers by outcome, batches, tokens looked up", "event"
                ): (lambda: self._stage.counts + self._waker.counts),
            },
            gauges={
                metrics.MetricFamily("hplm_plot_tenants", "Tenants there are", ""): lambda: {"": self._stage.tenants},
                metrics.MetricFamily(
                    "hplm_plot_waiting", "Requests that wait to be looked up or for files", ""
                ): lambda: ({"": self._stage.waiting}),
            },
            instance=args["model_instance_name"],
        )
        self._stage.start()

    def execute(self, requests):
        self._waker.call_began()
        now_s = time.monotonic()
        self._arrived_s = now_s - self._intake.waited_s(len(requests), now_s, self._waker.oldest_s)
        hold_s = self._hold.seconds(len(requests), now_s)
        submit, count = partial(submit_together, self._stage.submit), self._stage.count_refused
        found = translate.submit_all(requests, self._read, submit, self._writer, count, hold_s=hold_s)
        self._intake.returned(time.monotonic())
        self._waker.call_ended(is_busy=hold_s > 0)
        return found

    def finalize(self):
        self._waker.stop()
        self._stage.stop()
        self._metrics.stop()

    def _read(self, request):
        inputs, deadline_s = translate.inputs(request), translate.deadline_s(request)
        texts, tenants = translate.texts(inputs, wire.TEXT), translate.texts(inputs, wire.TENANT)
        return [
            LookupRequest(tuple(text), tenant, deadline_s, self._arrived_s, len(texts) > 1)
            for text, (tenant,) in zip(texts, tenants, strict=True)
        ]

    def _writer(self, request):
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
