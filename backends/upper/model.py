"""Triton backend `upper`: HIDDEN, TOKENS, TENANT, REQUEST_META -> LABEL, SCORE, SPAN, LOGITS."""

import json
import time
from functools import partial

import numpy as np

from hplm.core import wire
from hplm.core.settings import EncodeSettings, load_settings
from hplm.scheduling.batch_pacing import ReplyHold
from hplm.serving.encode_stage import EncodeRequest, EncodeStage
from hplm.serving.multi_text import fill_up, labelled, submit_together, unpack
from hplm.triton.bridge import metrics, translate
from hplm.triton.workarounds.kept_requests import TritonWakeup

# Of a call, for what the look-up passes on together to come in few. Who comes meanwhile may miss a batch that begins.
HOLD_S = 0.005


class TritonPythonModel:
    def initialize(self, args):
        translate.check_tensors(args, [wire.REQUEST_META])
        folder = translate.version_folder(args)
        settings = load_settings(EncodeSettings, folder / "settings.json")
        self._stage = EncodeStage(settings, folder, int(args["model_instance_device_id"]), translate.instances(args))
        self._waker = TritonWakeup(
            args,
            translate.queue_policy(args),
            {
                wire.HIDDEN: np.zeros((1, 1, 1), np.float16),
                wire.TOKENS: np.zeros((1, 1, 3), np.int32),
                wire.TENANT: np.array([[b""]], dtype=np.object_),
            },
        )
        self._metrics = metrics.MetricsPublisher(
            counters={
                metrics.MetricFamily(
                    "hplm_upper_events_total", "Answers by outcome, batches, tokens, loads", "event"
                ): (lambda: self._stage.counts + self._waker.counts)
            },
            gauges={
                metrics.MetricFamily(
                    "hplm_upper_waiting", "Requests that wait for a batch or for weights", ""
                ): lambda: ({"": self._stage.waiting})
            },
            instance=args["model_instance_name"],
        )
        # A GPU is done with a batch in less: nobody's requests would be read meanwhile.
        hold_s = HOLD_S if self._stage.engine.device.type == "cpu" else 0.0
        self._hold = ReplyHold(hold_s, json.loads(args["model_config"])["max_batch_size"])
        # What `auto` has come to: a GPU that torch does not see is no error.
        translate.log(f"{args['model_name']}: computing {self._stage.about}")
        self._stage.start()

    def execute(self, requests):
        self._waker.call_began()
        hold_s = self._hold.seconds(len(requests), time.monotonic())
        submit, count = partial(submit_together, self._stage.submit), self._stage.count_refused
        found = translate.submit_all(requests, self._read, submit, self._writer, count, hold_s=hold_s)
        self._waker.call_ended(is_busy=hold_s > 0)
        return found

    def finalize(self):
        self._waker.stop()
        self._stage.stop()
        self._metrics.stop()

    def _read(self, request):
        inputs, deadline_s = translate.inputs(request), translate.deadline_s(request)
        tenants, about = translate.texts(inputs, wire.TENANT), translate.optional(inputs, wire.REQUEST_META)
        known = [(-1, -1)] * len(tenants) if about is None else about[:, 1:].tolist()
        lengths = None if about is None else about[:, 0].tolist()
        hidden = unpack(translate.tensor(inputs, wire.HIDDEN), lengths)
        tokens = unpack(translate.tensor(inputs, wire.TOKENS), lengths)
        return [
            EncodeRequest(
                *own,
                tenant,
                deadline_s,
                arrived_ns / 1e9 if arrived_ns >= 0 else None,
                version if version >= 0 else None,
            )
            for *own, (tenant,), (version, arrived_ns) in zip(hidden, tokens, tenants, known, strict=True)
        ]

    def _writer(self, request):
        with_logits = translate.wants(request, wire.LOGITS)

        def write(answers):
            outputs = labelled([answer.spans for answer in answers])
            if with_logits:
                outputs[wire.LOGITS] = fill_up([answer.logits for answer in answers], wire.LOGITS_FILLER)
            return translate.respond(**outputs)

        return write
