"""The dispatcher's rule: probabilities of eq. 4, draws, and the values of the wire."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hplm.cascade.dispatch import DETERMINISTIC, NEVER, DispatchInput, draw_of, reroute_probability
from hplm.cascade.plan import Dispatch
from hplm.errors import BadInputError

SOUND = DispatchInput(temperature=1.5, cut_off=0.75, slope=4.0, draw=0.5, wants_importance=True)


def test_the_probability_is_that_of_equation_4() -> None:
    c, k = 0.9, 6.0
    for confidence in (0.91, 0.95, 0.99, 1.0):
        norm = (confidence - c) / (1 - c) - 0.5
        assert reroute_probability(confidence, c, k) == pytest.approx(1 / (1 + math.exp(k * norm)))
    assert reroute_probability([0.0, 0.9, 0.95], c, k).tolist() == pytest.approx([1.0, 1.0, 0.5])


def test_a_very_steep_slope_gives_probabilities_without_a_warning() -> None:
    assert reroute_probability([0.91, 0.99], 0.9, 1e6).tolist() == [1.0, 0.0]


def test_route_frequencies_of_many_texts_follow_equation_4() -> None:
    inputs = [replace(SOUND, draw=draw_of("acme", 3, str(i).encode())) for i in range(20_000)]
    for confidence in (0.76, 0.9, 1.0):
        share = np.mean([one.is_rerouted(confidence) for one in inputs])
        expected = float(reroute_probability(confidence, 0.75, 4.0))
        # Five standard errors of a share.
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / len(inputs))


def test_draws_of_two_levels_are_independent() -> None:
    draws = np.array([[draw_of("acme", 3, str(i).encode(), level=level) for level in (1, 2)] for i in range(20_000)])
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.04


def test_a_draw_depends_on_tenant_version_and_texts_alone() -> None:
    draws = [
        draw_of("acme", 3, b"a", b"b"),
        draw_of("acme", 3, b"ab"),
        draw_of("acme", 3, b"", b"ab"),
        draw_of("acme", 4, b"ab"),
        draw_of("acme3", 3, b"ab"),
    ]
    assert len(set(draws)) == len(draws)
    assert draws[0] == draw_of("acme", 3, b"a", b"b") == float(np.float32(draws[0]))
    # The same on every server and in every release: tenants' routes must not change with an update.
    assert draws[1] == 0.014707684516906738


def test_a_text_at_the_cut_off_is_always_rerouted_and_above_it_the_draw_decides() -> None:
    deterministic = replace(SOUND, draw=DETERMINISTIC)
    assert deterministic.is_rerouted(0.75)
    assert not deterministic.is_rerouted(0.7500002)
    assert replace(SOUND, draw=0.0).is_rerouted(1.0)


def test_the_last_level_reroutes_nothing() -> None:
    last = DispatchInput.of(Dispatch(1.0, 0.9, 4.0), 0.0, is_last=True)
    assert last.cut_off == NEVER
    assert not last.is_rerouted(0.0)


def test_values_of_the_wire_come_back_as_they_were() -> None:
    one = DispatchInput.of(Dispatch(1.3, 0.85, 4.7), 0.1, wants_importance=True)
    assert DispatchInput.from_array(one.to_array()) == one
    assert one.cut_off == float(np.float32(0.85))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 0.0),
        (0, np.inf),
        (0, np.nan),
        (1, 1.0),
        (1, -0.5),
        (1, np.nan),
        (2, -1.0),
        (2, np.nan),
        (3, 1.5),
        (3, -0.1),
        (4, 2.0),
    ],
)
def test_bad_values_are_refused(place: int, value: float) -> None:
    values = SOUND.to_array()
    values[place] = value
    with pytest.raises(BadInputError, match="temperature above 0"):
        DispatchInput.from_array(values)


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"\[4\]"):
        DispatchInput.from_array(SOUND.to_array()[:4])
