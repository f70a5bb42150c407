"""Answers of a cascade: of one level, or of several levels by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hplm.cascade.plan import CascadePlan
from hplm.cascade.weighting import log_probabilities, weighted
from hplm.core import wire
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.routing.call_tensors import RouteAnswer, response_outputs
from hplm.tasks.task import softmax


class CascadeAnswer(NamedTuple):
    """The answer to one text.

    `level`: the base that answered last. `confidence`: the calibrated probability that the answer is right, NaN without a plan.
    `reroutes`: how often the text went to a further level and was answered there. `is_late`: the next level should have
    answered too, and could not in time or at all.
    """

    answer: RouteAnswer
    level: str
    confidence: float
    reroutes: int
    is_late: bool


def combined(
    plan: CascadePlan,
    answers: Sequence[RouteAnswer],
    labels: Sequence[bytes] | None,
    *,
    with_logits: bool,
    is_late: bool = False,
) -> CascadeAnswer:
    """Return the answer to a text that these levels of a plan have answered, the first level first.

    `labels` in the order of the logits: then several levels answer together, and the logits are logarithms of probabilities.
    Without `labels`, or if a level has other labels, the last level's answer stands. Levels have other labels for a moment
    while an update of the tenant with new labels is published, because each process follows the registry by itself.
    """
    place = len(answers) - 1
    level, last = plan.levels[place], answers[place]
    if labels is None or not any(level.weights[:-1]) or (logits := _logits_of(answers, labels)) is None:
        assert last.dispatched is not None
        own = last if with_logits else last._replace(logits=None)
        return CascadeAnswer(own, level.base, last.dispatched.confidence, place, is_late)
    temperatures = [level.dispatch.temperature for level in plan.levels[: place + 1]]
    probabilities = weighted(logits, temperatures, level.weights)
    best = int(probabilities.argmax())
    together = RouteAnswer(
        np.array([labels[best]], dtype=np.object_),
        probabilities[[best]].astype(np.float32),
        # The first level has read the text before words were pruned.
        answers[0].spans,
        np.logical_or.reduce([answer.truncated for answer in answers]),
        last.students,
        log_probabilities(probabilities)[None] if with_logits else None,
    )
    return CascadeAnswer(together, level.base, float(probabilities[best]), place, is_late)


def _logits_of(answers: Sequence[RouteAnswer], labels: Sequence[bytes]) -> list[npt.NDArray[Any]] | None:
    """Return the logits `[1, labels]` of each level; None if a level's answer shows that its labels are others."""
    found = []
    for answer in answers:
        logits = answer.logits
        # The level names its best label itself, so labels in another order show too.
        if (
            logits is None
            or logits.shape != (1, len(labels))
            or answer.labels[0] != labels[int(softmax(logits[0]).argmax())]
        ):
            log_rate_limited(
                "cascade: levels of a tenant have different labels, as in an update; the last answers alone"
            )
            return None
        found.append(logits)
    return found


def cascade_outputs(answers: Sequence[CascadeAnswer]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a request's texts."""
    return {
        **response_outputs([one.answer for one in answers]),
        wire.LEVEL: np.array([[one.level.encode()] for one in answers], dtype=np.object_),
        wire.CONFIDENCE: np.array([[one.confidence] for one in answers], dtype=np.float32),
        wire.ROUTE: np.array([[one.reroutes] for one in answers], dtype=np.int32),
        wire.LATE: np.array([[one.is_late] for one in answers], dtype=np.bool_),
    }
