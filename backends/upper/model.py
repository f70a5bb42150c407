"""Triton backend `upper`, the last encode stage, which is usually the only one.

HIDDEN, IDS or STATES, TOKENS, TENANT, REQUEST_META -> LABEL, SCORE, SPAN, STUDENTS, LOGITS. With DISPATCH also ROUTE,
CONFIDENCE and IMPORTANCE.
"""

from hplm.core import wire
from hplm.serving.encode_stage import EncodeStage
from hplm.triton.bridge import translate
from hplm.triton.stages.encode_model import EncodeModel
from hplm.triton.stages.label_outputs import label_writer


class TritonPythonModel(EncodeModel):
    def initialize(self, args):
        self.begin_encode(args, EncodeStage, [wire.REQUEST_META, wire.STUDENTS])

    def writer(self, request):
        write, respond = label_writer(request), translate.responder(request)
        return lambda answers: respond(write(answers))
