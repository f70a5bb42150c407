"""The expected calibration error without what chance adds."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.cascade.calibration import measure_calibration


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
