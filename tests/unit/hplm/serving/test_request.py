"""A request keeps its client and its times on its way, and asks the client's server with care."""

from __future__ import annotations

import pytest

from hplm.errors import HplmError, QueueFullError
from hplm.serving.request import NOBODY, Request
from tests.submitting import CallbackClient


def test_a_request_with_another_item_has_the_same_client_and_times() -> None:
    answers: list[str | HplmError] = []
    raw: Request[bytes, str] = Request(b"text", b"acme", 2.0, 7.0, CallbackClient(answers.append))
    ready = raw.with_item(["text"])
    assert (ready.item, ready.tenant, ready.deadline_s, ready.arrived_s) == (["text"], b"acme", 2.0, 7.0)
    full = QueueFullError("full")
    ready.reply("answer")
    raw.reply(full)
    assert answers == ["answer", full]


@pytest.mark.parametrize("has_gone", [True, False])
def test_a_request_says_whether_its_client_has_gone(has_gone: bool) -> None:
    assert Request(b"", client=CallbackClient(print, lambda: has_gone)).is_cancelled() is has_gone


def test_a_client_has_not_gone_if_the_server_cannot_say() -> None:
    def fail() -> bool:
        raise RuntimeError("no shared memory")

    assert not Request(b"", client=CallbackClient(print, fail)).is_cancelled()


def test_a_request_that_was_not_submitted_has_nobody_to_answer() -> None:
    with pytest.raises(NotImplementedError):
        Request(b"").reply("answer")
    assert Request(b"").client is NOBODY
