"""The rule that decides whether a domain helps."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hplm_builder.domains.verdict import DevResult, Difference, Outcome, Rows, Verdict, compare, decide
from hypothesis import given
from hypothesis import strategies as st


def on_file(before: float, after: float, error: float, file: str = "a.csv") -> DevResult:
    return DevResult(file, "classification", "accuracy", 300, Difference(before, after, error))


@pytest.mark.parametrize(
    ("gain", "error", "outcome"),
    [
        (0.05, 0.01, "helps"),
        (-0.05, 0.01, "hurts"),
        (0.05, 0.03, "makes no difference"),
        (-0.05, 0.03, "makes no difference"),
        (0.004, 0.0, "makes no difference"),
        (0.0, 0.0, "makes no difference"),
        (0.05, math.inf, "makes no difference"),
    ],
)
def test_a_gain_counts_if_it_exceeds_noise_and_a_least_gain(gain: float, error: float, outcome: Outcome) -> None:
    assert decide(gain, error, 0.005) == outcome


@given(st.floats(-1, 1), st.floats(0, 1))
def test_what_helps_one_way_hurts_the_other_way(gain: float, error: float) -> None:
    opposite = {"helps": "hurts", "hurts": "helps", "makes no difference": "makes no difference"}
    assert decide(-gain, error, 0.005) == opposite[decide(gain, error, 0.005)]


def test_the_error_of_a_difference_of_means_is_that_of_the_paired_differences() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(40), rng.random(40)

    def means(rows: Rows) -> tuple[float, float]:
        return float(before[rows].mean()), float(after[rows].mean())

    found = compare(means, 40)
    assert (found.before, found.after) == pytest.approx((before.mean(), after.mean()))
    assert found.error == pytest.approx((after - before).std(ddof=1) / math.sqrt(40))


def test_texts_that_differ_alike_from_one_another_make_no_noise() -> None:
    hard = np.random.default_rng(0).random(400)

    def means(rows: Rows) -> tuple[float, float]:
        return float(hard[rows].mean()), float(hard[rows].mean() + 0.1)

    assert compare(means, 400).error == pytest.approx(0, abs=1e-9)


def test_a_single_text_decides_nothing() -> None:
    assert compare(lambda rows: (0.0, 1.0), 1).error == math.inf


def test_two_encoders_that_are_equally_good_are_rarely_told_apart() -> None:
    outcomes = []
    for seed in range(200):
        right = np.random.default_rng(seed).random((2, 200)) < 0.7

        def accuracies(rows: Rows, right: np.ndarray = right) -> tuple[float, float]:
            return float(right[0, rows].mean()), float(right[1, rows].mean())

        found = compare(accuracies, 200)
        outcomes.append(decide(found.change, found.error, 0.005))
    assert outcomes.count("makes no difference") >= 180


def test_labelled_examples_decide_if_there_are_some_and_else_the_held_out_text() -> None:
    lower_loss = Difference(3.0, 2.5, 0.01)
    alone = Verdict("law", "general", lower_loss)
    assert (alone.outcome, alone.on_dev) == ("helps", None)
    assert Verdict("law", "general", lower_loss, [on_file(0.8, 0.7, 0.01)]).outcome == "hurts"
    assert Verdict("law", "general", Difference(3.0, 2.99, 0.0)).outcome == "makes no difference"
    assert Verdict("law", "general", Difference(3.0, 3.5, 0.01)).outcome == "hurts"
    assert Verdict("law", "general", None).outcome == "makes no difference"


def test_files_are_judged_by_their_mean() -> None:
    up, down = on_file(0.7, 0.76, 0.02), on_file(0.7, 0.64, 0.02, "b.csv")
    assert Verdict("law", "general", None, [up]).outcome == "helps"
    assert Verdict("law", "general", None, [up, down]).outcome == "makes no difference"
    # Four files that are each too noisy alone.
    weak = on_file(0.7, 0.73, 0.02)
    assert Verdict("law", "general", None, [weak]).outcome == "makes no difference"
    assert Verdict("law", "general", None, [weak] * 4).outcome == "helps"


def test_the_words_have_the_outcome_the_figures_and_what_to_do() -> None:
    helps = Verdict("law", "general", Difference(3.0, 2.5, 0.01), [on_file(0.7, 0.8, 0.01)])
    assert helps.why == (
        "law helps on labelled examples, compared with general. Loss of masked words on held-out text: 3.000 before, 2.500 "
        "after (difference -0.500 ± 0.020). a.csv, 300 examples: accuracy 0.700 before, 0.800 after "
        "(difference +0.100 ± 0.020)."
    )
    assert helps.advice == "Train tenants over it: --domain law."
    unsure = Verdict("law", "general", Difference(3.0, 2.5, 0.01))
    assert "was measured on nothing else" in unsure.why
    assert "The store keeps no examples of tenants, and no file of them was given (--dev)." in unsure.why
    assert "A lower loss does not show that tenants gain" in unsure.advice
    hurts = Verdict("law", "general", Difference(3.0, 3.5, 0.01))
    assert hurts.advice == "`hplm domain delete law` removes the domain."
    update = Verdict("law", "version 2", Difference(3.0, 3.5, 0.01), is_update=True)
    assert update.advice.startswith("Leave tenants on version 2; `hplm domain delete law`")
    assert "too short to measure on" in Verdict("law", "general", None).why


def test_a_record_of_a_verdict_is_plain_json() -> None:
    verdict = Verdict("law", "general", Difference(3.0, 2.5, 0.01), [on_file(0.7, 0.8, 0.01)])
    record = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert record["verdict"] == "helps"
    assert record["held_out_text"]["outcome"] == "helps"
    assert record["dev"][0]["scores"] == {"before": 0.7, "after": 0.8, "error": 0.01}
