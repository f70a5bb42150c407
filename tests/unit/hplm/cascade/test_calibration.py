"""The expected calibration error without what chance adds."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.cascade.calibration import TEMPERATURES, fit_temperature, measure_calibration, why_uncalibrated
from hplm.cascade.level_outputs import LevelOutputs
from hplm.tasks.task import log_softmax
from tests.unit.hplm.cascade import made_outputs


def test_calibrated_confidences_have_the_error_that_chance_explains() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 600)
    measured = [measure_calibration(confidence, rng.random(600) < confidence, draws=50) for _ in range(20)]
    assert measured[0].by_chance > 0.02
    assert np.mean([one.error - one.by_chance for one in measured]) == pytest.approx(0.0, abs=0.005)
    assert min(one.excess for one in measured) == 0.0


def test_the_error_of_confidences_that_are_too_high_is_their_distance_from_the_accuracy() -> None:
    rng = np.random.default_rng(0)
    measured = measure_calibration(np.full(20_000, 0.95), rng.random(20_000) < 0.75, draws=50)
    assert measured.error == pytest.approx(0.2, abs=0.01)
    assert measured.excess == pytest.approx(0.2, abs=0.02)


def test_bins_hold_equally_many_texts_in_ascending_confidence() -> None:
    measured = measure_calibration(np.arange(100) / 100, np.arange(100) % 2 == 0, bins=10, draws=1)
    assert [one.texts for one in measured.bins] == [10] * 10
    assert [one.confidence for one in measured.bins] == pytest.approx([0.045 + 0.1 * i for i in range(10)])
    assert {one.accuracy for one in measured.bins} == {0.5}


def test_fewer_texts_than_bins_have_a_bin_each() -> None:
    assert len(measure_calibration([0.5, 0.7, 0.9], [True, False, True], draws=1).bins) == 3


def fitted(outputs: LevelOutputs, gold: np.ndarray) -> float:
    return fit_temperature(
        lambda temperature: float(log_softmax(outputs.logits, temperature)[np.arange(len(gold)), gold].sum()),
        outputs.right,
    )


def test_with_many_examples_the_temperature_is_that_of_the_model() -> None:
    part = made_outputs.made_part(4000)
    found = [fitted(outputs, part.gold) for outputs in part.whole]
    assert found == pytest.approx(made_outputs.TEMPERATURES[:2], rel=0.05)


@pytest.mark.parametrize(
    ("right", "why"),
    [
        ([True] * 400, "all 400 answers are right"),
        ([False] * 40, "all 40 answers are wrong"),
        ([True, False] * 9, "18 examples are fewer than 20"),
        ([True, False] * 10, ""),
    ],
)
def test_answers_that_cannot_calibrate_leave_the_temperature_at_one(right: list[bool], why: str) -> None:
    assert why_uncalibrated(right) == why
    # The likelihood grows without end as the temperature falls.
    temperature = fit_temperature(lambda temperature: 100 / temperature, right)
    assert temperature == (1.0 if why else pytest.approx(TEMPERATURES[0], rel=0.01))


def test_a_prior_and_bounds_do_not_harm_the_calibration_on_a_usual_dev_set() -> None:
    dev, test = made_outputs.made_part(400, seed=1), made_outputs.made_part(20_000, seed=2)
    for seen, new in zip(dev.whole, test.whole, strict=True):
        temperature = fitted(seen, dev.gold)
        errors = [
            measure_calibration(np.exp(log_softmax(new.logits, t).max(1)), new.right, draws=20).excess
            for t in (1.0, temperature)
        ]
        assert errors[1] < 0.02 < errors[0]
