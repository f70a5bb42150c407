"""Triton backend `upper`: HIDDEN, TOKENS, TENANT -> LABEL, SCORE, SPAN, LOGITS."""

import numpy as np

from hplm import config, wire
from hplm.serving.upper_stage import UpperAnswer, UpperInput, UpperStage
from hplm.triton import translate


class TritonPythonModel:
    def initialize(self, args):
        folder = translate.version_folder(args)
        settings = config.load(config.UpperSettings, folder / "settings.json")
        self._stage = UpperStage(settings, folder, int(args["model_instance_device_id"]))

    def execute(self, requests):
        return translate.answer_all(requests, self._read, self._stage.run, self._write)

    def _read(self, request):
        return UpperInput(
            translate.tensor(request, wire.HIDDEN),
            translate.tensor(request, wire.TOKENS),
            translate.text(request, wire.TENANT),
        )

    def _write(self, request, answer: UpperAnswer):
        outputs = {
            wire.LABEL: np.array([span.label.encode() for span in answer.spans], dtype=np.object_),
            wire.SCORE: np.array([span.score for span in answer.spans], dtype=np.float32),
            wire.SPAN: np.array([(span.start, span.end) for span in answer.spans], dtype=np.int32).reshape(-1, 2),
        }
        if translate.wants(request, wire.LOGITS):
            outputs[wire.LOGITS] = answer.logits
        return translate.respond(**outputs)
