"""A batch through a stage without its queue and threads: all of it together, whether the stage was started or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hplm.errors import HplmError
from hplm.scheduling.policy import Batch
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.request import Request
from hplm.serving.stage import Stage, for_the_wire

Input = TypeVar("Input")
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def look_up(stage: LookupStage, requests: Sequence[tuple[Sequence[bytes], bytes]]) -> list[LookupAnswer | HplmError]:
    """Answers to `(texts, tenant)`, in order; what is wrong with one request is that request's answer alone."""
    return compute(stage, [Request(tuple(texts), tenant) for texts, tenant in requests])


def find_labels(
    stage: EncodeStage, requests: Sequence[Request[EncodeInput, EncodeAnswer]]
) -> list[EncodeAnswer | HplmError]:
    """Answers in order; what is wrong with one request is that request's answer alone."""
    return compute(stage, requests)


def compute(stage: Stage[Input, Item, Answer], requests: Iterable[Request[Input, Answer]]) -> list[Answer | HplmError]:
    answers: dict[int, Answer | HplmError] = {}
    items: dict[int, Item] = {}
    for index, request in enumerate(requests):
        try:
            items[index] = admitted(stage, request)
        except HplmError as error:
            answers[index] = for_the_wire(error, request.tenant)
    places = list(items)
    for part, found in stage.run(list(items.values()), Batch((), students=(1,) * len(items))):
        answers.update(zip([places[i] for i in part], found, strict=True))
    return [answers[index] for index in range(len(answers))]


def admitted(stage: Stage[Input, Item, Any], request: Request[Input, Any]) -> Item:
    """The item of a request, for which this waits until all is loaded."""
    admission = stage.admit(request)
    value = None
    while True:
        try:
            value = admission.send(value).start().result()
        except StopIteration as ended:
            item: Item = ended.value.item
            return item
