"""Triton backend `waiting`: a stage of an emulated group. TENANT names the model; the last stage answers as hplm does."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hplm_loadtest.emulation.settings import WaitingSettings
from hplm_loadtest.emulation.waiting_stage import WaitingAnswer, WaitingItem, WaitingStage

from hplm.core import wire
from hplm.core.settings import load_settings
from hplm.core.wire import LabelledSpan
from hplm.serving.multi_text import labelled, submit_texts
from hplm.serving.request import Request
from hplm.triton.bridge import translate

Text = Request[WaitingItem, WaitingAnswer]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._settings = load_settings(WaitingSettings, translate.version_folder(args) / "settings.json")
        self._stage = WaitingStage(self._settings)
        self._hidden = np.zeros((1, self._settings.boundary_bytes), np.uint8)

    def execute(self, requests: list[Any]) -> None:
        submit = partial(submit_texts, self._stage.submit)
        translate.submit_all(requests, self._read, submit, self._writer, self._stage.count_refused)

    def finalize(self) -> None:
        self._stage.stop()

    def _read(self, request: Any) -> list[Text]:
        inputs, deadline_s, now_s = translate.inputs(request), translate.deadline_s(request), time.monotonic()
        meta = translate.optional(inputs, wire.REQUEST_META)
        arrived_s = now_s if meta is None else float(meta[0, 2]) / 1e9
        models = [tenant.decode() for (tenant,) in translate.texts(inputs, wire.TENANT)]
        return [Request(self._stage.item_of(model, arrived_s), b"", deadline_s, arrived_s) for model in models]

    def _writer(self, request: Any) -> Callable[[list[WaitingAnswer]], Any]:
        respond = translate.responder(request)

        def write(answers: list[WaitingAnswer]) -> Any:
            if not self._settings.is_last:
                meta = [[0, -1, int(answer.arrived_s * 1e9)] for answer in answers]
                return respond({wire.REQUEST_META: np.array(meta, np.int64), wire.HIDDEN: self._hidden})
            outputs = labelled([[LabelledSpan("waited", 1.0, 0, 0)] for _ in answers])
            return respond({**outputs, wire.TRUNCATED: np.zeros((len(answers), 1), bool)})

        return write
