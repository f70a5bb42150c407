"""The simulation with live queues: near the paper's runtime, and equal to the server's batch loop."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import ConfigError, HplmError
from hplm.placement.cluster import uniform_cluster
from hplm.placement.live_simulation import LiveQueues, simulate_live
from hplm.placement.outcomes import ROUNDING_S, Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Das, Edf, Fcfs, Sjf
from hplm.scheduling.policy import Batch, Budget, Policy
from hplm.scheduling.queue import RequestQueue
from hplm.serving.batch_loop import BatchLoop
from hplm.serving.request import Request
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from tests.submitting import CallbackClient
from tests.waiting import until

GIB = 2**30


def requests(times: Sequence[float], models: Sequence[int], deadlines: Sequence[float]) -> ModelRequests:
    names = ("a", "b", "c")
    columns = np.array(times, np.float64), np.array(models, np.int32), np.array(deadlines, np.float64)
    return ModelRequests(names, *columns, times[-1] + 1)


def one_group(stages: int, *names: str) -> Placement:
    return Placement((Group(tuple(range(stages)), ParallelConfig(stages)),), (names,))


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.125, 0.25]) | st.floats(0, 0.5), st.integers(0, 2), st.sampled_from([1, 2, 4, 9])
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(1, (0.25, 0.5, 1.0)), (1, (0.25,) * 3), (2, (0.25,) * 3), (4, (0.125,) * 3)]),
    ARRIVALS,
)
def test_one_group_of_one_stage_or_of_equal_stages_answers_as_in_the_papers_runtime(
    group: tuple[int, tuple[float, ...]], arrivals: list[tuple[float, int, int]]
) -> None:
    stages, seconds = group
    gaps, models, scales = zip(*arrivals, strict=True)
    times = StageTimes(
        uniform_cluster(stages, GIB),
        [ServedModel(name, (second,) * stages, (0,) * stages) for name, second in zip("abc", seconds, strict=True)],
    )
    # A request that meets idle stages ends just in time at scale 1.
    deadlines = [scale * seconds[model] * stages for model, scale in zip(models, scales, strict=True)]
    traffic = requests(np.cumsum(gaps).tolist(), models, deadlines)
    placement = one_group(stages, "a", "b", "c")
    live, paper = simulate_live(placement, times, traffic), simulate(placement, times, traffic)
    np.testing.assert_array_equal(live.groups, paper.groups)
    np.testing.assert_array_equal(live.ended_s, paper.ended_s)
    np.testing.assert_array_equal(live.busy_s, paper.busy_s)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), ARRIVALS)
def test_several_groups_of_one_stage_answer_as_in_the_papers_runtime(
    groups: int, arrivals: list[tuple[float, int, int]]
) -> None:
    gaps, models, scales = zip(*arrivals, strict=True)
    times = StageTimes(uniform_cluster(groups, GIB), [ServedModel(name, (0.25,), (0,)) for name in "abc"])
    traffic = requests(np.cumsum(gaps).tolist(), models, [0.25 * scale for scale in scales])
    placement = Placement(
        tuple(Group((number,), ParallelConfig(1)) for number in range(groups)),
        (("a", "b"), ("b", "c"), ("a",))[:groups],
    )
    live, paper = simulate_live(placement, times, traffic), simulate(placement, times, traffic)
    np.testing.assert_array_equal(live.groups, paper.groups)
    np.testing.assert_array_equal(live.ended_s, paper.ended_s)


@pytest.mark.parametrize("scale", [1.5, 5.0])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_live_queues_with_known_times_come_near_the_papers_runtime(stages: int, scale: float) -> None:
    models = model_set("S3")[::8]
    groups = 8 // stages
    names = tuple(sorted(model.name for model in models))
    held = [tuple(name for i, name in enumerate(names) if i % groups in (g, (g + 1) % groups)) for g in range(groups)]
    config = ParallelConfig(stages)
    placement = Placement(
        tuple(Group(tuple(range(g * stages, (g + 1) * stages)), config) for g in range(groups)), tuple(held)
    )
    mean_s = np.mean([model.latency_s for model in models])
    traffic = gamma_requests(
        dict.fromkeys(names, 0.5 * 8 / mean_s / len(names)),
        4,
        {model.name: scale * model.latency_s for model in models},
        120,
        np.random.default_rng(0),
    )
    times = StageTimes(table1_cluster(8), models)
    live, paper = simulate_live(placement, times, traffic), simulate(placement, times, traffic)
    assert live.attainment == pytest.approx(paper.attainment, abs=0.05)


def test_a_pipeline_refuses_on_arrival_what_its_later_stages_would_make_late() -> None:
    times = StageTimes(uniform_cluster(2, GIB), [ServedModel("a", (1.0, 1.0), (0, 0))])
    outcomes = simulate_live(one_group(2, "a"), times, requests([0, 0.5], [0, 0], [1.9, 2.0]))
    assert outcomes.groups.tolist() == [-1, 0]
    assert outcomes.busy_s.tolist() == [1, 1]


def test_batches_take_the_time_of_their_models() -> None:
    model = ServedModel("a", (1.0,), (0,), batch_times=(1.0, 1.25, 1.5, 2.0))
    times = StageTimes(uniform_cluster(1, GIB), [model, replace(model, name="b", layer_s=(2.0,))])
    queues = LiveQueues(budget=Budget(1, 2**62, 8, 8))
    # The first request runs alone, then five of `a` as four and one, and two of `b` with them.
    traffic = requests([0] * 8, [0, 0, 0, 0, 0, 0, 1, 1], [99] * 8)
    outcomes = simulate_live(one_group(1, "a", "b"), times, traffic, queues)
    assert outcomes.ended_s.tolist() == [1.0] + [1.0 + 2.0 + 1.0 + 2.5] * 7


def test_a_group_that_cannot_divide_its_model_is_refused() -> None:
    times = StageTimes(uniform_cluster(2, GIB), [ServedModel("a", (1.0,), (0,))])
    with pytest.raises(ConfigError, match=r"group 0 of configuration \(2, 1\) cannot divide the model a"):
        simulate_live(one_group(2, "a"), times, requests([0], [0], [9]))


class CountingQueue(RequestQueue):
    """A queue that knows how many batches began and ended."""

    began = ended = 0

    def done(self, seconds: float) -> None:
        super().done(seconds)
        self.ended += 1


class Server:
    """The server's batch loop on a manual clock: a batch submits the requests that arrive while it computes."""

    def __init__(self, traffic: ModelRequests, seconds: Sequence[float], queues: LiveQueues) -> None:
        self._traffic = traffic
        self._seconds = seconds
        self._tokens_per_s = queues.tokens_per_s
        self.ended_s = np.full(len(traffic), np.nan)
        self._clock_s = 0.0
        self._next = 0
        self._decided: set[int] = set()
        self._lock = threading.Lock()
        self._queue = CountingQueue(
            queues.policy, queues.budget, queues.cost(), capacity=queues.capacity, weights={}, starve_after_s=2.0
        )
        self._loop: BatchLoop[int, float] = BatchLoop(
            "test", self._queue, self._compute, tracer=Tracer(None, "test"), clock=lambda: self._clock_s
        )

    def serve(self) -> None:
        self._loop.start()
        while True:
            # If no request waits and no batch runs, the clock may go on to the next arrival.
            until(lambda: len(self._decided) == self._next and self._queue.ended == self._queue.began)
            if self._next == len(self._traffic):
                break
            self._submit()
        self._loop.stop()

    def _submit(self) -> None:
        number = self._next
        self._next += 1
        self._clock_s = float(self._traffic.times_s[number])
        model = int(self._traffic.models[number])

        def reply(answer: float | HplmError) -> None:
            with self._lock:
                self._decided.add(number)
                if not isinstance(answer, HplmError):
                    self.ended_s[number] = answer

        try:
            self._loop.submit(
                Request(number, client=CallbackClient(reply)),
                tenant=self._traffic.names[model],
                tokens=round(self._seconds[model] * self._tokens_per_s),
                arrived_s=self._clock_s,
                deadline_s=self._clock_s + float(self._traffic.deadlines_s[number] + ROUNDING_S),
            )
        except HplmError as error:
            reply(error)

    def _compute(self, items: list[int], _: Batch) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        self._queue.began += 1
        end_s = self._clock_s + sum(self._seconds[self._traffic.models[item]] for item in items)
        while self._next < len(self._traffic) and self._traffic.times_s[self._next] < end_s:
            self._submit()
        self._clock_s = end_s
        yield range(len(items)), [end_s] * len(items)


