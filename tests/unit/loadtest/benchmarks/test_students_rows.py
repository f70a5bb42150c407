"""The burst, the rows and the goals of `hplm bench students`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hplm_loadtest.benchmarks.serving.students import Variant, goals_of
from hplm_loadtest.benchmarks.serving.students_burst import Burst, BurstPlan, burst_rows, read_answer
from hplm_loadtest.scenarios.outcomes import NO_ANSWER, Run
from tritonclient.grpc import service_pb2

from hplm.core import wire

PLAN = BurstPlan(quiet_per_s=20.0, burst_per_s=400.0, part_s=2.0)


def test_an_answer_says_its_label_and_how_many_students_gave_it() -> None:
    message = service_pb2.ModelInferResponse(
        raw_output_contents=[(3).to_bytes(4, "little"), (4).to_bytes(4, "little") + b"blue" + b"rest"]
    )
    for name in (wire.STUDENTS, wire.LABEL):
        message.outputs.add(name=name)
    assert read_answer(message.SerializeToString()) == ("blue", 3)


def test_a_burst_is_between_two_quiet_times() -> None:
    times_s = PLAN.times(np.random.default_rng(0))
    counts = np.histogram(times_s, [0, 2, 4, 8])[0]
    assert counts[1] > 5 * max(counts[0], counts[2])
    assert (np.diff(times_s) >= 0).all()


def test_each_second_of_a_burst_has_its_own_k_accuracy_and_losses() -> None:
    planned_s = np.array([0.1, 0.2, 1.5, 1.6])
    run = Run(8.0, planned_s, planned_s, planned_s + 0.01, ["OK", "OK", "OK", NO_ANSWER], np.full(4, np.nan))
    burst = Burst(PLAN, run, np.array([4.0, 2.0, 1.0, np.nan]), np.array([1.0, 0.0, 1.0, np.nan]))
    first, second, third, *_ = burst_rows(burst)
    assert (first["k"], first["agreement"], first["answered"], first["lost"]) == (3.0, 50.0, 2, 0)
    assert (second["k"], second["agreement"], second["answered"], second["lost"]) == (1.0, 100.0, 1, 1)
    assert math.isnan(third["k"])
    assert third["offered"] == 0


def test_goals_compare_all_students_with_each_base_and_one_student_with_the_ratio_of_products() -> None:
    variants = [Variant("students k=1", "students", 1, ()), Variant("students k=4", "students", 4, ())]
    variants += [Variant(name, name, 1, ()) for name in ("half", "teacher")]
    times = {("students", 1): 1.0, ("students", 4): 2.0, ("half", 1): 4.0, ("teacher", 1): 8.0}
    rows = [{"engine": base, "tokens": 16, "students": k, "ms": ms} for (base, k), ms in times.items()]
    rates = {"students k=1": 300.0, "students k=4": 290.0, "half": 150.0, "teacher": 100.0}
    rows += [{"saturated": name, "requests_per_s": rate} for name, rate in rates.items()]
    rows += [{"trace": "teacher", "lost": 0, "failed": 0, "kept_up": 1.0}]
    flop = {"students": 2e9, "half": 4e9, "teacher": 8e9}
    values = {goal.id: goal.value for goal in goals_of(rows, variants, "students", flop)}
    assert values["students-engine-half"] == pytest.approx(2.0)
    assert values["students-engine-teacher"] == pytest.approx(4.0)
    assert values["students-throughput"] == pytest.approx(3.0 / 4.0)
    assert values["students-trace-lost"] == 0
