"""Tenants that are replaced, deleted, damaged and repaired while requests for them are under way."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hplm_client import Client
from hplm_loadtest.scenarios.infer_messages import METHOD
from hplm_loadtest.scenarios.server_metrics import metric_value

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.adapters.packed import widen
from hplm.adapters.tenant import Tenant
from hplm.engine import reference
from hplm.models.base import Base
from hplm.models.layers import UpperLayers
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.managed import await_seen
from tests.messages import TEXTS, TOLERANCE, looked_up, message, read, served_hidden
from tests.waiting import until
from tests.watching import stubs_of

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(600)]
OTHERS = ("beta", "gamma")
# Requests for each tenant at least while something changes: fewer would say little.
LEAST = 25
# Requests for a damaged one.
LEAST_DAMAGED = 3
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """A server of its own, whose store is written to while it serves."""

    server: TritonServer
    store: Store
    base: Base
    upper: UpperLayers
    states: list[torch.Tensor]
    asked: list[str] = field(default_factory=list)

    def wanted(self, member: Tenant) -> list[Logits]:
        """What a tenant must answer to each text."""
        return [reference.logits(self.upper, state, member)[0].numpy() for state in self.states]

    def versions(self, count: int) -> list[list[Logits]]:
        """Of `alpha` at seeds 100, 101, ..."""
        return [self.wanted(tiny.tenant_of(self.base, "alpha", 100 + version)) for version in range(count)]

    def publish(self, version: int) -> None:
        """Served when this returns."""
        tiny.make_tenant(self.store, self.base, "alpha", 100 + version)
        self.await_seen()

    def await_seen(self) -> None:
        """Until whatever was changed is served."""
        await_seen(self.server, self.store, self.base)

    def ask(self, tenant: str) -> str:
        """The code of a request over gRPC and of one over HTTP, which must be the same; OK where they are answered.

        They go first in turn: the first finds a tenant that is not in memory.
        """
        self.asked.append(tenant)
        urls = [self.server.ports.grpc_url, self.server.ports.http_url][:: -1 if len(self.asked) % 2 else 1]
        codes = {url: self._code(tenant, url) for url in urls}
        assert len(set(codes.values())) == 1, codes
        return codes[urls[0]]

    def answers(self, tenant: str) -> bool:
        """Over both protocols."""
        return all(self._code(tenant, url) == "OK" for url in (self.server.ports.grpc_url, self.server.ports.http_url))

    def _code(self, tenant: str, url: str) -> str:
        with Client(url) as client:
            try:
                client.predict(tenant, TEXTS[0])
            except errors.HplmError as error:
                return error.code
        return "OK"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("updates")
    models = tiny.make_repository(folder, num_slots=3)
    store, base = tiny.opened(folder)
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        states = looked_up(models, TEXTS)
        yield Place(server, store, base, base.load_upper(), states)


@dataclass(frozen=True)
class Outcome:
    """One request: `before` and `after` are how many changes had been finished when it was sent, and when it ended."""

    tenant: str
    text: int
    before: int
    after: int
    seconds: float
    code: str
    logits: Logits | None


class Traffic:
    """Threads that ask for tenants all the time, of each one over gRPC and one over HTTP.

    A context manager, which goes on until each tenant was asked LEAST times; `outcomes` are whole when it ends.
    """

    def __init__(self, server: TritonServer, tenants: tuple[str, ...], changes: Callable[[], int]) -> None:
        self.outcomes: list[Outcome] = []
        self._changes = changes
        self._done = threading.Event()
        self._server = server
        self._tenants = tenants
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.ports.grpc}")
        ways = (self._ask_over_grpc, self._ask_over_http)
        self._threads = [threading.Thread(target=way, args=(tenant,)) for tenant in tenants for way in ways]

    def _ask_over_grpc(self, tenant: str) -> None:
        call = self._channel.unary_unary(METHOD)
        messages = [message(tenant, text) for text in TEXTS]

        def logits_of(text: int) -> Logits:
            try:
                return read(call(messages[text], timeout=60))[1]
            except grpc.RpcError as error:
                raise errors.from_wire(str(error.details())) or error from None

        self._ask(tenant, logits_of)

    def _ask_over_http(self, tenant: str) -> None:
        with Client(self._server.ports.http_url, timeout_s=60) as client:

            def logits_of(text: int) -> Logits:
                found = client.predict(tenant, TEXTS[text], logits=True).logits
                assert found is not None
                return found[0]

            self._ask(tenant, logits_of)

    def _ask(self, tenant: str, logits_of: Callable[[int], Logits]) -> None:
        turn = 0
        while not self._done.is_set():
            text = turn % len(TEXTS)
            before, start, code, logits = self._changes(), time.monotonic(), "OK", None
            try:
                logits = logits_of(text)
            except errors.HplmError as error:
                code = error.code
            except grpc.RpcError as error:
                code = str(error)
            seconds = time.monotonic() - start
            self.outcomes.append(Outcome(tenant, text, before, self._changes(), seconds, code, logits))
            turn += 1

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                until(lambda: all(len(self.of(tenant)) >= LEAST for tenant in self._tenants))
        finally:
            self._done.set()
            for thread in self._threads:
                thread.join()
            self._channel.close()

    def of(self, tenant: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.tenant == tenant]

    def during(self, changes: int, tenant: str = "alpha") -> list[Outcome]:
        """What was sent and ended when so many changes had been finished."""
        return [outcome for outcome in self.of(tenant) if outcome.before == outcome.after == changes]

    def has_refused(self, changes: int) -> bool:
        """Whether `alpha` was refused to a request that was sent when so many changes had been finished."""
        return any(outcome.code != "OK" for outcome in self.of("alpha") if outcome.before == changes)


def version_of(outcome: Outcome, versions: list[list[Logits]]) -> int:
    """Which version answered; fails where none did."""
    assert outcome.logits is not None
    off = [float(np.abs(outcome.logits - version[outcome.text]).max()) for version in versions]
    assert min(off) < TOLERANCE, f"nobody's answer: {min(off)} from the nearest version"
    return int(np.argmin(off))


def others_unharmed(traffic: Traffic, place: Place, members: dict[str, list[Logits]], quiet_s: float) -> None:
    for name in OTHERS:
        outcomes = traffic.of(name)
        assert {outcome.code for outcome in outcomes} == {"OK"}
        assert {version_of(outcome, [members[name]]) for outcome in outcomes} == {0}
        # Nobody waits for another tenant's files. A machine that is busy with something else may be late, but not for ever.
        assert float(np.median([outcome.seconds for outcome in outcomes])) < max(4 * quiet_s, 1.0)
        assert max(outcome.seconds for outcome in outcomes) < 50 * quiet_s + 30.0


def members_of(place: Place) -> dict[str, list[Logits]]:
    """What each tenant answers as it was made with the repository."""
    seeds = {name: seed for seed, name in enumerate(tiny.TASKS, 1)}
    return {name: place.wanted(tiny.tenant_of(place.base, name, seeds[name])) for name in ("alpha", *OTHERS)}


def quiet_s_of(place: Place) -> float:
    """What a request takes while nothing changes."""
    with Traffic(place.server, ("alpha", *OTHERS), lambda: 0) as traffic:
        time.sleep(2)
    return float(np.median([outcome.seconds for outcome in traffic.outcomes]))


@pytest.fixture(scope="module")
def members(place: Place) -> dict[str, list[Logits]]:
    """What the others answer, whose files nobody touches."""
    return members_of(place)


@pytest.fixture(scope="module")
def quiet_s(place: Place) -> float:
    return quiet_s_of(place)


def test_a_tenant_replaced_while_asked_answers_as_the_old_or_the_new_and_never_a_mixture(
    place: Place, members: dict[str, list[Logits]], quiet_s: float
) -> None:
    versions = place.versions(9)
    place.publish(0)
    published = 0
    with Traffic(place.server, ("alpha", *OTHERS), lambda: published) as traffic:
        for version in range(1, 9):
            place.publish(version)
            published = version
    for outcome in traffic.of("alpha"):
        assert outcome.code == "OK"
        # One that was sent after an update is answered by it or what came after, seen at most while it was written.
        assert outcome.before <= version_of(outcome, versions) <= outcome.after + 1
    others_unharmed(traffic, place, members, quiet_s)


def test_a_tenant_deleted_while_asked_answers_or_is_unknown_and_answers_again_when_published(
    place: Place, members: dict[str, list[Logits]], quiet_s: float
) -> None:
    versions = place.versions(4)
    place.publish(0)
    changes = 0
    with Traffic(place.server, ("alpha", *OTHERS), lambda: changes) as traffic:
        for version in range(1, 4):
            tiny.delete_tenant(place.store, "alpha")
            place.await_seen()
            changes = version
            assert place.ask("alpha") == "UNKNOWN_TENANT"
            until(partial(traffic.has_refused, changes))
            place.publish(version)
            assert place.ask("alpha") == "OK"
    outcomes = traffic.of("alpha")
    codes = {outcome.code for outcome in outcomes}
    assert codes == {"OK", "UNKNOWN_TENANT"}
    for outcome in outcomes:
        if outcome.code == "OK":
            version_of(outcome, versions)
    others_unharmed(traffic, place, members, quiet_s)


def damage_weights(folder: Path) -> None:
    tiny.flip_last_byte(folder / "weights.safetensors")


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def cut_weights(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def lose_weights(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


def lose_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def damage_next(place: Place, member: Tenant, damage: Callable[[Path], None]) -> None:
    """Publish a version whose files are broken before anybody asks for it."""
    with closing(Registry.open(place.store)) as registry:
        current = registry.tenant(member.card.name).current
        number = registry.next_number(member.card.name)
        folder = place.store.tenant_version(member.card.name, number)
        tenants.save(folder, member)
        damage(folder)
        path = place.store.relative(folder)
        registry.publish_tenant(
            *(member.card.name, current.domain_version_id, path, time.time()),
            about={},
            number=number,
            expected=current.number,
        )


DAMAGES = {
    damage_weights: "CORRUPT_ARTIFACT",
    damage_manifest: "CORRUPT_ARTIFACT",
    cut_weights: "CORRUPT_ARTIFACT",
    lose_weights: "CORRUPT_ARTIFACT",
    lose_folder: "MISSING_ARTIFACT",
}


def await_damaged(traffic: Traffic, changes: int) -> None:
    """Until enough was asked while `alpha` is damaged."""
    until(lambda: len(traffic.during(changes)) >= LEAST_DAMAGED)


def refused_while_damaged(traffic: Traffic, damaged: dict[int, str], whole: list[Logits]) -> None:
    """After so many changes as `damaged` names `alpha` is refused with that code; what it answers is its `whole` version's."""
    outcomes = traffic.of("alpha")
    for changes, code in damaged.items():
        assert {outcome.code for outcome in traffic.during(changes)} == {code}
    assert {outcome.code for outcome in outcomes} == {"OK", *DAMAGES.values()}
    for outcome in outcomes:
        if outcome.code == "OK":
            version_of(outcome, [whole])


