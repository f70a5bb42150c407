"""Triton backend `route`: TEXT, TENANT -> LABEL, SCORE, SPAN, TRUNCATED, STUDENTS, LOGITS of the model of the tenant's base."""

from dataclasses import replace

from hplm.core import wire
from hplm.serving.routing.call_tensors import RouteInput, response_outputs
from hplm.serving.routing.route_stage import RouteStage
from hplm.triton.bridge import metrics, translate
from hplm.triton.bridge.model_calls import call_model
from hplm.triton.stages.text_model import TextModel


class TritonPythonModel(TextModel):
    def initialize(self, args):
        stage = RouteStage(translate.version_folder(args) / "settings.json", call_model)
        tenants = metrics.MetricFamily("hplm_route_tenants", "Tenants there are, of all bases", "")
        self.begin_texts(
            args,
            stage,
            # The texts wait elsewhere, and a held call would leave requests unread.
            hold_s=0.0,
            events="Answers by outcome, calls of models, texts sent once more",
            waiting="Texts that wait for a call",
            gauges={tenants: lambda: {"": stage.tenants}},
        )

    def read(self, request):
        with_logits = translate.wants(request, wire.LOGITS)
        return [replace(text, item=RouteInput(text.item, with_logits)) for text in super().read(request)]

    def writer(self, request):
        respond = translate.responder(request)
        return lambda answers: respond(response_outputs(answers))
