"""A batch through a stage without its queue and threads: all of it together, whether the stage was started or not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from hplm.core.text import check_text_count, decode_texts
from hplm.engine.encode import EngineRequest
from hplm.errors import HplmError
from hplm.scheduling.policy import Batch
from hplm.serving import encode_stage, lookup_stage
from hplm.serving.encode_stage import EncodeAnswer, EncodeRequest, EncodeStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.refusal import for_the_wire

Answer = TypeVar("Answer")


def look_up(stage: LookupStage, requests: Sequence[tuple[Sequence[bytes], bytes]]) -> list[LookupAnswer | HplmError]:
    """Answers to `(texts, tenant)`, in order; what is wrong with one request is that request's answer alone."""
    refused: dict[int, HplmError] = {}
    ready: dict[int, lookup_stage._Ready] = {}
    for index, (raw, name) in enumerate(requests):
        try:
            tenant = stage._bank.resolve(name)
            text = decode_texts(raw, stage._settings.max_text_bytes)
            check_text_count(text, stage._texts.fetch(tenant).result())
            lookup = stage._domains.fetch(tenant.lineage).result()
            ready[index] = lookup_stage._Ready(tenant, text, lookup, time.monotonic(), is_together=False)
        except HplmError as error:
            refused[index] = for_the_wire(error, name)
    return _in_order(refused, list(ready), stage._run(list(ready.values()), Batch(())))


def find_labels(stage: EncodeStage, inputs: Sequence[EncodeRequest]) -> list[EncodeAnswer | HplmError]:
    """Answers in order; what is wrong with one request is that request's answer alone."""
    refused: dict[int, HplmError] = {}
    ready: dict[int, encode_stage._Ready] = {}
    for index, given in enumerate(inputs):
        try:
            stage._check(given)
            tenant = stage._cache.fetch(stage._bank.resolve(given.tenant, given.version_id)).result()
            ready[index] = encode_stage._Ready(EngineRequest(tenant, given.hidden), given.tokens)
        except HplmError as error:
            refused[index] = for_the_wire(error, given.tenant)
    return _in_order(refused, list(ready), stage._run(list(ready.values()), Batch(())))


def _in_order(
    refused: Mapping[int, HplmError],
    ready: Sequence[int],
    answered: Iterable[tuple[Sequence[int], Sequence[Answer | HplmError]]],
) -> list[Answer | HplmError]:
    answers: dict[int, Answer | HplmError] = {**refused}
    for part, found in answered:
        answers.update(zip([ready[place] for place in part], found, strict=True))
    return [answers[index] for index in range(len(answers))]
