"""First stage of hBERT: requests' bytes -> hidden states, one batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.bank import TenantBank
from hplm.config import PlotSettings
from hplm.errors import HplmError
from hplm.nn import base as bases
from hplm.nn.dtype import choose_dtype
from hplm.nn.lookup import open_lookup
from hplm.store.layout import Store
from hplm.text import EncodedText, TextEncoder, check_not_empty, decode_utf8


@dataclass(frozen=True)
class LookedUp:
    """Of one text: `hidden` float16 `[T, H]`, `tokens` int32 `[T, 3]`."""

    hidden: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    truncated: bool


class PlotStage:
    """Tokenise, look up, merge. Raises ArtifactError or ConfigError on construction where the store is not sound."""

    def __init__(self, settings: PlotSettings, folder: Path) -> None:
        torch.set_num_threads(settings.num_threads)
        store = Store((folder / settings.store).resolve())
        base = bases.load(store.base(settings.base), verify=settings.verify)
        self._settings = settings
        self._bank = TenantBank(store, base.fingerprint, verify=settings.verify)
        self._encoder = TextEncoder(base.tokenizer_path, base.config.max_tokens)
        self._lookup = open_lookup(
            store,
            base,
            settings.table,
            miss=settings.miss,
            overlay_windows=settings.overlay_windows,
            dtype=choose_dtype(settings.dtype, torch.device("cpu")),
            verify=settings.verify,
        )

    @property
    def windows_by_level(self) -> Counter[str]:
        """How many windows each level has answered since the start."""
        return self._lookup.windows_by_level

    def run(self, requests: Sequence[tuple[bytes, bytes]]) -> list[LookedUp | HplmError]:
        """Answers to `(text, tenant)`, in order; what is wrong with one request is that request's answer alone."""
        answers: list[LookedUp | HplmError | None] = [None] * len(requests)
        texts: dict[int, str] = {}
        for index, (text, tenant) in enumerate(requests):
            try:
                self._bank.check(tenant)
                texts[index] = decode_utf8(text, self._settings.max_text_bytes)
            except HplmError as error:
                answers[index] = error
        encoded: dict[int, EncodedText] = {}
        for index, result in zip(texts, self._encoder.encode(list(texts.values())), strict=True):
            try:
                encoded[index] = check_not_empty(result)
            except HplmError as error:
                answers[index] = error
        if encoded:
            lengths = [len(result.ids) for result in encoded.values()]
            hidden = self._lookup.hidden_states(np.concatenate([e.ids for e in encoded.values()]), lengths)
            parts = np.split(hidden, np.cumsum(lengths)[:-1])
            for (index, result), part in zip(encoded.items(), parts, strict=True):
                answers[index] = LookedUp(part, result.tokens, result.truncated)
        return [answer for answer in answers if answer is not None]
