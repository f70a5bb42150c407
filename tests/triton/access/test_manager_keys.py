"""The manager of a running server answers the holders of keys alone, and notes each request."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient

from hplm.access.keys import parse
from hplm.core import wire
from hplm.errors import BadInputError, ForbiddenError, UnknownJobError, UnknownTenantError
from hplm.registry.registry import Registry
from hplm.runtime.local_http import LOCAL_HTTP
from tests.triton.access.making import OWN, PROTOCOLS, Place, as_bytes, ask, serving
from tests.waiting import until

pytestmark = pytest.mark.triton
TENANT, OTHER = OWN["small"], OWN["middle"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with serving(tmp_path_factory.mktemp("manager")) as made:
        yield made


@pytest.fixture(scope="module", params=PROTOCOLS)
def url(request: pytest.FixtureRequest, place: Place) -> str:
    ports = place.server.ports
    return ports.http_url if request.param == "http" else ports.grpc_url


@pytest.fixture(scope="module")
def admin(place: Place) -> str:
    key = place.add_key(None, "admin")
    await_accepted(place, key)
    return key


def await_accepted(place: Place, key: str) -> None:
    """Until the manager has heard of a key: it then refuses nothing that the key allows."""

    def is_known() -> bool:
        with ManageClient(place.server.ports.http_url, key=key) as manage:
            try:
                manage.ask("audit.list", limit=1)
            except ForbiddenError:
                return False
            return True

    until(is_known)


def test_without_a_key_the_manager_answers_nothing(place: Place, url: str) -> None:
    with ManageClient(url) as manage:
        for ask in (manage.list_tenants, manage.list_keys, lambda: manage.delete_tenant(TENANT)):
            with pytest.raises(ForbiddenError, match="the key is missing, or is not valid for this action"):
                ask()


def test_an_admin_makes_keys_that_work_at_once_and_revokes_them(place: Place, url: str, admin: str) -> None:
    with ManageClient(url, key=admin) as manage:
        reader = manage.create_operator_key("read", expires_in_s=3600)
        own = manage.create_key(TENANT, "manage")
        with ManageClient(url, key=reader.text) as reading:
            assert TENANT in [tenant.name for tenant in reading.list_tenants()]
            with pytest.raises(ForbiddenError):
                reading.delete_tenant(TENANT)
        with ManageClient(url, key=own.text) as managing:
            assert managing.show_tenant(TENANT).name == TENANT
            with pytest.raises(ForbiddenError):
                managing.show_tenant(OTHER)
        listed = {key.id: key for key in manage.list_keys()}
        assert (listed[own.id].tenant, listed[own.id].role) == (TENANT, "manage")
        for key in (reader, own):
            assert manage.revoke_key(key.id).revoked_s is not None
            with ManageClient(url, key=key.text) as revoked, pytest.raises(ForbiddenError):
                revoked.list_tenants()


def test_a_new_key_of_a_tenant_infers_and_a_revoked_one_does_not(place: Place, url: str, admin: str) -> None:
    with ManageClient(url, key=admin) as manage:
        key = manage.create_key(TENANT)
        with Client(url, key=key.text, model="small") as client:

            def is_answered() -> bool:
                try:
                    return client.predict(TENANT, "the red cat").label is not None
                except ForbiddenError:
                    return False

            until(is_answered)
            with pytest.raises(ForbiddenError):
                client.predict(OTHER, "the red cat")
            manage.revoke_key(key.id)
            until(lambda: not is_answered())


def test_a_watch_needs_a_key_too(place: Place, admin: str) -> None:
    with ManageClient(place.server.ports.grpc_url) as manage, pytest.raises(ForbiddenError):
        next(iter(manage.watch("no-such-job")))
    with ManageClient(place.server.ports.grpc_url, key=admin) as manage, pytest.raises(UnknownJobError):
        next(iter(manage.watch("no-such-job")))


def test_a_key_beside_a_header_for_a_proxy_is_found_in_its_tensor(place: Place, url: str, admin: str) -> None:
    with ManageClient(url, key=admin, headers={"authorization": "Basic proxy"}) as manage:
        assert manage.list_tenants()
    if url.startswith("grpc"):
        with (
            ManageClient(url, key=admin, headers={"authorization": "Basic proxy"}) as manage,
            pytest.raises(UnknownJobError),
        ):
            next(iter(manage.watch("no-such-job")))


def test_requests_are_in_the_audit_log_by_key(place: Place, url: str, admin: str) -> None:
    parsed = parse(admin.encode())
    assert parsed is not None
    with ManageClient(url, key=admin) as manage:
        made = manage.create_key(OTHER)
        manage.revoke_key(made.id)
        with pytest.raises(UnknownTenantError):
            manage.delete_tenant("nobody")
        revoked, created = manage.audit(key=parsed.id, limit=2)
        assert (created.action, created.subject, created.outcome) == ("key.create", f"tenant:{OTHER}", "ok")
        assert (revoked.action, revoked.subject, revoked.role) == ("key.revoke", f"key:{made.id}", "admin")
        of_key = {"id": made.id, "tenant": OTHER, "role": "infer", "expires_s": None}
        assert (created.details, revoked.details) == (of_key, of_key)


def test_commands_take_the_key_from_the_environment(
    place: Place,
    url: str,
    admin: str,
    hplm: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HPLM_KEY", raising=False)
    refused = hplm("tenant", "list", "--url", url)
    assert (refused.returncode, "FORBIDDEN" in refused.stderr) == (1, True)
    monkeypatch.setenv("HPLM_KEY", admin)
    assert TENANT in hplm("tenant", "list", "--url", url).stdout
    made = hplm("key", "create", TENANT, "--url", url).stdout.strip()
    assert parse(made.encode()) is not None
    listed = hplm("key", "list", TENANT, "--json", "--url", url).stdout
    assert made.split("_")[1] in listed
    shown = [json.loads(line) for line in hplm("audit", "--limit", "3", "--json", "--url", url).stdout.splitlines()]
    assert "key.create" in [entry["action"] for entry in shown]


def test_the_last_use_of_a_key_is_listed(place: Place, url: str, admin: str) -> None:
    with ManageClient(url, key=admin) as manage:
        (own,) = [key for key in manage.list_keys() if key.id == admin.split("_")[1]]
        until(lambda: any(key.last_used_s for key in manage.list_keys() if key.id == own.id))


def test_no_secret_is_in_a_log_a_process_list_or_a_file_of_the_store(place: Place, url: str, admin: str) -> None:
    with ManageClient(url, key=admin) as manage, pytest.raises(UnknownTenantError):
        manage.show_tenant("nobody")
    secret = admin.rpartition("_")[2].encode()
    logs = [path.read_bytes() for path in place.models.parent.glob("*.log*")]
    assert logs
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes())
        except OSError:
            continue  # the process has ended
    files = [path.read_bytes() for path in place.store.root.rglob("*") if path.is_file()]
    assert not any(secret in raw for raw in (*logs, *commands, *files))
    with closing(Registry.open_read_only(place.store)) as registry:
        assert registry.key(admin.split("_")[1]).role == "admin"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_key_takes_the_place_of_no_other_input(place: Place, admin: str, protocol: str) -> None:
    # Triton 24.10 only counts the inputs, and KEY is optional.
    key = as_bytes([admin])
    for model, inputs, name in (
        (wire.MANAGER, {wire.KEY: key[0]}, wire.REQUEST),
        (wire.CASCADE, {wire.TEXT: as_bytes(["the cat"]), wire.KEY: key}, wire.TENANT),
        ("middle_plot", {wire.TEXT: as_bytes(["the cat"]), wire.KEY: key}, wire.TENANT),
    ):
        refused = ask(place, protocol, model, inputs)
        assert isinstance(refused, BadInputError), repr(refused)
        assert str(refused) == f"the input {name} is missing"
    assert "Traceback" not in (place.models.parent / "triton.log").read_text()


def test_a_parameter_that_is_no_text_is_refused(place: Place) -> None:
    body = b'{"parameters": {"a": "\xff"}, "inputs": [{"name": "REQUEST", "shape": [1], "datatype": "BYTES", "data": ["{}"]}]}'
    request = urllib.request.Request(f"{place.server.ports.http_url}/v2/models/{wire.MANAGER}/infer", body)
    with pytest.raises(urllib.error.HTTPError) as refused:
        LOCAL_HTTP.open(request, timeout=20)
    with refused.value as answer:
        assert (answer.code, json.load(answer)) == (
            400,
            {"error": "BAD_INPUT: a parameter of the request is not UTF-8"},
        )
