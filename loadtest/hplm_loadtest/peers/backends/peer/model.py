"""Triton backend `peer`: answers TEXT and TENANT with LABEL, SCORE, SPAN, TRUNCATED and LOGITS as a peer system of hBERT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.stage import PeerAnswer, PeerStage

from hplm.core import wire
from hplm.core.settings import load_settings
from hplm.serving.multi_text import fill_up, labelled, submit_texts
from hplm.serving.request import Request
from hplm.triton.bridge import translate

Text = Request[bytes, PeerAnswer]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = translate.version_folder(args)
        self._stage = PeerStage(load_settings(PeerSettings, folder / "settings.json"), folder)

    def execute(self, requests: list[Any]) -> None:
        texts: list[Text] = []
        # A peer has no metrics: its refusals are not counted.
        translate.submit_all(
            requests, self._read, partial(submit_texts, texts.append), self._writer, lambda refused: None
        )
        self._stage.submit([(text.item, text.tenant, text.reply) for text in texts])

    def finalize(self) -> None:
        self._stage.stop()

    def _read(self, request: Any) -> list[Text]:
        inputs = translate.inputs(request)
        texts, tenants = translate.texts(inputs, wire.TEXT), translate.texts(inputs, wire.TENANT)
        # Peers do not support pairs of texts: only the first text counts.
        return [Request(text[0], tenant) for text, (tenant,) in zip(texts, tenants, strict=True)]

    def _writer(self, request: Any) -> Callable[[list[PeerAnswer]], Any]:
        with_logits, respond = translate.wants(request, wire.LOGITS), translate.responder(request)

        def write(answers: list[PeerAnswer]) -> Any:
            outputs = labelled([answer.spans for answer in answers])
            outputs[wire.TRUNCATED] = np.array([[answer.truncated] for answer in answers], dtype=bool)
            if with_logits:
                outputs[wire.LOGITS] = fill_up([answer.logits for answer in answers], wire.LOGITS_FILLER)
            return respond(outputs)

        return write
