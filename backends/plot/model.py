"""Triton backend `plot`, the look-up stage: TEXT, TENANT -> HIDDEN (IDS of a whole base), TOKENS, TRUNCATED, REQUEST_META."""

import numpy as np

from hplm.access.gate import proof_rows
from hplm.core import wire
from hplm.core.settings import LookupSettings, load_settings
from hplm.serving.lookup_stage import LookupStage
from hplm.serving.multi_text import pack
from hplm.triton.bridge import translate
from hplm.triton.stages.lookup_model import LookupModel

# Seconds that the look-up of one call takes if the tables know its text.
LOOK_UP_S = 0.003
# The most seconds that a call is held: requests that come meanwhile wait so much longer until they are admitted or refused.
MOST_HOLD_S = 0.015


class TritonPythonModel(LookupModel):
    ends_texts = False

    def initialize(self, args):
        translate.check_tensors(args, [wire.REQUEST_META])
        folder = translate.version_folder(args)
        settings = load_settings(LookupSettings, folder / "settings.json")
        stage = LookupStage(settings, folder, translate.instances(args))
        self.begin_lookup(
            args,
            stage,
            stage.lookup,
            hold_s=min(settings.batch_every_ms / 1000 + LOOK_UP_S, MOST_HOLD_S),
            events="Answers by outcome, batches, tokens looked up",
            waiting="Requests that wait to be looked up or for files",
        )

    def writer(self, request):
        respond, arrived_ns = translate.responder(request), int(self._arrived_s * 1e9)

        def write(answers):
            return respond(
                {
                    self.stage.output: pack([answer.features for answer in answers]),
                    wire.TOKENS: pack([answer.tokens for answer in answers]),
                    wire.TRUNCATED: np.array([[answer.truncated] for answer in answers], dtype=bool),
                    wire.PROOF: proof_rows([answer.proof for answer in answers]),
                    wire.REQUEST_META: np.array(
                        [(len(answer.tokens), answer.version_id, arrived_ns) for answer in answers], np.int64
                    ),
                }
            )

        return write
