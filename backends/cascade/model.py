"""Triton backend `cascade`: TEXT, TENANT -> the outputs of `route`, and LEVEL, CONFIDENCE, ROUTE, LATE."""

from dataclasses import replace

from hplm.core import wire
from hplm.serving.cascade.answers import cascade_outputs
from hplm.serving.cascade.cascade_stage import CascadeStage
from hplm.serving.routing.call_tensors import RouteInput
from hplm.triton.bridge import translate
from hplm.triton.bridge.metrics import MetricFamily
from hplm.triton.bridge.model_calls import call_model
from hplm.triton.stages.text_model import TextModel


class TritonPythonModel(TextModel):
    def initialize(self, args):
        stage = CascadeStage(translate.version_folder(args) / "settings.json", call_model)
        counts = stage.cascade_counts
        counters = {
            MetricFamily("hplm_cascade_answers_total", "Texts by the base that answered last", "level"): "answered",
            MetricFamily("hplm_cascade_rerouted_total", "Texts by the base that sent them on", "level"): "rerouted",
            MetricFamily("hplm_cascade_late_total", "Texts that the next level could not answer", "why"): "late",
            MetricFamily("hplm_cascade_confidence_bucket", "Confidences of first levels", "le"): "confidences",
            MetricFamily("hplm_cascade_logic_us_total", "Microseconds of the cascade's own logic", ""): "logic_us",
        }
        level_events = MetricFamily(
            "hplm_cascade_level_events_total", "Answers of levels, calls, texts sent again", "event"
        )
        tenants = MetricFamily("hplm_cascade_tenants", "Tenants there are, of all bases", "")
        drift = MetricFamily("hplm_cascade_drift", "Recent confidences less those on dev examples", "level")
        self.begin_texts(
            args,
            stage,
            # The texts wait elsewhere, and a held call would leave requests unread.
            hold_s=0.0,
            events="Answers by outcome, each text once",
            waiting="Texts that wait for a call of a level",
            counters={
                **{family: lambda name=name: getattr(counts, name) for family, name in counters.items()},
                level_events: stage.call_counts.read,
            },
            gauges={tenants: lambda: {"": stage.tenants}, drift: counts.drift},
        )

    def read(self, request):
        with_logits = translate.wants(request, wire.LOGITS)
        return [replace(text, item=RouteInput(text.item, with_logits)) for text in super().read(request)]

    def writer(self, request):
        respond = translate.responder(request)
        return lambda answers: respond(cascade_outputs(answers))
