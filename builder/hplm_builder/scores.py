"""Scores of predictions against gold."""

from __future__ import annotations

from collections.abc import Sequence

from hplm.wire import LabelledSpan
from hplm_builder.labelled import Entity


def accuracy(gold: Sequence[str], found: Sequence[str]) -> float:
    """Share of equal labels."""
    return sum(a == b for a, b in zip(gold, found, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], found: Sequence[str]) -> float:
    """Mean F1 over the classes of `gold`."""
    scores = []
    for label in set(gold):
        hits = sum(a == b == label for a, b in zip(gold, found, strict=True))
        scores.append(2 * hits / (sum(a == label for a in gold) + sum(b == label for b in found)))
    return sum(scores) / len(scores)


def entity_f1(gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[LabelledSpan]]) -> float:
    """Micro F1 over entities whose type and both ends agree."""
    hits = total_gold = total_found = 0
    for wanted, got in zip(gold, found, strict=True):
        a = {(entity.label, entity.start, entity.end) for entity in wanted}
        b = {(span.label, span.start, span.end) for span in got}
        hits, total_gold, total_found = hits + len(a & b), total_gold + len(a), total_found + len(b)
    return 2 * hits / (total_gold + total_found) if total_gold + total_found else 1.0
