"""The selection of a candidate that will hold a tenant's targets, and the nearest offer if there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hplm.cascade.candidates import Candidate
from hplm.cascade.plan import OnLate
from hplm.cascade.promise import examples_needed, proved_accuracy, right_needed
from hplm.errors import ConfigError, ContractError

# Without a target for accuracy, the accuracy may be so far below the best candidate's.
MOST_BELOW_BEST = 0.01


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


def select_candidate(
    candidates: Sequence[Candidate], target: CascadeTarget, select_examples: int, proof_examples: int
) -> Candidate:
    """Return the candidate with the lowest mean latency that will probably prove the target on `proof_examples` examples.

    Probably means: the share of right answers that the proof needs lies at least one standard error below the candidate's
    accuracy on `select_examples`. A candidate that just meets the share fails half of the proofs. If there is no such
    candidate, the most accurate one is taken, if its accuracy is at least the share. Raises ContractError with the nearest
    offer.
    """
    fast = [one for one in candidates if target.latency_ms is None or one.latency_ms <= target.latency_ms]
    accuracy = target.accuracy
    if accuracy is None:
        if not fast:
            raise ContractError(f"{_asked(target)} cannot be promised: {_offer_of_time(candidates)}")
        most = max(one.accuracy for one in fast)
        return min((one for one in fast if one.accuracy >= most - MOST_BELOW_BEST), key=_speed)
    needed = right_needed(accuracy, proof_examples)
    share = math.inf if needed is None else needed / proof_examples

    def cautious(one: Candidate) -> float:
        """Return an accuracy that the proof will probably show: one standard error below that on dev."""
        # The error is not 0 if all examples are right.
        spread = max(one.accuracy * (1 - one.accuracy), 0.5 / select_examples)
        return one.accuracy - math.sqrt(spread * (1 / select_examples + 1 / max(1, proof_examples)))

    if likely := [one for one in fast if cautious(one) >= share]:
        return min(likely, key=_speed)
    if possible := [one for one in fast if one.accuracy >= share]:
        return max(possible, key=_quality)
    offers = []
    if slower := [one for one in candidates if cautious(one) >= share]:
        offers.append(_offer(f"{accuracy:.3f}", min(slower, key=_speed).latency_ms))
    best = max(fast or candidates, key=_quality)
    if (right := math.floor(cautious(best) * proof_examples)) > 0:
        bound = float(proved_accuracy(right, proof_examples))
        offers.append(_offer(_floor(min(bound, accuracy)), best.latency_ms))
    why = _too_few(best.accuracy, accuracy, proof_examples, "" if target.latency_ms is None else " within that time")
    if not fast:
        why = f"the fastest candidate takes {_ceil(min(candidates, key=_speed).latency_ms)} ms"
    # Both offers are the same if the fastest candidate is also the most accurate one.
    nearest = " or ".join(dict.fromkeys(offers)) or "a promise without a target"
    raise ContractError(f"{_asked(target)} cannot be promised: {why}; the nearest offer is {nearest}")


def broken_promise(
    target: CascadeTarget, right: int, examples: int, expected: float, latency_ms: float
) -> ContractError:
    """Return the error for a cascade that did not prove the target's accuracy: `right` of `examples` were right.

    `expected` is its accuracy on dev.
    """
    assert target.accuracy is not None
    bound = float(proved_accuracy(right, examples))
    more = ""
    likely = min(expected, right / examples)
    if likely > target.accuracy and (number := examples_needed(target.accuracy, likely)):
        more = f"; about {number:,} proof examples are needed if {likely:.3f} of them are right"
    return ContractError(
        f"{_asked(target)} is not proved: {right:,} of {examples:,} proof examples were right, which proves {_floor(bound)}; "
        f"the nearest offer is {_offer(_floor(bound), latency_ms)}{more}"
    )


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
    return f"the nearest offer is {_offer(f'{fastest.accuracy:.3f} on dev', fastest.latency_ms)}"


def _asked(target: CascadeTarget) -> str:
    parts = []
    if target.accuracy is not None:
        parts.append(f"accuracy {target.accuracy:.3f}")
    if target.latency_ms is not None:
        parts.append(f"mean latency {target.latency_ms:g} ms")
    return " within ".join(parts)


def _offer(accuracy: str, latency_ms: float) -> str:
    return f"accuracy {accuracy} within {_ceil(latency_ms)} ms"


def _ceil(latency_ms: float) -> str:
    # The time is rounded up, so that asking for the offer is enough.
    return f"{math.ceil(latency_ms * 10) / 10:g}"


def _floor(accuracy: float) -> str:
    return f"{math.floor(accuracy * 1000) / 1000:.3f}"


def _speed(one: Candidate) -> tuple[float, float]:
    return one.latency_ms, -one.accuracy


def _quality(one: Candidate) -> tuple[float, float]:
    return one.accuracy, -one.latency_ms
