"""Replays requests against running servers: each request leaves at its planned time, whatever the servers do.

The replay chooses among several servers of a model as the simulator does: the shortest queue gets the next request. If the time
of a first stage is known, a queue has the requests that have not begun it, as far as the time says. Otherwise a queue has all
unanswered requests.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped]
import numpy as np
from hplm_client.transport.address import split_url

from hplm.errors import ConfigError, UnreachableError
from hplm.placement.outcomes import REFUSED, Outcomes
from hplm.workloads.model_requests import ModelRequests
from hplm_loadtest.scenarios.grpc_load import CONNECT_S, code_of
from hplm_loadtest.scenarios.infer_messages import METHOD, infer_messages
from hplm_loadtest.scenarios.outcomes import ANSWERED, Recorder, Run
from hplm_loadtest.workloads.load_plan import Requests

# Requests of each model to each of its servers before the replay. A server's cost model needs four batches, and a process's
# first batches are slow.
WARM_UP_REQUESTS = 8
# Seconds after which a request without an answer counts as lost.
LOST_S = 60.0
# The header by which a proxy sends a tenant's requests to the same node.
TENANT_HEADER = "hplm-tenant"
# The replay runs in a process that is forked from one that has imported this module already.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])

Call = Callable[..., Awaitable[bytes]]


@dataclass(frozen=True)
class Target:
    """Something that answers a model: the Triton model `model` at the gRPC address `url`.

    Targets with the same `queue` share a queue. `first_stage_s`: the seconds of the model's first stage, 0 if unknown.
    """

    url: str
    model: str
    queue: str
    first_stage_s: float = 0.0


@dataclass(frozen=True)
class Replay:
    """The measured outcomes of a replay. `outcomes.groups` are numbers of `queues`.

    `run` has the codes of errors and the lag of the generator. The busy seconds of devices are
    unknown, so `outcomes.busy_s` is empty.
    """

    outcomes: Outcomes
    run: Run
    queues: tuple[str, ...]


def replay(
    urls: Mapping[str, Sequence[str]],
    base_names: Mapping[str, str],
    tenants_of_base: Mapping[str, Sequence[str]],
    requests: ModelRequests,
    texts: Sequence[str],
) -> Replay:
    """Replay requests to bases, after a warm-up, and return how each request ended.

    urls: the gRPC addresses that answer each base; behind a proxy, the proxy's address alone. base_names: the Triton model of
    each base. tenants_of_base: the tenants that ask, one after another. A request's deadline travels as Triton's timeout.
    Raises ConfigError if a base has no address or no tenant, UnreachableError if no server listens.
    """
    targets = {base: [Target(url, base_names[base], url) for url in urls.get(base, ())] for base in requests.names}
    return recorded_replay(targets, tenants_of_base, requests, texts)


def recorded_replay(
    targets: Mapping[str, Sequence[Target]],
    tenants_of: Mapping[str, Sequence[str]],
    requests: ModelRequests,
    texts: Sequence[str],
    *,
    warm_up: int = WARM_UP_REQUESTS,
) -> Replay:
    """Replay requests to the `targets` of their models, as `replay` does. A process of its own sends."""
    used = [requests.names[number] for number in np.unique(requests.models)]
    for name in used:
        if not targets.get(name) or not tenants_of.get(name):
            raise ConfigError(f"model {name!r} has requests, so an address and a tenant were expected: it has none")
    if not texts:
        raise ConfigError("texts to send were expected, got none")
    plan = _plan(targets, tenants_of, requests, texts, used, warm_up)
    with ProcessPoolExecutor(1, _PROCESSES) as pool:
        run, queue_of = pool.submit(_replay_here, plan).result()
    ended_s = np.where(run.answered, run.done_s, np.nan)
    groups = np.where(run.answered, queue_of, REFUSED).astype(np.int32)
    return Replay(Outcomes(requests, ended_s, groups, np.zeros(0)), run, plan.queues)


@dataclass(frozen=True)
class _Plan:
    """All that the sending process needs.

    messages: the serialised request of each request, without its Triton model. heads: the serialised Triton model of each
    target. choices: the numbers of the targets of each model. Messages of the warm-up have no deadline.
    """

    requests: ModelRequests
    messages: Sequence[bytes]
    tenants: Sequence[str]
    targets: Sequence[Target]
    heads: Sequence[bytes]
    choices: Mapping[int, Sequence[int]]
    queues: tuple[str, ...]
    warm_up: Sequence[tuple[int, bytes, str]]


def _plan(
    targets: Mapping[str, Sequence[Target]],
    tenants_of: Mapping[str, Sequence[str]],
    requests: ModelRequests,
    texts: Sequence[str],
    used: Sequence[str],
    warm_up: int,
) -> _Plan:
    all_targets = list(dict.fromkeys(target for name in used for target in targets[name]))
    number_of = {target: number for number, target in enumerate(all_targets)}
    turns: Counter[str] = Counter()
    tenants = []
    for model in requests.models.tolist():
        own = tenants_of[requests.names[model]]
        tenants.append(own[turns[requests.names[model]] % len(own)])
        turns[requests.names[model]] += 1
    sent = Requests(tenants, [texts[i % len(texts)] for i in range(len(requests))], requests.deadlines_s)
    warm = []
    for name in used:
        own = [tenants_of[name][i % len(tenants_of[name])] for i in range(warm_up)]
        messages = _without_model(
            Requests(own, [texts[i % len(texts)] for i in range(warm_up)], np.full(warm_up, np.nan))
        )
        warm += [
            (number_of[target], message, tenant)
            for target in targets[name]
            for message, tenant in zip(messages, own, strict=True)
        ]
    return _Plan(
        requests,
        _without_model(sent),
        tenants,
        all_targets,
        [_head(target.model) for target in all_targets],
        {requests.names.index(name): [number_of[target] for target in targets[name]] for name in used},
        tuple(dict.fromkeys(target.queue for target in all_targets)),
        warm,
    )


def _without_model(requests: Requests) -> list[bytes]:
    return infer_messages(requests, model="")


def _head(model: str) -> bytes:
    # Two serialised messages, one after the other, are the merged message: field 1 is the name of the model.
    name = model.encode()
    if len(name) > 127:
        raise ConfigError(f"a name of at most 127 bytes was expected for a Triton model, got {model!r}")
    return b"\x0a" + bytes([len(name)]) + name


class _Queue:
    """The unanswered requests of a queue, each with the time at which its first stage should begin."""

    def __init__(self) -> None:
        self._begins_s: dict[int, float] = {}
        self._free_s = 0.0

    def rank(self, now_s: float) -> tuple[int, float]:
        """Return the length of the queue, and when its first stage should be free: the least is the best choice."""
        return sum(begin_s > now_s for begin_s in self._begins_s.values()), max(self._free_s, now_s)

    def add(self, index: int, first_stage_s: float, now_s: float) -> None:
        """Add a request. If its time is unknown, the request counts until it is answered."""
        self._begins_s[index] = max(self._free_s, now_s) if first_stage_s else math.inf
        self._free_s = max(self._free_s, now_s) + first_stage_s

    def remove(self, index: int, unused_s: float, now_s: float) -> None:
        """Remove an answered request. `unused_s`: the seconds of a refused request's first stage, which stay free."""
        begin_s = self._begins_s.pop(index)
        if unused_s and begin_s > now_s:
            self._free_s -= unused_s
            for other, later_s in self._begins_s.items():
                if later_s > begin_s:
                    self._begins_s[other] = later_s - unused_s


