"""The header that tells a proxy whose request it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures

import grpc  # type: ignore[import-untyped]
import pytest
from hplm_client import AsyncClient, Client
from hplm_client.transport.tenant_header import tenant_header

from hplm.errors import HplmError
from tests.unit.clients.answering import answering


def test_the_header_has_the_name_of_the_tenant() -> None:
    assert tenant_header("films-2") == {"hplm-tenant": "films-2"}


@pytest.mark.parametrize("tenant", ["", "Films", "a\r\nx: y", "ö", 3])
def test_a_name_that_no_tenant_can_have_gets_no_header(tenant: object) -> None:
    assert tenant_header(tenant) == {}


def test_every_call_over_http_has_the_header() -> None:
    with answering() as server:
        with Client(server.url, model="hbert") as client:
            client.predict("films", "a")
            client.predict_batch([("books", "a")])
            list(client.predict_many([("songs", "a"), ("plays", "b")]))

        async def ask() -> None:
            async with AsyncClient(server.url, model="hbert") as other:
                await other.predict("games", "a")

        asyncio.run(ask())
    assert sorted(server.tenant_headers, key=str) == ["books", "films", "games", "plays", "songs"]


def test_a_header_of_the_callers_own_stays() -> None:
    with answering() as server, Client(server.url, model="hbert", headers={"hplm-tenant": "ours"}) as client:
        client.predict("films", "a")
    assert server.tenant_headers == ["ours"]


class _Metadata(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Notes the header of each call, and refuses the call."""

    def __init__(self) -> None:
        self.tenants: list[str | None] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("ModelInfer"):
            self.tenants.append(dict(details.invocation_metadata).get("hplm-tenant"))
        return None


@pytest.fixture
def grpc_server() -> Iterator[tuple[str, _Metadata]]:
    handler = _Metadata()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}", handler
    server.stop(None)


def test_every_call_over_grpc_has_the_header(grpc_server: tuple[str, _Metadata]) -> None:
    url, handler = grpc_server
    with Client(url, model="hbert") as client:
        for deadline_s in (None, 5.0):
            with pytest.raises(HplmError):
                client.predict("films", "a", deadline_s=deadline_s)

    async def ask() -> None:
        async with AsyncClient(url, model="hbert") as other:
            with pytest.raises(HplmError):
                await other.predict("games", "a")

    asyncio.run(ask())
    assert handler.tenants == ["films", "films", "games"]
