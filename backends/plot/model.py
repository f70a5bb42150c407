"""Triton backend `plot`: TEXT, TENANT -> HIDDEN, TOKENS, TRUNCATED."""

import numpy as np

from hplm import config, wire
from hplm.serving.plot_stage import LookedUp, PlotStage
from hplm.triton import metrics, translate


class TritonPythonModel:
    def initialize(self, args):
        folder = translate.version_folder(args)
        self._stage = PlotStage(config.load(config.PlotSettings, folder / "settings.json"), folder)
        self._counter = metrics.LevelCounter(
            "hplm_plot_windows_total",
            "Windows looked up, by the level that answered",
            lambda: self._stage.windows_by_level,
        )

    def execute(self, requests):
        return translate.answer_all(requests, self._read, self._stage.run, self._write)

    def finalize(self):
        self._counter.stop()

    def _read(self, request):
        return translate.text(request, wire.TEXT), translate.text(request, wire.TENANT)

    def _write(self, request, answer: LookedUp):
        return translate.respond(
            HIDDEN=answer.hidden, TOKENS=answer.tokens, TRUNCATED=np.array([answer.truncated], dtype=bool)
        )
