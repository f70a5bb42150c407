"""`hplm eval int8`: look-up and engine answer for trained tenants, plain and in int8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.studies.int8 import clipped_share, computed_share, goals_of, int8_rows
from hplm_builder.tenants.bodies import AdapterModel
from hplm_builder.tenants.prepared import Prepared

from hplm.engine.kernels.int8 import APART
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.models.base import Base
from hplm.tasks.examples import LabelledText
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import report_of
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni


@needs_vnni
def test_plain_and_int8_answers_are_scored_on_every_task(tmp_path: Path) -> None:
    place = evaluated.make_place(tmp_path)
    report = report_of(place, "int8", "--resume", str(tmp_path / "runs"))
    assert [row["task"] for row in report["rows"]] == ["colours", "places", "average"]
    for row in report["rows"]:
        assert 0 <= row["plain"] <= 1
        assert row["points_lost"] == pytest.approx(100 * (row["plain"] - row["int8"]))
        assert row["same_answers"] > 0.8
        assert 0 <= row["clipped"] < 0.01
        assert 0 < row["computed"] < 1
    assert report["goals"][0]["id"] == "int8-loss"
    assert report_of(place, "int8", "--resume", str(tmp_path / "runs"))["rows"] == report["rows"]


@needs_vnni
def test_features_looked_up_in_int8_differ_from_plain_ones(tmp_path: Path) -> None:
    place = evaluated.make_place(tmp_path)
    plain = ServedDomain(place.store, place.base, tiny.PLOT)
    quantised = replace(plain, quantization="int8")
    assert (plain.source.name, quantised.source.name) == ("general-compute", "general-compute-int8")
    assert plain.about() != quantised.about()
    ids = np.random.default_rng(0).integers(5, place.base.config.vocab_size, 30)
    exact, found = (one.lookup.hidden_states(ids, [30]) for one in (plain, quantised))
    assert 0 < np.abs(found.astype(np.float32) - exact).max() < 0.5
    # All windows are new, because the counts were reset.
    assert [computed_share(quantised.lookup) for _ in range(2)] == [1.0, 0.0]


def test_values_beyond_the_ranges_are_counted_except_in_separate_inner_channels(tiny_base: Base) -> None:
    body = AdapterModel(tiny_base.load_upper(), 8)
    length = 30
    features = torch.randn(length, tiny_base.config.hidden_size, generator=torch.Generator().manual_seed(0))
    example = Prepared(features.half(), torch.zeros(1), np.zeros((length, 3), np.int32), LabelledText(""))
    wide = measure_ranges(tiny_base, load_lower(tiny_base), body.upper)
    wide = [replace(one, channels=one.channels * 3, inner=one.inner.clamp(min=1) * 3) for one in wide]
    assert clipped_share(body, wide, [example]) == 0
    # An inner channel has the scale of the widest, even if it was narrow when it was measured.
    narrow = [one.inner.clone() for one in wide]
    narrow[0][3] /= 1000
    assert clipped_share(body, [replace(one, inner=n) for one, n in zip(wide, narrow, strict=True)], [example]) == 0
    small = [replace(one, inner=torch.full_like(one.inner, 0.1)) for one in wide]
    beyond = clipped_share(body, small, [example])
    assert 0.1 < beyond < 0.9
    apart = [one.inner.clone() for one in small]
    for inner in apart:
        inner[:APART] = 1.0
    fewer = clipped_share(body, [replace(one, inner=n) for one, n in zip(small, apart, strict=True)], [example])
    assert 0 < fewer < beyond


def judged(plain: float, int8: float) -> dict[str, float]:
    return {"plain": plain, "int8": int8, "same": 1.0, "clipped": 0.0, "computed": 0.5}


def test_averages_are_over_the_seeds_that_diverged_on_no_task() -> None:
    rows = int8_rows({"one": [judged(0.8, 0.7), judged(0.6, 0.6)], "two": [None, judged(0.4, 0.3)]})
    first, second, average = rows
    assert first["points_lost"] == pytest.approx(5.0)
    assert first["lost_by_seed"] == [10.0, 0.0]
    assert second["lost_by_seed"] == [10.0]
    assert average["plain"] == pytest.approx(0.5)
    assert average["lost_by_seed"] == [5.0]
    assert [goal.value for goal in goals_of(rows, 2)] == [average["points_lost"]]


def test_a_task_without_results_meets_no_goal() -> None:
    rows = int8_rows({"one": [judged(0.8, 0.8)], "two": [None]})
    assert [row["task"] for row in rows] == ["one"]
    assert goals_of(rows, 2) == []
