"""Second stage of hBERT: hidden states of many tenants' texts -> labels, one batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.bank import TenantBank
from hplm.adapters.tenant import Tenant
from hplm.config import UpperSettings
from hplm.decode import decode_classification, decode_tagging
from hplm.errors import ArtifactError, HiddenStatesError, HplmError
from hplm.nn import base as bases
from hplm.nn.dtype import choose_device, choose_dtype
from hplm.nn.upper import UpperEngine, UpperRequest
from hplm.store.layout import Store
from hplm.wire import LabelledSpan


@dataclass(frozen=True)
class UpperInput:
    """One request: `hidden` float16 `[T, H]`, `tokens` int32 `[T, 3]`, `tenant` as it came."""

    hidden: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    tenant: bytes


@dataclass(frozen=True)
class UpperAnswer:
    """Labels of one text, and the `logits` float32 `[1 or T, labels]` they come from."""

    spans: list[LabelledSpan]
    logits: npt.NDArray[np.float32]


class UpperStage:
    """Check, run, decode. Raises ArtifactError or ConfigError on construction where the store is not sound."""

    def __init__(self, settings: UpperSettings, folder: Path, device_index: int = 0) -> None:
        torch.set_num_threads(settings.num_threads)
        store = Store((folder / settings.store).resolve())
        base = bases.load(store.base(settings.base), verify=settings.verify)
        device = choose_device(settings.device, device_index)
        self._config = base.config
        self._bank = TenantBank(store, base.fingerprint, verify=settings.verify)
        self.engine = UpperEngine(
            base.config,
            base.load_upper(),
            num_slots=settings.num_slots,
            reduced_size=max(1, base.config.hidden_size // settings.reduction_factor),
            device=device,
            dtype=choose_dtype(settings.dtype, device),
        )

    def run(self, inputs: Sequence[UpperInput]) -> list[UpperAnswer | HplmError]:
        """Answers in order; what is wrong with one request is that request's answer alone."""
        answers: list[UpperAnswer | HplmError | None] = [None] * len(inputs)
        requests: dict[int, UpperRequest] = {}
        for index, given in enumerate(inputs):
            try:
                tenant = self._tenant(given.tenant)
                self._check(given)
                requests[index] = UpperRequest(tenant, given.hidden)
            except HplmError as error:
                answers[index] = error
        for index, logits in zip(requests, self.engine.run(list(requests.values())), strict=True):
            answers[index] = UpperAnswer(decode(requests[index].tenant, logits, inputs[index].tokens), logits)
        return [answer for answer in answers if answer is not None]

    def _tenant(self, raw: bytes) -> Tenant:
        """The tenant with its weights. What is wrong with its files is for the operator's log, not for the wire."""
        name = self._bank.check(raw)
        try:
            return self._bank.get(name)
        except ArtifactError as error:
            logging.getLogger(__name__).error("tenant %s: %s", name, error)
            raise type(error)("this tenant's model cannot be loaded; the server's log says why") from None

    def _check(self, given: UpperInput) -> None:
        """Only a client that calls this stage directly can fail here."""
        length, width = given.hidden.shape
        if width != self._config.hidden_size:
            raise HiddenStatesError(f"hidden states are {width} wide, this base's are {self._config.hidden_size}")
        if not 1 <= length <= self._config.max_tokens:
            raise HiddenStatesError(f"{length} tokens came, 1 to {self._config.max_tokens} are accepted")
        if given.tokens.shape != (length, 3):
            raise HiddenStatesError(f"tokens have shape {given.tokens.shape}, ({length}, 3) was expected")
        if not np.isfinite(given.hidden).all():
            raise HiddenStatesError("hidden states hold NaN or infinity")


def decode(tenant: Tenant, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]) -> list[LabelledSpan]:
    """Labels of one text by its tenant's kind of task."""
    decoder = decode_tagging if tenant.card.task == "tagging" else decode_classification
    return decoder(logits, tenant.card.labels, tokens)
