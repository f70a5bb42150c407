"""TCB's model of a server: what is worked out by hand comes out, and no policy exceeds the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hplm_loadtest.slot_model import SlotModel

from hplm.scheduling.registry import BUILT_IN, load_policy

MODEL = SlotModel(rows=4, row_tokens=100, variance=100.0, batch_s=0.2, overload=2.0, deadlines_s=(0.5, 3.0), batches=60)


@pytest.mark.parametrize("row_tokens", [50, 100])
@pytest.mark.parametrize("variance", [0.0, 20.0, 400.0])
@pytest.mark.parametrize("overload", [1.5, 4.0])
def test_no_policy_exceeds_the_bound(row_tokens: int, variance: float, overload: float) -> None:
    model = replace(MODEL, row_tokens=row_tokens, variance=variance, overload=overload)
    found = {name: model.utility_per_s(load_policy(name, {})) for name in BUILT_IN}
    assert min(found.values()) > 0
    assert max(found.values()) <= model.most_per_s()


def test_equal_lengths_are_worth_the_same_in_any_order() -> None:
    # Five of 20 tokens fill a row: 4 rows x 5 requests x 1/20 each 0.2 s are 5 a second.
    model = replace(MODEL, variance=0.0, batches=600)
    for name in ("fcfs", "sjf", "edf", "das"):
        assert model.utility_per_s(load_policy(name, {})) == pytest.approx(5.0, rel=0.1)
    assert model.most_per_s() == pytest.approx(5.0, rel=0.1)


def test_what_no_batch_can_answer_in_time_counts_for_nothing() -> None:
    # A deadline shorter than a batch cannot be met.
    assert replace(MODEL, deadlines_s=(0.05, 0.1)).most_per_s() == 0
    # Nothing arrives in so short a time.
    assert replace(MODEL, batches=1, overload=1e-9).most_per_s() == 0


def test_shortest_first_comes_within_a_tenth_of_the_bound() -> None:
    model = replace(MODEL, deadlines_s=(2.0, 4.0), batches=300)
    assert model.utility_per_s(load_policy("sjf", {})) >= 0.9 * model.most_per_s()
