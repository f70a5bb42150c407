"""A server that needs keys: what each of its models answers to a client that calls it directly, over both protocols."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from hplm_client import AsyncClient, Client
from tritonclient.utils import InferenceServerException

from hplm.access.gate import PROOF_BYTES
from hplm.access.keys import new_key
from hplm.core import wire
from hplm.core.roles import models_of
from hplm.errors import ForbiddenError, HplmError
from hplm.runtime.local_http import LOCAL_HTTP
from tests.triton.access.certificates import make_certificate, needs_openssl
from tests.triton.access.making import (
    CALLING,
    CASCADED,
    INNER_MODELS,
    OWN,
    PROTOCOLS,
    TEXT_MODELS,
    Inputs,
    Place,
    answered,
    as_bytes,
    ask,
    ask_stream,
    bearer,
    inputs_of,
    looked_up,
    serving,
    texts,
    with_key,
)
from tests.triton.access.nginx import Proxy, needs_nginx, proxy
from tests.waiting import until

pytestmark = pytest.mark.triton
REFUSED = "the key is missing, or is not valid for this tenant"
# The models that take texts, each with a tenant of its base.
FIRST_MODELS = [
    *((model, OWN[base]) for base, models in TEXT_MODELS.items() for model in models),
    *((model, tenant) for model in CALLING for tenant in OWN.values()),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with serving(tmp_path_factory.mktemp("keys")) as made:
        yield made


@pytest.fixture(scope="module")
def keys(place: Place) -> dict[str, str]:
    """A key of each tenant, which every process of the server knows."""
    made = {tenant: place.add_key(tenant) for tenant in (*OWN.values(), CASCADED)}
    # Every process polls the registry five times a second.
    time.sleep(1.0)
    return made


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def as_proofs(*proofs: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(proofs), np.uint8).reshape(len(proofs), PROOF_BYTES)


def refusal(result: Inputs | HplmError) -> str:
    """The message of a request that is forbidden."""
    assert isinstance(result, ForbiddenError), repr(result)
    return str(result)


@pytest.fixture(scope="module")
def wrong_keys(place: Place, keys: dict[str, str]) -> dict[str, dict[str, str]]:
    """Keys of each kind that is not valid, by tenant."""
    made = {tenant: make_wrong_keys(place, tenant, keys) for tenant in OWN.values()}
    time.sleep(1.0)
    return made


def make_wrong_keys(place: Place, tenant: str, good: dict[str, str]) -> dict[str, str]:
    revoked = place.add_key(tenant)
    place.revoke(revoked)
    prefix, key_id, secret = good[tenant].split("_", 2)
    last = "A" if secret[0] != "A" else "B"
    unknown_id = "a" * len(key_id)
    return {
        "unknown id": f"{prefix}_{unknown_id}_{secret}",
        "wrong secret": f"{prefix}_{key_id}_{last}{secret[1:]}",
        "revoked": revoked,
        "expired": place.add_key(tenant, expires_s=time.time() - 1),
        "another tenant's": next(key for name, key in good.items() if name != tenant),
        "an operator's": place.add_key(None, "admin"),
        "malformed": "let-me-in",
    }


def test_the_tests_call_each_model_that_is_loaded(place: Place) -> None:
    called = {
        *(model for model, _ in FIRST_MODELS),
        *INNER_MODELS.values(),
        wire.MANAGER,
    }
    assert called == set(models_of(place.models))


@pytest.mark.parametrize(("model", "tenant"), FIRST_MODELS)
def test_a_first_model_answers_a_key_in_the_header_or_in_a_tensor_and_refuses_a_request_without(
    place: Place, keys: dict[str, str], protocol: str, model: str, tenant: str
) -> None:
    inputs, key = inputs_of(model, tenant), keys[tenant]
    assert refusal(ask(place, protocol, model, inputs)) == REFUSED
    for given in (ask(place, protocol, model, inputs, bearer(key)), ask(place, protocol, model, with_key(inputs, key))):
        assert answered(given)


@pytest.mark.parametrize(("model", "tenant"), FIRST_MODELS)
def test_a_first_model_refuses_every_wrong_key_with_the_same_words(
    place: Place,
    keys: dict[str, str],
    wrong_keys: dict[str, dict[str, str]],
    protocol: str,
    model: str,
    tenant: str,
) -> None:
    inputs = inputs_of(model, tenant)
    for key in wrong_keys[tenant].values():
        assert refusal(ask(place, protocol, model, with_key(inputs, key))) == REFUSED
        assert refusal(ask(place, protocol, model, inputs, {"authorization": f"Bearer {key}"})) == REFUSED
    # The error does not tell whether a tenant exists.
    unknown = inputs_of(model, "nobody")
    assert refusal(ask(place, protocol, model, unknown, bearer(keys[tenant]))) == REFUSED


@pytest.mark.parametrize("model", INNER_MODELS.values())
def test_an_inner_model_refuses_a_client_with_and_without_a_key(
    place: Place, keys: dict[str, str], protocol: str, model: str
) -> None:
    base = model.removesuffix("_upper")
    inputs = inputs_of(model, OWN[base])
    forged = {**inputs, wire.PROOF: as_proofs(b"A" * PROOF_BYTES)}
    for given, headers in ((inputs, {}), (inputs, bearer(keys[OWN[base]])), (forged, bearer(keys[OWN[base]]))):
        assert "only calls of the server's own first stage" in refusal(ask(place, protocol, model, given, headers))


MANAGE_REFUSED = "the key is missing, or is not valid for this action"
MANAGE_PROTOCOLS = ("http", "grpc", "stream")


def manage(place: Place, protocol: str, key: str | None, *, in_header: bool) -> Inputs | HplmError:
    """Send a manage request, with a key in the header or in the tensor."""
    inputs: Inputs = {wire.REQUEST: np.array([b'{"action": "tenant.list"}'], dtype=np.object_)}
    if key is not None and not in_header:
        inputs = with_key(inputs, key)
    headers = {"authorization": f"Bearer {key}"} if key is not None and in_header else {}
    if protocol == "stream":
        return ask_stream(place, wire.MANAGER, inputs, headers)
    return ask(place, protocol, wire.MANAGER, inputs, headers)


@pytest.mark.parametrize("in_header", [True, False], ids=["header", "tensor"])
@pytest.mark.parametrize("protocol", MANAGE_PROTOCOLS)
def test_the_manager_answers_an_operators_key_and_refuses_every_other_request(
    place: Place, keys: dict[str, str], wrong_keys: dict[str, dict[str, str]], protocol: str, in_header: bool
) -> None:
    tenant = OWN["small"]
    operator = place.add_key(None, "read")
    until(lambda: not isinstance(manage(place, protocol, operator, in_header=in_header), ForbiddenError))
    wrong = wrong_keys[tenant]
    for key in (None, keys[tenant], wrong["malformed"], wrong["revoked"], wrong["expired"], wrong["wrong secret"]):
        assert refusal(manage(place, protocol, key, in_header=in_header)) == MANAGE_REFUSED


def test_a_header_is_found_whatever_the_capitals_of_its_name(place: Place, keys: dict[str, str]) -> None:
    tenant = OWN["small"]
    body = {
        "inputs": [
            {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}
            for name, value in ((wire.TEXT, "the cat"), (wire.TENANT, tenant))
        ]
    }
    url = f"{place.server.ports.http_url}/v2/models/small/infer"
    for name, scheme in (("Authorization", "Bearer"), ("AUTHORIZATION", "bearer"), ("authorization", "BEARER")):
        request = urllib.request.Request(url, json.dumps(body).encode())
        request.headers[name] = f"{scheme} {keys[tenant]}"
        with LOCAL_HTTP.open(request, timeout=20) as answer:
            assert answer.status == 200


def test_a_parameter_of_the_request_takes_the_place_of_no_header(place: Place, keys: dict[str, str]) -> None:
    tenant = OWN["small"]
    body = {
        "parameters": {"authorization": f"Bearer {keys[tenant]}"},
        "inputs": [
            {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}
            for name, value in ((wire.TEXT, "the cat"), (wire.TENANT, tenant))
        ],
    }
    request = urllib.request.Request(
        f"{place.server.ports.http_url}/v2/models/small/infer",
        json.dumps(body).encode(),
        {"authorization": "Bearer wrong"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        LOCAL_HTTP.open(request, timeout=20)
    with refused.value as answer:
        assert answer.code == 400


@pytest.mark.parametrize("model", CALLING)
def test_in_a_request_of_several_texts_each_tenant_needs_its_key(
    place: Place, keys: dict[str, str], protocol: str, model: str
) -> None:
    tenants = [*OWN.values(), CASCADED]
    inputs, own = texts(tenants), [keys[tenant] for tenant in tenants]
    outputs = answered(ask(place, protocol, model, with_key(inputs, *own)))
    assert outputs[wire.LABEL].shape[0] == len(tenants)
    for index in range(len(tenants)):
        wrong = [*own]
        wrong[index] = own[index - 1]
        said = refusal(ask(place, protocol, model, with_key(inputs, *wrong)))
        assert said == f"text {index + 1} of {len(tenants)}: {REFUSED}"
    # The key of the header is that of the first tenant alone.
    assert refusal(ask(place, protocol, model, inputs, bearer(own[0]))) == f"text 2 of {len(tenants)}: {REFUSED}"


def test_all_texts_of_one_tenant_are_answered_with_one_header(
    place: Place, keys: dict[str, str], protocol: str
) -> None:
    tenant = OWN["small"]
    for model in ("small", "hplm"):
        outputs = answered(ask(place, protocol, model, texts([tenant] * 3), bearer(keys[tenant])))
        assert outputs[wire.LABEL].shape[0] == 3


def test_every_level_of_a_cascade_answers_a_request_whose_key_the_cascade_has_checked(
    place: Place, keys: dict[str, str], protocol: str
) -> None:
    outputs = answered(ask(place, protocol, "cascade", texts([CASCADED]), bearer(keys[CASCADED])))
    assert outputs[wire.ROUTE].tolist() == [[2]]
    assert outputs[wire.LATE].tolist() == [[False]]


@pytest.mark.parametrize("base", INNER_MODELS)
def test_a_proof_of_the_look_up_stage_is_for_its_tenant_and_version_alone(
    place: Place, keys: dict[str, str], protocol: str, base: str
) -> None:
    model, inputs = INNER_MODELS[base], looked_up(place, base, OWN[base], keys[OWN[base]])
    assert wire.LABEL in answered(ask(place, protocol, model, inputs))
    other_version = inputs[wire.REQUEST_META].copy()
    other_version[0, 1] += 1
    changed = (
        {**inputs, wire.TENANT: as_bytes(["nobody"])},
        {**inputs, wire.REQUEST_META: other_version},
        {name: value for name, value in inputs.items() if name != wire.REQUEST_META},
        {name: value for name, value in inputs.items() if name != wire.PROOF},
        {**inputs, wire.PROOF: inputs[wire.PROOF][:, ::-1].copy()},
    )
    for wrong in changed:
        refusal(ask(place, protocol, model, wrong))
    # It is no key, and no proof for a first stage.
    assert refusal(ask(place, protocol, base, {**texts([OWN[base]]), wire.PROOF: inputs[wire.PROOF]}))


@pytest.mark.parametrize("base", TEXT_MODELS)
def test_a_revoked_key_is_refused_by_every_model_within_a_second(place: Place, base: str) -> None:
    tenant = OWN[base]
    key = place.add_key(tenant)
    until(lambda: not isinstance(ask(place, "grpc", base, texts([tenant]), bearer(key)), HplmError))
    time.sleep(1.0)
    proven = looked_up(place, base, tenant, key) if base in INNER_MODELS else None
    place.revoke(key)
    time.sleep(1.0)
    for protocol in PROTOCOLS:
        for model in (*TEXT_MODELS[base], *CALLING):
            # Several processes of a look-up stage take turns.
            for _ in range(4):
                assert refusal(ask(place, protocol, model, inputs_of(model, tenant), bearer(key))) == REFUSED
        if proven is not None:
            assert refusal(ask(place, protocol, INNER_MODELS[base], proven)) == REFUSED


def test_a_key_expires_while_the_server_runs(place: Place, protocol: str) -> None:
    tenant = OWN["small"]
    expires_s = time.time() + 3
    key = place.add_key(tenant, expires_s=expires_s)

    def is_answered() -> bool:
        return not isinstance(ask(place, protocol, "small", texts([tenant]), bearer(key)), HplmError)

    until(is_answered, 2.9)
    time.sleep(max(0.0, expires_s - time.time()))
    assert refusal(ask(place, protocol, "small", texts([tenant]), bearer(key))) == REFUSED


def test_a_refused_text_is_counted_as_forbidden_and_looked_up_by_no_stage(place: Place) -> None:
    url = f"http://127.0.0.1:{place.server.ports.metrics}/metrics"

    def events(stage: str, event: str) -> float:
        with LOCAL_HTTP.open(url, timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [
            line for line in lines if line.startswith(f"hplm_{stage}_events_total{{") and f'event="{event}"' in line
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)

    # Metrics leave the stages every second, after all that came before.
    time.sleep(2.0)
    before = {event: events("plot", event) for event in ("forbidden", "ok", "unknown_tenant")}
    for _ in range(5):
        refusal(ask(place, "grpc", "small", texts(["nobody"])))
    until(lambda: events("plot", "forbidden") == before["forbidden"] + 5)
    assert events("plot", "ok") == before["ok"]
    assert events("plot", "unknown_tenant") == before["unknown_tenant"]


def test_no_key_and_no_secret_is_in_the_log_or_the_process_list(place: Place, keys: dict[str, str]) -> None:
    log = (place.models.parent / "triton.log").read_text()
    listed = b"".join(
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()
    ).decode(errors="replace")
    launcher_secret = next(iter(place.server.launcher_headers.values()))
    for secret in (*(key.split("_", 2)[2] for key in keys.values()), launcher_secret):
        assert secret not in log
        assert secret not in listed


# Over HTTP. JSON may write a letter as an escape.
CLASSIFICATIONS = (
    b'{"classification": 1}',
    b'{"classification"\n\t: 1}',
    b'{"\\u0063lassification":1}',
    b'{"classificat\\u0069o\\u006E":1}',
)


def text_body(text: str, tenant: str, parameters: bytes = b"{}") -> bytes:
    """The JSON of a request for LABEL with `parameters` of this output."""
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}
        for name, value in ((wire.TEXT, text), (wire.TENANT, tenant))
    ]
    label = b'{"name": "LABEL", "parameters": ' + parameters + b"}"
    return b'{"inputs": ' + json.dumps(inputs).encode() + b', "outputs": [' + label + b"]}"


def test_a_client_without_a_valid_key_cannot_end_triton_by_a_classification(place: Place, protocol: str) -> None:
    for headers in ({}, bearer(new_key().text())):
        inputs = inputs_of("hbert", OWN["hbert"])
        assert refusal(ask(place, protocol, "hbert", inputs, headers, [wire.LABEL], class_count=1)) == REFUSED


@pytest.fixture(scope="module")
def behind(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The example's nginx before the server."""
    folder = tmp_path_factory.mktemp("proxy")
    with proxy(place.server.ports, make_certificate(folder / "tls"), folder / "nginx") as made:
        yield made


