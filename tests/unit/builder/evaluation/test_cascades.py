"""The answers of a cascade to stored level outputs, and the effect of its settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hplm_builder.cascade.cascade_build import plan_of, select_again
from hplm_builder.evaluation.cascade.cascades import (
    CascadeRun,
    TextTimes,
    alpha_rows,
    cut_off_rows,
    level_answers,
    levels_row,
    sharing_row,
)
from hplm_builder.evaluation.cascade.pool import calibrated, fitted_temperatures, joined, taken

from hplm.cascade.candidates import Candidate
from hplm.cascade.level_outputs import CalibratedLevel, CascadeOutputs
from hplm.cascade.selection import CascadeTarget
from tests.unit.hplm.cascade.made_outputs import TEMPERATURES, made_part

BASES = ("small", "large")


@dataclass(frozen=True)
class PerToken:
    """A base that takes `ms` a token."""

    ms: float

    def latency_ms(self, tokens: int) -> float:
        return self.ms * tokens


TIMES = TextTimes({"small": PerToken(0.1), "large": PerToken(1.0)}, logic_ms=0.5)


@pytest.fixture(scope="module")
def outputs() -> CascadeOutputs:
    levels = tuple(CalibratedLevel(base, temperature) for base, temperature in zip(BASES, TEMPERATURES, strict=False))
    select, proof = (made_part(600, seed, alphas=(0.5, 0.7)) for seed in (0, 1))
    return CascadeOutputs("acme", "classification", ("a", "b", "c"), levels, select, proof)


@pytest.fixture(scope="module")
def run(outputs: CascadeOutputs) -> CascadeRun:
    candidate = Candidate((0, 1), 0.8, 12.0, 0.7, ((1.0,), (0.4, 0.6)), 0.9, 10.0, 20.0, 0.5)
    return CascadeRun.of(plan_of(candidate, outputs, CascadeTarget()), outputs, outputs.proof)


def test_a_text_takes_the_time_of_every_level_that_read_it(run: CascadeRun) -> None:
    answered = run.answered(TIMES)
    small = run.part.whole[0].tokens * 0.1
    large = run.part.pruned[0, 1, 0.7].tokens * 1.0 * (run.levels == 1)
    assert 0.1 < answered.shares[1] < 0.9
    assert answered.latency_ms == pytest.approx(small + large + 0.5)
    assert answered.cost({"small": 2, "large": 1}) == pytest.approx(small.mean() / 2 + large.mean())


def test_a_higher_cut_off_answers_fewer_texts_early_and_takes_longer(run: CascadeRun, outputs: CascadeOutputs) -> None:
    rows = cut_off_rows("colours", run, outputs, TIMES)
    assert [row["cut_off"] for row in rows] == sorted(row["cut_off"] for row in rows)
    assert [row["cut_off"] for row in rows if row["is_chosen"]] == [0.8]
    assert all(a["answered_by_first"] >= b["answered_by_first"] for a, b in pairwise(rows))
    assert rows[0]["mean_ms"] < rows[-1]["mean_ms"]


def test_pruning_is_measured_on_the_texts_that_came_to_the_large_level(run: CascadeRun) -> None:
    whole, half, chosen = alpha_rows("colours", run, TIMES)
    assert [row["alpha"] for row in (whole, half, chosen)] == [0.0, 0.5, 0.7]
    assert whole["pruned"] == whole["large_ms_less"] == 0
    assert chosen["pruned"] == pytest.approx(chosen["large_ms_less"])
    assert 45 < chosen["pruned"] < 55
    came = run.levels == 1
    assert chosen["rerouted"] == came.sum()
    assert chosen["accuracy"] == pytest.approx(100 * run.right[came].mean())


def test_levels_are_judged_on_the_texts_that_each_answers(run: CascadeRun) -> None:
    row = sharing_row("colours", run)
    returned = run.levels == 0
    assert row["returned"] == pytest.approx(100 * returned.mean())
    assert row["small_on_returned"] == pytest.approx(100 * run.right[returned].mean())
    # The dispatcher sends on what the small level is unsure of.
    assert row["small_on_returned"] > row["small_on_rerouted"] + 10


def test_a_row_of_levels_names_the_share_of_each(run: CascadeRun) -> None:
    row = levels_row("colours", run, TIMES, "selected")
    assert (row["levels"], row["plan"]) == (2, "small+large, c 0.8, k 12, alpha 0.7")
    assert row["answered_by_level"] == f"{100 * run.shares[0]:.1f}/{100 * run.shares[1]:.1f} %"


def test_levels_come_from_the_fastest_to_the_slowest(outputs: CascadeOutputs) -> None:
    swapped = replace(TIMES, profiles={"small": PerToken(2.0), "large": PerToken(1.0)})
    assert [level.base for level in level_answers(outputs, outputs.proof, TIMES)] == ["small", "large"]
    found = level_answers(outputs, outputs.proof, swapped)
    assert [level.base for level in found] == ["large", "small"]
    assert found[1].right.tolist() == outputs.proof.whole[0].right.tolist()


def test_parts_that_are_joined_and_taken_apart_again_are_the_same(outputs: CascadeOutputs) -> None:
    pool = joined([outputs.select, outputs.proof])
    assert len(pool) == 1200
    again = taken(pool, np.arange(600, 1200))
    assert again.whole[1].logits.tolist() == outputs.proof.whole[1].logits.tolist()
    assert again.pruned[0, 1, 0.5].tokens.tolist() == outputs.proof.pruned[0, 1, 0.5].tokens.tolist()
    assert again.draws.tolist() == outputs.proof.draws.tolist()


def test_temperatures_are_fitted_to_the_examples_that_are_drawn() -> None:
    part = made_part(4000)
    assert fitted_temperatures(part) == pytest.approx(TEMPERATURES[:2], rel=0.1)
    hotter = calibrated(part, [3.0, 3.0])
    assert hotter.whole[0].confidence.mean() < part.whole[0].confidence.mean()
    assert calibrated(part, TEMPERATURES[:2]).whole[0].confidence == pytest.approx(part.whole[0].confidence, abs=1e-5)


def test_the_selected_plan_answers_the_proof_as_it_was_proved(outputs: CascadeOutputs) -> None:
    built = select_again(outputs, CascadeTarget(), TIMES.profiles)
    answered = CascadeRun.of(built.plan, outputs, outputs.proof)
    assert answered.right.sum() == built.plan.promise.right