def test_a_tenant_whose_next_version_is_damaged_is_refused_and_answers_again_when_repaired(
    place: Place, members: dict[str, list[Logits]], quiet_s: float
) -> None:
    place.publish(0)
    changes, damaged = 0, dict[int, str]()
    with Traffic(place.server, ("alpha", *OTHERS), lambda: changes) as traffic:
        for version, (damage, code) in enumerate(DAMAGES.items(), 1):
            damage_next(place, tiny.tenant_of(place.base, "alpha", 100 + version), damage)
            place.await_seen()
            changes += 1
            damaged[changes] = code
            assert place.ask("alpha") == code
            await_damaged(traffic, changes)
            changes += 1
            place.publish(0)
            assert place.ask("alpha") == "OK"
    refused_while_damaged(traffic, damaged, *place.versions(1))
    others_unharmed(traffic, place, members, quiet_s)


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Place]:
    """A server with host memory for one tenant: who is asked for beside others is read from the disk again and again."""
    settings = {"host_cache_mb": 1, "reduction_factor": 1}
    models = tiny.make_repository(tmp_path, shape=tiny.config(hidden_size=192), upper_settings=settings)
    store, base = tiny.opened(tmp_path)
    for name in tiny.TASKS:
        # As wide as slots are, 0.6 MB each.
        member = tiny.load_tenant(store, base, name)
        tiny.publish(store, base, tiny.PLOT, replace(member, packed=widen(member.packed, 192)))
    with TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        yield Place(server, store, base, base.load_upper(), [served_hidden(server, "alpha", text) for text in TEXTS])


