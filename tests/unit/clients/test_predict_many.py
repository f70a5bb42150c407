"""Many texts in one call: nobody's answer is lost to another's request."""

from __future__ import annotations

from typing import Any

import pytest
from hplm_client import Client

from hplm.errors import BadInputError, ConfigError, HplmError, TextEncodingError
from tests.unit.clients.answering import answering


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


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("concurrency", [0, -1])
def test_no_request_at_once_is_refused_by_name(scheme: str, concurrency: int) -> None:
    with pytest.raises(ConfigError, match=f"concurrency is {concurrency}; it must be 1 or more"):
        Client(f"{scheme}://127.0.0.1:1", concurrency=concurrency)
