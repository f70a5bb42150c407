"""An asynchronous client that is closed while calls are under way, or before they begin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from hplm_client import AsyncClient

from hplm.errors import UnreachableError
from tests.unit.clients.answering import answering
from tests.unit.clients.transport.frozen import frozen_grpc


@pytest.fixture(params=["http", "grpc"])
def silent(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that takes requests and answers none."""
    ended = threading.Event()
    with frozen_grpc() if request.param == "grpc" else answering(lambda text: ended.wait()) as server:
        yield server.url
        ended.set()


async def under_way(client: AsyncClient, count: int = 1) -> list[asyncio.Task[object]]:
    calls: list[asyncio.Task[object]] = [asyncio.create_task(client.predict("films", "good")) for _ in range(count)]
    await asyncio.sleep(0.1)
    return calls


def test_calls_under_way_and_later_ones_say_that_the_client_was_closed(silent: str) -> None:
    async def ask() -> None:
        client = AsyncClient(silent, concurrency=1)
        # The second call waits for a permit.
        calls = await under_way(client, 2)
        await client.close()
        for call in (*calls, client.predict("films", "good"), client.is_ready()):
            with pytest.raises(UnreachableError, match=r"^the client was closed$"):
                await call

    asyncio.run(ask())


def test_a_call_under_way_over_grpc_is_answered_before_the_connections_close() -> None:
    async def ask() -> None:
        client = AsyncClient("grpc://127.0.0.1:1")
        await client._triton.close()
        order: list[str] = []

        class Connection:
            """A stand-in for tritonclient's client."""

            async def is_model_ready(self, *_: object, **__: object) -> bool:
                await asyncio.sleep(0.1)
                order.append("answered")
                return True

            async def close(self) -> None:
                order.append("closed")

        client._triton = Connection()
        asking = asyncio.create_task(client.is_ready())
        await asyncio.sleep(0)
        await client.close()
        assert await asking
        assert order == ["answered", "closed"]

    asyncio.run(ask())


def test_a_caller_that_is_cancelled_is_cancelled(silent: str) -> None:
    async def ask() -> None:
        async with AsyncClient(silent) as client:
            early, late = await under_way(client, 2)
            early.cancel()
            with pytest.raises(asyncio.CancelledError):
                await early
            late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late

    asyncio.run(ask())
