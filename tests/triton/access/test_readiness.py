"""`hplm serve` asks its own models with and without keys, and its questions count for no tenant."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient

from hplm.access.keys import new_key
from hplm.errors import ForbiddenError, QuotaError, UnreachableError
from hplm.metering.text_meter import EVALUATE_EVERY_S
from hplm.quotas.limits import Limits
from hplm.registry.access.audit import AuditEntry
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm_cli.health.readiness import KEEP_S
from tests import tiny
from tests.triton.access.certificates import make_certificate, needs_openssl
from tests.triton.failures.serve_process import START_S, Service
from tests.waiting import until

pytestmark = pytest.mark.triton
MODELS = {"hbert", "hbert_plot", "hbert_upper", "hbert_dispatch", "manager", "hplm", "cascade"}
# The tenant that questions are about: the first by name.
TENANT = min(tiny.TASKS)
# The server with keys also has TLS over gRPC.
WITH_TLS = "keys and TLS"
# Questions of every model before counts are read.
PROBES = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_repository(tmp_path_factory.mktemp("readiness"), manager_settings={}, route=True)


@pytest.fixture(scope="module")
def keys(models: Path) -> tuple[str, str]:
    """An operator's key and the tenant's, in the registry before a server starts."""
    store = Store(models.parent / "store")
    return add_key(store, None, "admin"), add_key(store, TENANT, "infer")


@pytest.fixture(scope="module", params=["open", pytest.param(WITH_TLS, marks=needs_openssl)])
def service(request: pytest.FixtureRequest, models: Path, keys: tuple[str, str]) -> Iterator[Service]:
    flags = ["--no-worker"]
    if request.param == WITH_TLS:
        certificate = make_certificate(models.parent / "tls")
        key = certificate.with_name("key.pem")
        flags += ["--keys", "--grpc-use-ssl=1", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    made = Service(models, free_ports(), flags)
    made.launch()
    try:
        until(lambda: is_ready(made), START_S)
        yield made
    finally:
        made.stop()


def is_ready(service: Service) -> bool:
    with suppress(OSError):
        return service.health()[0] == 200
    return False


def add_key(store: Store, tenant: str | None, role: str) -> str:
    key = new_key()
    with closing(Registry.open(store)) as registry:
        registry.add_key(AccessKey(key.id, tenant, role, key.sha256(), time.time()))
    return key.text()


def counts(manage: ManageClient) -> dict[str, int]:
    """The tenant's counts of the last hour, when all texts are counted."""
    read = [manage.show_tenant(TENANT).recent["hour"]]
    while len(read) < 2 or read[-1] != read[-2]:
        time.sleep(2.5 * EVALUATE_EVERY_S)
        read.append(manage.show_tenant(TENANT).recent["hour"])
    return read[-1]


def noted(registry: Registry, before: int) -> list[AuditEntry]:
    """The entries of the audit log behind the first `before`."""
    entries = registry.audit(limit=1000)
    return entries[: len(entries) - before]


def test_every_model_is_ready_and_questions_count_for_no_tenant(
    service: Service, models: Path, keys: tuple[str, str]
) -> None:
    has_keys = "--keys" in service.flags
    store = Store(models.parent / "store")
    with closing(Registry.open(store)) as registry:
        registry.set_limits(TENANT, Limits(requests_per_s=0.001))
        noted_before = len(registry.audit(limit=1000))
    admin, own = keys if has_keys else (None, None)
    with (
        ManageClient(service.ports.http_url, key=admin) as manage,
        Client(service.ports.http_url, model="hbert", key=own) as client,
    ):
        service.await_ready()

        def is_used_up() -> bool:
            try:
                client.predict(TENANT, "the red cat")
            except QuotaError:
                return True
            return False

        until(is_used_up)
        before = counts(manage)
        for _ in range(PROBES):
            time.sleep(KEEP_S)
            status, answer = service.health()
            assert (status, set(answer["models"])) == (200, MODELS), answer
            assert {name: model["answer"] for name, model in answer["models"].items()} == {
                **dict.fromkeys(MODELS, "ok"),
                "manager": "UNKNOWN_JOB",
            }
        after = counts(manage)
    if has_keys:
        assert after == before
    else:
        # A base counts the tokens of what the models that call it ask.
        assert {**after, "tokens": 0} == {**before, "tokens": 0}
    with closing(Registry.open(store)) as registry:
        registry.set_limits(TENANT, Limits())
        # Entries wait for some seconds, and are written in order.
        until(lambda: any(entry.action == "tenant.show" for entry in noted(registry, noted_before)))
        entries = noted(registry, noted_before)
    assert not [entry for entry in entries if entry.subject.startswith("job:") or entry.outcome == "FORBIDDEN"]
    if has_keys:
        with LOCAL_HTTP.open(urllib.request.Request(f"http://127.0.0.1:{service.ports.metrics}/metrics")) as page:
            lines = page.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("hplm_tenant_texts_total") and TENANT in line]
        # The client's own texts were counted, and no model counted a question.
        assert counted
        assert {line.split('stage="')[1].split('"')[0] for line in counted} <= {"plot", "upper"}


def test_grpc_has_tls_if_the_options_of_triton_say_so(
    service: Service, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_tls = "--keys" in service.flags
    url, other_url = (replace(service.ports, has_grpc_tls=tls).grpc_url for tls in (has_tls, not has_tls))
    assert f"gRPC on {url}," in service.said()
    # Another tenant than the one that a test above limits.
    tenant, key = max(tiny.TASKS), None
    if has_tls:
        key = add_key(Store(models.parent / "store"), tenant, "infer")
        monkeypatch.setenv("SSL_CERT_FILE", str(models.parent / "tls" / "cert.pem"))
    with Client(url, key=key) as client:

        def is_answered() -> bool:
            # Each stage follows the registry.
            with suppress(ForbiddenError):
                return client.predict(tenant, "the red cat").label is not None
            return False

        until(is_answered)
    with Client(other_url, key=key) as wrong, pytest.raises(UnreachableError):
        wrong.predict(tenant, "the red cat")
    if has_tls:
        with Client(url) as without_key, pytest.raises(ForbiddenError, match="the key is missing"):
            without_key.predict(tenant, "the red cat")
