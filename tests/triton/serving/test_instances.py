"""A real server with two processes of each of its models: the same answers, counted and told together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hplm_client import AsyncClient
from hplm_client.prediction import Prediction
from hplm_loadtest.scenarios.server_metrics import metric_value

from hplm.engine import reference
from hplm.metering.recent_counts import DAY, read_recent
from hplm.runtime.process import SHARED_MEMORY, backlogs_of
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.messages import TOLERANCE, looked_up
from tests.waiting import until

pytestmark = pytest.mark.triton
TEXTS = tiny.sentences(6)
ASKED = 240


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What comes from tables alone is the same whoever is looked up beside it.
    settings = {"miss": "backoff"}
    return tiny.make_repository(
        tmp_path_factory.mktemp("two"), plot_settings=settings, instances=2, look_up_instances=2
    )


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[TritonServer]:
    with TritonServer(models, free_ports(), log=models.parent / "triton.log") as running:
        running.wait_ready()
        yield running


def test_both_answer_as_the_reference_and_are_counted_together(models: Path, server: TritonServer) -> None:
    store, base = tiny.opened(models.parent)
    upper = base.load_upper()
    encoded = base.load_text_encoder().encode(TEXTS)
    states = looked_up(models, TEXTS)
    given = {text: (state, one.tokens) for text, state, one in zip(TEXTS, states, encoded, strict=True)}
    members = {name: tiny.load_tenant(store, base, name) for name in tiny.TASKS}
    rng = np.random.default_rng(0)
    pairs = [(str(rng.choice(list(members))), str(rng.choice(TEXTS))) for _ in range(ASKED)]

    async def ask() -> list[Prediction]:
        async with AsyncClient(server.ports.http_url) as http, AsyncClient(server.ports.grpc_url) as grpc:
            by_turns = ((http, grpc)[number % 2] for number in range(ASKED))
            return await asyncio.gather(
                *(client.predict(*pair, logits=True) for client, pair in zip(by_turns, pairs, strict=True))
            )

    for (name, text), answer in zip(pairs, asyncio.run(ask()), strict=True):
        assert answer.logits is not None
        state, tokens = given[text]
        wanted = reference.answered(upper, state, members[name], tokens)
        np.testing.assert_allclose(answer.logits, wanted, atol=TOLERANCE, rtol=0, err_msg=name)
    for family, role in [("hplm_plot_events_total", "hbert_plot"), ("hplm_upper_events_total", "hbert_upper")]:
        until(lambda family=family: metric_value(server, f'{family}{{event="ok"}}') == ASKED)
        each = [
            metric_value(server, f'{family}{{event="ok",model_instance="{role}_0_{number}"}}') for number in range(2)
        ]
        assert min(each) > 0
        assert sum(each) == ASKED


def test_each_tells_what_waits_and_leaves_nothing_behind(models: Path) -> None:
    with TritonServer(models, free_ports(), log=models.parent / "other.log") as running:
        running.wait_ready()
        pattern = f"{backlogs_of(running.process.pid)}*.json"
        until(lambda: len(list(SHARED_MEMORY.glob(pattern))) == 2)
    assert not list(SHARED_MEMORY.glob(pattern))


def test_all_processes_count_for_the_same_tenant(models: Path, server: TritonServer) -> None:
    store = Store(models.parent / "store")
    before = read_recent(store.root, "", "beta")[DAY]

    async def ask() -> None:
        async with AsyncClient(server.ports.grpc_url) as client:
            await asyncio.gather(*(client.predict("beta", text) for text in TEXTS * 20))

    asyncio.run(ask())
    wanted = before.ok + 20 * len(TEXTS)
    until(lambda: read_recent(store.root, "", "beta")[DAY].ok == wanted)
    family = 'hplm_tenant_texts_total{tenant="beta",outcome="ok"}'
    until(lambda: metric_value(server, family) >= 20 * len(TEXTS))
