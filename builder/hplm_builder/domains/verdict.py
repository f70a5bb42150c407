"""The rule that decides whether a domain helps, and its words. Pure: `hplm_builder.domains.benefit` measures.

Two encoders are compared on the same texts. The difference of their scores has a standard error over these texts, because
other texts of the kind would give another difference. A difference counts if it is larger than SURE standard errors and than a
least difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Outcome = Literal["helps", "makes no difference", "hurts"]
# Standard errors that a difference must exceed: a difference of nothing exceeds two of them once in twenty times.
SURE = 2.0
# Least gain that counts, as a share of the loss of masked words. Any further pretraining lowers that loss by some thousandths.
LEAST_LOSS_SHARE = 0.01
# Least gain that counts in a task's score, which is at most 1. A domain costs memory and a cold start for less than that.
LEAST_SCORE = 0.005
# Groups of texts, each of which is left out once to find the standard error.
MOST_GROUPS = 50

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """A score of texts over the parent (`before`) and over the domain (`after`), and the standard error of after - before."""

    before: float
    after: float
    error: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class DevResult:
    """The scores of heads on a file of labelled examples: `metric` is the task's, higher is better.

    `repeats` says in a sentence which copies of texts were left out.
    """

    file: str
    task: str
    metric: str
    examples: int
    scores: Difference
    repeats: str = ""


def compare(score: Callable[[Rows], tuple[float, float]], count: int) -> Difference:
    """Return the difference between two scores of the same `count` texts, with its standard error (grouped jackknife).

    `score` returns both scores of the texts with the given numbers. It may be any function of them, such as an F1.
    """
    # Neighbours in a file are often alike, so texts are spread over the groups.
    groups = np.array_split(np.random.default_rng(0).permutation(count), min(count, MOST_GROUPS))
    before, after = score(np.arange(count))
    if len(groups) < 2:
        return Difference(before, after, math.inf)
    without = [score(np.setdiff1d(np.arange(count), group)) for group in groups]
    changes = np.array([after - before for before, after in without])
    spread = np.square(changes - changes.mean()).sum()
    return Difference(before, after, float(np.sqrt(spread * (len(groups) - 1) / len(groups))))


def decide(gain: float, error: float, least: float) -> Outcome:
    """Return what a gain of `gain`, positive if the domain is better, with a standard error says."""
    if abs(gain) < least or abs(gain) <= SURE * error:
        return "makes no difference"
    return "helps" if gain > 0 else "hurts"


@dataclass(frozen=True)
class Verdict:
    """The measurements of a domain: `text` on held-out text of its corpus, `dev` on files of labelled examples.

    `text` holds losses, None if the held-out text is too short. `domain` and `start` name what is compared: the domain, and
    its parent, or the version before if `is_update`. `base` is the base of the domain.
    """

    domain: str
    start: str
    text: Difference | None
    dev: Sequence[DevResult] = ()
    is_update: bool = False
    base: str = ""

    @property
    def on_text(self) -> Outcome:
        """The outcome by the loss of masked words on held-out text."""
        if self.text is None:
            return "makes no difference"
        return decide(-self.text.change, self.text.error, LEAST_LOSS_SHARE * self.text.before)

    @property
    def on_dev(self) -> Outcome | None:
        """The outcome by the mean over the files of labelled examples; None if there are none."""
        if not self.dev:
            return None
        gain = float(np.mean([result.scores.change for result in self.dev]))
        error = math.sqrt(sum(result.scores.error**2 for result in self.dev)) / len(self.dev)
        return decide(gain, error, LEAST_SCORE)

    @property
    def outcome(self) -> Outcome:
        """The outcome that counts: tenants are what a domain is for, so labelled examples decide if there are some."""
        return self.on_dev or self.on_text

    @property
    def why(self) -> str:
        """The outcome with its figures, in sentences."""
        measured = "on labelled examples" if self.dev else "on held-out text, and was measured on nothing else"
        sentences = [f"{self.domain} {self.outcome} {measured}, compared with {self.start}."]
        if self.text is None:
            sentences.append("The held-out text of the corpus is too short to measure on.")
        else:
            sentences.append(f"Loss of masked words on held-out text: {_words(self.text)}.")
        sentences += [
            f"{result.file}, {result.examples:,} examples: {result.metric} {_words(result.scores)}."
            + (f" {result.repeats}." if result.repeats else "")
            for result in self.dev
        ]
        if not self.dev:
            sentences.append("The store keeps no examples of tenants, and no file of them was given (--dev).")
        return " ".join(sentences)

    @property
    def advice(self) -> str:
        """What to do next."""
        if self.outcome == "helps" and self.dev:
            return f"Train tenants over it: --domain {self.domain}."
        if self.outcome == "helps":
            return f"A lower loss does not show that tenants gain: compare a tenant over both, {self.domain} and {self.start}."
        # Each base may have a domain of this name.
        of_base = f" --base {self.base}" if self.base else ""
        remove = f"`hplm domain delete {self.domain}{of_base}` removes the domain"
        return f"Leave tenants on {self.start}; {remove} with all versions." if self.is_update else f"{remove}."

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as a version's record keeps it, in JSON values."""
        return {
            "verdict": self.outcome,
            "why": self.why,
            "advice": self.advice,
            "compared_with": self.start,
            "held_out_text": None if self.text is None else {**asdict(self.text), "outcome": self.on_text},
            "dev": [asdict(result) for result in self.dev],
        }


def _words(difference: Difference) -> str:
    """Return both scores and their difference, which is followed by the width that `SURE` allows it."""
    return (
        f"{difference.before:.3f} before, {difference.after:.3f} after "
        f"(difference {difference.change:+.3f} ± {SURE * difference.error:.3f})"
    )
