"""Two stages in a row under overload: the second can still answer in time what the first lets through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hplm.core.settings import LookupSettings
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Das, Fcfs
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import simulate

# Requests a second. The look-up computes the windows of new text, and reads those of known text.
NEW, KNOWN = 137.0, 4000.0
UPPER = 440.0
STEP_S = 0.01
TOKENS = 20


def goodput(load: float, deadlines_s: tuple[float, float], seconds: float = 10.0, known_until_s: float = 0.0) -> float:
    """Return answers in time over the look-up's capacity for new text. Texts are known in the first `known_until_s`."""
    rng = np.random.default_rng(0)
    count = int(load * NEW * seconds)
    at, whole = np.sort(rng.uniform(0, seconds, count)), rng.uniform(*deadlines_s, count)
    reserve = np.minimum(whole / 2, LookupSettings.reserve_s)
    deadline = (at + whole).tolist()
    arrivals = [
        Waiting(i, f"t{i % 50}", TOKENS, a, by)
        for i, (a, by) in enumerate(zip(at.tolist(), (at + whole - reserve).tolist(), strict=True))
    ]
    first = RequestQueue(
        *(Fcfs(), Budget(1, 2048, 64, 64), CostModel(forgetting=0.8, is_linear=True)),
        capacity=4096,
        weights={},
        starve_after_s=30.0,
    )
    looked_up = simulate(
        arrivals,
        first,
        lambda batch: sum(1 / (KNOWN if one.arrived_s < known_until_s else NEW) for one in batch.requests),
    )
    passed = sorted((one for one in looked_up if one.kind == "answered"), key=lambda one: one.ended_s)
    cost = CostModel.fit([(n * TOKENS, n * TOKENS**2, STEP_S + n / UPPER) for n in (1, 50)])
    second = RequestQueue(*(Das(), Budget(1, 1024, 64, 63), cost), capacity=4096, weights={}, starve_after_s=2.0)
    answered = simulate(
        [
            replace(one.request, id=i, arrived_s=one.ended_s, deadline_s=deadline[one.request.id])
            for i, one in enumerate(passed)
        ],
        second,
        lambda batch: STEP_S + len(batch.requests) / UPPER,
    )
    return sum(one.in_time for one in answered) / (NEW * (seconds - known_until_s))


@pytest.mark.parametrize("deadlines_s", [(2.0, 2.0), (0.5, 3.0), (0.2, 0.5)])
@pytest.mark.parametrize("load", [1.5, 3.0, 10.0])
def test_under_overload_what_can_be_looked_up_is_answered_in_time(
    load: float, deadlines_s: tuple[float, float]
) -> None:
    assert goodput(load, deadlines_s) > 0.9


def test_text_that_is_new_from_one_moment_on_does_not_make_everything_late() -> None:
    # Requests of the first seconds are answered in any case, so only later answers count.
    known = goodput(2.0, (0.5, 2.0), seconds=5.0)
    assert known > 0.9
    assert goodput(2.0, (0.5, 2.0), seconds=10.0, known_until_s=5.0) - 2.0 > 0.8
