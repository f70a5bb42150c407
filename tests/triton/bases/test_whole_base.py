"""Whole bases on the real Triton: tenants' answers are the reference's, and real models compute as `transformers` does."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from hplm_builder.convert.base import KNOWN_MODELS
from hplm_builder.convert.whole import make_whole_base
from hplm_builder.export.model_folders import export
from hplm_builder.export.register import ROOT_OF_WHOLE
from hplm_client import Client
from tritonclient.utils import InferenceServerException

from hplm.core.roles import served_base
from hplm.core.settings import EncodeSettings, LookupSettings
from hplm.errors import UnknownTenantError
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.backends.test_whole_stages import ASKED, expected
from tests.triton.failures.serve_process import START_S, Service
from tests.triton.serving.test_server import expected_logits
from tests.unit.builder.convert.test_whole import identity_tenant, states_of_transformers
from tests.waiting import until

pytestmark = pytest.mark.triton
Hplm = Callable[..., subprocess.CompletedProcess[str]]
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])
REAL_TEXTS = [
    "A moving, beautifully acted film that never quite earns its final scene.",
    "It rained.",
    " ".join(["Aspirin irreversibly inhibits cyclooxygenase and the synthesis of thromboxane A2."] * 30),
    ("How do I transfer money abroad?", "What is the weather going to be like in Lisbon this weekend?"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_repository(tmp_path_factory.mktemp("whole"), shape=tiny.config(form="whole"), other_tasks=True)


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[TritonServer]:
    with TritonServer(models, free_ports(), log=models.parent / "triton.log") as started:
        started.wait_ready()
        yield started


@PROTOCOLS
def test_tenants_of_every_task_get_the_references_logits(server: TritonServer, models: Path, protocol: str) -> None:
    store, base = tiny.opened(models.parent)
    asked = [(tenant, *(text if isinstance(text, tuple) else (text, None))) for text, tenant in ASKED]
    with Client(getattr(server.ports, f"{protocol}_url")) as client:
        answers = list(client.predict_many(asked, logits=True))
    for (text, tenant), answer in zip(ASKED, answers, strict=True):
        assert answer.logits is not None
        wanted = expected(store, base, text, tenant)
        np.testing.assert_allclose(answer.logits, wanted, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("server", ["two stages"], indirect=True)
def test_the_encode_stage_takes_ids_alone_and_names_what_is_wrong_with_them(server: TritonServer) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as triton:
        named = {tensor["name"] for tensor in triton.get_model_metadata("hbert_upper")["inputs"]}
        assert named == {"IDS", "TOKENS", "TENANT", "REQUEST_META", "DISPATCH", "PROOF"}
        values = {
            "IDS": np.full((1, 3, 2), 10**6, np.int32),
            "TOKENS": np.zeros((1, 3, 3), np.int32),
            "TENANT": np.array([[b"alpha"]], dtype=np.object_),
        }
        kinds = {"TENANT": "BYTES"}
        inputs = []
        for name, value in values.items():
            inputs.append(tritonclient.http.InferInput(name, value.shape, kinds.get(name, "INT32")))
            inputs[-1].set_data_from_numpy(value)
        with pytest.raises(InferenceServerException, match="BAD_HIDDEN_STATES: ids of tokens must be 0 to"):
            triton.infer("hbert_upper", inputs)


@pytest.mark.parametrize(
    "model",
    # MPNet's package has 440 MB.
    ["minilm", pytest.param("mpnet", marks=pytest.mark.stress)],
)
def test_real_weights_compute_as_transformers_does_over_http_and_grpc(model: str, tmp_path: Path) -> None:
    store, source = Store(tmp_path / "store"), KNOWN_MODELS[model][1]()
    base = make_whole_base(store, source, name=model, origin=model, adapters="upper", max_tokens=256)
    tenant = identity_tenant(base)
    pairs = replace(tenant, card=replace(tenant.card, name="pairs", texts=2))
    for each in (tenant, pairs):
        tiny.publish(store, base, ROOT_OF_WHOLE, each)
    common = {"store": "", "base": model, "dtype": "float32"}
    export(store, tmp_path / "models", LookupSettings(**common, table=ROOT_OF_WHOLE), EncodeSettings(**common))
    requests = [("pairs", *text) if isinstance(text, tuple) else (tenant.card.name, text, None) for text in REAL_TEXTS]
    wanted = [states.mean(0).numpy() for states in states_of_transformers(source, base, REAL_TEXTS)]
    with TritonServer(tmp_path / "models", free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        for url in (server.ports.http_url, server.ports.grpc_url):
            with Client(url) as client:
                for answer, states in zip(client.predict_many(requests, logits=True), wanted, strict=True):
                    assert answer.logits is not None
                    np.testing.assert_allclose(answer.logits[0], states, atol=2e-4, rtol=2e-3)


def test_a_hierarchical_and_a_whole_base_answer_from_one_server(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    whole = tiny.make_base(store, tiny.config(form="whole", name="whole"), seed=3)
    tiny.publish(store, whole, ROOT_OF_WHOLE, tiny.tenant_of(whole, "omega", 5, like="alpha"))
    common = {"store": "", "base": "whole", "dtype": "float32"}
    export(store, models, LookupSettings(**common, table=ROOT_OF_WHOLE), EncodeSettings(**common), name="whole")
    texts = tiny.sentences(20, seed=4)
    with TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        with (
            Client(server.ports.grpc_url, model="hbert") as first,
            Client(server.ports.http_url, model="whole") as second,
        ):
            # Both streams are read in turn, so that requests of both bases are under way at once.
            streams = (
                first.predict_many([("alpha", text) for text in texts], logits=True),
                second.predict_many([("omega", text) for text in texts], logits=True),
            )
            for text, of_first, of_second in zip(texts, *streams, strict=True):
                assert of_first.logits is not None
                assert of_second.logits is not None
                (wanted,) = expected_logits(store, base, [("alpha", text)])
                np.testing.assert_allclose(of_first.logits, wanted, atol=5e-3, rtol=5e-3)
                np.testing.assert_allclose(
                    of_second.logits, expected(store, whole, text, "omega"), atol=5e-4, rtol=5e-4
                )
            for client, other in ((first, "omega"), (second, "alpha")):
                with pytest.raises(UnknownTenantError):
                    client.predict(other, "the red cat")


def test_an_export_over_a_served_base_says_who_loses_service_and_health_says_how_to_repair_it(
    tmp_path: Path, hplm: Hplm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    models = tiny.make_repository(tmp_path, route=True)
    store, _ = tiny.opened(tmp_path)
    tiny.name_root(store, tiny.make_base(store, tiny.config(form="whole", name="whole"), seed=3), ROOT_OF_WHOLE)
    over = ["build", "export", "--base", "whole", "--store", str(store.root), "--models", str(models)]
    refused = hplm(*over)
    assert refused.returncode == 1
    assert "take service from 4 tenants (alpha, beta, gamma, tagger): give --name whole" in refused.stderr
    assert served_base(models).base == "tiny"

    service = Service(models, free_ports(), ["--no-worker"])
    service.launch()
    try:
        service.await_answers()
        assert hplm(*over, "--replace", "--dtype", "float32").returncode == 0
        # The server still has the earlier models, and is asked about them.
        service.await_ready()
        with Client(service.ports.grpc_url, model="hbert") as client:
            assert client.predict("alpha", "the red cat").label is not None
        service.stop()
        service.launch()
        until(lambda: service.said().count("Serving HTTP") == 2 or service.process.poll() is not None, START_S)
        assert service.process.poll() is None, service.said()
        with Client(service.ports.grpc_url) as client, pytest.raises(UnknownTenantError):
            client.predict("alpha", "the red cat")
        service.await_ready()
        done = hplm("health", "--url", service.ports.health_url)
        note = "4 tenants of base 'tiny' have no model in"
        assert done.returncode == 0
        assert f"note: {note}" in done.stdout
        assert note in service.said()
        assert note in (tmp_path / "triton.log").read_text().splitlines()[0]
        repair = re.findall("`hplm (build export [^`]*)`", done.stdout)[0]
        assert hplm(*repair.split(), "--dtype", "float32").returncode == 0
        until(lambda: "notes" not in service.health()[1])
        until(lambda: "model tiny was added" in service.said())
        service.await_answers()
        # A deletion that takes service from tenants wants an answer, and nobody gives one here.
        asked = hplm("base", "delete", "tiny", "--models", str(models))
        assert asked.returncode == 1
        assert "The server stops to answer 4 tenants (alpha, beta, gamma, tagger) by base tiny." in asked.stderr
        assert "give --yes" in asked.stderr
        service.await_answers()
    finally:
        service.stop()
