"""Manage requests over the real server: tenants made while it serves, watched live, and every bad request refused."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hplm_client import Client, JobEvent, ManageClient
from hplm_loadtest.scenarios.server_metrics import metric_value
from tritonclient.utils import InferenceServerException

from hplm import errors
from hplm.core.roles import MANAGER
from hplm.errors import HplmError
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds import idle_connections
from tests import tiny
from tests.managed import FAST, LEARNING, Place, swapped, write_rows
from tests.waiting import until

pytestmark = pytest.mark.triton
LEASE_S = 30.0
WATCHERS = 50


@pytest.fixture
def registry(place: Place) -> Iterator[Registry]:
    with closing(Registry.open(place.store)) as opened:
        yield opened


def make(manage: ManageClient, place: Place, name: str) -> str:
    """The job of a new tenant."""
    return manage.create_tenant(name, train=manage.upload(place.rows), settings=FAST)


def test_a_tenant_is_created_by_upload_shown_updated_rolled_back_and_deleted(
    manage: ManageClient, place: Place
) -> None:
    with place.working():
        told: list[JobEvent] = []
        event = manage.wait(make(manage, place, "acme"), told.append)
        assert event.result is not None
        assert event.result["version"] == manage.show_tenant("acme").version
        assert {one.state for one in told} >= {"done"}
        first = manage.show_tenant("acme")
        assert "dev_accuracy" in first.about["scores"]
        manage.wait(manage.update_tenant("acme", train=manage.upload(swapped(place.rows)), settings=LEARNING))
    second = manage.show_tenant("acme")
    assert second.version > first.version
    assert manage.rollback_tenant("acme") == first.version
    assert "acme" in [tenant.name for tenant in manage.list_tenants("a")]
    manage.delete_tenant("acme")
    with pytest.raises(errors.UnknownTenantError):
        manage.show_tenant("acme")


def test_what_is_published_answers_within_a_second_and_what_is_deleted_no_more(
    manage: ManageClient, place: Place, registry: Registry
) -> None:
    with Client(manage.url) as client:

        def served(name: str) -> bool:
            try:
                return client.predict(name, "the red cat").label in ("cat", "none")
            except errors.UnknownTenantError:
                return False

        took = []
        # The best of some: other tests run on the same cores.
        for name in (f"quick-{number}" for number in range(8)):
            assert not served(name)
            with place.working():
                job = make(manage, place, name)
                # Asked all the time: what counts is when it was published, not when the job's end was heard of.
                until(lambda name=name: served(name), 120)
                seen_s = time.time()
                (version,) = registry.tenant_versions(name)
                manage.wait(job)
            manage.delete_tenant(name)
            start_s = time.monotonic()
            until(lambda name=name: not served(name))
            took.append((seen_s - version.created_s, time.monotonic() - start_s))
            if max(took[-1]) < 1.0:
                break
        assert min(published for published, _ in took) < 1.0
        assert min(deleted for _, deleted in took) < 1.0


def test_a_running_job_is_cancelled_and_its_upload_serves_another(manage: ManageClient, place: Place) -> None:
    name = f"endless-{manage.url.partition(':')[0]}"
    with place.working():
        long = {"epochs": 1000, "patience": 1000, "learning_rates": [1e-5]}
        source = manage.upload(place.rows)
        job = manage.create_tenant(name, train=source, settings=long)
        until(lambda: manage.show_job(job).progress > 0.25, 120)
        manage.cancel_job(job)
        with pytest.raises(errors.JobCancelledError):
            manage.wait(job)
        assert manage.show_job(job).state == "cancelled"
        with pytest.raises(errors.UnknownTenantError):
            manage.show_tenant(name)
        assert not place.store.path(f"tenants/{name}").exists()
        manage.wait(manage.create_tenant(name, train=source, settings=FAST))
    manage.delete_tenant(name)


def test_files_may_be_named_by_path_inside_the_operators_folder_only(manage: ManageClient, place: Place) -> None:
    with place.working():
        done = manage.wait(manage.create_tenant("by-path", train=manage.on_server(place.rows.name), settings=FAST))
    assert done.result is not None
    assert done.result["version"] == manage.show_tenant("by-path").version
    manage.delete_tenant("by-path")
    for outside in ("../store/registry.sqlite", str(place.store.root / "registry.sqlite"), "/etc/passwd"):
        with pytest.raises(errors.ForbiddenError):
            manage.create_tenant("by-path", train=manage.on_server(outside), settings=FAST)
    assert place.rows.is_file()


USELESS = {
    "not UTF-8": "text,label\nnaïve cat,cat\nred dog,none\n".encode("latin-1"),
    "UTF-16 without its mark": "text,label\nred cat,cat\nred dog,none\n".encode("utf-16-le"),
    "no column of texts": b"Body,label\nred cat,cat\nred dog,none\n",
    "one class": b"text,label\nred cat,cat\nblue cat,cat\nsmall cat,cat\n",
    "one example": b"text,label\nred cat,cat\n",
    "no rows": b"text,label\n",
    "a zip": b"PK\x03\x04\x00\x00",
}


@pytest.mark.parametrize(
    ("content", "part"),
    [*((content, "train") for content in USELESS.values()), (USELESS["not UTF-8"], "dev")],
    ids=[*USELESS, "not UTF-8 beside good"],
)
def test_data_that_cannot_be_used_are_refused_with_a_reason_and_leave_nothing(
    place: Place, tmp_path: Path, content: bytes, part: str
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_bytes(content)
    with ManageClient(place.url("http")) as manage:
        sources = {name: manage.upload(path) for name, path in {"train": place.rows, part: bad}.items()}
        with place.working(), pytest.raises(errors.DataError) as caught:
            manage.wait(manage.create_tenant("useless", **sources, settings=FAST))
        assert len(str(caught.value)) > 20
        with pytest.raises(errors.UnknownTenantError):
            manage.show_tenant("useless")
    # Also the good file that came with the bad one.
    until(lambda: not any(place.store.upload(str(source["upload"])).exists() for source in sources.values()))
    assert not place.store.tenant_version("useless", 1).parent.exists()


def test_an_update_with_other_labels_is_refused_and_the_tenant_goes_on(
    manage: ManageClient, place: Place, tmp_path: Path
) -> None:
    other = tmp_path / "other.csv"
    other.write_text(place.rows.read_text().replace(",none", ",bird"))
    with place.working(), Client(manage.url) as client:
        manage.wait(make(manage, place, "steady"))
        before = manage.show_tenant("steady").version
        with pytest.raises(errors.DataError, match="bird"):
            manage.wait(manage.update_tenant("steady", train=manage.upload(other), settings=FAST))
        assert manage.show_tenant("steady").version == before
        place.await_seen()
        assert client.predict("steady", "the red cat").label in ("cat", "none")
    manage.delete_tenant("steady")


def test_a_rolled_back_tenant_answers_as_before(manage: ManageClient, place: Place) -> None:
    def logits() -> np.ndarray:
        found = client.predict("back", "the red cat", logits=True).logits
        assert found is not None
        return found

    with place.working(), Client(manage.url) as client:
        manage.wait(make(manage, place, "back"))
        place.await_seen()
        first = logits()
        manage.wait(manage.update_tenant("back", train=manage.upload(swapped(place.rows)), settings=LEARNING))
        place.await_seen()
        second = logits()
        manage.rollback_tenant("back")
        place.await_seen()
        np.testing.assert_allclose(logits(), first, atol=1e-3)
        assert np.abs(second - first).max() > 1e-2
    manage.delete_tenant("back")


def test_a_dry_run_says_what_it_would_cost_and_changes_nothing(manage: ManageClient, place: Place) -> None:
    with place.working():
        plan = manage.plan("tenant.create", tenant="planned", data={"train": manage.upload(place.rows)}, settings=FAST)
    assert plan.estimated_s > 0
    assert plan.details["labels"] == ["cat", "none"]
    with pytest.raises(errors.UnknownTenantError):
        manage.show_tenant("planned")


def test_progress_comes_live_over_a_stream(place: Place, registry: Registry) -> None:
    with ManageClient(place.url("grpc")) as manage:
        job = make(manage, place, "live")
        assert registry.claim_job("me", time.time(), LEASE_S)
        watch = manage.watch(job)
        assert next(watch).state == "running"
        delays = []
        for step in range(1, 6):
            registry.report_job(job, "me", time.time(), LEASE_S, step="train", progress=step / 10, eta_s=1.0)
            start = time.monotonic()
            assert next(watch).progress == step / 10
            delays.append(time.monotonic() - start)
        registry.finish_job(job, "me", time.time(), result={"version": 1})
        assert [event.state for event in watch] == ["done"]
    # Most of them: other tests run on the same cores.
    assert sorted(delays)[1] < 1.0


def test_fifty_clients_watch_a_job_and_all_hear_its_end(place: Place, registry: Registry) -> None:
    with ManageClient(place.url("grpc")) as manage:
        job = make(manage, place, "watched")
    assert registry.claim_job("me", time.time(), LEASE_S)
    watching = threading.Barrier(WATCHERS + 1, timeout=200)

    def watch(_: int) -> list[JobEvent]:
        with ManageClient(place.url("grpc")) as client:
            events = client.watch(job)
            seen = [next(events)]
            watching.wait()
            seen.append(next(events))
            watching.wait()
            return [*seen, *events]

    with ThreadPoolExecutor(WATCHERS) as pool:
        heard = [pool.submit(watch, number) for number in range(WATCHERS)]
        watching.wait()
        registry.report_job(job, "me", time.time(), LEASE_S, step="train", progress=0.5, eta_s=None)
        watching.wait()
        registry.finish_job(job, "me", time.time(), result={})
        for one in heard:
            assert [(event.state, event.progress) for event in one.result(200)] == [
                *(("running", 0.0), ("running", 0.5), ("done", 1.0))
            ]


def test_the_metrics_count_jobs_by_state(place: Place) -> None:
    with ManageClient(place.url("grpc")) as manage:
        job = make(manage, place, "left")
        before = metric_value(place.server, 'hplm_jobs{state="cancelled"}')
        until(lambda: metric_value(place.server, 'hplm_jobs{state="queued"}') > 0)
        manage.cancel_job(job)
        until(lambda: metric_value(place.server, 'hplm_jobs{state="cancelled"}') > before)


def test_plain_curl_gets_an_answer(place: Place) -> None:
    request = json.dumps({"action": "domain.list"})
    body = {"inputs": [{"name": "REQUEST", "shape": [1], "datatype": "BYTES", "data": [request]}]}
    url = f"{place.server.ports.http_url}/v2/models/manager/infer"
    done = subprocess.run(["curl", "-s", url, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["name"] == "RESPONSE"
    answer = json.loads(output["data"][0])
    assert answer["ok"] is True
    assert [domain["name"] for domain in answer["domains"]] == ["general"]


Raw = tuple[Any, Any]


@pytest.fixture(params=["http", "grpc"])
def raw(request: pytest.FixtureRequest, place: Place) -> Iterator[Raw]:
    """tritonclient itself."""
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    opened = module.InferenceServerClient(place.url(request.param).partition("//")[2])
    yield module, opened
    opened.close()


def infer(
    raw: Raw, value: np.ndarray, datatype: str = "BYTES", *, name: str = "REQUEST", model: str = "manager"
) -> Any:
    module, client = raw
    tensor = module.InferInput(name, list(value.shape), datatype)
    tensor.set_data_from_numpy(value)
    return json.loads(client.infer(model, [tensor]).as_numpy("RESPONSE")[0])


def as_bytes(*values: bytes) -> np.ndarray:
    return np.array(values, dtype=np.object_)


def request(action: str, **values: Any) -> bytes:
    return json.dumps({"action": action, **values}).encode()


NO_UPLOAD = {"train": {"upload": "u1"}}
BAD: list[tuple[bytes, type[HplmError]]] = [
    (b"", errors.BadManageRequestError),
    (b"\xff\xfe{}", errors.BadManageRequestError),
    (b"{", errors.BadManageRequestError),
    (b"[" * 100_000, errors.BadManageRequestError),
    (b"[]", errors.BadManageRequestError),
    (b'{"action": NaN}', errors.BadManageRequestError),
    (request("tenant.explode"), errors.BadManageRequestError),
    (request("tenant.show"), errors.BadManageRequestError),
    (request("tenant.show", tenant=7), errors.BadManageRequestError),
    (request("tenant.show", tenant="acme", also=1), errors.BadManageRequestError),
    (request("tenant.show", tenant="../../etc"), errors.TenantNameError),
    (request("tenant.show", tenant="nobody"), errors.UnknownTenantError),
    (request("tenant.update", tenant="nobody", data=NO_UPLOAD), errors.UnknownTenantError),
    (request("tenant.delete", tenant="nobody"), errors.UnknownTenantError),
    (request("tenant.rollback", tenant="alpha", version=99), errors.UnknownVersionError),
    (request("tenant.create", tenant="alpha", data=NO_UPLOAD), errors.AlreadyThereError),
    (request("tenant.create", tenant="x", data=NO_UPLOAD), errors.UnknownUploadError),
    (request("tenant.create", tenant="x", domain="nowhere", data=NO_UPLOAD), errors.UnknownDomainError),
    (request("tenant.create", tenant="x", data={"train": {"path": "/etc/passwd"}}), errors.ForbiddenError),
    (request("tenant.create", tenant="x", data=NO_UPLOAD, settings={"epochs": 0}), errors.BadManageRequestError),
    (request("domain.show", domain="nowhere"), errors.UnknownDomainError),
    (request("domain.delete", domain="general"), errors.BadManageRequestError),
    (request("domain.update", domain="nowhere", corpus={"upload": "u1"}), errors.UnknownDomainError),
    (request("domain.create", domain="general", corpus={"upload": "u1"}), errors.AlreadyThereError),
    (request("job.show", job="j1"), errors.UnknownJobError),
    (request("job.cancel", job="j1"), errors.UnknownJobError),
    (request("job.list", states=["lost"]), errors.BadManageRequestError),
    (request("job.watch", job="j1"), errors.BadManageRequestError),
    (request("upload.start", bytes=1, sha256="x", name="a.csv"), errors.BadManageRequestError),
    (request("upload.start", bytes=1 << 40, sha256="0" * 64, name="a.csv"), errors.UploadError),
    (request("upload.start", bytes=1, sha256="0" * 64, name="../a.csv"), errors.BadManageRequestError),
    (request("upload.chunk", upload="u1", offset=0, data="AAAA"), errors.UnknownUploadError),
    (request("upload.chunk", upload="u1", offset=0, data="!"), errors.BadManageRequestError),
    (request("upload.finish", upload="u1"), errors.UnknownUploadError),
    (request("upload.chunk", upload="u1", offset=0, data="A" * (10 << 20)), errors.UploadError),
    (b"x" * (10 << 20), errors.BadManageRequestError),
    (b"x" * (20 << 20), errors.BadManageRequestError),
]


@pytest.mark.parametrize(("sent", "error"), BAD, ids=[f"{error.code}-{i}" for i, (_, error) in enumerate(BAD)])
def test_a_bad_request_gets_its_code_and_no_traceback(raw: Raw, sent: bytes, error: type[HplmError]) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(raw, as_bytes(sent))
    message = str(caught.value.message())
    assert type(errors.from_wire(message)) is error
    assert "Traceback" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "call",
    [
        lambda raw: infer(raw, np.array([1], dtype=np.int32), "INT32"),
        lambda raw: infer(raw, as_bytes(b"{}", b"{}")),
        lambda raw: infer(raw, as_bytes(b"{}")[None]),
        lambda raw: infer(raw, as_bytes()),
        lambda raw: infer(raw, as_bytes(b"{}"), name="QUESTION"),
    ],
    ids=["wrong-dtype", "two-requests", "two-dimensions", "none", "wrong-name"],
)
def test_a_wrong_call_is_refused_and_the_server_goes_on(raw: Raw, call: Callable[[Raw], Any]) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call(raw)
    assert "Traceback" not in str(caught.value.message())
    assert infer(raw, as_bytes(request("domain.list")))["ok"]


def test_an_error_has_its_http_status(place: Place) -> None:
    def status(sent: bytes) -> int:
        body = {"inputs": [{"name": "REQUEST", "shape": [1], "datatype": "BYTES", "data": [sent.decode()]}]}
        url = f"{place.server.ports.http_url}/v2/models/manager/infer"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert status(request("domain.list")) == 200
    assert status(request("tenant.show", tenant="nobody")) == 404
    assert status(b"{") == 400


def test_bad_requests_among_good_ones_leave_the_good_ones_unharmed(place: Place) -> None:
    def good(_: int) -> int:
        with ManageClient(place.url("grpc")) as client:
            return len(client.list_domains())

    def bad(number: int) -> type[Exception]:
        with ManageClient(place.url("http")) as client:
            try:
                client.ask("tenant.show", tenant=f"nobody-{number}")
            except HplmError as error:
                return type(error)
        return AssertionError

    with ThreadPoolExecutor(16) as pool:
        goods, bads = pool.map(good, range(60)), pool.map(bad, range(60))
        assert set(goods) == {1}
        assert set(bads) == {errors.UnknownTenantError}


def test_the_managers_process_holds_no_torch(place: Place) -> None:
    session = str(place.server.process.pid)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--sid", session], capture_output=True, text=True, check=True
    )
    stubs = [line.split()[0] for line in listed.stdout.splitlines() if line.endswith("backends/manager")]
    assert len(stubs) == 1
    assert "libtorch" not in Path(f"/proc/{stubs[0]}/maps").read_text()


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton without models that takes long to end is let: on a busy machine its two seconds are many more."""
    monkeypatch.setattr(idle_connections, "EMPTY_ENDS_S", 60.0)


@pytest.mark.usefixtures("no_hurry")
def test_a_dry_run_under_way_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path, manager_settings={})
    rows = write_rows(tmp_path / "rows.csv")
    store = Store(tmp_path / "store")
    server = TritonServer(models, free_ports(), models=(MANAGER.name,), log=tmp_path / "triton.log")
    server.wait_ready()

    def plan() -> dict[str, Any]:
        with ManageClient(server.ports.http_url) as client:
            data = {"train": dict(client.upload(rows))}
            return client.ask("tenant.create", tenant="acme", data=data, dry_run=True)

    with ThreadPoolExecutor(1) as pool, closing(Registry.open(store)) as registry:
        asked = pool.submit(plan)
        until(lambda: bool(registry.jobs()))
        assert server.stop(timeout_s=60) == 0
        # No worker will make it: its job is the answer.
        assert asked.result(60)["job"] == registry.jobs()[0].id
