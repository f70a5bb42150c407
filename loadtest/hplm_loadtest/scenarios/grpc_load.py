"""Sends load over gRPC with as little processor time as Python allows.

Requests are serialised before the load starts, and only the status of an answer is read. Client and server share the machine;
a request of `hplm_client.AsyncClient` takes about twice the processor time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc  # type: ignore[import-untyped]
import numpy as np
from hplm_client.transport.address import split_url
from hplm_client.transport.error_translation import from_triton
from tritonclient.utils import InferenceServerException

from hplm.core import wire
from hplm.errors import ConfigError, UnreachableError
from hplm_loadtest.scenarios.infer_messages import METHOD, infer_messages
from hplm_loadtest.scenarios.outcomes import ANSWERED, Recorder, Run, joined
from hplm_loadtest.workloads.load_plan import LoadPlan, Requests

CHANNELS = 2
CONNECT_S = 5.0  # seconds to wait for a connection
# Generators are forked from a process that has imported this module already, which saves half a second for each.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])

# Takes a request's index and message; returns when the outcome is recorded.
Send = Callable[[int, bytes], Coroutine[None, None, None]]
Call = Callable[..., Awaitable[bytes]]


def open_loop(url: str, plan: LoadPlan, *, timeout_s: float = 30.0, model: str = wire.MODEL) -> Run:
    """Send each request at its planned time whatever the server does. Raises UnreachableError if no server listens.

    A process of its own sends, so that no thread of the caller delays a request.
    """
    with ProcessPoolExecutor(1, _PROCESSES) as pool:
        return pool.submit(open_loop_here, url, plan, timeout_s, model).result()


def open_loop_here(url: str, plan: LoadPlan, timeout_s: float, model: str = wire.MODEL) -> Run:
    """Run `open_loop` in this process."""
    return asyncio.run(_open(url, plan, timeout_s, model))


def open_loop_with_answers(
    url: str, plan: LoadPlan, outputs: Sequence[str], *, timeout_s: float = 30.0, model: str = wire.MODEL
) -> tuple[Run, list[bytes | None]]:
    """Run `open_loop`; return its run, and the serialised answer to each request, None without one.

    `outputs` are further outputs to ask for. Keeping answers costs the generator memory, but no time.
    """
    with ProcessPoolExecutor(1, _PROCESSES) as pool:
        return pool.submit(_open_with_answers, url, plan, timeout_s, model, tuple(outputs)).result()


def _open_with_answers(
    url: str, plan: LoadPlan, timeout_s: float, model: str, outputs: tuple[str, ...]
) -> tuple[Run, list[bytes | None]]:
    answers: list[bytes | None] = [None] * len(plan.requests)
    return asyncio.run(_open(url, plan, timeout_s, model, outputs, answers)), answers


def closed_loop(
    url: str,
    requests: Requests,
    in_flight: int,
    *,
    timeout_s: float = 30.0,
    generators: int = 1,
    model: str = wire.MODEL,
) -> Run:
    """Send the next request when a request is answered, with `in_flight` requests under way: throughput at saturation.

    A request's planned time is the time it is sent, so latency does not show what a steady stream of users would wait.
    Several `generators`, each a process of its own, share the requests and `in_flight`.
    """
    with ProcessPoolExecutor(generators, _PROCESSES) as pool:
        parts = [
            pool.submit(
                _closed_part,
                url,
                requests.share(number, generators),
                (in_flight + number) // generators,
                timeout_s,
                model,
            )
            for number in range(generators)
        ]
        return joined([part.result() for part in parts])


def _closed_part(url: str, requests: Requests, in_flight: int, timeout_s: float, model: str) -> tuple[float, Run]:
    """Run one generator; return the start of its Recorder, and the run."""
    return asyncio.run(_closed(url, requests, in_flight, timeout_s, model))


async def _open(
    url: str,
    plan: LoadPlan,
    timeout_s: float,
    model: str,
    outputs: Sequence[str] = (),
    answers: list[bytes | None] | None = None,
) -> Run:
    messages = infer_messages(plan.requests, model, outputs)
    async with AsyncExitStack() as stack:
        calls = await _connect(url, stack)
        recorder = Recorder(plan.times_s, plan.requests.deadlines_s, plan.duration_s)
        send = _sender(url, calls, recorder, timeout_s, answers)
        tasks = []
        for index, planned_s in enumerate(plan.times_s.tolist()):
            # If the generator is late, it sleeps for 0 s, so that requests under way can proceed between two sends.
            await asyncio.sleep(max(0.0, planned_s - recorder.elapsed_s()))
            tasks.append(asyncio.create_task(send(index, messages[index])))
        await asyncio.gather(*tasks)
        return recorder.run(len(messages))


async def _closed(url: str, requests: Requests, in_flight: int, timeout_s: float, model: str) -> tuple[float, Run]:
    messages = iter(enumerate(infer_messages(requests, model)))
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
    """Open the connections, which `stack` closes. Raises ConfigError for an address that is not plain gRPC."""
    address = split_url(url)
    if address.protocol != "grpc" or address.tls:
        raise ConfigError(f"this load goes over plain gRPC only, not to {url}; write grpc://HOST:8001")
    calls = []
    for _ in range(CHANNELS):
        # Without a pool of their own, all channels would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address.host, options=options))
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
        except asyncio.TimeoutError:
            raise UnreachableError(f"{url} does not answer") from None
        calls.append(channel.unary_unary(METHOD))
    return calls


def _sender(
    url: str, calls: list[Call], recorder: Recorder, timeout_s: float, answers: list[bytes | None] | None = None
) -> Send:
    async def send(index: int, message: bytes) -> None:
        recorder.sent(index)
        try:
            answer = await calls[index % len(calls)](message, timeout=timeout_s)
        except grpc.RpcError as error:
            recorder.done(index, code_of(error, url))
        else:
            recorder.done(index, ANSWERED)
            if answers is not None:
                answers[index] = answer

    return send


def code_of(error: grpc.RpcError, url: str) -> str:
    """Return the code of `hplm.errors` that the server answered with; UNREACHABLE if the server did not answer."""
    return from_triton(InferenceServerException(error.details(), str(error.code())), url).code
