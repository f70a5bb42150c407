"""Many requests at once: the asynchronous client lets some wait, and the wait does not count as the server's time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hplm_client import AsyncClient

from hplm.errors import ConfigError
from tests.unit.clients.answering import answering

TAKES_S = 0.2


def test_the_wait_for_a_permit_is_not_part_of_a_requests_time() -> None:
    permits = threading.Semaphore(2)
    too_many = []

    def before_answer(text: str) -> None:
        if not permits.acquire(blocking=False):
            too_many.append(text)
            return
        time.sleep(TAKES_S)
        permits.release()

    async def ask(url: str) -> list[str]:
        # In pairs the 60 requests take longer than the timeout of one request.
        async with AsyncClient(url, timeout_s=25 * TAKES_S, concurrency=2) as client:
            answers = await asyncio.gather(*(client.predict("films", f"text {number}") for number in range(60)))
            return [answer.text for answer in answers]

    with answering(before_answer) as server:
        assert asyncio.run(ask(server.url)) == [f"text {number}" for number in range(60)]
    assert too_many == []


def test_the_timeout_counts_from_when_a_request_has_a_permit() -> None:
    async def ask(url: str) -> list[object]:
        async with AsyncClient(url, timeout_s=5, concurrency=1) as client:
            calls = (client.predict("films", text) for text in ("never", "soon"))
            return [type(answer).__name__ for answer in await asyncio.gather(*calls, return_exceptions=True)]

    ended = threading.Event()
    with answering(lambda text: ended.wait() if text == "never" else None) as server:
        assert asyncio.run(ask(server.url)) == ["UnreachableError", "Prediction"]
        ended.set()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_concurrency_of_0_is_refused_by_name(scheme: str) -> None:
    async def make() -> None:
        AsyncClient(f"{scheme}://127.0.0.1:1", concurrency=0)

    with pytest.raises(ConfigError, match="concurrency is 0; it must be 1 or more"):
        asyncio.run(make())
