"""Candidates of a selection, and the offline twin of a cascade."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hplm.cascade.candidates import CUT_OFFS, SLOPES, Candidate, best_candidates, find_candidates
from hplm.cascade.level_outputs import PartOutputs
from hplm.cascade.offline import answer_offline, draws_of
from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from tests.unit.hplm.cascade.made_outputs import TEMPERATURES, made_part

BASES = ("small", "middle", "large")
LATENCIES = [lambda tokens: 1.0 + 0.1 * tokens, lambda tokens: 3.0 + 0.3 * tokens, lambda tokens: 5.0 + 0.5 * tokens]


def plan_of(candidate: Candidate, *, deterministic: bool = False) -> CascadePlan:
    levels = [
        LevelPlan(
            BASES[level],
            0,
            Dispatch(TEMPERATURES[level], candidate.cut_off, candidate.slope),
            candidate.weights[place],
            candidate.alpha if place == 1 else 0.0,
        )
        for place, level in enumerate(candidate.levels)
    ]
    return CascadePlan(tuple(levels), Promise(0.0, 0, 0, candidate.latency_ms), deterministic)


def found_in(part: PartOutputs, *, deterministic: bool = False) -> list[Candidate]:
    count = len(part.whole)
    return find_candidates(part, TEMPERATURES[:count], LATENCIES[:count], deterministic=deterministic)


@pytest.mark.parametrize("skills", [(4.0, 12.0), (4.0, 8.0, 14.0)], ids=["two-levels", "three-levels"])
def test_a_deterministic_candidate_expects_what_the_offline_cascade_answers(skills: tuple[float, ...]) -> None:
    part = made_part(300, skills=skills, alphas=(0.5,))
    candidates = [one for one in found_in(part, deterministic=True) if len(one.levels) == len(skills)]
    assert {one.alpha for one in candidates} == {0.0, 0.5}
    for candidate in candidates[::5]:
        answers = answer_offline(plan_of(candidate, deterministic=True), BASES, part)
        spent = [
            sum(LATENCIES[level](tokens) for level, tokens in zip(candidate.levels, answer.tokens, strict=False))
            for answer in answers
        ]
        assert np.mean([answer.right for answer in answers]) == pytest.approx(candidate.accuracy)
        assert np.mean(spent) == pytest.approx(candidate.latency_ms)
        assert np.mean([answer.level > 0 for answer in answers]) == pytest.approx(candidate.rerouted)
        assert candidate.p75_ms == pytest.approx(np.quantile(spent, 0.75, method="inverted_cdf"))


def test_a_candidate_expects_the_mean_of_what_draws_give() -> None:
    part = made_part(200, skills=(4.0, 8.0, 14.0))
    candidate = next(one for one in found_in(part) if one.levels == (0, 1, 2) and one.slope == SLOPES[0])
    rng = np.random.default_rng(1)
    runs = [answer_offline(plan_of(candidate), BASES, part, rng.random((len(part), 3))) for _ in range(100)]
    assert np.mean([[answer.right for answer in run] for run in runs]) == pytest.approx(candidate.accuracy, abs=0.005)
    assert np.mean([[answer.level > 0 for answer in run] for run in runs]) == pytest.approx(
        candidate.rerouted, abs=0.01
    )


def test_cascades_have_ascending_levels_and_single_levels_are_candidates_too() -> None:
    found = {candidate.levels for candidate in found_in(made_part(200, skills=(4.0, 8.0, 14.0)))}
    assert found == {(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)}


def test_cut_offs_fall_while_the_accuracy_is_at_least_the_mean_of_the_levels() -> None:
    part = made_part(400, skills=(2.0, 30.0))
    mean = np.mean([level.accuracy for level in part.whole])
    for slope in SLOPES:
        cascades = [one for one in found_in(part) if len(one.levels) == 2 and one.slope == slope]
        assert [one.cut_off for one in cascades] == list(CUT_OFFS[: len(cascades)])
        assert 0 < len(cascades) < len(CUT_OFFS)
        assert min(one.accuracy for one in cascades) >= mean


def test_a_cascade_whose_slow_texts_take_too_long_is_no_candidate() -> None:
    part = made_part(200)
    # Both levels are equally slow, and most texts need both.
    slow = find_candidates(part, TEMPERATURES[:2], [LATENCIES[0], LATENCIES[0]])
    limit = 1.5 * max(one.p75_ms for one in slow if len(one.levels) == 1)
    assert all(one.p75_ms <= limit for one in slow)
    assert len(slow) < len(found_in(part))


def test_weights_are_proportional_to_accuracies_on_the_texts_that_are_re_routed() -> None:
    part = made_part(500)
    candidate = next(one for one in found_in(part, deterministic=True) if len(one.levels) == 2)
    rerouted = part.whole[0].confidence <= np.float32(candidate.cut_off)
    small, large = (float(level.right[rerouted].mean()) for level in part.whole)
    assert candidate.weights == ((1.0,), pytest.approx((small / (small + large), large / (small + large))))


def test_taggings_are_not_weighted() -> None:
    part = made_part(200)
    whole = tuple(dataclasses.replace(level, logits=np.zeros((200, 0), np.float32)) for level in part.whole)
    tagging = dataclasses.replace(part, whole=whole, gold=np.full(200, -1))
    candidate = next(one for one in found_in(tagging) if len(one.levels) == 2)
    assert candidate.weights == ((1.0,), (0.0, 1.0))
    answers = answer_offline(plan_of(candidate), BASES, tagging)
    assert [answer.right for answer in answers] == [
        bool(part.whole[answer.level].right[text]) for text, answer in enumerate(answers)
    ]


def test_no_row_of_the_table_is_slower_and_no_better_than_another_of_its_levels() -> None:
    candidates = found_in(made_part(300, alphas=(0.5, 0.6)))
    rows = best_candidates(candidates)
    assert {one.levels for one in rows} == {one.levels for one in candidates}
    for row in rows:
        for other in candidates:
            if other.levels == row.levels and other != row:
                assert other.accuracy < row.accuracy or other.latency_ms >= row.latency_ms


def test_draws_depend_on_the_text_the_version_and_the_level() -> None:
    texts = ["red", ("red", "blue"), "redblue"]
    draws = draws_of("acme", 3, texts, 2)
    assert draws.shape == (3, 2)
    assert len(np.unique(draws)) == 6
    assert (draws_of("acme", 3, texts, 2) == draws).all()
    assert not (draws_of("acme", 4, texts, 2) == draws).any()
