"""The selection of a candidate, and what is offered instead."""

from __future__ import annotations

import pytest

from hplm.cascade.candidates import Candidate
from hplm.cascade.promise import proved_accuracy
from hplm.cascade.selection import CascadeTarget, broken_promise, select_candidate
from hplm.errors import ConfigError, ContractError


def made(accuracy: float, latency_ms: float) -> Candidate:
    return Candidate((0,), 0.0, 0.0, 0.0, ((1.0,),), accuracy, latency_ms, latency_ms, 0.0)


# From fast to slow.
CANDIDATES = [made(0.80, 10.0), made(0.88, 20.0), made(0.91, 30.0), made(0.93, 40.0)]


def selected(target: CascadeTarget, select: int = 2000, proof: int = 2000) -> Candidate:
    return select_candidate(CANDIDATES, target, select, proof)


def test_the_fastest_candidate_that_will_prove_the_accuracy_is_selected() -> None:
    assert selected(CascadeTarget(accuracy=0.85)).latency_ms == 20.0
    assert selected(CascadeTarget(accuracy=0.88)).latency_ms == 30.0


def test_fewer_proof_examples_need_a_more_accurate_candidate() -> None:
    assert selected(CascadeTarget(accuracy=0.85), proof=200).latency_ms == 40.0


def test_the_most_accurate_is_selected_if_all_candidates_just_meet_the_share() -> None:
    assert selected(CascadeTarget(accuracy=0.92), proof=3000).latency_ms == 40.0
    assert select_candidate([*CANDIDATES, made(0.931, 60.0)], CascadeTarget(0.92), 2000, 3000).latency_ms == 60.0


def test_without_an_accuracy_the_fastest_within_a_point_of_the_best_is_selected() -> None:
    assert selected(CascadeTarget()).latency_ms == 40.0
    assert select_candidate([*CANDIDATES, made(0.925, 15.0)], CascadeTarget(), 100, 100).latency_ms == 15.0
    assert selected(CascadeTarget(latency_ms=35.0)).latency_ms == 30.0


def test_the_offer_for_an_accuracy_that_is_too_slow_names_the_time_it_takes() -> None:
    with pytest.raises(ContractError, match=r"accuracy 0\.900 within mean latency 25 ms cannot be promised") as refused:
        selected(CascadeTarget(accuracy=0.90, latency_ms=25.0))
    assert "the nearest offer is accuracy 0.900 within 40 ms or accuracy 0.8" in str(refused.value)


def test_a_refusal_for_the_time_says_so_and_makes_each_offer_once() -> None:
    with pytest.raises(
        ContractError, match=r"the fastest candidate takes 10 ms; the nearest offer is .* within 40 ms$"
    ) as no:
        selected(CascadeTarget(accuracy=0.90, latency_ms=1.0))
    assert str(no.value).count("accuracy 0.900 within") == 2
    with pytest.raises(ContractError, match=r"the best accuracy on dev within that time is 0\.880"):
        selected(CascadeTarget(accuracy=0.90, latency_ms=25.0))


def test_an_offer_of_less_accuracy_is_accepted_when_it_is_asked_for() -> None:
    with pytest.raises(ContractError) as refused:
        selected(CascadeTarget(accuracy=0.97))
    offer = str(refused.value).split("the nearest offer is accuracy ")[1]
    accuracy, latency_ms = float(offer[:5]), float(offer.split(" within ")[1].split(" ms")[0])
    assert 0.90 < accuracy < 0.93
    assert selected(CascadeTarget(accuracy, latency_ms)).accuracy >= accuracy


def test_too_few_proof_examples_are_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(ContractError, match=r"20 proof examples are too few, about \d+ are needed"):
        selected(CascadeTarget(accuracy=0.90), proof=20)


def test_a_latency_that_no_candidate_has_is_refused_with_the_fastest() -> None:
    with pytest.raises(ContractError, match=r"the nearest offer is accuracy 0\.800 on dev within 10 ms"):
        selected(CascadeTarget(latency_ms=5.0))


def test_a_promise_that_is_not_proved_offers_what_was_proved() -> None:
    error = broken_promise(CascadeTarget(accuracy=0.9), 540, 600, 0.92, 30.0)
    assert "540 of 600 proof examples were right" in str(error)
    assert f"{int(float(proved_accuracy(540, 600)) * 1000) / 1000:.3f} within 30 ms" in str(error)


@pytest.mark.parametrize("wrong", [{"accuracy": 88.0}, {"accuracy": 0.0}, {"latency_ms": -1.0}])
def test_targets_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        CascadeTarget(**wrong)
