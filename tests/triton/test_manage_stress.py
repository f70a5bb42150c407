"""A thousand manage requests while a hundred infer requests a second run: nobody gets a wrong answer, or none."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hplm_client import ManageClient
from hplm_loadtest.infer_message import METHOD

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.nn import base as bases
from hplm.nn import reference
from hplm.nn.base import Base
from hplm.store import caretaker
from hplm.store.catalog import LOOK_EVERY_S
from hplm.store.layout import Store
from hplm.store.registry import Registry
from hplm.triton.server import MANAGER_ROLES, ROLES, TritonServer, free_ports
from tests import tiny
from tests.managed import Place
from tests.messages import TEXTS, TOLERANCE, message, read, served_hidden

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(280)]
ONE_EPOCH = {"epochs": 1, "learning_rates": [0.003]}
LANES, CYCLES, ROLLBACKS = 4, 9, 25
PER_SECOND, QUIET_S = 100.0, 10.0
# Until both stages have seen what was published.
SEEN_S = 2.5 * LOOK_EVERY_S
STEADY = ("alpha", "beta", "gamma")
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("manage-stress")
    models = tiny.make_repository(folder, num_slots=3, manager_settings={"keep_versions": 3})
    rows = folder / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"{t},{'cat' if 'cat' in t else 'none'}\n" for t in tiny.sentences(40)))
    roles = (*ROLES, *MANAGER_ROLES)
    with TritonServer(models, free_ports(), models=roles, log=folder / "triton.log") as server:
        server.wait_ready()
        yield Place(server, Store(folder / "store"), rows)


@dataclass(frozen=True)
class Outcome:
    """One infer request: to whom, which text, when it was due, how long it took from then, and what came."""

    name: str
    text: int
    due_s: float
    took_s: float
    code: str
    logits: Logits | None


def ask_steadily(port: int, names: tuple[str, ...], ready: Event, done: Event, outcomes: Queue[list[Outcome]]) -> None:
    """Open-loop infer requests: each has a time at which it is due, whatever became of the others, and counts from then.

    In a process of its own: threads that change tenants would make each answer look later than it came.
    """
    made = {(name, text): message(name, TEXTS[text]) for name in names for text in range(len(TEXTS))}
    pairs, found = list(made), list[Outcome]()
    rng = np.random.default_rng(0)

    def ask(due_s: float, name: str, text: int) -> None:
        code, logits = "OK", None
        try:
            logits = read(call(made[name, text], timeout=60))[1]
        except grpc.RpcError as error:
            known = errors.from_wire(str(error.details()))
            code = str(error) if known is None else known.code
        found.append(Outcome(name, text, due_s, time.monotonic() - due_s, code, logits))

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(32) as pool:
        call = channel.unary_unary(METHOD)
        ready.set()
        due = time.monotonic()
        while not done.is_set():
            due += rng.exponential(1 / PER_SECOND)
            time.sleep(max(0.0, due - time.monotonic()))
            pool.submit(ask, due, *pairs[rng.integers(len(pairs))])
    outcomes.put(found)


@dataclass
class Traffic:
    """What was asked while the context lasted."""

    server: TritonServer
    names: tuple[str, ...]
    outcomes: list[Outcome] = field(default_factory=list)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        spawn = multiprocessing.get_context("spawn")
        ready, done, outcomes = spawn.Event(), spawn.Event(), spawn.Queue()
        arguments = (self.server.ports.grpc, self.names, ready, done, outcomes)
        asking = spawn.Process(target=ask_steadily, args=arguments)
        asking.start()
        try:
            assert ready.wait(60)
            yield
        finally:
            done.set()
            self.outcomes += outcomes.get(timeout=90)
            asking.join(30)

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
        assert process.wait(60) == 0


@dataclass
class Lane:
    """A tenant that is created, updated, rolled back to and fro, and deleted, again and again.

    `versions`: all that were published. `lives`: from when it was surely served until it was told to go.
    """

    name: str
    versions: list[tenants.Tenant] = field(default_factory=list)
    lives: list[tuple[float, float]] = field(default_factory=list)

    def run(self, place: Place, base: Base) -> int:
        """Returns how many requests that took."""
        count = 0
        with ManageClient(place.url("grpc")) as manage:
            for _ in range(CYCLES):
                born_s = 0.0
                for make in (manage.create_tenant, manage.update_tenant):
                    manage.wait(make(self.name, train=manage.upload(place.rows), settings=ONE_EPOCH))
                    born_s = born_s or time.monotonic() + SEEN_S
                    version = manage.show_tenant(self.name).version
                    folder = place.store.tenant_version(self.name, version)
                    self.versions.append(tenants.load(folder, name=self.name, fingerprint=base.fingerprint))
                for turn in range(ROLLBACKS):
                    assert manage.rollback_tenant(self.name, version - 1 + turn % 2) == version - 1 + turn % 2
                self.lives.append((born_s, time.monotonic()))
                manage.delete_tenant(self.name)
                count += 3 + ROLLBACKS
                # Seen by both stages: a name made again at once would look like one more update.
                time.sleep(LOOK_EVERY_S)
        return count

    def lived(self, one: Outcome) -> bool:
        """Whether it was served all the while the request was under way."""
        return any(born_s < one.due_s and one.due_s + one.took_s < gone_s for born_s, gone_s in self.lives)


def test_a_thousand_changes_leave_every_answer_right(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    base = bases.load(place.store.base("tiny"))
    lanes = {f"lane-{number}": Lane(f"lane-{number}") for number in range(LANES)}
    states = [served_hidden(place.server, "alpha", text) for text in TEXTS]
    quiet, traffic = Traffic(place.server, STEADY), Traffic(place.server, (*STEADY, *lanes))
    with quiet.flowing():
        time.sleep(QUIET_S)
    with traffic.flowing(), worker_of(place), ThreadPoolExecutor(LANES) as pool:
        requests = sum(pool.map(lambda lane: lane.run(place, base), lanes.values()))
    assert requests >= 1000
    upper = base.load_upper()

    def wanted(member: tenants.Tenant) -> list[Logits]:
        return [reference.logits(upper, torch.Tensor(state), member)[0].numpy() for state in states]

    right = {name: [wanted(tiny.load_tenant(place.store, base, name))] for name in STEADY}
    right |= {name: [wanted(member) for member in lane.versions] for name, lane in lanes.items()}
    codes = Counter(one.code for one in traffic.outcomes)
    for one in traffic.outcomes:
        if one.name in STEADY or lanes[one.name].lived(one):
            assert one.code == "OK", f"{one.name}: {one.code}"
        if one.logits is not None:
            off = min(float(np.abs(one.logits - version[one.text]).max()) for version in right[one.name])
            assert off < TOLERANCE, f"{one.name} got nobody's answer, {off} from the nearest version"
    assert set(codes) == {"OK", "UNKNOWN_TENANT"}
    # Tenants that come and go were asked while they were there, not only refused while they were not.
    assert all(any(lane.lived(one) for one in traffic.outcomes if one.name == name) for name, lane in lanes.items())
    with capsys.disabled():
        print(
            f"\n{requests} manage requests, {len(traffic.outcomes)} infer requests {dict(codes)}; p99 of the others "
            f"{traffic.p99_ms():.1f} ms, {quiet.p99_ms():.1f} ms while quiet"
        )
    with closing(Registry.open(place.store)) as registry:
        assert caretaker.verify(place.store, registry, time.time()).problems == ()
        caretaker.collect(place.store, registry, time.time() + 1e6, grace_s=0.0)
        assert not list((place.store.root / "tenants").glob("lane-*/*"))
        assert caretaker.verify(place.store, registry, time.time()).problems == ()
