"""The way of a text through levels without Triton: the levels are functions behind real routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hplm import errors
from hplm.access.quotas import Charge
from hplm.cascade.dispatch import DispatchInput
from hplm.cascade.level_times import LEAST_TIMES
from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.cascade.weighting import weighted
from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.errors import HplmError
from hplm.scheduling.gathering import GatherLimits
from hplm.serving.cascade.answers import CascadeAnswer, cascade_outputs
from hplm.serving.cascade.cascade_counts import BUCKETS, CascadeCounts
from hplm.serving.cascade.deadline_timer import DeadlineTimer
from hplm.serving.cascade.journey import CascadeRequest, Equipment, Journey
from hplm.serving.cascade.recent_times import RecentTimes
from hplm.serving.counts import Counts
from hplm.serving.multi_text import fill_up, labelled
from hplm.serving.request import Request
from hplm.serving.routing.call_tensors import RouteInput
from hplm.serving.routing.model_route import ModelRoute
from tests.submitting import CallbackClient
from tests.waiting import until

LABELS = (b"no", b"yes")
Tensors = dict[str, npt.NDArray[Any]]


def level_plan(base: str, place: int, cut_off: float = 0.5, alpha: float = 0.0, temperature: float = 1.0) -> LevelPlan:
    weights = tuple([1 / place] * place)
    return LevelPlan(base, 7, Dispatch(temperature, cut_off, 8.0), weights, alpha)


def plan_of(*levels: LevelPlan, latency_ms: float = 1.0, **settings: Any) -> CascadePlan:
    return CascadePlan(levels, Promise(0.9, 95, 100, latency_ms), **{"deterministic": True, **settings})


class Level:
    """A level that calls a text `yes` with the probability that is the text's last word, and is as sure of it."""

    def __init__(self, base: str, *, calls: int = 1, capacity: int = 100, students: int = 1) -> None:
        self.students = students
        self.texts: list[tuple[bytes, ...]] = []
        self.dispatch: list[list[float]] = []
        self.outputs: list[list[str]] = []
        self.charges: list[Charge] = []
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()
        self.route = ModelRoute(
            base, self._call, Counts(), calls=calls, capacity=capacity, gather_s=0.0, limits=GatherLimits()
        )

    def _call(
        self, inputs: Mapping[str, Any], names: Sequence[str], timeout_s: float | None, charges: Sequence[Charge]
    ) -> Tensors:
        rows = inputs[wire.TEXT].tolist()
        self.charges += charges
        self.texts += map(tuple, rows)
        self.dispatch += inputs[wire.DISPATCH].tolist()
        self.outputs.append(list(names))
        assert self.free.wait(60)
        if self.error is not None:
            raise self.error
        sure = [float(row[0].split()[-1]) for row in rows]
        sent = [DispatchInput.from_array(one) for one in inputs[wire.DISPATCH]]
        route = [one.is_rerouted(confidence) for one, confidence in zip(sent, sure, strict=True)]
        words = [
            _words(row[0]) if goes and one.wants_importance else np.empty((0, 3), np.float32)
            for row, goes, one in zip(rows, route, sent, strict=True)
        ]
        found = labelled(
            [
                [LabelledSpan("yes" if confidence > 0.5 else "no", confidence, 0, len(row[0]))]
                for row, confidence in zip(rows, sure, strict=True)
            ]
        )
        logits = [np.array([[0.0, np.log(confidence / (1 - confidence))]], np.float32) for confidence in sure]
        return found | {
            wire.TRUNCATED: np.zeros((len(rows), 1), bool),
            wire.STUDENTS: np.full((len(rows), 1), self.students, np.int32),
            wire.LOGITS: fill_up(logits, wire.LOGITS_FILLER),
            wire.ROUTE: np.array(route, np.int32)[:, None],
            wire.CONFIDENCE: np.array(sure, np.float32)[:, None],
            wire.IMPORTANCE: fill_up(words, -1),
        }


def _words(text: bytes) -> npt.NDArray[np.float32]:
    """The words of a text, of which those that begin with a capital letter or a digit are important."""
    found, start = [], 0
    for word in text.decode().split(" "):
        found.append((start, start + len(word), 2.0 if word[0].isupper() or word[0].isdigit() else 0.1))
        start += len(word) + 1
    return np.array(found, np.float32)


