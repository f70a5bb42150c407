"""A server, its manager and its worker over a registry in PostgreSQL, which is killed while they are at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_client import Client, ManageClient

from hplm import errors
from tests import managed
from tests.managed import FAST, Place, swapped
from tests.postgres import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.triton
LONG = {"epochs": 150, "patience": 150, "learning_rates": [0.003]}


def code_of(place: Place, tenant: str) -> str:
    with Client(place.url("grpc")) as client:
        try:
            client.predict(tenant, "the red cat")
        except errors.HplmError as error:
            return error.code
    return "OK"


def test_tenants_are_made_served_and_deleted_over_a_postgresql_that_is_killed_meanwhile(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    postgres.clear()
    with managed.serving(tmp_path, postgres.url) as place, ManageClient(place.url("http")) as manage:
        assert not (place.store.root / "registry.sqlite").exists()
        with place.working():
            first = manage.wait(manage.create_tenant("acme", train=manage.upload(place.rows), settings=FAST)).result
            until(lambda: code_of(place, "acme") == "OK")
            job = manage.update_tenant("acme", train=manage.upload(swapped(place.rows)), settings=LONG)
            until(lambda: manage.show_job(job).progress > 0.25)
            postgres.restart("immediate")
            # What is known is served on, and what was under way comes to its end.
            assert code_of(place, "acme") == "OK"
            second = manage.wait(job).result
        assert first is not None
        assert second is not None
        assert first["version"] < second["version"]
        assert manage.rollback_tenant("acme") == first["version"]
        assert [one.version for one in manage.list_tenants("acme")] == [first["version"]]
        manage.delete_tenant("acme")
        until(lambda: code_of(place, "acme") == "UNKNOWN_TENANT")
        assert code_of(place, "alpha") == "OK"
