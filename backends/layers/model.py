"""Triton backend `layers`, an encode stage before the last: HIDDEN, IDS or STATES, TOKENS, TENANT, REQUEST_META -> STATES."""

from hplm.core import wire
from hplm.serving.encode_stage import LayersStage
from hplm.serving.multi_text import pack
from hplm.triton.bridge import translate
from hplm.triton.stages.encode_model import EncodeModel


class TritonPythonModel(EncodeModel):
    ends_texts = False

    def initialize(self, args):
        self.begin_encode(args, LayersStage, [wire.REQUEST_META, wire.STATES])

    def writer(self, request):
        respond = translate.responder(request)
        return lambda answers: respond({wire.STATES: pack([answer.states for answer in answers])})
