"""The cost model learns the seconds of a batch from batches, is never negative, and says how many tokens fit into a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.queue import RequestQueue
from tests.unit.hplm.scheduling.test_queue import cost


def test_the_cost_model_learns_and_shrugs_off_hiccups_and_nonsense() -> None:
    model = cost()
    assert model.predict(500, 10_000) == pytest.approx(0.5, rel=0.05)
    model.observe(500, 10_000, 50.0)
    assert model.predict(500, 10_000) < 1.0
    for seconds in (0.0, -1.0, math.nan, math.inf):
        model.observe(500, 10_000, seconds)
    for _ in range(300):
        for tokens in (50, 200, 800):
            model.observe(tokens, tokens * 20, tokens * 2e-3)
    assert model.predict(500, 10_000) == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 4000), st.floats(1e-6, 10.0)), min_size=1, max_size=30))
def test_no_coefficient_of_the_cost_model_is_negative(samples: list[tuple[int, float]]) -> None:
    model = CostModel.fit([(tokens, tokens * tokens, seconds) for tokens, seconds in samples])
    assert model.predict(0, 0) >= 0
    assert model.predict(10, 0) >= model.predict(5, 0)
    assert model.predict(10, 200) >= model.predict(10, 100)


def test_batches_do_not_become_so_small_that_tokens_are_less_than_four_fifths_of_their_cost() -> None:
    model = cost(batch_s=0.01)
    assert model.tokens_within(1.0, 20) == pytest.approx(990, rel=0.01)
    assert model.tokens_within(0.02, 20) == model.tokens_within(0.0, 20) == pytest.approx(40, rel=0.01)
    assert CostModel().tokens_within(0.0, 20) == math.inf


def test_nothing_is_concluded_from_the_first_batches_of_a_process_which_are_slow() -> None:
    queue = RequestQueue(
        *(Fcfs(), Budget(1, 2048, 64, 64), CostModel(forgetting=0.8)), capacity=4096, weights={}, starve_after_s=30.0
    )
    assert not queue.offer(Waiting(0, "a", 256, arrived_s=0.0, deadline_s=30.0), 0.0)
    for seconds in (1.2, 0.02, 0.02, 0.02, 0.02):
        queue.take(0.0)
        queue.done(seconds)
        refused = [queue.offer(Waiting(i, "a", 90, arrived_s=0.0, deadline_s=30.0), 0.0) for i in range(1, 97)]
        assert not any(refused)
        queue.drain()
        queue.offer(Waiting(0, "a", 256, arrived_s=0.0, deadline_s=30.0), 0.0)
    assert 0 < queue.cost.predict(256, 256**2) < 1.2


def test_a_linear_model_knows_what_a_long_text_costs_where_only_short_ones_were_seen() -> None:
    rng = np.random.default_rng(1)

    def most_off(model: CostModel) -> float:
        """Return how many times too expensive a text of 256 tokens looks at worst, while batches of short texts run."""
        worst = 0.0
        for seen in range(2000):
            lengths = np.clip(rng.normal(20, 10, rng.integers(1, 30)).round(), 3, 100).astype(int)
            tokens = int(lengths.sum())
            model.observe(tokens, int((lengths**2).sum()), (1e-3 + 3e-5 * tokens) * math.exp(rng.normal(0, 0.2)))
            if seen > 50:
                worst = max(worst, model.predict(256, 256**2) / (1e-3 + 3e-5 * 256))
        return worst

    assert most_off(CostModel(0.8)) > 5
    assert most_off(CostModel(0.8, is_linear=True)) < 3
