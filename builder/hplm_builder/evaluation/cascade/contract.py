"""How often a cascade's promise holds: resamples of which examples calibrate, select, prove and judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from hplm_builder.evaluation.cascade.answered import Booleans, Integers, Row

# Chooses a cascade from the examples with these numbers. Returns whether each example of the pool is answered right, or None
# if no candidate could prove the target.
Choose = Callable[[Integers], "Booleans | None"]
# Returns the promised accuracy from the number of right answers and the number of examples.
Bound = Callable[[int, int], float]


@dataclass(frozen=True)
class Parts:
    """How many examples of a pool calibrate and select (`seen`), and how many prove. The rest judges."""

    seen: int
    proof: int


@dataclass(frozen=True)
class Resample:
    """The promise of a resample, and the truth. A refusal promises nothing.

    `bound` was proved on examples that `judged` has none of; `judged` is the accuracy on the rest. `drawn_bound` was proved
    on as many examples, drawn with replacement from all that selected nothing; `accuracy` is the accuracy on all of these.
    """

    bound: float | None
    judged: float
    drawn_bound: float | None
    accuracy: float


def resample(
    count: int, parts: Parts, rng: np.random.Generator, choose: Choose, bound: Bound, target: float
) -> Resample:
    """Draw which of `count` examples do what, choose a cascade, prove and judge it. A bound below `target` is refused."""
    order = rng.permutation(count)
    seen, rest = order[: parts.seen], order[parts.seen :]
    proof, judge = rest[: parts.proof], rest[parts.proof :]
    right = choose(np.sort(seen))
    if right is None:
        return Resample(None, float("nan"), None, float("nan"))

    def proved(examples: Integers) -> float | None:
        found = bound(int(right[examples].sum()), len(examples))
        return found if found >= target else None

    drawn = rng.choice(rest, parts.proof)
    return Resample(proved(proof), float(right[judge].mean()), proved(drawn), float(right[rest].mean()))


def contract_row(task: str, target: float | None, parts: Parts, count: int, resamples: Sequence[Resample]) -> Row:
    """Return the row of a task: how many resamples promised something, and the percentage that kept the promise.

    `kept` counts draws with replacement against the accuracy on all examples that selected nothing: that is what a
    Clopper-Pearson bound promises. `kept_on_judge` counts disjoint examples, where the chance of the judge adds. `broken`
    counts the broken promises among all resamples, refusals included.
    """
    drawn = [(each.drawn_bound, each.accuracy) for each in resamples if each.drawn_bound is not None]
    judged = [(each.bound, each.judged) for each in resamples if each.bound is not None]
    return {
        "task": task,
        "target": "none" if target is None else round(100 * target, 2),
        "resamples": len(resamples),
        "select": parts.seen,
        "prove": parts.proof,
        "judge": count - parts.seen - parts.proof,
        "promised": len(drawn),
        "kept": _kept_percent(drawn),
        "broken": 100 * sum(accuracy < bound for bound, accuracy in drawn) / len(resamples),
        "kept_on_judge": _kept_percent(judged),
        "points_promised_below": fmean(100 * (accuracy - bound) for bound, accuracy in drawn)
        if drawn
        else float("nan"),
    }


def _kept_percent(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the percentage of pairs (bound, accuracy) whose accuracy is at least the bound; NaN without pairs."""
    return 100 * fmean(accuracy >= bound for bound, accuracy in pairs) if pairs else float("nan")
