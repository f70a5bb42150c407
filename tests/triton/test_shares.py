"""Shares on a real server: a flood keeps to its own, a weight is worth what it says, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hplm_client import AsyncClient
from hplm_loadtest.metrics import metric
from hplm_loadtest.open_loop import closed_loop, open_loop
from hplm_loadtest.plan import Plan, Requests

from hplm.triton.server import TritonServer, free_ports
from tests import tiny

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(200)]
TEXT = tiny.sentences(1, words=(20, 21))[0]
COUNTS = {"alpha": 180, "beta": 90, "gamma": 60}
# A client has at most a hundred requests under way.
OF_A_CLIENT = 50
LOOKED_UP = 'nv_inference_request_success{model="hbert_plot"}'
Seconds = npt.NDArray[np.float64]


def over_grpc(url: str, names: list[str]) -> Seconds:
    """When each request was answered, all sent within a third of a second."""
    requests = Requests(names, [TEXT] * len(names), np.full(len(names), np.nan))
    run = open_loop(url, Plan(np.linspace(0.0, 0.3, len(names)), requests, 0.3), timeout_s=150.0)
    assert run.kinds == {"answered": len(names)}
    return time.monotonic() - run.done_s.max() + run.done_s


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


def all_came_s(server: TritonServer, before: float) -> float:
    """When all requests beside `before` were looked up, and so wait for the upper layers or were answered."""
    for _ in range(600):
        if metric(server, LOOKED_UP) - before >= sum(COUNTS.values()):
            return time.monotonic()
        time.sleep(0.1)
    raise TimeoutError("not all requests came within a minute")


def test_a_flood_gets_no_more_than_its_share_and_a_weight_of_three_gets_three_times_as_much(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"tenant_weights": {"beta": 3}}
    models = tiny.make_repository(
        tmp_path,
        # Slow enough that all wait at once: of a batch of ten beta may have six, the others two each.
        shape=tiny.config(hidden_size=512, upper_layers=24),
        num_slots=8,
        plot_settings={"default_deadline_s": 150.0, **weights},
        upper_settings={
            "batch_requests": 10,
            "device": "cpu",
            "num_threads": 1,
            "default_deadline_s": 150.0,
            "starve_after_s": 150.0,
            **weights,
        },
    )
    rng = np.random.default_rng(0)
    names = rng.permutation([name for name, count in COUNTS.items() for _ in range(count)]).tolist()
    with TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        warm_up = Requests(names[:20], [TEXT] * 20, np.full(20, np.nan))
        closed_loop(server.ports.grpc_url, warm_up, 4)
        for ask, url in ((over_grpc, server.ports.grpc_url), (over_http, server.ports.http_url)):
            before = metric(server, LOOKED_UP)
            with ThreadPoolExecutor(1) as pool:
                came_s = pool.submit(all_came_s, server, before)
                check_shares(names, ask(url, names), came_s.result())


def check_shares(names: list[str], done_s: Seconds, came_s: float) -> None:
    done = {name: np.sort(done_s[np.array(names) == name]) for name in COUNTS}
    # From when all have come until there are some of each still.
    last_s = done["beta"][78]
    assert np.count_nonzero(done["beta"] < came_s) < 40
    assert last_s < min(own[-1] for own in done.values())
    answered = {name: int(np.count_nonzero((own > came_s) & (own <= last_s))) for name, own in done.items()}
    print(answered)
    # First come, first served would answer two of alpha for one of beta.
    assert 2 < answered["beta"] / answered["gamma"] < 4.5
    assert answered["alpha"] < 1.5 * answered["gamma"]
