"""A request of several texts gets one answer for all texts, or one error."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm import errors
from hplm.serving.multi_text import fill_up, pack, submit_texts, unpack
from hplm.serving.request import Request
from tests.submitting import CallbackClient

Reply = Callable[[Any], None]


class Submitted:
    """A client's request of some texts to a stage that keeps its requests, and answers the text "bad" with an error."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.replies: dict[str, Reply] = {}
        self.is_over: dict[str, Callable[[], bool]] = {}
        self.answers: list[Any] = []
        self.is_cancelled = False
        client = CallbackClient(self.answers.append, lambda: self.is_cancelled)
        submit_texts(self._submit, [Request(text) for text in texts], client)

    def _submit(self, request: Request[str, Any]) -> None:
        if request.item == "bad":
            request.reply(errors.EmptyTextError("nothing to read"))
            return
        assert not request.is_cancelled()
        self.is_cancelled = True
        assert request.is_cancelled()
        self.is_cancelled = False
        self.replies[request.item], self.is_over[request.item] = request.reply, lambda: request.client.is_over


def test_all_are_answered_in_order_once_the_last_of_them_is_ready() -> None:
    submitted = Submitted("abc")
    for text in "bca":
        assert submitted.answers == []
        submitted.replies[text](text.upper())
    assert submitted.answers == [["A", "B", "C"]]


def test_an_error_of_one_is_the_answer_of_all_and_says_which() -> None:
    submitted = Submitted("abc")
    submitted.replies["a"]("A")
    assert not submitted.is_over["c"]()
    submitted.replies["b"](errors.DeadlineError("too late"))
    assert [error.wire() for error in submitted.answers] == ["DEADLINE_UNMEETABLE: text 2 of 3: too late"]
    assert submitted.is_over["c"](), "nobody waits for it any more"
    submitted.replies["c"]("C")
    assert len(submitted.answers) == 1


def test_an_error_of_a_text_alone_says_no_number() -> None:
    submitted = Submitted("a")
    submitted.replies["a"](errors.DeadlineError("too late"))
    assert [str(error) for error in submitted.answers] == ["too late"]


def test_one_that_is_refused_at_once_ends_the_request_and_those_before_it_are_over() -> None:
    before: dict[str, Callable[[], bool]] = {}

    def submit(request: Request[str, Any]) -> None:
        if request.item == "bad":
            raise errors.UnknownTenantError("no such tenant")
        before[request.item] = lambda: request.client.is_over

    with pytest.raises(errors.UnknownTenantError, match="text 2 of 3: no such tenant"):
        submit_texts(submit, [Request("a"), Request("bad"), Request("c")], CallbackClient(pytest.fail))
    assert [*before] == ["a"], "what comes after it is not submitted"
    assert before["a"]()


def test_one_that_replies_an_error_while_it_is_submitted_ends_the_request() -> None:
    submitted = Submitted(["a", "bad", "c"])
    assert [error.wire() for error in submitted.answers] == ["EMPTY_TEXT: text 2 of 3: nothing to read"]
    assert [*submitted.replies] == ["a"], "what comes after it is not submitted"


def test_a_mistake_of_ours_leaves_nothing_under_way() -> None:
    before: list[Request[str, Any]] = []

    def submit(request: Request[str, Any]) -> None:
        before.append(request)
        if request.item == "b":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit_texts(submit, [Request("a"), Request("b")], CallbackClient(pytest.fail))
    assert before[0].client.is_over


def test_after_an_error_no_answer_is_kept_by_the_texts_that_still_wait() -> None:
    class Large:
        pass

    submitted, answers = Submitted("abcd"), [Large(), Large()]
    kept = [weakref.ref(answer) for answer in answers]
    submitted.replies["a"](answers[0])
    submitted.replies["b"](errors.DeadlineError("too late"))
    submitted.replies["c"](answers[1])
    del answers
    assert [one() for one in kept] == [None, None]
    assert "d" in submitted.replies


def test_threads_that_answer_and_refuse_at_once_make_one_answer() -> None:
    for _ in range(50):
        submitted = Submitted([str(number) for number in range(8)])
        begin = threading.Barrier(8)

        def answer(number: int, submitted: Submitted = submitted, begin: threading.Barrier = begin) -> None:
            begin.wait()
            submitted.replies[str(number)](errors.DeadlineError("late") if number in (3, 6) else number)

        threads = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(found) for found in submitted.answers] == [errors.DeadlineError]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_what_is_packed_comes_out_as_it_was(lengths: list[int]) -> None:
    parts = [np.random.default_rng(length).integers(0, 99, (length, 3), np.int32) for length in lengths]
    packed = pack(parts)
    assert len(packed) == len(parts)
    assert packed.size - 3 * sum(lengths) < 3 * len(parts), "no more filling than one row's end takes"
    found = unpack(packed, lengths)
    assert all(one.base is None for one in found), "Triton takes its own memory back"
    for one, part in zip(found, parts, strict=True):
        np.testing.assert_array_equal(one, part)


def test_a_text_waits_for_others_if_its_request_has_several() -> None:
    for count in (1, 3):
        requests: list[Request[int, Any]] = []
        submit_texts(requests.append, [Request(number) for number in range(count)], CallbackClient(pytest.fail))
        assert {request.client.waits_for_others for request in requests} == {count > 1}


def test_without_lengths_a_text_has_a_whole_row() -> None:
    rows = np.arange(12).reshape(2, 3, 2)
    np.testing.assert_array_equal(unpack(rows, None), rows)


@pytest.mark.parametrize("width", [2, 0])
@pytest.mark.parametrize("lengths", [[3, 4], [7, -1], [0, 6], [2**63 - 1, 2**63 - 1]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int], width: int) -> None:
    with pytest.raises(errors.HiddenStatesError):
        unpack(np.zeros((2, 3, width)), lengths)


def test_answers_of_several_sizes_are_filled_up() -> None:
    found = fill_up([np.ones((2, 1)), np.ones((1, 3)), np.ones((0, 0))], 0)
    assert found.tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]
    labels = fill_up([np.array([b"a", b"b"], dtype=object), np.array([], dtype=object)], b"")
    assert labels.tolist() == [[b"a", b"b"], [b"", b""]]


def test_answers_that_would_be_little_else_than_filler_are_left_out() -> None:
    tagging, of_many_labels = np.zeros((256, 5), np.float32), np.zeros((1, 1000), np.float32)
    assert fill_up([tagging] * 64, 0).shape == (64, 256, 5)
    assert fill_up([of_many_labels] * 64, 0).shape == (64, 1, 1000)
    assert fill_up([tagging, of_many_labels], 0).shape == (2, 256, 1000)
    assert fill_up([tagging, *[of_many_labels] * 63], 0).shape == (64, 0, 0)