def test_a_tenant_damaged_while_it_is_served_is_refused_when_it_is_read_again_and_answers_when_repaired(
    crowded: Place, tmp_path: Path
) -> None:
    members, quiet_s = members_of(crowded), quiet_s_of(crowded)
    folder, kept = tiny.folder_of(crowded.store, "alpha"), tmp_path / "kept"
    shutil.copytree(folder, kept)
    changes, damaged = 0, dict[int, str]()
    with Traffic(crowded.server, ("alpha", *OTHERS), lambda: changes) as traffic:
        for damage, code in DAMAGES.items():
            damage(folder)
            # It may have been read in the midst of the damage, and several be refused for that: not who comes afterwards.
            for _ in range(2):
                changes += 1
                until(partial(traffic.has_refused, changes))
            changes += 1
            damaged[changes] = code
            assert crowded.ask("alpha") == code
            await_damaged(traffic, changes)
            changes += 1
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            # While it is repaired one protocol's request may be refused, and the other's answered.
            until(lambda: crowded.answers("alpha"))
    refused_while_damaged(traffic, damaged, members["alpha"])
    others_unharmed(traffic, crowded, members, quiet_s)


def test_a_tenant_damaged_before_anybody_asked_is_refused_until_its_byte_is_repaired(place: Place) -> None:
    tiny.make_tenant(place.store, place.base, "damaged", 7, like="beta")
    place.await_seen()
    damage_weights(tiny.folder_of(place.store, "damaged"))
    assert [place.ask("damaged") for _ in range(3)] == ["CORRUPT_ARTIFACT"] * 3
    damage_weights(tiny.folder_of(place.store, "damaged"))
    assert place.ask("damaged") == "OK"


