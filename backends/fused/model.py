"""Triton backend `fused`, look-up and encoder in one process: TEXT, TENANT -> LABEL, SCORE, SPAN, TRUNCATED, STUDENTS, LOGITS.

With DISPATCH also ROUTE, CONFIDENCE and IMPORTANCE.
"""

from dataclasses import replace

import numpy as np

from hplm.cascade.dispatch import parse_dispatch
from hplm.core import wire
from hplm.core.settings import FusedSettings, load_settings
from hplm.serving.fused_stage import FusedInput, FusedStage
from hplm.triton.bridge import translate
from hplm.triton.launcher.instances import count_sharing_processes
from hplm.triton.stages.label_outputs import label_writer
from hplm.triton.stages.lookup_model import LookupModel
from hplm.triton.stages.student_metrics import student_counters, student_gauges

# The most seconds that a call is held. Requests that come meanwhile wait so much longer until they are admitted or refused.
HOLD_S = 0.005


class TritonPythonModel(LookupModel):
    def initialize(self, args):
        translate.check_tensors(args, [wire.DISPATCH, wire.STUDENTS])
        folder = translate.version_folder(args)
        settings = load_settings(FusedSettings, folder / "settings.json")
        device_index, instances = int(args["model_instance_device_id"]), translate.instances(args)
        stage = FusedStage(settings, folder, device_index, instances, count_sharing_processes(folder, instances))
        # The log says what `auto` has chosen: a GPU that torch does not see is no error.
        translate.log(f"{args['model_name']}: computing {stage.about}")
        self.begin_lookup(
            args,
            stage,
            stage.lookup,
            # A GPU computes a batch in less time, and a held call would leave requests unread.
            hold_s=HOLD_S if stage.engine.device.type == "cpu" else 0.0,
            events="Answers by outcome, batches, tokens, loads",
            waiting="Requests that wait for a batch or for files",
            counters=student_counters(stage),
            gauges=student_gauges(stage),
        )

    def read(self, request):
        texts = super().read(request)
        dispatches = parse_dispatch(translate.optional(translate.inputs(request), wire.DISPATCH), len(texts))
        return [
            replace(text, item=FusedInput(text.item, dispatch))
            for text, dispatch in zip(texts, dispatches, strict=True)
        ]

    def writer(self, request):
        write_labels, respond = label_writer(request), translate.responder(request)

        def write(answers):
            truncated = np.array([[answer.truncated] for answer in answers], dtype=bool)
            return respond({**write_labels(answers), wire.TRUNCATED: truncated})

        return write
