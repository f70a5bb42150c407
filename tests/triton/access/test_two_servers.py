"""Two servers over one registry in PostgreSQL: both follow its keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hplm_client import Client

from hplm.errors import ForbiddenError, HplmError
from hplm.store.layout import Store
from tests import tiny
from tests.postgres import PostgresServer
from tests.triton.access.making import Place, ask, bearer, keyed_server, looked_up, texts
from tests.waiting import until

pytestmark = pytest.mark.triton
TENANT = "alpha"
# Threads that send requests to each server.
LOADERS = 4


@pytest.fixture(scope="module")
def places(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    postgres.clear()
    folder = tmp_path_factory.mktemp("two-servers")
    models = tiny.make_repository(folder, registry=postgres.url, look_up_instances=2)
    store = Store(folder / "store", postgres.url)
    with ExitStack() as stack:
        servers = [stack.enter_context(keyed_server(models, folder / f"triton-{number}.log")) for number in range(2)]
        made = [Place(server, store, models) for server in servers]
        for place in made:
            place.server.wait_ready()
        yield made


class Load:
    """Threads that ask one server with one key until the end. They note each answer: when its request began, and whether it
    was refused."""

    def __init__(self, place: Place, key: str) -> None:
        self.answers: list[tuple[float, bool]] = []
        self.errors: list[Exception] = []
        self._place, self._key = place, key
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(LOADERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with Client(self._place.server.ports.grpc_url, model="hbert", headers=bearer(self._key)) as client:
            while not self._ended.is_set():
                began_s = time.monotonic()
                try:
                    client.predict(TENANT, "the red cat")
                except ForbiddenError:
                    self.answers.append((began_s, True))
                except Exception as error:
                    self.errors.append(error)
                else:
                    self.answers.append((began_s, False))


def test_a_key_that_is_revoked_under_load_is_refused_by_both_servers_within_a_second(places: list[Place]) -> None:
    key = places[0].add_key(TENANT)
    for place in places:
        until(lambda place=place: not isinstance(ask(place, "grpc", "hbert", texts([TENANT]), bearer(key)), HplmError))
    # Processes of a look-up stage that have not answered yet may not know the key yet.
    time.sleep(1.0)
    with Load(places[0], key) as first, Load(places[1], key) as second:
        time.sleep(0.5)
        places[1].revoke(key)
        revoked_s = time.monotonic()
        time.sleep(2.0)
    for load in (first, second):
        assert load.errors == []
        before = [is_refused for began_s, is_refused in load.answers if began_s < revoked_s - 0.1]
        after = [is_refused for began_s, is_refused in load.answers if began_s > revoked_s + 1.0]
        assert before
        assert not any(before)
        assert after
        assert all(after)


def test_a_proof_of_one_server_is_worth_nothing_at_another(places: list[Place]) -> None:
    key = places[0].add_key(TENANT)
    time.sleep(1.0)
    inputs = looked_up(places[0], "hbert", TENANT, key)
    assert not isinstance(ask(places[0], "grpc", "hbert_upper", inputs), HplmError)
    assert isinstance(ask(places[1], "grpc", "hbert_upper", inputs), ForbiddenError)


def test_keys_that_are_known_stay_valid_while_the_registry_is_away(
    places: list[Place], postgres: PostgresServer
) -> None:
    key = places[0].add_key(TENANT)
    time.sleep(1.0)
    postgres.restart("immediate")
    for place in places:
        for _ in range(4):
            assert not isinstance(ask(place, "grpc", "hbert", texts([TENANT]), bearer(key)), HplmError)
            assert isinstance(ask(place, "grpc", "hbert", texts(["beta"]), bearer(key)), ForbiddenError)
    # The servers follow the registry again.
    places[0].revoke(key)
    for place in places:
        until(lambda place=place: isinstance(ask(place, "grpc", "hbert", texts([TENANT]), bearer(key)), ForbiddenError))
