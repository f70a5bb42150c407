"""Triton backend `peer`: TEXT, TENANT -> LABEL, SCORE, SPAN, TRUNCATED, LOGITS, by a system that hBERT is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.stage import PeerAnswer, PeerStage

from hplm import config, wire
from hplm.errors import HplmError
from hplm.triton import translate

Given = tuple[bytes, bytes]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = translate.version_folder(args)
        self._stage = PeerStage(config.load(PeerSettings, folder / "settings.json"), folder)

    def execute(self, requests: list[Any]) -> None:
        arrived = []

        def submit(given: Given, reply: Callable[[PeerAnswer | HplmError], None], _: Callable[[], bool]) -> None:
            arrived.append((*given, reply))

        # It has no metrics.
        translate.submit_all(requests, self._read, submit, self._writer, lambda refused: None)
        self._stage.submit(arrived)

    def finalize(self) -> None:
        self._stage.stop()

    def _read(self, request: Any) -> Given:
        inputs = translate.inputs(request)
        return translate.text(inputs, wire.TEXT), translate.text(inputs, wire.TENANT)

    def _writer(self, request: Any) -> Callable[[Given, PeerAnswer], Any]:
        with_logits = translate.wants(request, wire.LOGITS)

        def write(given: Given, answer: PeerAnswer) -> Any:
            outputs = translate.labelled(answer.spans)
            outputs[wire.TRUNCATED] = np.array([answer.truncated], dtype=bool)
            if with_logits:
                outputs[wire.LOGITS] = answer.logits
            return translate.respond(**outputs)

        return write