@pytest.fixture
def trusted(behind: Proxy, monkeypatch: pytest.MonkeyPatch) -> Path:
    certificate = behind.folder.parent / "tls" / "cert.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    return certificate


@pytest.fixture
def post(behind: Proxy, trusted: Path) -> Callable[..., int]:
    """Send a request through the proxy and return the status of the answer."""
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(trusted)))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)

    def send(path: str, body: bytes | None, headers: Mapping[str, str]) -> int:
        try:
            with opener.open(urllib.request.Request(f"{behind.https_url}/{path}", body, dict(headers))) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    return send


@needs_nginx
@needs_openssl
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_over_tls_the_example_proxy_hands_keys_on_and_refuses_what_is_no_key(
    behind: Proxy, keys: dict[str, str], scheme: str
) -> None:
    url = behind.https_url if scheme == "https" else behind.grpcs_url
    tenants = (OWN["small"], CASCADED)

    async def ask_async(tenant: str) -> str | None:
        async with AsyncClient(url, key=keys[tenant]) as client:
            return (await client.predict(tenant, "the cat")).label

    for tenant in tenants:
        with Client(url, key=keys[tenant]) as client:
            label = client.predict(tenant, "the cat").label
            assert label is not None
            with pytest.raises(ForbiddenError, match=REFUSED):
                client.predict(OWN["middle"], "the cat")
        assert asyncio.run(ask_async(tenant)) == label
        assert keys[tenant].split("_")[1] in behind.access_log()
    # A client with several keys shows one of them to the proxy too.
    several = {tenant: keys[tenant] for tenant in tenants}
    with Client(url, key=several, headers=bearer(keys[tenants[0]])) as client:
        assert len(client.predict_batch([(tenant, "the cat") for tenant in tenants])) == len(tenants)
    with Client(url) as client, pytest.raises(ForbiddenError, match="refuses this client: status 401"):
        client.predict(tenants[0], "the cat")
    assert not any(key.split("_", 2)[2] in behind.access_log() for key in keys.values())


