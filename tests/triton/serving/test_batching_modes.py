"""A real server in each of the batching modes that stand beside `packed`, which all other tests serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hplm_client import AsyncClient
from hplm_client.prediction import Prediction
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, benchmark_server
from hplm_loadtest.scenarios.server_metrics import metric_value

from hplm.adapters.tenant import Tenant
from hplm.engine import reference
from hplm.models import base as bases
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.messages import TOLERANCE, served_hidden
from tests.waiting import until

pytestmark = pytest.mark.triton
# From one word to more than the base reads.
TEXTS = [" ".join(np.random.default_rng(n).choice(tiny.WORDS, n)) for n in (*range(1, 31, 2), 34, 38, 45)]
IN_FLIGHT = 96
# Longer than the longest text, so that a row has room for several.
ROW_TOKENS = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "naive": {},
    "turbo": {},
    "concat": {},
    "slotted": {"policy": "slotted_das"},
}
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fleet:
    """Model folders over a base, and its tenants."""

    models: Path
    base: bases.Base
    members: list[Tenant]

    def wanted(self, server: TritonServer) -> dict[tuple[str, str], Logits]:
        """What each tenant must answer to each text: the slow reference's logits, over what the second stage is handed."""
        upper = self.base.load_upper()
        encoded = self.base.load_text_encoder().encode(TEXTS)
        states = [
            (text, served_hidden(server, "alpha", text), one.tokens) for text, one in zip(TEXTS, encoded, strict=True)
        ]
        return {
            (member.card.name, text): reference.answered(upper, state, member, tokens)
            for member in self.members
            for text, state, tokens in states
        }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """More tenants than slots, every third a tagging."""
    folder = tmp_path_factory.mktemp("modes")
    # What comes from tables alone is the same whoever is looked up beside it.
    models = tiny.make_repository(folder, num_slots=9, plot_settings={"miss": "backoff"})
    store, base = tiny.opened(folder)
    members = [tiny.load_tenant(store, base, name) for name in tiny.TASKS]
    for number, like in enumerate(("tagger", "beta", "gamma", "tagger", "alpha", "beta", "tagger", "gamma")):
        members.append(tiny.make_tenant(store, base, f"more{number}", 20 + number, like=like))
    return Fleet(models, base, members)


@pytest.fixture(scope="module", params=SETTINGS)
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[TritonServer]:
    """A server in one of the modes; what comes to its second stage comes together."""
    upper = {"batching": request.param, "row_tokens": ROW_TOKENS, "device": "cpu", **SETTINGS[request.param]}
    log = f"{request.param}.log"
    with benchmark_server(fleet.models, StageSettings({"batch_every_ms": 40}, upper), log=log) as running:
        yield running


async def ask(server: TritonServer, pairs: Sequence[tuple[str, str]]) -> list[Prediction]:
    """Answers in order, by turns over HTTP and gRPC, IN_FLIGHT under way at once."""
    room = asyncio.Semaphore(IN_FLIGHT)
    async with AsyncClient(server.ports.http_url) as http, AsyncClient(server.ports.grpc_url) as grpc:

        async def one(client: AsyncClient, tenant: str, text: str) -> Prediction:
            async with room:
                return await client.predict(tenant, text, logits=True)

        return await asyncio.gather(*(one((http, grpc)[i % 2], *pair) for i, pair in enumerate(pairs)))


def counted(server: TritonServer, event: str) -> float:
    return metric_value(server, f'hplm_upper_events_total{{event="{event}"}}')


def test_texts_of_all_lengths_and_tenants_batched_together_are_answered_as_by_the_reference(
    fleet: Fleet, server: TritonServer
) -> None:
    wanted = fleet.wanted(server)
    pairs = [list(wanted)[i] for i in np.random.default_rng(0).permutation(len(wanted))]
    answers = asyncio.run(ask(server, pairs))
    for pair, answer in zip(pairs, answers, strict=True):
        assert answer.logits is not None
        np.testing.assert_allclose(answer.logits, wanted[pair], atol=TOLERANCE, rtol=0, err_msg=str(pair))
    until(lambda: counted(server, "ok") == len(pairs))
    assert counted(server, "batches") < len(pairs) / 2
    # In this mode, for `packed` fills each batch up to a multiple of eight and no more.
    assert counted(server, "computed_tokens") > counted(server, "tokens") + 8 * counted(server, "batches")