@pytest.mark.parametrize("cost", [CostModel, None], ids=["learned", "known"])
@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Edf(), Das()], ids=lambda policy: type(policy).__name__)
def test_simulator_and_server_decide_alike_about_the_same_arrivals(
    policy: Policy, cost: type[CostModel] | None
) -> None:
    queues = LiveQueues(policy=policy, budget=Budget(1, 2**40, 6, 6), tenant_of_model={name: name for name in "abc"})
    if cost is not None:
        queues = replace(queues, cost=cost, tokens_per_s=1024.0)
    # Powers of two, so that sums are exact in any order.
    seconds = [1 / 128, 1 / 64, 1 / 16]
    models = [
        ServedModel(name, (second,), (0,), batch_times=tuple(range(1, 7)))
        for name, second in zip("abc", seconds, strict=True)
    ]
    # Overload, so that many requests are refused.
    traffic = gamma_requests(
        dict.fromkeys("abc", 18.0), 3, {"a": 0.1, "b": 0.15, "c": 0.5}, 12, np.random.default_rng(1)
    )
    server = Server(traffic, seconds, queues)
    server.serve()
    simulated: Outcomes = simulate_live(
        one_group(1, "a", "b", "c"), StageTimes(uniform_cluster(1, GIB), models), traffic, queues
    )
    assert 0.05 < np.isnan(simulated.ended_s).mean() < 0.6
    np.testing.assert_array_equal(server.ended_s, simulated.ended_s)
    assert math.isfinite(simulated.busy_s[0])