@needs_nginx
@needs_openssl
def test_the_example_proxy_refuses_a_classification_and_lets_a_text_about_it_pass(
    place: Place, keys: dict[str, str], post: Callable[..., int], behind: Proxy, trusted: Path
) -> None:
    tenant = OWN["hbert"]
    path, headers = "v2/models/hbert/infer", bearer(keys[tenant])
    for parameters in CLASSIFICATIONS:
        body = text_body("the cat", tenant, parameters)
        assert post(path, body, headers) == 400
        # A long body is read as whole as a short body.
        assert post(path, body.replace(b'"outputs"', b" " * 250_000 + b'"outputs"'), headers) == 400
    port = behind.grpcs_url.rpartition(":")[2]
    certificate = str(trusted)
    with closing(
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}", ssl=True, root_certificates=certificate)
    ) as triton:
        tensors = []
        for name, value in texts([tenant]).items():
            tensors.append(tritonclient.grpc.InferInput(name, value.shape, "BYTES"))
            tensors[-1].set_data_from_numpy(value)
        wanted = [tritonclient.grpc.InferRequestedOutput(wire.LABEL, class_count=1)]
        assert triton.infer("hbert", tensors, headers=headers).as_numpy(wire.LABEL) is not None
        with pytest.raises(InferenceServerException, match="400"):
            triton.infer("hbert", tensors, outputs=wanted, headers=headers)
    assert not place.server.has_ended
    for text in ('{"classification": 1}', "the word \\u0063 of a classification:"):
        assert post(path, text_body(text, tenant), headers) == 200


@needs_nginx
@needs_openssl
def test_the_example_proxy_publishes_infer_and_ready_alone(keys: dict[str, str], post: Callable[..., int]) -> None:
    tenant = OWN["hbert"]
    headers, body = bearer(keys[tenant]), text_body("the cat", tenant)
    assert post("v2/models/hbert/ready", None, headers) == 200
    for path in ("v2/models/manager/infer", "v2/repository/index", "v2/models/hbert/stats", "v2/logging", "metrics"):
        assert post(path, body, headers) == 404
    assert post("v2/models/hbert/infer", None, headers) == 400
    assert post("v2/models/hbert/ready", body, headers) == 403
    assert post("v2/models/hbert/infer", body + b" " * 300_000, headers) == 413
    # A compressed body reaches Triton as it is, which is no JSON.
    assert post("v2/models/hbert/infer", gzip.compress(body), {**headers, "Content-Encoding": "gzip"}) >= 400
    for wrong in ({}, {"authorization": "Bearer let-me-in"}, {"authorization": f"Basic {keys[tenant]}"}):
        assert post("v2/models/hbert/infer", body, wrong) == 401