def await_counted(place: Place) -> None:
    """Until the page shows what the second stage has counted by now."""
    answered = 'hplm_upper_events_total{event="ok"}'
    # One look at the counts may be under way now and one may be on the page in part: with the third all of the second is there.
    for _ in range(3):
        before = metric_value(place.server, answered)
        assert place.ask("beta") == "OK"
        until(lambda before=before: metric_value(place.server, answered) > before)


def test_requests_that_come_together_for_a_cold_tenant_load_it_once(place: Place) -> None:
    tiny.make_tenant(place.store, place.base, "cold", 11, like="beta")
    place.await_seen()
    loads = 'hplm_upper_events_total{event="host_loads"}'
    await_counted(place)
    before = metric_value(place.server, loads)
    with grpc.insecure_channel(f"127.0.0.1:{place.server.ports.grpc}") as channel:
        call = channel.unary_unary(METHOD)
        started = [call.future(message("cold", TEXTS[i % len(TEXTS)]), timeout=60) for i in range(40)]
        assert all(one.exception(timeout=60) is None for one in started)
    await_counted(place)
    assert metric_value(place.server, loads) == before + 1


def test_a_tenant_published_while_serving_answers_without_a_restart(place: Place) -> None:
    assert place.ask("newcomer") == "UNKNOWN_TENANT"
    made = tiny.make_tenant(place.store, place.base, "newcomer", 77, like="gamma")
    place.await_seen()
    with Client(place.server.ports.http_url) as client:
        found = client.predict("newcomer", TEXTS[1], logits=True).logits
    assert found is not None
    np.testing.assert_allclose(found[0], place.wanted(made)[1], atol=TOLERANCE)


def test_a_bank_cut_short_while_served_is_refused_to_new_tenants_only_and_kills_nothing(tmp_path: Path) -> None:
    folder = tmp_path
    models = tiny.make_repository(folder, num_slots=3)
    store, base = tiny.opened(folder)
    members = tiny.make_fleet(store, base, 20)
    path = store.bank("fleet") / "adapters.bin"
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        place = Place(server, store, base, base.load_upper(), [served_hidden(server, "t0", text) for text in TEXTS])
        wanted = {f"t{i}": [place.wanted(members[i])] for i in range(4)}
        assert [place.ask(f"t{i}") for i in range(4)] == ["OK"] * 4
        before, whole = stubs_of(server), path.read_bytes()
        with Traffic(server, tuple(wanted), lambda: 0) as traffic:
            os.truncate(path, 100)
            assert [place.ask(f"t{i}") for i in range(10, 20)] == ["CORRUPT_ARTIFACT"] * 10
            with path.open("r+b") as file:
                file.write(whole)
            assert [place.ask(f"t{i}") for i in range(10, 15)] == ["OK"] * 5
            os.truncate(path, 100)
            assert [place.ask(f"t{i}") for i in range(15, 20)] == ["CORRUPT_ARTIFACT"] * 5
            # As a back-up puts a file back: another one in its place.
            (folder / "again").write_bytes(whole)
            (folder / "again").replace(path)
            assert [place.ask(f"t{i}") for i in range(15, 20)] == ["OK"] * 5
        assert stubs_of(server) == before
    assert {outcome.code for outcome in traffic.outcomes} == {"OK"}
    assert {version_of(outcome, wanted[outcome.tenant]) for outcome in traffic.outcomes} == {0}


def test_a_bank_replaced_while_asked_answers_as_the_old_or_the_new(tmp_path: Path) -> None:
    folder = tmp_path
    models = tiny.make_repository(folder)
    store, base = tiny.opened(folder)
    first = tiny.make_fleet(store, base, 20)
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        states = [served_hidden(server, "t0", text) for text in TEXTS]
        upper = base.load_upper()
        both = [first, tiny.fleet_of(base, 20, seed=1)]
        wanted = {
            f"t{i}": [[reference.logits(upper, state, fleet[i])[0].numpy() for state in states] for fleet in both]
            for i in range(4)
        }
        changes = 0
        with Traffic(server, tuple(wanted), lambda: changes) as traffic:
            for turn in range(1, 5):
                tiny.make_fleet(store, base, 20, seed=turn % 2)
                await_seen(server, store, base)
                changes = turn
                until(lambda turn=turn: len(traffic.during(turn, "t0")) > 0)
    assert {outcome.code for outcome in traffic.outcomes} == {"OK"}
    assert {version_of(outcome, wanted[outcome.tenant]) for outcome in traffic.outcomes} == {0, 1}
