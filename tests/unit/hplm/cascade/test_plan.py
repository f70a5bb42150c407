"""The plan of a cascade."""

from __future__ import annotations

import json

import pytest

from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.errors import ConfigError

SMALL = LevelPlan("small", 3, Dispatch(1.5, 0.9, 10.0), (1.0,))
LARGE = LevelPlan("large", 4, Dispatch(1.2, 0.0, 0.0), (0.4, 0.6), alpha=0.7)
PROMISE = Promise(0.88, 90, 100, 12.0, target_accuracy=0.87)


def test_a_plan_is_the_same_after_json() -> None:
    plan = CascadePlan((SMALL, LARGE), PROMISE, deterministic=True, on_late="refuse", about={"seed": 0})
    assert CascadePlan.from_json(json.loads(json.dumps(plan.to_json())), "a plan") == plan


def test_a_level_needs_a_weight_for_each_level_up_to_it() -> None:
    with pytest.raises(ConfigError, match="level 2 needs 2 weights"):
        CascadePlan((SMALL, SMALL), PROMISE)


@pytest.mark.parametrize("values", [(0.0, 0.9, 1.0), (1.0, 1.0, 1.0), (1.0, 0.9, -1.0)])
def test_a_dispatcher_out_of_range_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="were expected"):
        Dispatch(*values)