class Cascade:
    """Levels, and the parts that texts of all levels share."""

    def __init__(self) -> None:
        self.levels: dict[str, Level] = {}
        self.counts, self.times, self.timer = CascadeCounts(), RecentTimes(), DeadlineTimer()
        self.labels: Sequence[bytes] | None = LABELS

    def level(self, base: str, **options: Any) -> Level:
        self.levels[base] = Level(base, **options)
        return self.levels[base]

    def submit(
        self, text: str | tuple[str, str], plan: CascadePlan, *, logits: bool = False, **request: Any
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        texts = (text,) if isinstance(text, str) else text
        item = RouteInput(tuple(one.encode() for one in texts), logits)
        made: CascadeRequest = Request(item, b"acme", client=CallbackClient(answer.set_result), **request)
        routes = [self.levels[level.base].route for level in plan.levels]
        shared = Equipment(self.counts, self.times, self.timer, self._finish)
        Journey(made, "acme", plan, routes, lambda: self.labels, lambda: answer.set_result("alone"), shared).begin()
        return answer

    def ask(self, text: str | tuple[str, str], plan: CascadePlan, **options: Any) -> CascadeAnswer:
        found = self.submit(text, plan, **options).result(60)
        assert isinstance(found, CascadeAnswer), found
        return found

    def _finish(self, request: CascadeRequest, result: CascadeAnswer | HplmError) -> None:
        request.reply(result)


@pytest.fixture
def cascade() -> Iterator[Cascade]:
    made = Cascade()
    yield made
    for level in made.levels.values():
        level.free.set()
        level.route.close()
    made.timer.stop()


TWO = (level_plan("small", 1), level_plan("large", 2))


def test_a_text_above_the_cut_off_is_answered_by_the_small_level_alone(cascade: Cascade) -> None:
    cascade.level("small")
    large = cascade.level("large")
    answer = cascade.ask("red 0.75", plan_of(*TWO))
    assert (answer.level, answer.confidence, answer.reroutes, answer.is_late) == ("small", 0.75, 0, False)
    assert answer.answer.labels.tolist() == [b"yes"]
    assert answer.answer.logits is None
    assert large.texts == []


def test_a_text_below_the_cut_off_gets_the_weighted_answer_of_all_levels(cascade: Cascade) -> None:
    cascade.level("small")
    cascade.level("middle")
    cascade.level("large")
    levels = (level_plan("small", 1, 0.3, temperature=2.0), level_plan("middle", 2, 0.5), level_plan("large", 3))
    answer = cascade.ask("red 0.25", plan_of(*levels), logits=True)
    logits = np.array([0, np.log(0.25 / 0.75)])
    wanted = weighted([logits] * 3, [2.0, 1.0, 1.0], levels[2].weights)
    assert (answer.level, answer.reroutes, answer.is_late) == ("large", 2, False)
    assert answer.answer.labels.tolist() == [b"no"]
    assert answer.confidence == pytest.approx(wanted[0])
    assert answer.answer.scores == pytest.approx([wanted[0]])
    assert answer.answer.logits is not None
    np.testing.assert_allclose(answer.answer.logits, np.log(wanted)[None], rtol=1e-5)


def test_the_first_level_corrects_what_the_cascade_has_charged_and_no_further_level_does(cascade: Cascade) -> None:
    small, large = cascade.level("small"), cascade.level("large")
    cascade.ask("red 0.25", plan_of(*TWO), charge=Charge(9))
    assert (small.charges, large.charges) == ([Charge(9)], [Charge(0)])


def test_an_answer_has_the_students_of_the_level_that_answered_last(cascade: Cascade) -> None:
    cascade.level("small", students=4)
    cascade.level("large", students=2)
    answers = [cascade.ask(text, plan_of(*TWO)) for text in ("red 0.75", "red 0.25")]
    assert cascade_outputs(answers)[wire.STUDENTS].tolist() == [[4], [2]]


def test_the_last_level_answers_whatever_its_confidence_is(cascade: Cascade) -> None:
    level = cascade.level("small")
    answer = cascade.ask("red 0.125", plan_of(level_plan("small", 1)))
    assert (answer.confidence, answer.reroutes, answer.is_late) == (0.125, 0, False)
    assert level.dispatch[0][1] == -1


def test_the_next_level_reads_the_pruned_text_and_the_span_is_that_of_the_whole_text(cascade: Cascade) -> None:
    cascade.level("small")
    large = cascade.level("large")
    plan = plan_of(level_plan("small", 1), level_plan("large", 2, alpha=0.5))
    answer = cascade.ask("the red Cat sleeps 0.25", plan)
    assert large.texts == [(b"Cat 0.25",)]
    assert answer.answer.spans.tolist() == [[0, 23]]


def test_importances_are_wanted_only_if_the_next_level_prunes(cascade: Cascade) -> None:
    small = cascade.level("small")
    cascade.level("large")
    cascade.ask("the 0.75", plan_of(*TWO))
    cascade.ask("the 0.75", plan_of(level_plan("small", 1), level_plan("large", 2, alpha=0.5)))
    assert [sent[4] for sent in small.dispatch] == [0, 1]


def test_draws_differ_by_text_and_level_and_are_the_same_for_the_same_text(cascade: Cascade) -> None:
    small = cascade.level("small")
    cascade.level("large")
    plan = plan_of(*TWO, deterministic=False)
    for text in ("red 0.75", "blue 0.75", "red 0.75"):
        cascade.ask(text, plan)
    draws = [sent[3] for sent in small.dispatch]
    assert draws[0] == draws[2] != draws[1]
    assert max(draws) < 1
    cascade.ask("red 0.75", replace(plan, deterministic=True))
    assert small.dispatch[-1][3] == 1


FAILURES = [errors.StageDownError("died"), errors.UnreachableError("not loaded"), errors.QueueFullError("full")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: error.code)
def test_if_the_next_level_fails_the_small_level_answers_and_says_so(cascade: Cascade, error: HplmError) -> None:
    cascade.level("small")
    cascade.level("large").error = error
    answer = cascade.ask("red 0.25", plan_of(*TWO))
    assert (answer.level, answer.confidence, answer.reroutes, answer.is_late) == ("small", 0.25, 0, True)
    assert cascade.counts.late == {error.code.lower(): 1}
    assert cascade.counts.rerouted == {"small": 1}


def test_a_tenant_may_have_a_text_refused_if_the_next_level_fails(cascade: Cascade) -> None:
    cascade.level("small")
    cascade.level("large").error = FAILURES[0]
    found = cascade.submit("red 0.25", plan_of(*TWO, on_late="refuse")).result(60)
    assert isinstance(found, errors.StageDownError)


def test_if_the_third_level_fails_the_first_two_answer_together(cascade: Cascade) -> None:
    cascade.level("small")
    cascade.level("middle")
    cascade.level("large").error = FAILURES[1]
    levels = (level_plan("small", 1), level_plan("middle", 2), level_plan("large", 3))
    answer = cascade.ask("red 0.25", plan_of(*levels))
    assert (answer.level, answer.reroutes, answer.is_late) == ("middle", 1, True)
    assert answer.confidence == pytest.approx(0.75)


def test_an_error_of_the_first_level_is_the_texts_error(cascade: Cascade) -> None:
    cascade.level("small").error = errors.EmptyTextError("the text is empty")
    cascade.level("large")
    found = cascade.submit("red 0.25", plan_of(*TWO)).result(60)
    assert isinstance(found, errors.EmptyTextError)


def test_a_level_whose_queue_is_full_leaves_the_answer_to_the_small_level(cascade: Cascade) -> None:
    cascade.level("small", calls=4)
    large = cascade.level("large", capacity=1)
    large.free.clear()
    plan = plan_of(*TWO)
    first = cascade.submit("first 0.25", plan)
    until(lambda: len(large.texts) == 1)
    waiting = cascade.submit("second 0.25", plan)
    until(lambda: large.route.waiting == 1)
    third = cascade.ask("third 0.25", plan)
    assert (third.level, third.is_late) == ("small", True)
    large.free.set()
    assert [future.result(60).level for future in (first, waiting)] == ["large", "large"]


def test_a_text_is_not_sent_on_if_too_little_time_is_left(cascade: Cascade) -> None:
    cascade.level("small")
    large = cascade.level("large")
    plan = plan_of(*TWO, latency_ms=60_000)
    assert cascade.ask("red 0.25", plan, deadline_s=30.0).is_late
    refused = cascade.submit("red 0.25", replace(plan, on_late="refuse"), deadline_s=30.0).result(60)
    assert isinstance(refused, errors.DeadlineError)
    assert large.texts == []
    assert cascade.counts.late == {"no_time": 2}
    assert not cascade.ask("red 0.25", plan, deadline_s=120.0).is_late
    assert not cascade.ask("red 0.25", plan).is_late


def test_a_level_that_hangs_is_given_up_in_time_and_soon_not_asked_any_more(cascade: Cascade) -> None:
    cascade.level("small")
    large = cascade.level("large")
    large.free.clear()
    plan = plan_of(*TWO)
    for _ in range(LEAST_TIMES):
        assert cascade.ask("red 0.25", plan, deadline_s=0.2).is_late
    until(lambda: cascade.ask("red 0.25", plan, deadline_s=0.1).is_late and cascade.counts.late["no_time"] > 0)
    assert cascade.counts.late["gave_up"] >= LEAST_TIMES


@pytest.mark.parametrize("labels", [(b"a", b"b", b"c"), (b"yes", b"no")], ids=["other labels", "another order"])
def test_levels_with_different_labels_while_an_update_is_published_are_answered_by_the_last_level(
    cascade: Cascade, labels: tuple[bytes, ...]
) -> None:
    cascade.level("small")
    cascade.level("large")
    cascade.labels = labels
    answer = cascade.ask("red 0.25", plan_of(*TWO))
    assert (answer.level, answer.confidence, answer.reroutes) == ("large", 0.25, 1)
    assert answer.answer.labels.tolist() == [b"no"]


def test_a_tagging_is_answered_by_the_last_level(cascade: Cascade) -> None:
    cascade.level("small")
    cascade.level("large")
    cascade.labels = None
    answer = cascade.ask("red 0.25", plan_of(*TWO))
    assert (answer.level, answer.confidence, answer.answer.labels.tolist()) == ("large", 0.25, [b"no"])


def test_logits_are_asked_for_only_if_answers_are_weighted(cascade: Cascade) -> None:
    small = cascade.level("small")
    cascade.level("large")
    alone = replace(TWO[1], weights=(0.0, 1.0))
    assert cascade.ask("red 0.25", plan_of(TWO[0], alone)).level == "large"
    assert wire.LOGITS not in small.outputs[-1]
    cascade.ask("red 0.25", plan_of(*TWO))
    assert wire.LOGITS in small.outputs[-1]


def test_a_tenant_that_the_first_level_does_not_know_any_more_is_answered_by_its_default_base(cascade: Cascade) -> None:
    cascade.level("small").error = errors.UnknownTenantError("there is no tenant 'acme'")
    cascade.level("large")
    assert cascade.submit("red 0.25", plan_of(*TWO)).result(60) == "alone"


def test_answers_of_one_two_and_three_levels_make_one_response(cascade: Cascade) -> None:
    for base in ("small", "middle", "large"):
        cascade.level(base)
    levels = (level_plan("small", 1, 0.5), level_plan("middle", 2, 0.25), level_plan("large", 3))
    found = [cascade.ask(text, plan_of(*levels), logits=True) for text in ("a 0.75", "b 0.375", "c 0.125")]
    outputs = cascade_outputs(found)
    assert outputs[wire.LEVEL].tolist() == [[b"small"], [b"middle"], [b"large"]]
    assert outputs[wire.ROUTE].tolist() == [[0], [1], [2]]
    assert outputs[wire.LATE].tolist() == [[False]] * 3
    assert outputs[wire.LABEL].tolist() == [[b"yes"], [b"no"], [b"no"]]
    assert outputs[wire.LOGITS].shape == (3, 1, 2)


def test_confidences_are_counted_as_prometheus_counts_them_and_drift_is_their_mean_difference_from_dev() -> None:
    counts = CascadeCounts()
    for confidence in (0.2, 0.5, 0.97):
        counts.add_confidence("small", confidence, 0.5)
    counts.add_confidence("small", 0.99, None)
    found = counts.confidences
    assert [found[f"{end:g}"] for end in BUCKETS] == [1, 2, 2, 2, 2, 2, 2, 2, 3, 4]
    assert found["+Inf"] == 4
    assert counts.drift()["small"] == pytest.approx((0.2 + 0.5 + 0.97) / 3 - 0.5, abs=1e-3)


def test_alarms_ring_after_one_that_is_further_away_than_python_can_wait() -> None:
    timer, rung = DeadlineTimer(), threading.Event()
    timer.add(2**63 / 1e6, lambda: None)
    time.sleep(0.05)
    timer.add(0.0, rung.set)
    assert rung.wait(10)
    timer.stop()


def test_alarms_that_are_called_off_do_not_pile_up_until_their_time() -> None:
    timer = DeadlineTimer()
    for _ in range(5000):
        timer.add(float("inf"), lambda: None).call_off()
    assert len(timer) < 2000
    timer.stop()


def test_an_alarm_that_is_called_off_does_not_ring() -> None:
    timer, rung = DeadlineTimer(), list[str]()

    def ring(name: str) -> Callable[[], None]:
        return lambda: rung.append(name)

    timer.add(0.0, ring("first"))
    off = timer.add(float("inf"), ring("never"))
    off.call_off()
    off.ring()
    until(lambda: rung == ["first"])
    timer.stop()
