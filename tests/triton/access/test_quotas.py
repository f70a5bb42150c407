"""Quotas on a real server with two look-up processes, directly and through the model that routes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from hplm_client import AsyncClient, Client
from hplm_loadtest.scenarios.server_metrics import metric_value
from typer.testing import CliRunner

from hplm.access.quota_keeper import QuotaKeeper
from hplm.core import wire
from hplm.errors import QuotaError
from hplm.metering.recent_counts import DAY, Counts, read_recent
from hplm.quotas.limits import Limits
from hplm.quotas.token_bucket import DEBT_S, rate_of
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_cli import make_app
from tests import tiny
from tests.triton.access.making import Place, answered, ask, texts
from tests.waiting import until

pytestmark = pytest.mark.triton
TENANT, OTHER = "alpha", "beta"
RACERS = 64
RATE = 40.0


class Served:
    """A server with its quotas, and the store."""

    def __init__(self, server: TritonServer, keeper: QuotaKeeper, store: Store) -> None:
        self.server, self.keeper, self.store = server, keeper, store

    @contextmanager
    def limited(self, tenant: str, limits: Limits) -> Iterator[None]:
        """Limit a tenant as long as the block lasts."""
        with closing(Registry.open(self.store)) as registry:
            registry.set_limits(tenant, limits)
            time.sleep(0.6)  # two polls of each stage
            try:
                yield
            finally:
                registry.set_limits(tenant, Limits())
                time.sleep(0.6)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("quotas")
    models = tiny.make_repository(folder, manager_settings={}, route=True, look_up_instances=2)
    store = Store(folder / "store")
    keeper = QuotaKeeper(store)
    keeper.start()
    try:
        with TritonServer(
            models, free_ports(), log=models.parent / "triton.log", environment=keeper.environment
        ) as running:
            running.wait_ready()
            yield Served(running, keeper, store)
    finally:
        keeper.stop()


async def race(
    url: str, model: str, tenant: str, seconds: float, watch: Callable[[], object] = lambda: None
) -> tuple[int, list[QuotaError], float]:
    """Ask from many tasks at once, and call `watch` often. Return the answers, the refusals, and how long it took."""
    refused: list[QuotaError] = []
    answered = 0

    async def ask(client: AsyncClient) -> None:
        nonlocal answered
        while time.monotonic() - began_s < seconds:
            watch()
            try:
                await client.predict(tenant, "the red cat")
                answered += 1
            except QuotaError as error:
                refused.append(error)
                await asyncio.sleep(0.01)

    async with AsyncClient(url, model=model) as client:
        began_s = time.monotonic()
        await asyncio.gather(*(ask(client) for _ in range(RACERS)))
    return answered, refused, time.monotonic() - began_s


@pytest.mark.parametrize("model", [wire.MODEL, wire.ROUTER, wire.CASCADE])
def test_racing_clients_get_no_more_than_the_quota(served: Served, model: str) -> None:
    with served.limited(TENANT, Limits(requests_per_s=RATE)):
        answered, refused, took_s = asyncio.run(race(served.server.ports.grpc_url, model, TENANT, 2.5))
    assert answered <= RATE * took_s + rate_of(RATE).capacity
    assert answered >= 0.5 * RATE * 2.5
    assert refused
    assert all(error.wait_s is not None and 0 < error.wait_s <= 1.0 for error in refused)


def test_another_tenant_is_not_limited(served: Served) -> None:
    with served.limited(TENANT, Limits(requests_per_s=1.0)):
        answered, refused, _ = asyncio.run(race(served.server.ports.grpc_url, wire.ROUTER, OTHER, 0.5))
    assert answered > 5
    assert not refused


def test_tokens_are_charged_as_tokenised_whichever_model_is_called(served: Served) -> None:
    # Bytes tell of 3 tokens more or less than there are; the corrections make up for it.
    with served.limited(TENANT, Limits(tokens_per_s=200.0)):
        for model in (wire.MODEL, wire.ROUTER):
            before = metric_value(served.server, 'hplm_plot_events_total{event="tokens"}')
            _, refused, took_s = asyncio.run(race(served.server.ports.grpc_url, model, TENANT, 2.0))
            assert refused
            time.sleep(1.5)  # until the counter is on the page
            tokens = metric_value(served.server, 'hplm_plot_events_total{event="tokens"}') - before
            # Requests under way at the same time may each be charged too little until they are tokenised.
            assert 100 < tokens <= 200.0 * took_s + 200.0


def test_requests_at_the_same_time_are_limited_and_end(served: Served) -> None:
    for model in (wire.MODEL, wire.ROUTER):
        with served.limited(TENANT, Limits(concurrent=2)):
            most = 0

            def watch() -> None:
                nonlocal most
                most = max(most, served.keeper._file.under_way(TENANT, time.monotonic()))

            answered, refused, _ = asyncio.run(race(served.server.ports.grpc_url, model, TENANT, 1.0, watch))
            assert answered > 2, refused[:3]
            # Also those on their way from the look-up stage to the encode stage.
            assert most <= 2
            assert any("concurrent" in str(error) for error in refused)
            until(lambda: served.keeper._file.under_way(TENANT, time.monotonic()) == 0)


def test_a_client_that_calls_the_encode_stage_itself_is_limited_too(served: Served) -> None:
    # Nobody has used this tenant's quota.
    with served.limited(OTHER, Limits(requests_per_s=0.1)):
        place = Place(served.server, served.store, served.store.root.parent / "models")
        inputs = texts([OTHER])
        outputs = answered(ask(place, "grpc", f"{wire.MODEL}_plot", inputs))
        del outputs[wire.TRUNCATED]
        of_encoder = {**outputs, wire.TENANT: inputs[wire.TENANT]}
        # The look-up stage has charged the first request.
        answered(ask(place, "grpc", f"{wire.MODEL}_upper", of_encoder))
        assert isinstance(ask(place, "http", f"{wire.MODEL}_upper", of_encoder), QuotaError)


def test_refusals_are_counted_for_the_tenant(served: Served) -> None:
    with served.limited(TENANT, Limits(requests_per_s=1.0)):
        _, refused, _ = asyncio.run(race(served.server.ports.grpc_url, wire.MODEL, TENANT, 0.2))
    assert refused
    family = f'hplm_tenant_texts_total{{stage="plot",tenant="{TENANT}",outcome="quota"}}'
    until(lambda: metric_value(served.server, family) >= len(refused), 20)


def test_invented_names_in_a_refused_request_are_not_counted_and_spoil_no_counts(served: Served) -> None:
    place = Place(served.server, served.store, served.store.root.parent / "models")

    def refused() -> int:
        return read_recent(served.store.root, served.store.registry, TENANT)[DAY].refused

    began = refused()
    with served.limited(TENANT, Limits(requests_per_s=0.1)):
        until(lambda: isinstance(ask(place, "grpc", wire.MODEL, texts([TENANT])), QuotaError))
        until(lambda: refused() > began, 20)
        for invented in ("n" * 100, "invented"):
            before = refused()
            assert isinstance(ask(place, "grpc", wire.MODEL, texts([TENANT, invented])), QuotaError)
            until(lambda before=before: refused() > before, 20)
    assert read_recent(served.store.root, served.store.registry, "invented")[DAY] == Counts()


def run_limit(served: Served, *arguments: str) -> str:
    """Run `hplm tenant limit` and return its output."""
    env = {"HPLM_URL": served.server.ports.grpc_url}
    done = CliRunner().invoke(make_app("tenant"), ["tenant", "limit", *arguments], env=env)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize("model", [wire.MODEL, wire.ROUTER])
def test_a_huge_batch_refuses_for_a_minute_at_most_and_not_at_all_once_the_limit_is_set_again(
    served: Served, model: str
) -> None:
    batch = [(TENANT, "the red cat sings " * 60)] * 64
    run_limit(served, TENANT, "--tokens-per-second", "5")
    try:
        time.sleep(0.6)  # two polls of each stage
        with Client(served.server.ports.grpc_url, model=model) as client:
            assert len(client.predict_batch(batch)) == len(batch)
            with pytest.raises(QuotaError) as refused:
                client.predict(TENANT, "the red cat")
            assert refused.value.wait_s is not None
            # The debt of the batch is far beyond the bound.
            assert DEBT_S - 10 < refused.value.wait_s <= DEBT_S + 1 / 5
            run_limit(served, TENANT, "--clear")
            run_limit(served, TENANT, "--tokens-per-second", "5")
            time.sleep(0.6)
            client.predict(TENANT, "the red cat")
    finally:
        run_limit(served, TENANT, "--clear")
        time.sleep(0.6)


def test_the_command_sets_shows_and_removes_limits(served: Served) -> None:
    def run(*arguments: str) -> str:
        return run_limit(served, *arguments)

    run("--default", "--concurrent", "9")
    run(TENANT, "--requests-per-second", "5", "--tokens-per-second", "300")
    shown = json.loads(run(TENANT, "--json"))
    assert shown["limits"] == {"requests_per_s": 5.0, "tokens_per_s": 300.0, "concurrent": None}
    assert shown["in_force"] == {"requests_per_s": 5.0, "tokens_per_s": 300.0, "concurrent": 9}
    run(TENANT, "--clear")
    run("--default", "--clear")
    assert "no limits" in run(TENANT)
