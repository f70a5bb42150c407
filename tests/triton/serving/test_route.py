"""The model `hplm` on a real Triton: a tenant of any base is answered as by its base's own model, errors included."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hplm_builder.export.model_folders import export
from hplm_builder.tables.plot_tables import build_plot
from hplm_client import AsyncClient, Client
from hplm_loadtest.scenarios.infer_messages import METHOD
from hplm_loadtest.scenarios.server_metrics import metric_value
from rich.progress import Progress
from tritonclient.utils import InferenceServerException

from hplm import errors
from hplm.core import wire
from hplm.core.roles import base_roles, names, route_role, settings_path
from hplm.core.settings import EncodeSettings, LookupSettings
from hplm.errors import HplmError
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import StubKeeper
from tests import tiny
from tests.messages import TOLERANCE, ask_all, message, read
from tests.triton.serving.test_server import as_bytes
from tests.waiting import until
from tests.watching import stubs_of

pytestmark = pytest.mark.triton

# The tenants of each model: those of the second base have the tasks of the first base's, and other weights.
TENANTS = {
    "hbert": {name: name for name in (*tiny.TASKS, *tiny.OTHER_TASKS)},
    "small": {f"small-{name}": name for name in (*tiny.TASKS, *tiny.OTHER_TASKS)},
}
PAIRS = {name for name, (_, _, texts) in tiny.OTHER_TASKS.items() if texts == 2}
SINGLE = [
    (model, tenant) for model, tenants in TENANTS.items() for tenant, like in tenants.items() if like not in PAIRS
]
TEXTS = tiny.sentences(12, seed=5, words=(1, 12))
UNDER_WAY = 2000
BAD: list[tuple[list[bytes], bytes]] = [
    ([b""], b"alpha"),
    ([b"caf\xe9"], b"alpha"),
    ([b"x" * 100_000], b"alpha"),
    ([b"hello"], b"nobody"),
    ([b"hello"], b"../alpha"),
    ([b"hello"], b""),
    ([b"the cat", b"the dog"], b"alpha"),
    ([b"the cat"], b"follows"),
    ([b"one", b"two", b"three"], b"follows"),
]


def two_bases(folder: Path) -> Path:
    """A store with two bases, and a repository with a model of each and the model that routes."""
    store, models = Store(folder / "store"), folder / "models"
    bases = {
        "hbert": (tiny.make_base(store, tiny.config(), seed=0), tiny.PLOT),
        "small": (tiny.make_base(store, tiny.config(name="small", hidden_size=32, upper_layers=1), seed=1), "roots"),
    }
    for seed, (model, (base, root)) in enumerate(bases.items()):
        build_plot(store, base.config.name, root, tiny.sentences(30), 30.0, Progress(disable=True), dtype="float32")
        for number, (tenant, like) in enumerate(TENANTS[model].items()):
            tiny.make_tenant(store, base, tenant, 100 * seed + number, like, domain=root)
        look_up = LookupSettings(store="", base=base.config.name, table=root, dtype="float32")
        encode = EncodeSettings(store="", base=base.config.name, dtype="float32")
        export(store, models, look_up, encode, name=model)
    return models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_bases(tmp_path_factory.mktemp("route"))


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[TritonServer]:
    with TritonServer(models, free_ports(), log=models.parent / "triton.log") as running:
        running.wait_ready()
        yield running


def url(server: TritonServer, protocol: str) -> str:
    return server.ports.grpc_url if protocol == "grpc" else server.ports.http_url


def triton_of(server: TritonServer, protocol: str) -> tuple[Any, Any]:
    module = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    port = server.ports.grpc if protocol == "grpc" else server.ports.http
    return module, module.InferenceServerClient(
        f"127.0.0.1:{port}", **({} if protocol == "grpc" else {"concurrency": 4})
    )


def infer(raw: tuple[Any, Any], model: str, texts: Any, tenants: Any, **options: Any) -> Any:
    module, triton = raw
    inputs = []
    for name, value in ((wire.TEXT, texts), (wire.TENANT, tenants)):
        inputs.append(module.InferInput(name, list(value.shape), "BYTES"))
        inputs[-1].set_data_from_numpy(value)
    return triton.infer(model, inputs, **options)


def outputs_of(result: Any) -> dict[str, Any]:
    names = (wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, wire.LOGITS)
    return {name: result.as_numpy(name) for name in names}


def assert_same_outputs(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        if value.dtype == np.float32:
            np.testing.assert_allclose(found[name], value, atol=TOLERANCE, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_tenant_is_answered_as_by_its_bases_own_model(server: TritonServer, protocol: str) -> None:
    raw = triton_of(server, protocol)
    with closing(raw[1]):
        for model, tenants in TENANTS.items():
            for tenant, like in tenants.items():
                texts = [b"Anna sings in Paris", b"the red cat"][: 2 if like in PAIRS else 1]
                text, name = np.array([texts], dtype=np.object_), as_bytes(tenant.encode())
                found = outputs_of(infer(raw, "hplm", text, name))
                assert_same_outputs(found, outputs_of(infer(raw, model, text, name)))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_may_have_texts_for_tenants_of_several_bases(server: TritonServer, protocol: str) -> None:
    requests = [(tenant, TEXTS[i % len(TEXTS)]) for i, (_, tenant) in enumerate(SINGLE)]
    with Client(url(server, protocol), model="hplm") as client, Client(url(server, protocol), model="small") as small:
        together = client.predict_batch(requests, logits=True)
        for request, found in zip(requests, together, strict=True):
            wanted = client.predict(*request, logits=True)
            assert [span.label for span in found.spans] == [span.label for span in wanted.spans]
            np.testing.assert_allclose(found.logits, wanted.logits, atol=TOLERANCE)
        with pytest.raises(errors.UnknownTenantError, match="text 1 of"):
            small.predict_batch(requests)


def test_two_thousand_requests_under_way_over_two_bases_have_no_crossed_answers(server: TritonServer) -> None:
    kinds = [(model, tenant, text) for model, tenant in SINGLE for text in TEXTS]
    own = ask_all(server, [message(tenant, text, model) for model, tenant, text in kinds], 64)
    order = np.random.default_rng(0).integers(0, len(kinds), 2 * UNDER_WAY)
    routed = ask_all(server, [message(*kinds[i][1:], "hplm") for i in order], UNDER_WAY, channels=16)
    wanted = [read(answer) for answer in own]
    for i, answer in zip(order, routed, strict=True):
        label, logits = read(answer)
        assert label == wanted[i][0], kinds[i]
        np.testing.assert_allclose(logits, wanted[i][1], atol=TOLERANCE)
    calls = metric_value(server, 'hplm_route_events_total{event="calls"}')
    assert calls < metric_value(server, 'hplm_route_events_total{event="ok"}')


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_error_has_the_code_the_words_and_the_status_of_the_bases_own_model(
    server: TritonServer, protocol: str
) -> None:
    raw = triton_of(server, protocol)
    with closing(raw[1]):
        for texts, tenant in BAD:
            found = []
            for model in ("hplm", "hbert"):
                with pytest.raises(InferenceServerException) as caught:
                    infer(raw, model, np.array([texts], dtype=np.object_), as_bytes(tenant))
                error = errors.from_wire(str(caught.value.message()))
                assert error is not None
                found.append((error.wire(), caught.value.status()))
            assert found[0] == found[1]


def test_bad_texts_among_many_get_their_own_errors_and_the_others_their_answers(server: TritonServer) -> None:
    bad = [(tenant, text) for tenant, text in (("alpha", ""), ("nobody", "hello"), ("small-alpha", "x" * 100_000))]
    requests = [
        bad[i // 4 % 3] if i % 4 == 0 else (SINGLE[i % len(SINGLE)][1], TEXTS[i % len(TEXTS)]) for i in range(800)
    ]
    wanted: dict[tuple[str, str], str] = {}
    with Client(server.ports.grpc_url, model="hbert") as hbert, Client(server.ports.grpc_url, model="small") as small:
        for tenant, text in bad:
            with pytest.raises(HplmError) as caught:
                (small if tenant.startswith("small") else hbert).predict(tenant, text)
            wanted[tenant, text] = caught.value.wire()
    with Client(server.ports.grpc_url, concurrency=400, model="hplm") as client:
        answers = list(client.predict_many(requests, on_error="yield"))
    for request, answer in zip(requests, answers, strict=True):
        found = answer.wire() if isinstance(answer, HplmError) else "answered"
        assert found == wanted.get(request, "answered")


def test_a_deadline_that_cannot_be_met_is_refused_and_one_that_can_is_met(server: TritonServer) -> None:
    with Client(server.ports.grpc_url, model="hplm") as client:
        with pytest.raises(errors.DeadlineError):
            client.predict("small-alpha", "the red cat", deadline_s=1e-6)
        deadlines_s = [None, 30.0, 5.0, 60.0, 29.0]
        for deadline_s in deadlines_s:
            assert client.predict("small-alpha", "the red cat", deadline_s=deadline_s).label in ("yes", "no")


def test_requests_whose_clients_have_gone_leave_the_server_sound(server: TritonServer) -> None:
    messages = [message(tenant, TEXTS[i % len(TEXTS)], "hplm") for i, (_, tenant) in enumerate(SINGLE * 20)]

    async def run() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports.grpc}") as channel:
            call = channel.unary_unary(METHOD)
            calls = [call(one, timeout=60) for one in messages]
            await calls[0]
            # One by one while answers leave, of which Triton 24.10 may not be asked any more.
            for one in calls[1::2]:
                one.cancel()
            await asyncio.gather(*calls[::2])

    asyncio.run(run())
    with Client(server.ports.grpc_url, model="hplm") as client:
        assert client.predict("alpha", "the red cat").label in ("yes", "no")
    until(lambda: metric_value(server, "hplm_route_waiting") == 0)


def test_a_client_calls_a_model_for_all_bases_if_the_server_has_it_and_no_model_is_named(server: TritonServer) -> None:
    async def run() -> str:
        async with AsyncClient(server.ports.http_url) as client:
            assert await client.is_ready()
            return (await client.predict("small-alpha", "the red cat")).label

    assert asyncio.run(run()) in ("yes", "no")
    for protocol in ("http", "grpc"):
        with Client(url(server, protocol)) as client, Client(url(server, protocol), model="hbert") as hbert:
            assert client.is_ready()
            assert client.predict("small-alpha", "the red cat").label in ("yes", "no")
            assert len(list(client.predict_many([("alpha", "red"), ("small-alpha", "red")]))) == 2
            with pytest.raises(errors.UnknownTenantError):
                hbert.predict("small-alpha", "the red cat")


def test_the_model_that_routes_loads_no_torch(server: TritonServer) -> None:
    maps = Path(f"/proc/{stubs_of(server)['hplm']}/maps").read_text()
    assert "numpy" in maps
    assert "libtorch" not in maps


def first_answers(client: Client, tenants: Sequence[str]) -> list[str]:
    found = client.predict_many([(tenant, "the red cat") for tenant in tenants], on_error="yield")
    return [answer.code if isinstance(answer, HplmError) else "ok" for answer in found]


def test_after_the_death_of_a_bases_stage_the_other_base_is_served_and_so_is_it_once_it_is_loaded_again(
    server: TritonServer,
) -> None:
    keeper = StubKeeper(server, lambda: server.has_ended)
    with Client(server.ports.grpc_url, model="hplm") as client, Client(server.ports.grpc_url, model="small") as small:
        assert first_answers(client, ["alpha", "small-alpha"]) == ["ok", "ok"]
        os.kill(stubs_of(server)["small_upper"], signal.SIGKILL)
        until(lambda: first_answers(client, ["small-alpha"]) == ["STAGE_DOWN"])
        assert first_answers(client, ["alpha", "small-alpha"] * 20) == ["ok", "STAGE_DOWN"] * 20
        with pytest.raises(errors.StageDownError):
            small.predict("small-alpha", "the red cat")
        until(lambda: any("small_upper" in said for said in keeper.look()))
        until(lambda: first_answers(client, ["small-alpha"]) == ["ok"])


def test_after_the_death_of_the_model_that_routes_the_bases_own_models_are_served(server: TritonServer) -> None:
    keeper = StubKeeper(server, lambda: server.has_ended)
    with Client(server.ports.grpc_url, model="hplm") as client, Client(server.ports.grpc_url, model="hbert") as hbert:
        assert first_answers(client, ["alpha"]) == ["ok"]
        os.kill(stubs_of(server)["hplm"], signal.SIGKILL)
        until(lambda: first_answers(client, ["alpha"]) == ["STAGE_DOWN"])
        assert first_answers(hbert, ["alpha"]) == ["ok"]
        until(lambda: any("hplm" in said for said in keeper.look()))
        until(lambda: first_answers(client, ["alpha", "small-alpha"]) == ["ok", "ok"])


def test_a_base_that_leaves_the_settings_has_unknown_tenants_until_it_is_back(
    server: TritonServer, models: Path
) -> None:
    path = settings_path(models, route_role())
    before = path.read_text()
    values = json.loads(before)
    values["models"] = {base: model for base, model in values["models"].items() if model != "small"}
    with Client(server.ports.grpc_url, model="hplm") as client:
        try:
            path.write_text(json.dumps(values))
            until(lambda: first_answers(client, ["alpha", "small-alpha"]) == ["ok", "UNKNOWN_TENANT"])
            with pytest.raises(errors.UnknownTenantError, match="there is no tenant 'small-alpha'"):
                client.predict("small-alpha", "the red cat")
        finally:
            path.write_text(before)
        until(lambda: first_answers(client, ["alpha", "small-alpha"]) == ["ok", "ok"])


def test_a_new_tenant_and_a_deleted_one_are_seen(server: TritonServer, models: Path) -> None:
    store, base = tiny.opened(models.parent)
    with Client(server.ports.grpc_url, model="hplm") as client:
        tiny.make_tenant(store, base, "delta", 7, "alpha")
        until(lambda: first_answers(client, ["delta"]) == ["ok"])
        tiny.delete_tenant(store, "delta")
        until(lambda: first_answers(client, ["delta"]) == ["UNKNOWN_TENANT"])


def test_the_stage_that_routes_refuses_what_waits_when_the_server_ends(models: Path) -> None:
    loaded = (*names(base_roles("hbert")), route_role().name)
    with TritonServer(models, free_ports(), models=loaded, log=models.parent / "ending.log") as running:
        running.wait_ready()
        with Client(running.ports.grpc_url, concurrency=200, timeout_s=60, model="hplm") as client:
            answers = client.predict_many([("alpha", text) for text in TEXTS * 100], on_error="yield")
            assert not isinstance(next(answers), HplmError)
            begun_s = time.monotonic()
            assert running.stop() is not None
            left = list(answers)
        assert time.monotonic() - begun_s < 60
        assert {type(one) for one in left if isinstance(one, HplmError)} <= {
            errors.StoppingError,
            errors.UnreachableError,
            errors.CancelledError,
        }