def _replay_here(plan: _Plan) -> tuple[Run, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return asyncio.run(_replay(plan))


async def _replay(plan: _Plan) -> tuple[Run, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    requests = plan.requests
    queue_numbers = [plan.queues.index(target.queue) for target in plan.targets]
    queue_of = np.full(len(requests), REFUSED, np.int32)
    async with AsyncExitStack() as stack:
        call_of = await _connect({target.url for target in plan.targets}, stack)
        calls = [call_of[target.url] for target in plan.targets]
        await _warm_up(plan, calls)
        queues = [_Queue() for _ in plan.queues]
        recorder = Recorder(requests.times_s, requests.deadlines_s, requests.duration_s)

        async def send(index: int, model: int) -> None:
            now_s = recorder.elapsed_s()
            target = min(plan.choices[model], key=lambda number: queues[queue_numbers[number]].rank(now_s))
            queue = queues[queue_numbers[target]]
            queue_of[index] = queue_numbers[target]
            queue.add(index, plan.targets[target].first_stage_s, now_s)
            recorder.sent(index)
            header = ((TENANT_HEADER, plan.tenants[index]),)
            try:
                await calls[target](plan.heads[target] + plan.messages[index], timeout=LOST_S, metadata=header)
            except grpc.RpcError as error:
                recorder.done(index, code_of(error, plan.targets[target].url))
                queue.remove(index, plan.targets[target].first_stage_s, recorder.elapsed_s())
            else:
                recorder.done(index, ANSWERED)
                queue.remove(index, 0.0, recorder.elapsed_s())

        tasks = []
        for index, (planned_s, model) in enumerate(
            zip(requests.times_s.tolist(), requests.models.tolist(), strict=True)
        ):
            # If the generator is late, it sleeps for 0 s, so that requests under way can proceed between two sends.
            await asyncio.sleep(max(0.0, planned_s - recorder.elapsed_s()))
            tasks.append(asyncio.create_task(send(index, model)))
        await asyncio.gather(*tasks)
        return recorder.run(len(requests)), queue_of


async def _connect(urls: set[str], stack: AsyncExitStack) -> dict[str, Call]:
    calls = {}
    for url in sorted(urls):
        address = split_url(url)
        if address.protocol != "grpc" or address.tls:
            raise ConfigError(f"a replay goes over plain gRPC only, not to {url}; write grpc://HOST:8001")
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address.host, options=options))
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
        except asyncio.TimeoutError:
            raise UnreachableError(f"{url} does not answer") from None
        calls[url] = channel.unary_unary(METHOD)
    return calls


async def _warm_up(plan: _Plan, calls: Sequence[Call]) -> None:
    """Send the requests of the warm-up, one at a time to each target. Raises the error of a request that fails."""

    async def warm(target: int) -> None:
        for number, message, tenant in plan.warm_up:
            if number == target:
                header = ((TENANT_HEADER, tenant),)
                try:
                    await calls[target](plan.heads[target] + message, timeout=LOST_S, metadata=header)
                except grpc.RpcError as error:
                    url, model = plan.targets[target].url, plan.targets[target].model
                    raise UnreachableError(f"{url}: model {model} failed in the warm-up: {error.details()}") from None

    await asyncio.gather(*(warm(target) for target in range(len(plan.targets))))
