"""Routing without Triton: calls of many texts, answers of each text, and what a failed call means for each of its texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hplm import errors
from hplm.access.quotas import Charge
from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.registry.registry import Registry
from hplm.scheduling.gathering import GatherLimits
from hplm.serving.counts import Counts
from hplm.serving.multi_text import fill_up, labelled
from hplm.serving.request import Request
from hplm.serving.routing.call_tensors import RouteAnswer, RouteInput, call_answers, call_inputs, response_outputs
from hplm.serving.routing.failed_call import judge
from hplm.serving.routing.model_route import ModelRoute
from hplm.serving.routing.route_stage import RouteStage
from hplm.store.layout import Store
from tests.submitting import CallbackClient, never
from tests.unit.hplm.registry.making import publish, publish_root
from tests.waiting import until

SPANS = [
    [LabelledSpan("PER", 0.5, 0, 3), LabelledSpan("LOC", 0.75, 5, 9)],
    [],
    [LabelledSpan("yes", 1.0, 0, 4)],
]
LOGITS = [np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((2, 3), np.float32), np.ones((1, 2), np.float32)]


def outputs_of(texts: Sequence[int], *, logits: bool = True) -> dict[str, npt.NDArray[Any]]:
    """What a base's model answers for some of SPANS."""
    outputs = labelled([SPANS[i] for i in texts])
    outputs[wire.TRUNCATED] = np.array([[i == 2] for i in texts])
    outputs[wire.STUDENTS] = np.array([[i + 1] for i in texts], np.int32)
    if logits:
        outputs[wire.LOGITS] = fill_up([LOGITS[i] for i in texts], wire.LOGITS_FILLER)
    return outputs


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("request_texts", [[0], [1], [2], [0, 2], [2, 1, 0]])
def test_texts_answered_in_a_call_of_many_make_the_response_that_the_model_itself_makes(
    request_texts: list[int], logits: bool
) -> None:
    called = [0, 1, 2]
    answers = call_answers(outputs_of(called, logits=logits))
    assert answers is not None
    made = response_outputs([answers[i] for i in request_texts])
    wanted = outputs_of(request_texts, logits=logits)
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        assert made[name].shape == value.shape, name
        np.testing.assert_array_equal(made[name], value)


def test_a_call_whose_logits_are_left_out_has_no_answers() -> None:
    outputs = outputs_of([0, 1]) | {wire.LOGITS: np.empty((2, 0, 0), np.float32)}
    assert call_answers(outputs) is None


def test_pairs_fill_a_row_of_the_input() -> None:
    inputs = call_inputs([(RouteInput((b"a", b"b"), False), b"x"), (RouteInput((b"c", b"d"), False), b"y")])
    assert inputs[wire.TEXT].tolist() == [[b"a", b"b"], [b"c", b"d"]]
    assert inputs[wire.TENANT].tolist() == [[b"x"], [b"y"]]


def test_an_error_that_names_a_text_is_that_texts_alone_and_loses_the_number() -> None:
    verdict = judge(errors.UnknownTenantError("text 2 of 3: there is no tenant 'x'"), ["a", "x", "x"])
    assert verdict.refused == (1,)
    assert verdict.error.wire() == "UNKNOWN_TENANT: there is no tenant 'x'"


def test_a_tenant_that_sends_too_much_is_refused_with_all_its_texts_of_the_call() -> None:
    verdict = judge(errors.QueueFullError("text 1 of 3: too many requests wait; try again later"), ["a", "b", "a"])
    assert verdict.refused == (0, 2)


def test_a_refusal_without_a_text_concerns_the_whole_call() -> None:
    for error in (errors.StageDownError("died"), errors.StoppingError("text 1 of 2: the server is shutting down")):
        verdict = judge(error, ["a", "b"])
        assert verdict.refused == (0, 1)
        assert not str(verdict.error).startswith("text")


def test_a_fault_that_names_no_text_is_tried_with_each_text_alone() -> None:
    assert judge(errors.InternalError("failed"), ["a", "b"]).refused == ()


Model = Callable[[list[bytes]], Mapping[str, npt.NDArray[Any]]]


