"""A frozen server, which takes calls and answers none."""

from __future__ import annotations

import asyncio
import itertools
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from socket import AF_INET, SOCK_STREAM
from typing import Any

import gevent
import pytest
from geventhttpclient.connectionpool import ConnectionPool
from hplm_client import AsyncClient, Client
from hplm_client.transport.time_limits import DEADLINE_GRACE_S

from hplm.errors import DeadlineError, UnreachableError
from tests.unit.clients.answering import answering
from tests.unit.clients.transport.frozen import frozen_grpc

TIMEOUT_S = 0.2


@pytest.fixture
def frozen() -> Iterator[str]:
    """The address of a frozen server that speaks gRPC."""
    with frozen_grpc() as server:
        yield server.url


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.is_ready(),
        lambda client: client.predict("films", "good"),
        lambda client: list(client.predict_many([("films", "good")])),
    ],
    ids=["is_ready", "predict", "predict_many"],
)
def test_every_call_ends_with_its_timeout(frozen: str, call: Callable[[Client], object]) -> None:
    with Client(frozen, timeout_s=TIMEOUT_S) as client, pytest.raises(UnreachableError, match=frozen):
        call(client)


@pytest.mark.parametrize(
    "call",
    [lambda client: client.is_ready(), lambda client: client.predict("films", "good")],
    ids=["is_ready", "predict"],
)
def test_every_call_of_the_asynchronous_client_ends_with_its_timeout(
    frozen: str, call: Callable[[AsyncClient], Any]
) -> None:
    async def ask() -> None:
        async with AsyncClient(frozen, timeout_s=TIMEOUT_S) as client:
            await call(client)

    with pytest.raises(UnreachableError, match=frozen):
        asyncio.run(ask())


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of an HTTP server: the first two connections' answers arrive byte by byte without end, later ones at once."""
    ended = threading.Event()

    class Dripping(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            # The first connection asks for the model's outputs.
            is_early = next(self.server.numbers) < 2  # type: ignore[attr-defined]
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while is_early and not ended.wait(TIMEOUT_S / 3):
                    self.wfile.write(b"x")
                self.wfile.write(b"Content-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        server.numbers = itertools.count()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        ended.set()
        server.shutdown()
        thread.join()


def test_a_call_over_http_ends_with_its_timeout_though_pieces_of_its_answer_come(dripping: str) -> None:
    with Client(dripping, timeout_s=5, model="hbert") as client:
        with pytest.raises(UnreachableError, match="timed out"):
            client.predict("films", "good")
        # The rest of that answer is not taken for the next one.
        assert client.is_ready()


def test_a_call_over_http_tries_no_other_address_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def connect(pool: ConnectionPool, socket: Any, address: Any) -> Any:
        tried.append(address)
        gevent.sleep(60)

    addresses = [(AF_INET, SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in (1, 2)]
    monkeypatch.setattr(ConnectionPool, "_connect_socket", connect)
    monkeypatch.setattr(ConnectionPool, "_resolve", lambda pool: addresses)
    words = r"^http://127.0.0.1:1 does not answer: timed out after 0.2 s$"
    with (
        Client("http://127.0.0.1:1", timeout_s=TIMEOUT_S, model="hbert") as client,
        pytest.raises(UnreachableError, match=words),
    ):
        client.predict("films", "good")
    # The model's outputs are asked for too.
    assert tried == [("127.0.0.1", 1)] * 2


@pytest.fixture(params=["http", "grpc"])
def silent(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that takes requests and answers none of them."""
    ended = threading.Event()
    with ExitStack() as stack:
        if request.param == "grpc":
            yield stack.enter_context(frozen_grpc()).url
        else:
            yield stack.enter_context(answering(lambda text: ended.wait())).url
            ended.set()


def test_a_client_waits_no_longer_than_the_deadline_and_its_stated_grace(silent: str) -> None:
    started_s = time.monotonic()
    with Client(silent, timeout_s=60) as client:
        with pytest.raises(DeadlineError, match=r"within the deadline of 0\.2 s and 1 s more"):
            client.predict("films", "good", deadline_s=TIMEOUT_S)
        taken_s = time.monotonic() - started_s
    assert TIMEOUT_S + DEADLINE_GRACE_S <= taken_s < TIMEOUT_S + 3 * DEADLINE_GRACE_S


def test_the_asynchronous_client_waits_no_longer_either(silent: str) -> None:
    async def ask() -> list[object]:
        async with AsyncClient(silent, timeout_s=60) as client:
            calls = (client.predict("films", "good", deadline_s=TIMEOUT_S) for _ in range(3))
            return [type(answer) for answer in await asyncio.gather(*calls, return_exceptions=True)]

    started_s = time.monotonic()
    assert asyncio.run(ask()) == [DeadlineError] * 3
    assert time.monotonic() - started_s < TIMEOUT_S + 4 * DEADLINE_GRACE_S


def test_each_of_many_has_its_deadline() -> None:
    ended = threading.Event()
    with (
        answering(lambda text: ended.wait() if text == "never" else None) as server,
        Client(server.url, timeout_s=60) as client,
    ):
        asked = [("films", text) for text in ("never", "soon", "never")]
        answers = list(client.predict_many(asked, deadline_s=TIMEOUT_S, on_error="yield"))
        ended.set()
    assert [type(answer).__name__ for answer in answers] == ["DeadlineError", "Prediction", "DeadlineError"]


def test_each_of_many_over_grpc_has_its_deadline(frozen: str) -> None:
    started_s = time.monotonic()
    with Client(frozen, timeout_s=60) as client:
        # The question whether the server is live would time out first.
        client._check_server_is_live = lambda: None  # type: ignore[method-assign]
        answers = list(client.predict_many([("films", "good")] * 3, deadline_s=TIMEOUT_S, on_error="yield"))
    assert [type(answer) for answer in answers] == [DeadlineError] * 3
    assert time.monotonic() - started_s < TIMEOUT_S + 4 * DEADLINE_GRACE_S


def test_a_timeout_before_the_deadline_counts(silent: str) -> None:
    with Client(silent, timeout_s=TIMEOUT_S) as client, pytest.raises(UnreachableError, match="does not answer"):
        client.predict("films", "good", deadline_s=60)
