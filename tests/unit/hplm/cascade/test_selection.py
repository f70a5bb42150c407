"""The selection of a candidate, and what is offered instead."""

from __future__ import annotations

import re

import pytest

from hplm.cascade.candidates import Candidate
from hplm.cascade.selection import CascadeTarget, choose_candidate, select_candidate
from hplm.errors import ConfigError, ContractError


def made(accuracy: float, latency_ms: float) -> Candidate:
    return Candidate((0,), 0.0, 0.0, 0.0, ((1.0,),), accuracy, latency_ms, latency_ms, 0.0)


# From fast to slow.
CANDIDATES = [made(0.80, 10.0), made(0.88, 20.0), made(0.91, 30.0), made(0.93, 40.0)]


def selected(target: CascadeTarget, select: int = 2000, proof: int = 2000, worse_by: float = 0.0) -> Candidate:
    """Select for a target; the candidates are `worse_by` less accurate on the proof than on dev, the slower ones the more."""

    def count_right(one: Candidate) -> int:
        return round((one.accuracy - worse_by * one.latency_ms / 40) * proof)

    return select_candidate(CANDIDATES, target, select, proof, count_right)


def test_the_fastest_candidate_that_will_prove_the_accuracy_is_selected() -> None:
    assert selected(CascadeTarget(accuracy=0.85)).latency_ms == 20.0
    assert selected(CascadeTarget(accuracy=0.88)).latency_ms == 30.0


def test_fewer_proof_examples_need_a_more_accurate_candidate() -> None:
    assert selected(CascadeTarget(accuracy=0.85), proof=200).latency_ms == 40.0


def test_the_most_accurate_is_selected_if_all_candidates_just_meet_the_share() -> None:
    assert selected(CascadeTarget(accuracy=0.92), proof=3000).latency_ms == 40.0
    most_accurate = choose_candidate([*CANDIDATES, made(0.931, 60.0)], CascadeTarget(0.92), 2000, 3000)
    assert most_accurate is not None
    assert most_accurate.latency_ms == 60.0


def test_without_an_accuracy_the_fastest_within_a_point_of_the_best_is_selected() -> None:
    assert selected(CascadeTarget()).latency_ms == 40.0
    fastest = choose_candidate([*CANDIDATES, made(0.925, 15.0)], CascadeTarget(), 100, 100)
    assert fastest is not None
    assert fastest.latency_ms == 15.0
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


@pytest.mark.parametrize("worse_by", [0.0, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("proof", [60, 200, 2000])
@pytest.mark.parametrize(
    "target", [CascadeTarget(0.97), CascadeTarget(0.9), CascadeTarget(0.9, 25.0), CascadeTarget(0.88, 1.0)]
)
def test_every_offer_is_accepted_when_it_is_asked_for_as_it_is_printed(
    target: CascadeTarget, proof: int, worse_by: float
) -> None:
    try:
        assert selected(target, proof=proof, worse_by=worse_by).accuracy >= (target.accuracy or 0)
    except ContractError as refused:
        offers = re.findall(r"accuracy (0\.\d{3}) within ([\d.]+) ms", str(refused).split("the nearest offer is ")[1])
        assert offers
        for accuracy, latency_ms in offers:
            selected(CascadeTarget(float(accuracy), float(latency_ms)), proof=proof, worse_by=worse_by)
        # Less accuracy alone is enough too, if the time was not the reason.
        if target.latency_ms is None:
            selected(CascadeTarget(float(offers[0][0])), proof=proof, worse_by=worse_by)


def test_too_few_proof_examples_are_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(ContractError, match=r"20 proof examples are too few, about \d+ are needed"):
        selected(CascadeTarget(accuracy=0.90), proof=20)


def test_a_latency_that_no_candidate_has_is_refused_with_the_fastest() -> None:
    with pytest.raises(ContractError, match=r"the nearest offer is accuracy 0\.800 on dev within 10 ms"):
        selected(CascadeTarget(latency_ms=5.0))


def test_a_promise_that_is_not_proved_says_what_the_proof_shows_and_how_many_examples_are_needed() -> None:
    with pytest.raises(
        ContractError,
        match=r"accuracy 0\.905 is not proved: 1,830 of 2,000 proof examples were right, which proves 0\.904",
    ) as refused:
        selected(CascadeTarget(0.905), worse_by=0.015)
    assert (
        "nearest offer is accuracy 0.904 within 40 ms; about 2,499 proof examples are needed if 0.915 of them"
        in str(refused.value)
    )


@pytest.mark.parametrize("wrong", [{"accuracy": 88.0}, {"accuracy": 0.0}, {"latency_ms": -1.0}])
def test_targets_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        CascadeTarget(**wrong)