class Route:
    """A route to a model that is a function of the texts of a call."""

    def __init__(self, model: Model, calls: int = 1, **settings: Any) -> None:
        self.calls: list[list[bytes]] = []
        self.timeouts_s: list[float | None] = []
        self.charges: list[list[Charge]] = []
        self.free = threading.Event()
        self.counts = Counts()

        def call(
            inputs: Mapping[str, npt.NDArray[Any]],
            names: Sequence[str],
            timeout_s: float | None,
            charges: Sequence[Charge],
        ) -> Mapping[str, npt.NDArray[Any]]:
            texts = [row[0] for row in inputs[wire.TEXT].tolist()]
            self.calls.append(texts)
            self.timeouts_s.append(timeout_s)
            self.charges.append(list(charges))
            if texts == [b"first"]:
                # Keeps the only thread busy, so that texts gather.
                assert self.free.wait(60)
            return model(texts)

        options: dict[str, Any] = {"capacity": 100, "gather_s": 0.0, "limits": GatherLimits(), **settings}
        self.route = ModelRoute("hbert", call, self.counts, calls=calls, **options)

    def submit(self, text: bytes, tenant: str = "a", **request: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        client = CallbackClient(answer.set_result, request.pop("is_cancelled", never))
        self.route.submit(Request(RouteInput((text,), False), tenant.encode(), client=client, **request), tenant)
        return answer


def echo(texts: list[bytes]) -> dict[str, npt.NDArray[Any]]:
    outputs = labelled([[LabelledSpan(text.decode(), 1.0, 0, 1)] for text in texts])
    return outputs | {
        wire.TRUNCATED: np.zeros((len(texts), 1), bool),
        wire.STUDENTS: np.ones((len(texts), 1), np.int32),
    }


def bad(texts: list[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Refuses a text that begins with `bad`, as a base's model does."""
    for index, text in enumerate(texts):
        if text.startswith(b"bad"):
            raise errors.about_text(errors.EmptyTextError(f"no {text.decode()}"), index, len(texts))
    return echo(texts)


@pytest.fixture
def routes() -> Iterator[Callable[..., Route]]:
    made: list[Route] = []

    def make(model: Model = echo, **settings: Any) -> Route:
        made.append(Route(model, **settings))
        return made[-1]

    yield make
    for one in made:
        one.free.set()
        one.route.close()


def busy(route: Route) -> Future[Any]:
    """Occupy the route's only thread until `free` is set."""
    first = route.submit(b"first", "z")
    until(lambda: route.calls == [[b"first"]])
    return first


def label(answer: Future[Any]) -> str:
    found = answer.result(60)
    assert isinstance(found, RouteAnswer), found
    return str(found.labels[0].decode())


def test_texts_that_come_while_all_calls_are_under_way_go_together(routes: Callable[..., Route]) -> None:
    route = routes()
    first = busy(route)
    answers = [route.submit(f"text {number}".encode(), f"tenant-{number}") for number in range(10)]
    route.free.set()
    assert label(first) == "first"
    assert [label(answer) for answer in answers] == [f"text {number}" for number in range(10)]
    assert len(route.calls) == 2


def test_bad_texts_of_a_call_get_their_own_errors_and_the_others_their_answers(routes: Callable[..., Route]) -> None:
    route = routes(bad)
    busy(route)
    answers = {text: route.submit(text) for text in (b"one", b"bad 1", b"two", b"bad 2", b"bad 3", b"three")}
    route.free.set()
    for text, answer in answers.items():
        if text.startswith(b"bad"):
            assert answer.result(60).wire() == f"EMPTY_TEXT: no {text.decode()}"
        else:
            assert label(answer) == text.decode()
    # Two calls fail, and then each text has a call of its own.
    assert [len(call) for call in route.calls] == [1, 6, 5, 1, 1, 1, 1]
    assert route.counts.read()["retried"] == 9


def test_a_text_that_is_sent_once_more_is_charged_once_more_only_for_what_its_estimate_lacked(
    routes: Callable[..., Route],
) -> None:
    route = routes(bad)
    busy(route)
    answers = [route.submit(text, charge=Charge(9)) for text in (b"bad", b"good")]
    route.free.set()
    assert label(answers[1]) == "good"
    assert route.charges[1:] == [[Charge(9), Charge(9)], [Charge(9, is_repeated=True)]]


def test_the_timeout_of_a_call_is_its_shortest_remaining_time_from_arrival(routes: Callable[..., Route]) -> None:
    route = routes()
    busy(route)
    deadlines_s = [100.0, 90.0, 1000.0, None]
    answers = [route.submit(str(deadline_s).encode(), deadline_s=deadline_s) for deadline_s in deadlines_s]
    route.free.set()
    for answer, deadline_s in zip(answers, deadlines_s, strict=True):
        assert label(answer) == str(deadline_s)
    # Each time limit belongs to a call, in any order.
    limits = dict(zip(map(tuple, route.calls), route.timeouts_s, strict=True))
    assert limits[b"None",] is None
    shortest_s, longest_s = limits[b"100.0", b"90.0"], limits[b"1000.0",]
    assert shortest_s is not None
    assert longest_s is not None
    assert 0 < shortest_s <= 90 < longest_s <= 1000


def test_a_text_past_its_deadline_is_refused_at_once_or_by_a_sweep(routes: Callable[..., Route]) -> None:
    route = routes()
    busy(route)
    with pytest.raises(errors.DeadlineError):
        route.submit(b"late", arrived_s=0.0, deadline_s=0.5)
    waiting = route.submit(b"soon", deadline_s=0.05)

    def is_refused() -> bool:
        route.route.sweep()
        return waiting.done()

    until(is_refused)
    assert isinstance(waiting.result(), errors.DeadlineError)
    assert route.calls == [[b"first"]]


def test_a_waiting_text_whose_client_has_gone_is_not_sent(routes: Callable[..., Route]) -> None:
    route = routes()
    busy(route)
    gone = route.submit(b"gone", is_cancelled=lambda: True, arrived_s=0.0)
    stays = route.submit(b"stays", arrived_s=0.0)
    route.route.sweep()
    assert isinstance(gone.result(60), errors.CancelledError)
    route.free.set()
    assert label(stays) == "stays"


def test_beyond_its_capacity_a_route_refuses_the_tenant_that_sends_most(routes: Callable[..., Route]) -> None:
    route = routes(capacity=3)
    busy(route)
    flood = [route.submit(f"flood {number}".encode(), "flood") for number in range(3)]
    with pytest.raises(errors.QueueFullError):
        route.submit(b"more", "flood")
    other = route.submit(b"other", "other")
    assert isinstance(flood[2].result(60), errors.QueueFullError)
    route.free.set()
    assert [label(answer) for answer in (*flood[:2], other)] == ["flood 0", "flood 1", "other"]


def test_a_failure_of_ours_is_every_texts_error_and_the_thread_lives_on(routes: Callable[..., Route]) -> None:
    def fail_once(texts: list[bytes]) -> dict[str, npt.NDArray[Any]]:
        if b"broken" in texts:
            raise OSError("no shared memory")
        return echo(texts)

    route = routes(fail_once)
    assert isinstance(route.submit(b"broken").result(60), errors.InternalError)
    assert label(route.submit(b"sound")) == "sound"


def test_a_closed_route_refuses_what_waits_and_answers_what_is_under_way(routes: Callable[..., Route]) -> None:
    route = routes()
    first = busy(route)
    waiting = route.submit(b"waiting")
    route.route.close()
    assert isinstance(waiting.result(60), errors.StoppingError)
    with pytest.raises(errors.StoppingError):
        route.submit(b"later")
    route.free.set()
    assert label(first) == "first"


def test_a_model_that_is_exported_over_another_base_is_called_for_the_tenants_of_both(tmp_path: Path) -> None:
    path, called = tmp_path / "settings.json", list[str]()

    def write(models: dict[str, str]) -> None:
        path.write_text(json.dumps({"store": "store", "models": models}))

    def call(model: str, inputs: Mapping[str, npt.NDArray[Any]], *options: Any) -> Mapping[str, npt.NDArray[Any]]:
        called.append(model)
        return echo([row[0] for row in inputs[wire.TEXT].tolist()])

    def ask(tenant: str) -> Any:
        answer: Future[Any] = Future()
        item = RouteInput((b"text",), False)
        try:
            stage.submit(Request(item, tenant.encode(), client=CallbackClient(answer.set_result)))
        except errors.UnknownTenantError as error:
            return error
        return answer.result(60)

    with closing(Registry.open(Store(tmp_path / "store"), create=True)) as registry:
        for tenant, base in (("old", "b"), ("new", "c"), ("other", "d")):
            publish(registry, tenant, publish_root(registry, f"general-{base}", base))
    write({"b": "hbert", "d": "small"})
    stage = RouteStage(path, call)
    stage.start()
    try:
        assert isinstance(ask("new"), errors.UnknownTenantError)
        write({"c": "hbert"})
        until(lambda: isinstance(ask("other"), errors.UnknownTenantError))
        called.clear()
        assert [ask(tenant).labels[0] for tenant in ("old", "new")] == [b"text"] * 2
        assert called == ["hbert"] * 2
    finally:
        stage.stop()


def test_the_stage_runs_from_its_start_to_its_stop(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"store": "store", "models": {"b": "hbert"}}))
    Registry.open(Store(tmp_path / "store"), create=True).close()
    stage = RouteStage(path, lambda *_: {})
    assert not stage.is_running
    stage.start()
    assert stage.is_running
    stage.stop()
    assert not stage.is_running
