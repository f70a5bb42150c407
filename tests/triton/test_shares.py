"""Shares on a real server: a flood keeps to its own, a weight is worth what it says, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hplm_client import AsyncClient
from hplm_loadtest.open_loop import closed_loop, open_loop
from hplm_loadtest.plan import Plan, Requests

from hplm.triton.server import TritonServer, free_ports
from tests import tiny

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(200)]
TEXT = tiny.sentences(1, words=(20, 21))[0]
COUNTS = {"alpha": 180, "beta": 90, "gamma": 60}
# A client has at most a hundred connections.
OF_A_CLIENT = 50
Seconds = npt.NDArray[np.float64]


def over_grpc(url: str, names: list[str]) -> tuple[Seconds, Seconds]:
    """When each request was sent and when it was answered, all sent within a third of a second."""
    requests = Requests(names, [TEXT] * len(names), np.full(len(names), np.nan))
    run = open_loop(url, Plan(np.linspace(0.0, 0.3, len(names)), requests, 0.3), timeout_s=150.0)
    assert run.kinds == {"answered": len(names)}
    return run.sent_s, run.done_s


def over_http(url: str, names: list[str]) -> tuple[Seconds, Seconds]:
    """As `over_grpc`."""
    sent_s, done_s = np.zeros(len(names)), np.zeros(len(names))

    async def ask_all() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(url, timeout_s=150.0))
                for _ in range(0, len(names), OF_A_CLIENT)
            ]

            async def ask(index: int) -> None:
                sent_s[index] = time.monotonic()
                await clients[index // OF_A_CLIENT].predict(names[index], TEXT)
                done_s[index] = time.monotonic()

            await asyncio.gather(*map(ask, range(len(names))))

    asyncio.run(ask_all())
    return sent_s, done_s


def test_a_flood_gets_no_more_than_its_share_and_a_weight_of_three_gets_three_times_as_much(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"tenant_weights": {"beta": 3}}
    models = tiny.make_repository(
        tmp_path,
        # Slow enough that all wait at once: of a batch of ten beta may have six, the others two each.
        shape=tiny.config(hidden_size=512, upper_layers=12),
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
        check_shares(names, *over_grpc(server.ports.grpc_url, names))
        check_shares(names, *over_http(server.ports.http_url, names))


def check_shares(names: list[str], sent_s: Seconds, done_s: Seconds) -> None:
    done = {name: np.sort(done_s[np.array(names) == name]) for name in COUNTS}
    # All have come, and of all some are still there.
    first_s, last_s = done["beta"][24], done["beta"][78]
    assert float(np.nanmax(sent_s)) < first_s
    assert last_s < min(own[-1] for own in done.values())
    answered = {name: int(np.count_nonzero((own > first_s) & (own <= last_s))) for name, own in done.items()}
    print(answered)
    # First come, first served would answer two of alpha for one of beta.
    assert 2 < answered["beta"] / answered["gamma"] < 4.5
    assert answered["alpha"] < 1.5 * answered["gamma"]
