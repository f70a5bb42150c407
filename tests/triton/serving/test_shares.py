"""Shares on a real server: a flood keeps to its own, a weight is worth what it says, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hplm_client import AsyncClient, Client
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop_here
from hplm_loadtest.scenarios.server_metrics import metric_value
from hplm_loadtest.workloads.load_plan import LoadPlan, Requests

from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.waiting import until

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(600)]
TEXT = tiny.sentences(1, words=(20, 21))[0]
# Takes the upper layers longer than all others need to come, on a quick machine and on a slow one.
LONG_TEXT = tiny.sentences(1, words=(2000, 2001))[0]
COUNTS = {"alpha": 180, "beta": 90, "gamma": 60}
# A client has at most a hundred requests under way.
OF_A_CLIENT = 50
OF_A_BATCH = 10
# At once, but it does not say that they were looked up; and up to a second later.
CAME = 'nv_inference_request_success{model="hbert_plot"}'
LOOKED_UP = 'hplm_plot_events_total{event="ok"}'
Seconds = npt.NDArray[np.float64]


def over_grpc(url: str, names: list[str]) -> Seconds:
    """When each request was answered, all sent within a third of a second."""
    requests = Requests(names, [TEXT] * len(names), np.full(len(names), np.nan))
    # Not in a process of its own: between the last answer and now that would end.
    run = open_loop_here(url, LoadPlan(np.linspace(0.0, 0.3, len(names)), requests, 0.3), 150.0)
    now_s = time.monotonic()
    assert run.kinds == {"answered": len(names)}
    return now_s - run.done_s.max() + run.done_s


def over_http(url: str, names: list[str]) -> Seconds:
    """As `over_grpc`, over connections that are open already."""
    done_s = np.zeros(len(names))

    async def ask_all() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(url, timeout_s=150.0))
                for _ in range(0, len(names), OF_A_CLIENT)
            ]

            await asyncio.gather(*(client.is_ready() for client in clients for _ in range(OF_A_CLIENT)))

            async def ask(index: int) -> None:
                await clients[index // OF_A_CLIENT].predict(names[index], TEXT)
                done_s[index] = time.monotonic()

            await asyncio.gather(*map(ask, range(len(names))))

    asyncio.run(ask_all())
    return done_s


def wait_for_looked_up(server: TritonServer, count: int) -> None:
    until(lambda: metric_value(server, LOOKED_UP) == count)


def all_wait_s(server: TritonServer, count: int, long_request: Future[Any]) -> float:
    """When `count` requests had come and the one that kept the upper layers busy meanwhile was answered."""
    long_request.result()
    until(lambda: metric_value(server, CAME) >= count)
    return time.monotonic()


def test_a_flood_gets_no_more_than_its_share_and_a_weight_of_three_gets_three_times_as_much(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"tenant_weights": {"beta": 3}}
    models = tiny.make_repository(
        tmp_path,
        # Of a batch of ten beta may have six, the others two each.
        shape=tiny.config(hidden_size=512, upper_layers=24, max_tokens=2048),
        num_slots=8,
        plot_settings={"default_deadline_s": 150.0, **weights},
        upper_settings={
            "batch_requests": OF_A_BATCH,
            "device": "cpu",
            "num_threads": 1,
            "default_deadline_s": 150.0,
            "starve_after_s": 150.0,
            **weights,
        },
    )
    rng = np.random.default_rng(0)
    names = rng.permutation([name for name, count in COUNTS.items() for _ in range(count)]).tolist()
    with (
        TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server,
        Client(server.ports.grpc_url, timeout_s=150.0) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait_ready()
        warm_up = Requests(names[:20], [TEXT] * 20, np.full(20, np.nan))
        closed_loop(server.ports.grpc_url, warm_up, 4)
        count = len(warm_up)
        for ask, url in ((over_grpc, server.ports.grpc_url), (over_http, server.ports.http_url)):
            wait_for_looked_up(server, count)
            long_request = pool.submit(client.predict, "tagger", LONG_TEXT)
            wait_for_looked_up(server, count + 1)
            count += 1 + len(names)
            from_s = pool.submit(all_wait_s, server, count, long_request)
            check_shares(names, ask(url, names), from_s.result())


def check_shares(names: list[str], done_s: Seconds, from_s: float) -> None:
    """From when all wait until there are some of each still."""
    done = {name: np.sort(done_s[np.array(names) == name]) for name in COUNTS}
    until_s = min(own[-OF_A_BATCH] for own in done.values())
    answered = {name: int(np.count_nonzero((own > from_s) & (own <= until_s))) for name, own in done.items()}
    print(answered)
    # Else the others took longer to come than the long request to compute, and the figures below mean little.
    assert sum(answered.values()) >= 6 * OF_A_BATCH
    # First come, first served would answer two of alpha for one of beta.
    assert 2 < answered["beta"] / answered["gamma"] < 4.5
    assert answered["alpha"] < 1.5 * answered["gamma"]
