"""Many requests in one call of `predict_many`: an error of one request loses no other answer."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from hplm_client import Client, Prediction
from hplm_client.transport.http_worker_thread import THREAD_NAME, HttpWorkerThread
from tritonclient.utils import InferenceServerException

from hplm.errors import BadInputError, ConfigError, HplmError, TextEncodingError, UnreachableError
from tests.unit.clients.answering import answering
from tests.waiting import until


@pytest.mark.parametrize(
    ("bad", "error"),
    [(("films", None), BadInputError), (("films", "\udc80"), TextEncodingError), ("films", BadInputError)],
    ids=["no-text", "lone-surrogate", "no-tuple"],
)
def test_answers_to_requests_before_a_bad_one_come_first(bad: Any, error: type[HplmError]) -> None:
    texts = [f"text {number}" for number in range(5)]
    requests = [*(("films", text) for text in texts), bad, ("films", "behind")]
    with answering() as server, Client(server.url) as client:
        answers = client.predict_many(requests)
        assert [next(answers).text for _ in texts] == texts
        with pytest.raises(error):
            next(answers)
        assert sorted(server.texts) == texts


def test_a_server_that_forbids_the_live_question_still_answers_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def restricted() -> bool:
        raise InferenceServerException("This protocol is restricted, expecting header 'key'", "StatusCode.UNAVAILABLE")

    with answering() as server, Client(server.url) as client:
        monkeypatch.setattr(client._triton, "is_server_live", restricted)
        assert [answer.label for answer in client.predict_many([("films", "good")])] == ["ok"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_concurrency_below_1_is_refused_by_name(scheme: str, concurrency: int) -> None:
    with pytest.raises(ConfigError, match=f"concurrency is {concurrency}; it must be 1 or more"):
        Client(f"{scheme}://127.0.0.1:1", concurrency=concurrency)


def test_a_request_is_sent_before_the_next_one_is_read() -> None:
    with answering() as server, Client(server.url) as client:

        def requests() -> Iterator[tuple[str, str]]:
            for number in range(4):
                yield "films", f"text {number}"
                until(lambda number=number: len(server.texts) == number + 1)

        assert len(list(client.predict_many(requests()))) == 4


def test_each_request_has_its_timeout_while_the_caller_is_busy() -> None:
    ended = threading.Event()
    delay_s = {"slow": 0.3, "never": None}
    with (
        answering(lambda text: ended.wait(delay_s.get(text, 0.0))) as server,
        Client(server.url, timeout_s=4.0, concurrency=2) as client,
    ):
        requests = [("films", text) for text in ("soon", "slow", "never", "soon", "slow", "soon")]
        answers = []
        for answer in client.predict_many(requests, on_error="yield"):
            answers.append(type(answer).__name__)
            if len(answers) <= 2:  # the next requests are under way
                time.sleep(4.5)
        ended.set()
    assert answers == ["Prediction", "Prediction", "UnreachableError", *["Prediction"] * 3]


def test_requests_under_way_end_when_the_client_is_closed() -> None:
    ended, before = threading.Event(), set(threading.enumerate())
    with answering(lambda text: text == "first" or ended.wait()) as server:
        with Client(server.url, timeout_s=60, concurrency=2) as client:
            answers = client.predict_many([("films", text) for text in ("first", "a", "b", "c")], on_error="yield")
            assert isinstance(next(answers), Prediction)
            worker_threads = {thread for thread in threading.enumerate() if thread.name == THREAD_NAME} - before
        assert [str(answer).rpartition(": ")[2] for answer in answers] == ["the client was closed"] * 3
        assert not any(thread.is_alive() for thread in worker_threads)
        client.close()
        ended.set()


def test_a_request_sent_while_the_client_closes_is_refused() -> None:
    is_closing, may_close = threading.Event(), threading.Event()

    class Slow:
        def close(self) -> None:
            is_closing.set()
            while not may_close.is_set():
                gevent.sleep(0.01)

    worker_thread = HttpWorkerThread(lambda: (None, Slow()))
    closing = threading.Thread(target=worker_thread.close)
    closing.start()
    assert is_closing.wait(60)
    sent = worker_thread.send(lambda client: client)
    may_close.set()
    closing.join()
    for outcome in (sent, worker_thread.send(lambda client: client)):
        answer, error = outcome.get(timeout=60)
        assert answer is None
        assert isinstance(error, UnreachableError)


def test_a_client_that_nobody_closes_leaves_no_thread() -> None:
    with answering() as server:
        before = set(threading.enumerate())
        client = Client(server.url)
        assert len(list(client.predict_many([("films", "a")]))) == 1
        (worker_thread,) = [
            thread for thread in threading.enumerate() if thread not in before and thread.name == THREAD_NAME
        ]
        del client
        gc.collect()
        assert not worker_thread.is_alive()


def test_a_known_answer_is_yielded_before_more_requests_are_read() -> None:
    count = 15
    with answering() as server, Client(server.url, concurrency=count + 1) as client:
        read: list[int] = []
        read_when_answered: list[int] = []

        def requests() -> Iterator[tuple[str, str]]:
            for number in range(count):
                read.append(number)
                yield "films", f"text {number}"
                if not read_when_answered:
                    time.sleep(0.5)

        for _ in client.predict_many(requests()):
            read_when_answered.append(len(read))
    assert len(read_when_answered) == count
    assert read_when_answered[0] < count
    assert read_when_answered == sorted(read_when_answered)


@pytest.mark.parametrize("on_error", ["ignore", "Raise", None])
def test_an_unknown_on_error_is_refused_at_the_call(on_error: Any) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(ConfigError, match="on_error is 'raise' or 'yield'"):
        client.predict_many([], on_error=on_error)


@pytest.mark.parametrize("deadline_s", [0, float("nan"), "1"])
def test_a_bad_deadline_is_refused_at_the_call(deadline_s: Any) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(BadInputError, match="a deadline is a number"):
        client.predict_many([], deadline_s=deadline_s)
