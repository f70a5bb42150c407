"""A thousand manage requests while a hundred infer requests a second run: nobody gets a wrong answer, or none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

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
LANES, CYCLES, ROLLBACKS = 4, 6, 40
PER_SECOND = 100.0
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


@dataclass
class Traffic:
    """Open-loop infer requests: each is sent when it is due, whatever became of the others."""

    server: TritonServer
    names: tuple[str, ...]
    outcomes: list[tuple[str, int, float, str, Logits | None]] = field(default_factory=list)

    def run(self, done: Callable[[], bool]) -> None:
        made = {(name, text): message(name, TEXTS[text]) for name in self.names for text in range(len(TEXTS))}
        pairs = list(made)
        rng = np.random.default_rng(0)
        with grpc.insecure_channel(f"127.0.0.1:{self.server.ports.grpc}") as channel, ThreadPoolExecutor(32) as pool:
            call = channel.unary_unary(METHOD)
            due = time.monotonic()
            while not done():
                due += rng.exponential(1 / PER_SECOND)
                time.sleep(max(0.0, due - time.monotonic()))
                name, text = pairs[rng.integers(len(pairs))]
                pool.submit(self._ask, call, name, text, made[name, text])

    def _ask(self, call: Callable[..., bytes], name: str, text: int, sent: bytes) -> None:
        start, code, logits = time.monotonic(), "OK", None
        try:
            logits = read(call(sent, timeout=60))[1]
        except grpc.RpcError as error:
            found = errors.from_wire(str(error.details()))
            code = str(error) if found is None else found.code
        self.outcomes.append((name, text, time.monotonic() - start, code, logits))

    def p99_ms(self) -> float:
        return 1000 * float(np.percentile([seconds for name, _, seconds, _, _ in self.outcomes if name in STEADY], 99))


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


def change(place: Place, lane: int, kept: dict[str, list[tenants.Tenant]], base: Base) -> int:
    """Create, update, go back and forth, delete, again and again; returns how many requests that took."""
    name, count = f"lane-{lane}", 0
    with ManageClient(place.url("grpc")) as manage:
        for _ in range(CYCLES):
            for make in (manage.create_tenant, manage.update_tenant):
                manage.wait(make(name, train=manage.upload(place.rows), settings=ONE_EPOCH))
                version = manage.show_tenant(name).version
                folder = place.store.tenant_version(name, version)
                kept[name].append(tenants.load(folder, name=name, fingerprint=base.fingerprint))
            for turn in range(ROLLBACKS):
                assert manage.rollback_tenant(name, version - 1 + turn % 2) == version - 1 + turn % 2
            manage.delete_tenant(name)
            count += 3 + ROLLBACKS
            # Seen by both stages: a name made again at once would look like one more update.
            time.sleep(LOOK_EVERY_S)
    return count


def test_a_thousand_changes_leave_every_answer_right(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    base = bases.load(place.store.base("tiny"))
    lanes = [f"lane-{lane}" for lane in range(LANES)]
    kept: dict[str, list[tenants.Tenant]] = {name: [] for name in lanes}
    states = [served_hidden(place.server, "alpha", text) for text in TEXTS]
    quiet = Traffic(place.server, STEADY)
    until = time.monotonic() + 8
    quiet.run(lambda: time.monotonic() > until)
    traffic, finished = Traffic(place.server, (*STEADY, *lanes)), threading.Event()
    asking = threading.Thread(target=traffic.run, args=(finished.is_set,))
    asking.start()
    try:
        with worker_of(place), ThreadPoolExecutor(LANES) as pool:
            requests = sum(pool.map(lambda lane: change(place, lane, kept, base), range(LANES)))
    finally:
        finished.set()
        asking.join()
    assert requests >= 1000
    upper = base.load_upper()

    def wanted(member: tenants.Tenant) -> list[Logits]:
        return [reference.logits(upper, torch.Tensor(state), member)[0].numpy() for state in states]

    right = {name: [wanted(tiny.load_tenant(place.store, base, name))] for name in STEADY}
    right |= {name: [wanted(member) for member in members] for name, members in kept.items()}
    codes: dict[str, int] = {}
    for name, text, _, code, logits in traffic.outcomes:
        codes[code] = codes.get(code, 0) + 1
        if name in STEADY:
            assert code == "OK", f"{name}: {code}"
        if logits is not None:
            off = min(float(np.abs(logits - version[text]).max()) for version in right[name])
            assert off < TOLERANCE, f"{name} got nobody's answer, {off} from the nearest version"
    assert set(codes) == {"OK", "UNKNOWN_TENANT"}
    with capsys.disabled():
        print(
            f"\n{requests} manage requests, {len(traffic.outcomes)} infer requests {codes}; p99 of the others "
            f"{traffic.p99_ms():.1f} ms, {quiet.p99_ms():.1f} ms while quiet"
        )
    with closing(Registry.open(place.store)) as registry:
        assert caretaker.verify(place.store, registry, time.time()).problems == ()
        caretaker.collect(place.store, registry, time.time() + 1e6, grace_s=0.0)
        assert not list((place.store.root / "tenants").glob("lane-*/*"))
        assert caretaker.verify(place.store, registry, time.time()).problems == ()
