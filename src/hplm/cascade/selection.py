"""The selection of a candidate that will hold a tenant's targets, and the nearest offer if there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hplm.cascade.candidates import Candidate
from hplm.cascade.plan import OnLate
from hplm.cascade.promise import examples_needed, proved_accuracy, right_needed
from hplm.core.numbers import rounded_down
from hplm.errors import ConfigError, ContractError

# Without a target for accuracy, the accuracy may be so far below the best candidate's.
MOST_BELOW_BEST = 0.01
# The least accuracy that is offered, because `hplm tenant target` takes no smaller one.
LEAST_OFFER = 0.01


@dataclass(frozen=True)
class CascadeTarget:
    """The accuracy that a tenant asks for, a share of right answers, and the mean latency of requests one at a time.

    Without `accuracy`, the fastest candidate is taken whose accuracy on dev is at most MOST_BELOW_BEST below the best of those
    that meet `latency_ms`. With `deterministic`, the dispatcher draws nothing.
    """

    accuracy: float | None = None
    latency_ms: float | None = None
    deterministic: bool = False
    on_late: OnLate = "answer"

    def __post_init__(self) -> None:
        if self.accuracy is not None and not 0 < self.accuracy < 1:
            raise ConfigError(f"accuracy must be a share above 0 and below 1, such as 0.88, got {self.accuracy}")
        if self.latency_ms is not None and not 0 < self.latency_ms < math.inf:
            raise ConfigError(f"latency_ms must be above 0, got {self.latency_ms}")


def choose_candidate(
    candidates: Sequence[Candidate], target: CascadeTarget, select_examples: int, proof_examples: int
) -> Candidate | None:
    """Return the candidate with the lowest mean latency that will probably prove the target on `proof_examples` examples.

    Probably means: the share of right answers that the proof needs lies at least one standard error below the candidate's
    accuracy on `select_examples`. A candidate that just meets the share fails half of the proofs. If there is no such
    candidate, the most accurate one is taken, if its accuracy is at least the share. None if no candidate will do.
    """
    fast = _within(candidates, target.latency_ms)
    if target.accuracy is None:
        most = max((one.accuracy for one in fast), default=0.0)
        return min((one for one in fast if one.accuracy >= most - MOST_BELOW_BEST), key=_speed, default=None)
    needed = right_needed(target.accuracy, proof_examples)
    share = math.inf if needed is None else needed / proof_examples

    def cautious(one: Candidate) -> float:
        """Return an accuracy that the proof will probably show: one standard error below that on dev."""
        # The error is not 0 if all examples are right.
        spread = max(one.accuracy * (1 - one.accuracy), 0.5 / select_examples)
        return one.accuracy - math.sqrt(spread * (1 / select_examples + 1 / max(1, proof_examples)))

    if likely := [one for one in fast if cautious(one) >= share]:
        return min(likely, key=_speed)
    return max((one for one in fast if one.accuracy >= share), key=_quality, default=None)


def select_candidate(
    candidates: Sequence[Candidate],
    target: CascadeTarget,
    select_examples: int,
    proof_examples: int,
    count_right: Callable[[Candidate], int],
) -> Candidate:
    """Return the candidate of `choose_candidate`, if the examples of the proof prove the target's accuracy.

    `count_right` returns how many of them a candidate answers right. Raises ContractError with the nearest offers. An offer
    holds when it is asked for: it was chosen and proved in the same way.
    """

    def proves(one: Candidate, accuracy: float) -> bool:
        return float(proved_accuracy(count_right(one), proof_examples)) >= accuracy

    def choose(asked: CascadeTarget) -> Candidate | None:
        return choose_candidate(candidates, asked, select_examples, proof_examples)

    def offer(accuracy: float, latency_ms: float | None) -> str | None:
        if accuracy < LEAST_OFFER:
            return None
        asked = replace(target, accuracy=accuracy, latency_ms=latency_ms)
        if (found := choose(asked)) is None:
            return None
        # The offered time may be asked for too. It is rounded up, and may let in another candidate.
        within = _ceil(found.latency_ms)
        in_time = choose(replace(asked, latency_ms=float(within))) or found
        is_proved = proves(found, accuracy) and proves(in_time, accuracy)
        return f"accuracy {accuracy:.3f} within {within} ms" if is_proved else None

    chosen, accuracy = choose(target), target.accuracy
    if chosen is not None and (accuracy is None or proves(chosen, accuracy)):
        return chosen
    if accuracy is None:
        raise ContractError(f"{_asked(target)} cannot be promised: {_offer_of_time(candidates)}")
    fast = _within(candidates, target.latency_ms)
    slower = None if target.latency_ms is None else offer(rounded_down(accuracy), None)
    lower = None
    if fast or slower is None:
        best = max(fast or candidates, key=_quality)
        # No candidate is chosen for more than its accuracy on dev would prove.
        most = rounded_down(float(proved_accuracy(math.floor(best.accuracy * proof_examples), proof_examples)))
        steps = range(round(1000 * min(most, rounded_down(accuracy))), 0, -1)
        limit_ms = target.latency_ms if fast else None
        lower = next(filter(None, (offer(step / 1000, limit_ms) for step in steps if step / 1000 < accuracy)), None)
    nearest = " or ".join(filter(None, (slower, lower))) or "a promise without a target"
    if chosen is not None:
        right = count_right(chosen)
        bound = rounded_down(float(proved_accuracy(right, proof_examples)))
        likely, more = min(chosen.accuracy, right / proof_examples), ""
        if likely > accuracy and (number := examples_needed(accuracy, likely)):
            more = f"; about {number:,} proof examples are needed if {likely:.3f} of them are right"
        raise ContractError(
            f"{_asked(target)} is not proved: {right:,} of {proof_examples:,} proof examples were right, which proves "
            f"{bound:.3f}; the nearest offer is {nearest}{more}"
        )
    within = "" if target.latency_ms is None else " within that time"
    why = (
        _too_few(max(fast, key=_quality).accuracy, accuracy, proof_examples, within)
        if fast
        else f"the fastest candidate takes {_ceil(min(candidates, key=_speed).latency_ms)} ms"
    )
    raise ContractError(f"{_asked(target)} cannot be promised: {why}; the nearest offer is {nearest}")


def _within(candidates: Sequence[Candidate], latency_ms: float | None) -> list[Candidate]:
    return [one for one in candidates if latency_ms is None or one.latency_ms <= latency_ms]


def _too_few(expected: float, accuracy: float, examples: int, within: str) -> str:
    """Return why the best candidate, whose accuracy on dev is `expected`, does not prove the accuracy.

    `within` says which candidates are meant.
    """
    number = examples_needed(accuracy, expected) if expected > accuracy else None
    if number and number > examples:
        return (
            f"{examples:,} proof examples are too few, about {number:,} are needed if {expected:.3f} of them are right, "
            "as on dev"
        )
    return f"the best accuracy on dev{within} is {expected:.3f}"


def _offer_of_time(candidates: Sequence[Candidate]) -> str:
    fastest = min(candidates, key=_speed)
    return f"the nearest offer is accuracy {fastest.accuracy:.3f} on dev within {_ceil(fastest.latency_ms)} ms"


def _asked(target: CascadeTarget) -> str:
    parts = []
    if target.accuracy is not None:
        parts.append(f"accuracy {target.accuracy:.3f}")
    if target.latency_ms is not None:
        parts.append(f"mean latency {target.latency_ms:g} ms")
    return " within ".join(parts)


def _ceil(latency_ms: float) -> str:
    # The time is rounded up, so that asking for the offer is enough.
    return f"{math.ceil(latency_ms * 10) / 10:g}"


def _speed(one: Candidate) -> tuple[float, float]:
    return one.latency_ms, -one.accuracy


def _quality(one: Candidate) -> tuple[float, float]:
    return one.accuracy, -one.latency_ms
