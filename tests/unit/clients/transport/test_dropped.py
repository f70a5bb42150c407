"""A server that drops the connection instead of answering has perhaps done what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hplm_client import AsyncClient, Client

from hplm.errors import UnreachableError
from tests.unit.clients.answering import answering


def gone(text: str) -> None:
    raise OSError("gone")


def ask(url: str) -> None:
    with Client(url) as client:
        client.predict("films", "good")


def ask_many(url: str) -> None:
    with Client(url) as client:
        list(client.predict_many([("films", "good")]))


def ask_asynchronously(url: str) -> None:
    async def predict() -> None:
        async with AsyncClient(url) as client:
            await client.predict("films", "good")

    asyncio.run(predict())


@pytest.mark.parametrize("asked", [ask, ask_many, ask_asynchronously])
def test_a_request_whose_connection_drops_is_sent_once(asked: Callable[[str], None]) -> None:
    with answering(gone) as server:
        with pytest.raises(UnreachableError):
            asked(server.url)
        assert server.texts == ["good"]
