"""Closed clients, clients in another thread or loop, and malformed arguments are refused alike over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gevent
import pytest
from gevent._hub_local import get_hub_if_exists
from hplm_client import AsyncClient, Client, ManageClient
from hplm_client.client import PendingPrediction
from hplm_client.transport.client_ownership import destroy_hub

from hplm.errors import ConfigError, UnreachableError
from tests.open_files import open_files
from tests.unit.clients.answering import answering
from tests.unit.clients.transport.frozen import frozen_grpc
from tests.waiting import until

URLS = ["http://127.0.0.1:1", "grpc://127.0.0.1:1"]


def in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("url", URLS)
def test_calls_of_a_closed_client_say_that_it_was_closed(url: str) -> None:
    client, manage = Client(url), ManageClient(url)
    for closed in (client, manage):
        closed.close()
        closed.close()
    for call in (
        lambda: client.predict("films", "good"),
        client.is_ready,
        lambda: list(client.predict_many([("films", "good")])),
        lambda: manage.ask("tenant.list"),
    ):
        with pytest.raises(UnreachableError, match=r"^the client was closed$"):
            call()


def test_calls_under_way_over_grpc_say_that_the_client_was_closed() -> None:
    with frozen_grpc() as server, ThreadPoolExecutor(2) as pool:
        client = Client(server.url)
        calls = [pool.submit(call) for call in (client.is_ready, lambda: client.predict("films", "good"))]
        many = client._start([], client._call_options(False, None))
        threading.Event().wait(0.2)
        client.close()
        for call in calls:
            with pytest.raises(UnreachableError, match=r"^the client was closed$"):
                call.result()
        with pytest.raises(UnreachableError, match=r"^the client was closed$"):
            client._finish(PendingPrediction(("films", "good", None), many), False)


def test_over_http_another_thread_is_refused_even_after_the_first_has_ended() -> None:
    words = "make one in each thread"
    with answering() as server:
        with Client(server.url) as client:
            assert client.predict("films", "good").label == "ok"
            with pytest.raises(ConfigError, match=words):
                in_thread(lambda: client.predict("films", "good"))
            assert client.predict("films", "good").label == "ok"
        with Client(server.url) as client:
            in_thread(lambda: client.predict("films", "good"))
            for call in (client.is_ready, lambda: list(client.predict_many([("films", "good")]))):
                with pytest.raises(ConfigError, match=words):
                    call()
                with pytest.raises(ConfigError, match=words):
                    in_thread(call)


@pytest.mark.parametrize("url", URLS)
def test_an_asynchronous_client_is_for_the_loop_that_it_is_made_in(url: str) -> None:
    with pytest.raises(ConfigError, match="inside the running loop"):
        AsyncClient(url)

    async def make() -> AsyncClient:
        return AsyncClient(url)

    async def use(client: AsyncClient) -> None:
        for call in (client.predict("films", "good"), client.is_ready()):
            with pytest.raises(ConfigError, match="made in another loop"):
                await call

    first = asyncio.new_event_loop()
    client = first.run_until_complete(make())
    asyncio.run(use(client))
    first.run_until_complete(client.close())
    first.close()


async def made_in_a_loop(*arguments: Any, **named: Any) -> None:
    await AsyncClient(*arguments, **named).close()


MAKERS = [Client, ManageClient, lambda *a, **named: asyncio.run(made_in_a_loop(*a, **named))]


@pytest.mark.parametrize("made", MAKERS, ids=["sync", "manage", "async"])
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), None, 0, -1, "5", 1e12, True])
def test_a_timeout_out_of_range_is_refused_by_name(made: Callable[..., object], url: str, timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s is a number of seconds above 0"):
        made(url, timeout_s=timeout_s)


@pytest.mark.parametrize("made", MAKERS, ids=["sync", "manage", "async"])
@pytest.mark.parametrize(
    ("url", "named", "words"),
    [
        (None, {}, "an address is a str, not NoneType"),
        (5, {}, "an address is a str, not int"),
        *((url, {"headers": headers}, "headers are a mapping") for url in URLS for headers in ([], [("a", "b")], "a")),
        (URLS[1], {"headers": {"x-bin": "abc"}}, "'x-bin' is not a name of a header over gRPC"),
        (URLS[1], {"headers": {"X!": "abc"}}, "'x!' is not a name of a header over gRPC"),
    ],
)
def test_a_malformed_argument_is_refused_by_name(
    made: Callable[..., object], url: Any, named: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        made(url, **named)


@pytest.mark.parametrize("made", [MAKERS[0], MAKERS[2]], ids=["sync", "async"])
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("concurrency", ["3", 1.5, True, None])
def test_a_concurrency_that_is_not_a_whole_number_is_refused(
    made: Callable[..., object], url: str, concurrency: Any
) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        made(url, concurrency=concurrency)


def test_a_header_whose_name_only_http_takes_goes_over_http() -> None:
    with answering() as server, Client(server.url, headers={"x-bin": "abc"}) as client:
        assert client.predict("films", "good").label == "ok"


def test_ended_threads_with_clients_over_http_leave_no_files_and_threads() -> None:
    def call() -> None:
        with Client(URLS[0]) as client, ManageClient(URLS[0]) as manage:
            for ask in (lambda: client.predict("films", "good"), lambda: manage.ask("tenant.list")):
                with pytest.raises(UnreachableError):
                    ask()

    def files_and_threads() -> tuple[int, int]:
        return len(open_files()), len(os.listdir("/proc/self/task"))

    for _ in range(2):
        in_thread(call)
    before = files_and_threads()
    for _ in range(5):
        in_thread(call)
    # An ended thread may be listed for a moment.
    until(lambda: all(now <= then for now, then in zip(files_and_threads(), before, strict=True)))


def test_a_client_works_after_another_client_of_its_thread_is_closed() -> None:
    def call() -> object:
        with answering() as server, Client(server.url) as client:
            Client(server.url).close()
            return client.predict("films", "good").label

    assert in_thread(call) == "ok"


def test_a_hub_of_the_program_stays_and_so_does_a_hub_that_looks_up_a_name() -> None:
    def call() -> object:
        hub = gevent.get_hub()
        with Client(URLS[0]) as client, pytest.raises(UnreachableError):
            client.predict("films", "good")
        gevent.sleep(0)
        return hub is gevent.get_hub()

    assert in_thread(call)

    def look_up() -> object:
        hub = gevent.get_hub()
        may_end = threading.Event()
        hub.threadpool.spawn(may_end.wait)
        destroy_hub(hub)
        stays = get_hub_if_exists() is hub
        may_end.set()
        hub.threadpool.join()
        destroy_hub(hub)
        return stays, get_hub_if_exists()

    assert in_thread(look_up) == (True, None)
