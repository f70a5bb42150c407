"""Entities of answers against entities of examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hplm.tasks.examples import Entity, LabelledText, may_be_dropped
from hplm.tasks.task import Answers, Tokens


def gold_entities(example: LabelledText, tokens: Tokens) -> list[Entity]:
    """Return the example's entities as answers may have them, from the beginning of a token to the end of a token.

    Characters that the tokenizer dropped at an entity's ends are cut off, as an accent that is a character of its own. Ends
    within a word, or past the last token of a text that was cut, stay: no answer has them.
    """

    def is_dropped(place: int) -> bool:
        if not may_be_dropped(example.text[place]):
            return False
        return not bool(((tokens[:, 0] <= place) & (place < tokens[:, 1])).any())

    entities = []
    for entity in example.entities:
        start, end = entity.start, entity.end
        while start < end and is_dropped(start):
            start += 1
        while start < end and is_dropped(end - 1):
            end -= 1
        entities.append(replace(entity, start=start, end=end))
    return entities


def entity_f1(gold: Sequence[Sequence[Entity]], answers: Answers) -> float:
    """Return the micro F1 over entities; an answer is right if its type and both ends are."""
    counts = _entity_counts(gold, answers)
    hits, wanted, got = (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0, 0)
    return 2 * hits / (wanted + got) if counts else 1.0


def entity_types(gold: Sequence[Sequence[Entity]], answers: Answers) -> dict[str, dict[str, float]]:
    """Return entity type -> `precision`, `recall` and `f1`, and the numbers of entities they are over: `gold` and `found`."""
    return {
        kind: {
            "precision": hits / got if got else 0.0,
            "recall": hits / wanted if wanted else 0.0,
            "f1": 2 * hits / (wanted + got),
            "gold": wanted,
            "found": got,
        }
        for kind, (hits, wanted, got) in sorted(_entity_counts(gold, answers).items())
    }


def _entity_counts(gold: Sequence[Sequence[Entity]], answers: Answers) -> dict[str, tuple[int, int, int]]:
    """Return type -> numbers of entities that are in both, in gold, and in answers."""
    hits, wanted, got = Counter[str](), Counter[str](), Counter[str]()
    for entities, spans in zip(gold, answers, strict=True):
        a = {(entity.label, entity.start, entity.end) for entity in entities}
        b = {(span.label, span.start, span.end) for span in spans}
        for counter, members in ((hits, a & b), (wanted, a), (got, b)):
            counter.update(label for label, _, _ in members)
    return {kind: (hits[kind], wanted[kind], got[kind]) for kind in wanted.keys() | got.keys()}
