"""Hundreds of manage requests while infer requests run: nobody gets a wrong answer, or none.

`make test` sends 424 manage requests beside 50 infer requests a second, `make test-long` 1,008 beside 100 a second.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hplm_client import ManageClient
from hplm_loadtest.scenarios.infer_messages import METHOD

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.core.roles import MANAGER, base_roles, names
from hplm.engine import reference
from hplm.housekeeping import garbage_collection
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny, unlike
from tests.managed import Place, await_seen
from tests.messages import TEXTS, TOLERANCE, message, read, served_hidden
from tests.triton.repetitions import repetitions

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.repeated, pytest.mark.timeout(900)]
# A cycle has all kinds of changes.
LANES, CYCLES = 4, repetitions(2, 9)
# Of a cycle. Rollbacks take the least time, so fewer cycles have more of them.
ROLLBACKS = repetitions(50, 25)
PER_SECOND, QUIET_S = repetitions(50.0, 100.0), repetitions(3.0, 10.0)
# How long a version stays that nothing else may answer for.
ALONE_S = 0.5
STEADY = ("alpha", "beta", "gamma")
# Any two answers that the test tells apart differ by so much: other tenants, other versions, other texts.
APART = 100 * TOLERANCE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("manage-stress")
    # Over random windows each update learns something, so each publishes a version.
    shape = tiny.config(form="windows")
    models = tiny.make_repository(folder, num_slots=3, shape=shape, manager_settings={"keep_versions": 3})
    roles = names((*base_roles(), MANAGER))
    with TritonServer(models, free_ports(), models=roles, log=folder / "triton.log") as server:
        server.wait_ready()
        yield Place(server, Store(folder / "store"), folder / "rows.csv")


@dataclass(frozen=True)
class Outcome:
    """One infer request: to whom, which text, when it was due, how long it took from then, and what came."""

    name: str
    text: int
    due_s: float
    took_s: float
    code: str
    label: str = ""
    logits: unlike.Logits | None = None

    def __str__(self) -> str:
        return f"{self.name}, text {self.text}, asked at {self.due_s:.3f}, after {self.took_s:.3f} s"


@dataclass(frozen=True)
class Told:
    """What the asking process says at its end: how many requests it sent, what became of them, what it did not expect."""

    sent: int
    outcomes: list[Outcome]
    faults: list[str]


def ask_steadily(port: int, names: tuple[str, ...], ready: Event, done: Event, told: Queue[Told]) -> None:
    """Open-loop infer requests: each has a time at which it is due, whatever became of the others, and counts from then.

    In a process of its own: threads that change tenants would make each answer look later than it came.
    """
    made = {(name, text): message(name, TEXTS[text]) for name in names for text in range(len(TEXTS))}
    pairs, found, asked = list(made), list[Outcome](), list[Future[None]]()
    rng = np.random.default_rng(0)

    def ask(due_s: float, name: str, text: int) -> None:
        try:
            answer = call(made[name, text], timeout=60)
        except grpc.RpcError as error:
            known = errors.from_wire(str(error.details()))
            code = str(error) if known is None else known.code
            found.append(Outcome(name, text, due_s, time.monotonic() - due_s, code))
        else:
            found.append(Outcome(name, text, due_s, time.monotonic() - due_s, "OK", *read(answer)))

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(32) as pool:
        call = channel.unary_unary(METHOD)
        ready.set()
        due = time.monotonic()
        while not done.is_set():
            due += rng.exponential(1 / PER_SECOND)
            time.sleep(max(0.0, due - time.monotonic()))
            asked.append(pool.submit(ask, due, *pairs[rng.integers(len(pairs))]))
    told.put(Told(len(asked), found, [repr(one.exception()) for one in asked if one.exception()]))


@dataclass
class Traffic:
    """What was asked while the context lasted."""

    server: TritonServer
    names: tuple[str, ...]
    outcomes: list[Outcome] = field(default_factory=list)
    lasted_s: float = 0.0

    @contextmanager
    def flowing(self) -> Iterator[None]:
        spawn = multiprocessing.get_context("spawn")
        ready, done, queue = spawn.Event(), spawn.Event(), spawn.Queue()
        asking = spawn.Process(target=ask_steadily, args=(self.server.ports.grpc, self.names, ready, done, queue))
        asking.start()
        try:
            assert ready.wait(60)
            start_s = time.monotonic()
            yield
            self.lasted_s = time.monotonic() - start_s
        finally:
            done.set()
            told = queue.get(timeout=90)
            asking.join(30)
        assert told.faults == []
        assert len(told.outcomes) == told.sent, "a request got no answer at all, or two"
        self.outcomes += told.outcomes

    def p99_ms(self) -> float:
        """Of tenants that nobody changes."""
        return 1000 * float(np.percentile([one.took_s for one in self.outcomes if one.name in STEADY], 99))


@contextmanager
def worker_of(place: Place) -> Iterator[None]:
    """A worker as `hplm serve` starts one: a process of its own, at low priority."""
    command = [sys.executable, "-m", "hplm_cli", "worker", "--store", str(place.store.root)]
    with (place.store.root.parent / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        # At its low priority it may not come to its orderly end in the seconds that it gives itself.
        assert process.wait(60) in (0, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Change:
    """From when to when a tenant may have come to another of its versions; None where it is deleted.

    `seen_s`: by then it had, infinite where nobody has looked.
    """

    asked_s: float
    seen_s: float
    version: int | None


@dataclass
class Lane:
    """A tenant that is created, updated, rolled back to and fro, and deleted, again and again.

    `versions`: all that were published, `changes`: in order.
    """

    name: str
    number: int = 0
    versions: list[tenants.Tenant] = field(default_factory=list)
    changes: list[Change] = field(default_factory=lambda: [Change(-inf, -inf, None)])

    def run(self, place: Place, base: Base) -> int:
        """Returns how many requests that took."""
        count = 0
        with ManageClient(place.url("grpc")) as manage:
            for cycle in range(CYCLES):
                for update in (False, True):
                    self._publish(place, base, manage, update=update)
                newest, version = len(self.versions) - 1, manage.show_tenant(self.name).version
                for turn in range(cycle, cycle + ROLLBACKS):
                    asked_s, back = time.monotonic(), turn % 2
                    assert manage.rollback_tenant(self.name, version - back) == version - back
                    self.changes.append(Change(asked_s, inf, newest - back))
                self._await_seen(place, base)
                time.sleep(ALONE_S)
                self.changes.append(Change(time.monotonic(), inf, None))
                manage.delete_tenant(self.name)
                count += 3 + ROLLBACKS
                # A name made again at once would look like one more update.
                self._await_seen(place, base)
        return count

    def _await_seen(self, place: Place, base: Base) -> None:
        """Until the newest version is served, which ends the time of those before."""
        await_seen(place.server, place.store, base)
        now_s = time.monotonic()
        self.changes = [replace(change, seen_s=min(change.seen_s, now_s)) for change in self.changes]

    def _publish(self, place: Place, base: Base, manage: ManageClient, *, update: bool) -> None:
        number = 1000 * self.number + len(self.versions)
        file = place.rows.with_stem(f"{self.name}-{number}")
        file.write_text(unlike.rows(self.name, number))
        make = manage.update_tenant if update else manage.create_tenant
        train = manage.upload(file)
        asked_s = time.monotonic()
        manage.wait(make(self.name, train=train, settings=unlike.settings(number, update=update)))
        self.changes.append(Change(asked_s, inf, len(self.versions)))
        self._await_seen(place, base)
        folder = place.store.tenant_version(self.name, manage.show_tenant(self.name).version)
        self.versions.append(tenants.load(folder, name=self.name, fingerprint=base.fingerprint))

    def right(self, one: Outcome) -> set[int | None]:
        """The versions that may have been served while the request was under way; None where there may have been none."""
        following = [*self.changes[1:], Change(inf, inf, None)]
        return {
            change.version
            for change, after in zip(self.changes, following, strict=True)
            if change.asked_s < one.due_s + one.took_s and one.due_s < after.seen_s
        }


def test_hundreds_of_changes_leave_every_answer_right(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 changes in `make test-long`."""
    base = bases.load(place.store.base("tiny"))
    changing = [Lane(f"lane-{number}", number) for number in range(LANES)]
    always = [Change(-inf, -inf, 0)]
    lanes = {name: Lane(name, 0, [tiny.load_tenant(place.store, base, name)], always) for name in STEADY}
    lanes |= {lane.name: lane for lane in changing}
    states = [served_hidden(place.server, "alpha", text) for text in TEXTS]
    quiet, traffic = Traffic(place.server, STEADY), Traffic(place.server, tuple(lanes))
    with quiet.flowing():
        time.sleep(QUIET_S)
    with traffic.flowing(), worker_of(place), ThreadPoolExecutor(LANES) as pool:
        requests = sum(pool.map(lambda lane: lane.run(place, base), changing))
    assert requests >= repetitions(400, 1000)
    assert len(traffic.outcomes) > 0.9 * PER_SECOND * traffic.lasted_s
    upper = base.load_upper()
    members = {(lane.name, version): one for lane in lanes.values() for version, one in enumerate(lane.versions)}
    wanted = {
        (whose, text): reference.logits(upper, torch.Tensor(state), member)[0].numpy()
        for whose, member in members.items()
        for text, state in enumerate(states)
    }
    # Else an answer of another tenant, version or text could pass for the right one.
    assert unlike.least_difference([*wanted.values()]) > APART
    alone = Counter[str]()
    for one in traffic.outcomes:
        right = lanes[one.name].right(one)
        if one.logits is None:
            assert one.code == "UNKNOWN_TENANT", f"{one}: {one.code}"
            assert None in right, f"{one}: unknown, while there was one of the versions {right}"
            continue
        off, name, version = min((unlike.difference(one.logits, wanted[whose, one.text]), *whose) for whose in members)
        assert off < TOLERANCE, f"{one}: nobody's answer, {off} from that of {name}, version {version}"
        assert name == one.name, f"{one}: the answer of {name}"
        assert version in right, f"{one}: the answer of version {version}, there were {right}"
        assert one.label == members[name, version].card.labels[int(one.logits.argmax())]
        alone[one.name] += len(right) == 1
    codes = Counter(one.code for one in traffic.outcomes)
    # Tenants that come and go were asked while they were not there, and while one version alone was right.
    assert set(codes) == {"OK", "UNKNOWN_TENANT"}
    assert all(alone[name] > CYCLES for name in lanes), alone
    with capsys.disabled():
        print(
            f"\n{requests} manage requests, {len(traffic.outcomes)} infer requests {dict(codes)}, of {alone.total()} one "
            f"version alone was right; p99 of the others {traffic.p99_ms():.1f} ms, {quiet.p99_ms():.1f} ms while quiet"
        )
    with closing(Registry.open(place.store)) as registry:
        assert garbage_collection.verify(place.store, registry, time.time()).problems == ()
        garbage_collection.collect(place.store, registry, time.time() + 1e6, grace_s=0.0)
        assert not list((place.store.root / "tenants").glob("lane-*/*"))
        assert garbage_collection.verify(place.store, registry, time.time()).problems == ()
