"""Cuts are the best there are, by brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.partition import Cut, balanced_cut, even_cut, stage_layers, stage_seconds


def all_cuts(layers: int, stages: int) -> list[Cut]:
    return [
        tuple(stop - start for start, stop in pairwise((0, *bounds, layers)))
        for bounds in combinations(range(1, layers), stages - 1)
    ]


@st.composite
def layered(draw: st.DrawFn) -> tuple[list[float], int]:
    layer_s = draw(st.lists(st.floats(0.01, 10) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=9))
    return layer_s, draw(st.integers(1, len(layer_s)))


@given(layered(), st.sampled_from([0.0, 0.5, 3.0]))
def test_the_balanced_cut_has_the_quickest_slowest_stage(case: tuple[list[float], int], send_s: float) -> None:
    layer_s, stages = case
    cut = balanced_cut(layer_s, stages, send_s)
    best = min(max(stage_seconds(layer_s, other, send_s)) for other in all_cuts(len(layer_s), stages))
    assert max(stage_seconds(layer_s, cut, send_s)) == pytest.approx(best)


@given(layered(), st.sampled_from([0.0, 0.5]))
def test_of_equally_quick_cuts_the_balanced_cut_is_the_most_even(case: tuple[list[float], int], send_s: float) -> None:
    layer_s, stages = case

    def squares(cut: Cut) -> float:
        return sum(second**2 for second in stage_seconds(layer_s, cut, send_s))

    cut = balanced_cut(layer_s, stages, send_s)
    slowest = max(stage_seconds(layer_s, cut, send_s))
    as_quick = [
        other
        for other in all_cuts(len(layer_s), stages)
        if max(stage_seconds(layer_s, other, send_s)) <= slowest * (1 + 1e-12)
    ]
    assert squares(cut) <= min(map(squares, as_quick)) * (1 + 1e-9)


def test_equal_layers_are_cut_evenly() -> None:
    assert sorted(balanced_cut([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_sending_makes_the_last_stage_larger() -> None:
    assert balanced_cut([1.0] * 10, 2, send_s=2.0) == (4, 6)


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_of_an_even_cut_differ_by_one_layer_at_most(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=f"1 to {layers} stages were expected"):
            even_cut(layers, stages)
        return
    cut = even_cut(layers, stages)
    assert sum(cut) == layers
    assert max(cut) - min(cut) <= 1


def test_an_even_cut_leaves_the_embedding_and_the_head_uncounted() -> None:
    assert even_cut(26, 8, 1, 1) == (4, 3, 3, 3, 3, 3, 3, 4)


def test_stage_layers_are_the_layers_in_order() -> None:
    assert [list(layers) for layers in stage_layers((2, 1, 3))] == [[0, 1], [2], [3, 4, 5]]
