"""Load over gRPC as cheap as Python can send it: ready-made bytes in, only the status of the answer looked at.

Client and server share the machine, and a request of `hplm_client.AsyncClient` takes about twice the processor time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc  # type: ignore[import-untyped]
import numpy as np
from hplm_client.transport.address import split_url
from hplm_client.transport.error_translation import from_triton
from tritonclient.utils import InferenceServerException

from hplm.errors import ConfigError, UnreachableError
from hplm_loadtest.scenarios.infer_message import METHOD, infer_messages
from hplm_loadtest.scenarios.run import ANSWERED, Recorder, Run, joined
from hplm_loadtest.workloads.plan import Plan, Requests

CHANNELS = 2
CONNECT_S = 5.0
# Generators are forked off a process that has imported this module before: half a second less for each.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])

# Takes a request's index and message, returns when its outcome is recorded.
Send = Callable[[int, bytes], Coroutine[None, None, None]]
Call = Callable[..., Awaitable[bytes]]


def open_loop(url: str, plan: Plan, *, timeout_s: float = 30.0) -> Run:
    """Send each request at its planned time whatever the server does. Raises UnreachableError where nobody listens.

    From a process of its own, made by `multiprocessing`'s method `forkserver`: no thread of the caller's is in its way.
    """
    with ProcessPoolExecutor(1, _PROCESSES) as pool:
        return pool.submit(open_loop_here, url, plan, timeout_s).result()


def open_loop_here(url: str, plan: Plan, timeout_s: float) -> Run:
    """As `open_loop`, in this process."""
    return asyncio.run(_open(url, plan, timeout_s))


def closed_loop(url: str, requests: Requests, in_flight: int, *, timeout_s: float = 30.0, generators: int = 1) -> Run:
    """Send the next request when one is answered, `in_flight` of them under way: throughput at saturation.

    A request is planned when it is sent: latency does not show what a steady stream of users would have waited.
    Several `generators`, processes of their own, share requests and what is under way.
    """
    with ProcessPoolExecutor(generators, _PROCESSES) as pool:
        parts = [
            pool.submit(
                _closed_part, url, requests.share(number, generators), (in_flight + number) // generators, timeout_s
            )
            for number in range(generators)
        ]
        return joined([part.result() for part in parts])


def _closed_part(url: str, requests: Requests, in_flight: int, timeout_s: float) -> tuple[float, Run]:
    """Of one generator, with the start of its Recorder."""
    return asyncio.run(_closed(url, requests, in_flight, timeout_s))


async def _open(url: str, plan: Plan, timeout_s: float) -> Run:
    messages = infer_messages(plan.requests)
    async with AsyncExitStack() as stack:
        calls = await _connect(url, stack)
        recorder = Recorder(plan.times_s, plan.requests.deadlines_s, plan.duration_s)
        send = _sender(url, calls, recorder, timeout_s)
        tasks = []
        for index, planned_s in enumerate(plan.times_s.tolist()):
            # Behind plan this is a sleep of 0: what is under way gets its turn between two sends.
            await asyncio.sleep(max(0.0, planned_s - recorder.elapsed_s()))
            tasks.append(asyncio.create_task(send(index, messages[index])))
        await asyncio.gather(*tasks)
        return recorder.run(len(messages))


async def _closed(url: str, requests: Requests, in_flight: int, timeout_s: float) -> tuple[float, Run]:
    messages = iter(enumerate(infer_messages(requests)))
    async with AsyncExitStack() as stack:
        calls = await _connect(url, stack)
        recorder = Recorder(np.zeros(len(requests)), requests.deadlines_s, 0.0)
        send = _sender(url, calls, recorder, timeout_s)

        async def worker() -> None:
            for index, message in messages:
                await send(index, message)

        await asyncio.gather(*(worker() for _ in range(in_flight)))
        run = recorder.run(len(requests))
        return recorder.started_s, replace(run, planned_s=run.sent_s, duration_s=recorder.elapsed_s())


async def _connect(url: str, stack: AsyncExitStack) -> list[Call]:
    """Hot connections, closed with `stack`."""
    address = split_url(url)
    if address.protocol != "grpc" or address.tls:
        raise ConfigError(f"this load goes over plain gRPC only, not to {url}; write grpc://HOST:8001")
    calls = []
    for _ in range(CHANNELS):
        # Without a pool of its own each channel would share the one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address.host, options=options))
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
        except asyncio.TimeoutError:
            raise UnreachableError(f"{url} does not answer") from None
        calls.append(channel.unary_unary(METHOD))
    return calls


def _sender(url: str, calls: list[Call], recorder: Recorder, timeout_s: float) -> Send:
    async def send(index: int, message: bytes) -> None:
        recorder.sent(index)
        try:
            await calls[index % len(calls)](message, timeout=timeout_s)
        except grpc.RpcError as error:
            recorder.done(index, code_of(error, url))
        else:
            recorder.done(index, ANSWERED)

    return send


def code_of(error: grpc.RpcError, url: str) -> str:
    """The code of `hplm.errors` that the server answered with; UNREACHABLE where it did not answer."""
    return from_triton(InferenceServerException(error.details(), str(error.code())), url).code
