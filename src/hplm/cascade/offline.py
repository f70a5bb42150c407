"""The slow twin of a served cascade: what a plan answers, computed from stored outputs of its levels, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.cascade.dispatch import DETERMINISTIC, DispatchInput, draw_of
from hplm.cascade.level_outputs import LevelOutputs, Numbers, PartOutputs
from hplm.cascade.plan import CascadePlan
from hplm.cascade.weighting import weighted


@dataclass(frozen=True)
class OfflineAnswer:
    """The answer to one text: the number of its label (-1 of a tagging, whose entities are in `LevelOutputs.answers`).

    `level` is the number of the level in the plan that answered last, from 0; so often was the text re-routed. `confidence` is
    that of the answer: calibrated, and of a weighted answer its largest probability. `tokens` has what each level read.
    """

    label: int
    level: int
    confidence: float
    right: bool
    tokens: tuple[int, ...]


def answer_offline(
    plan: CascadePlan, bases: Sequence[str], part: PartOutputs, draws: Numbers | None = None
) -> list[OfflineAnswer]:
    """Return the answers of a plan to the texts of a part, as the model `cascade` gives them if no level is late.

    `bases` are those of the part's levels, in order. `draws` `[N, levels]` are by default those of the part; those of a served
    plan are `draws_of` its tenant and number. Texts are pruned before the second level, and later levels read them as they are
    then: the part must have the answers to texts pruned so.
    """
    draws = part.draws if draws is None else draws
    numbers = [bases.index(level.base) for level in plan.levels]
    alpha = plan.levels[1].alpha if len(numbers) > 1 else 0.0
    outputs = [part.whole[numbers[0]], *(part.read(numbers[0], number, alpha) for number in numbers[1:])]
    return [_answer(plan, outputs, part, text, draws[text]) for text in range(len(part))]


def _answer(
    plan: CascadePlan, outputs: Sequence[LevelOutputs], part: PartOutputs, text: int, draws: Numbers
) -> OfflineAnswer:
    place = 0
    while _is_rerouted(plan, outputs[place], place, text, float(draws[place])):
        place += 1
    answering, read = outputs[place], outputs[: place + 1]
    tokens = tuple(int(level.tokens[text]) for level in read)
    confidence = float(answering.confidence[text])
    if not answering.logits.shape[1]:
        return OfflineAnswer(-1, place, confidence, bool(answering.right[text]), tokens)
    if place == 0:
        return OfflineAnswer(int(answering.logits[text].argmax()), 0, confidence, bool(answering.right[text]), tokens)
    probabilities = weighted(
        [level.logits[text] for level in read],
        [level.dispatch.temperature for level in plan.levels[: place + 1]],
        plan.levels[place].weights,
    )
    label = int(probabilities.argmax())
    return OfflineAnswer(label, place, float(probabilities.max()), label == int(part.gold[text]), tokens)


def _is_rerouted(plan: CascadePlan, outputs: LevelOutputs, place: int, text: int, draw: float) -> bool:
    dispatch = DispatchInput.of(
        plan.levels[place].dispatch,
        DETERMINISTIC if plan.deterministic else draw,
        is_last=place == len(plan.levels) - 1,
    )
    return dispatch.is_rerouted(float(outputs.confidence[text]))


def draws_of(tenant: str, number: int, texts: Sequence[str | tuple[str, str]], levels: int) -> Numbers:
    """Return the draws `[N, levels]` of texts or pairs, if the plan's last level is version `number` of the tenant."""
    parts = [(text,) if isinstance(text, str) else text for text in texts]
    rows = [
        [draw_of(tenant, number, *(one.encode() for one in text), level=level) for level in range(1, levels + 1)]
        for text in parts
    ]
    return np.array(rows, np.float64).reshape(len(texts), levels)
