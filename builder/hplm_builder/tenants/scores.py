"""Scores of predictions against gold, and where they go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hplm.adapters.tenant import Task
from hplm.core.wire import LabelledSpan
from hplm_builder.data.labelled import Entity

# What a task is judged by: the best dev score of it is kept.
METRICS: Mapping[Task, str] = {"classification": "accuracy", "tagging": "f1", "regression": "pearson"}


def accuracy(gold: Sequence[str], found: Sequence[str]) -> float:
    """Share of equal labels."""
    return sum(a == b for a, b in zip(gold, found, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], found: Sequence[str]) -> float:
    """Mean F1 over the classes of `gold`: not over those that were only `found`, as the committed results have it."""
    wanted, got = Counter(gold), Counter(found)
    hits = Counter(a for a, b in zip(gold, found, strict=True) if a == b)
    return sum(2 * hits[label] / (wanted[label] + got[label]) for label in wanted) / len(wanted)


def confusion(gold: Sequence[str], found: Sequence[str]) -> dict[str, dict[str, int]]:
    """Label -> label found for it -> how often; what never happened is left out, so 150 classes stay small."""
    table: dict[str, dict[str, int]] = {}
    for (wanted, got), count in sorted(Counter(zip(gold, found, strict=True)).items()):
        table.setdefault(wanted, {})[got] = count
    return table


def entity_f1(gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[LabelledSpan]]) -> float:
    """Micro F1 over entities whose type and both ends agree."""
    counts = _entity_counts(gold, found)
    hits, wanted, got = (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0, 0)
    return 2 * hits / (wanted + got) if counts else 1.0


def entity_types(
    gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[LabelledSpan]]
) -> dict[str, dict[str, float]]:
    """Entity type -> `precision`, `recall` and `f1`, and of how many entities: `gold` and `found`."""
    return {
        kind: {
            "precision": hits / got if got else 0.0,
            "recall": hits / wanted if wanted else 0.0,
            "f1": 2 * hits / (wanted + got),
            "gold": wanted,
            "found": got,
        }
        for kind, (hits, wanted, got) in sorted(_entity_counts(gold, found).items())
    }


def _entity_counts(
    gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[LabelledSpan]]
) -> dict[str, tuple[int, int, int]]:
    """Type -> how many are in both, in gold, and found."""
    hits: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    got: Counter[str] = Counter()
    for entities, spans in zip(gold, found, strict=True):
        a = {(entity.label, entity.start, entity.end) for entity in entities}
        b = {(span.label, span.start, span.end) for span in spans}
        for counter, some in ((hits, a & b), (wanted, a), (got, b)):
            counter.update(label for label, _, _ in some)
    return {kind: (hits[kind], wanted[kind], got[kind]) for kind in wanted.keys() | got.keys()}


def pearson(gold: Sequence[float], found: Sequence[float]) -> float:
    """Correlation of values; 0 where one side is constant."""
    a, b = (np.asarray(side, dtype=np.float64) - np.mean(side) for side in (gold, found))
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm > 0 else 0.0


def spearman(gold: Sequence[float], found: Sequence[float]) -> float:
    """Correlation of ranks, equal values sharing the mean of theirs."""
    return pearson(_ranks(gold).tolist(), _ranks(found).tolist())


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: npt.NDArray[np.float64] = (ends - (counts - 1) / 2)[which]
    return means
