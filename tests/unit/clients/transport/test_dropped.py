"""A server that drops the connection may have handled the request, so the client does not send it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hplm_client import AsyncClient, Client

from hplm.errors import UnreachableError
from tests.unit.clients.answering import answering


def drop_connection(text: str) -> None:
    raise OSError


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


@pytest.mark.parametrize("send", [ask, ask_many, ask_asynchronously])
def test_a_request_whose_connection_drops_is_sent_once(send: Callable[[str], None]) -> None:
    with answering(drop_connection) as server:
        with pytest.raises(UnreachableError):
            send(server.url)
        assert server.texts == ["good"]
