"""`hplm key` and `hplm audit` on a store itself."""

from __future__ import annotations

import json
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hplm.access.key_ring import KeyRing
from hplm.access.keys import parse
from hplm.errors import BadManageRequestError, MissingRegistryError, UnknownKeyError, UnknownTenantError
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm_cli import make_app
from hplm_cli.key import parse_duration
from hplm_cli.store_requests import open_manager
from tests.unit.hplm.registry.making import publish, publish_root


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    with closing(Registry.open(made, create=True)) as registry:
        publish(registry, "films", publish_root(registry))
    return made


def run(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(make_app(arguments[0]), [*arguments, "--store", str(store.root)])


def create(store: Store, *arguments: str) -> str:
    done = run(store, "key", "create", *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_a_created_key_is_alone_on_standard_output_and_opens_its_tenant(store: Store) -> None:
    key = create(store, "films", "--expires", "90d")
    parsed = parse(key.encode())
    assert parsed is not None
    with closing(KeyRing(store)) as ring:
        assert ring.check(key.encode(), "films") == parsed.id


def test_a_person_is_told_whose_key_it_is_and_to_keep_it(store: Store) -> None:
    done = run(store, "key", "create", "films")
    assert "of tenant films, infer, valid until it is revoked. Keep it now" in done.stderr
    assert done.stdout.strip() not in done.stderr
    operator = run(store, "key", "create", "--operator", "admin", "--expires", "1d")
    assert "of an operator, admin, valid until 2" in operator.stderr


def test_the_key_is_in_json_too(store: Store) -> None:
    shown = json.loads(run(store, "key", "create", "films", "--scope", "manage", "--expires", "12h", "--json").stdout)
    assert (shown["tenant"], shown["role"]) == ("films", "manage")
    assert shown["expires_s"] - shown["created_s"] == 12 * 3600
    assert parse(shown["text"].encode()) is not None


def test_keys_are_listed_with_their_state_and_never_whole(store: Store) -> None:
    keys = [create(store, "films"), create(store, "--operator", "read")]
    listed = run(store, "key", "list").stdout
    assert listed.splitlines()[0].split() == ["id", "tenant", "role", "created", "expires", "revoked", "last_used"]
    for key in keys:
        parsed = parse(key.encode())
        assert parsed is not None
        assert parsed.id in listed
        assert parsed.secret.decode() not in listed
    (of_films,) = run(store, "key", "list", "films", "--json").stdout.splitlines()
    assert json.loads(of_films)["tenant"] == "films"


def test_a_key_is_revoked_by_its_id_or_whole(store: Store) -> None:
    for whole in (False, True):
        key = create(store, "films")
        parsed = parse(key.encode())
        assert parsed is not None
        done = run(store, "key", "revoke", key if whole else parsed.id)
        said = f"key {parsed.id} is revoked: all servers refuse it by "
        assert done.stdout.startswith(said)
        refused_by = datetime.fromisoformat(done.stdout.removeprefix(said).strip())
        assert abs(refused_by.timestamp() - time.time()) < 60
        with closing(Registry.open(store)) as registry:
            assert registry.key(parsed.id).revoked_s is not None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("create", "nobody"), UnknownTenantError),
        (("revoke", "a" * 16), UnknownKeyError),
        (("revoke", "nonsense"), BadManageRequestError),
    ],
)
def test_what_cannot_be_done_is_said(store: Store, arguments: tuple[str, ...], error: type[Exception]) -> None:
    assert isinstance(run(store, "key", *arguments).exception, error)


@pytest.mark.parametrize(
    "arguments",
    [(), ("films", "--operator", "read"), ("--operator", "read", "--scope", "infer"), ("films", "--expires", "9")],
)
def test_options_that_do_not_go_together_are_refused(store: Store, arguments: tuple[str, ...]) -> None:
    assert run(store, "key", "create", *arguments).exit_code == 2
    with closing(Registry.open(store)) as registry:
        assert registry.access_keys() == []


def test_a_store_without_a_registry_is_named_and_none_is_made(tmp_path: Path) -> None:
    done = run(Store(tmp_path), "key", "list")
    assert isinstance(done.exception, MissingRegistryError)
    assert list(tmp_path.iterdir()) == []


def test_commands_on_the_store_are_in_the_audit_log(store: Store) -> None:
    key = create(store, "films")
    before_s = time.time()
    run(store, "key", "create", "nobody")
    entries = [json.loads(line) for line in run(store, "audit", "--json").stdout.splitlines()]
    assert [(entry["role"], entry["action"], entry["subject"], entry["outcome"]) for entry in entries] == [
        ("local", "key.create", "tenant:nobody", "UNKNOWN_TENANT"),
        ("local", "key.create", "tenant:films", "ok"),
    ]
    assert abs(entries[0]["at_s"] - before_s) < 3600
    table = run(store, "audit", "--subject", "tenant:films").stdout
    assert "key.create" in table
    assert "nobody" not in table
    assert key not in table
    assert key.rpartition("_")[2] not in json.dumps(entries)


def test_the_audit_log_says_which_key_was_made_or_revoked_and_what_limits_were_set(store: Store) -> None:
    key = json.loads(run(store, "key", "create", "films", "--scope", "manage", "--expires", "90d", "--json").stdout)
    operator = json.loads(run(store, "key", "create", "--operator", "read", "--json").stdout)
    run(store, "key", "revoke", operator["id"])
    with open_manager("", store.root, "", as_json=False) as client:
        client.limit_tenant("films", requests_per_s=50, concurrent=3)
        client.limit_tenant("films", clear=True)
        client.limit_tenant("films")
    entries = [json.loads(line) for line in run(store, "audit", "--json").stdout.splitlines()]
    of_operator = {"id": operator["id"], "tenant": None, "role": "read", "expires_s": None}
    assert [entry["details"] for entry in reversed(entries)] == [
        {"id": key["id"], "tenant": "films", "role": "manage", "expires_s": key["expires_s"]},
        of_operator,
        of_operator,
        {"requests_per_s": 50.0, "concurrent": 3},
        {"cleared": True},
        {},
    ]
    table = run(store, "audit").stdout
    expires = datetime.fromtimestamp(key["expires_s"]).isoformat(sep=" ", timespec="seconds")
    for said in (
        f"id {key['id']}, tenant films, role manage, expires_s {expires}",
        f"id {operator['id']}, tenant -, role read, expires_s -",
        "requests_per_s 50, concurrent 3",
        "cleared yes",
    ):
        assert said in table


@pytest.mark.parametrize(("text", "seconds"), [("90d", 90 * 86_400), ("12h", 43_200), ("30m", 1800), ("45s", 45)])
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
