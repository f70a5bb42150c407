"""Killed without warning, whatever it is: the store opens sound, nobody is served what was not published, no file stays."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hplm_client import Client, ManageClient

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.errors import HplmError
from hplm.nn import base as bases
from hplm.nn import reference
from hplm.store import caretaker
from hplm.store.layout import Store
from hplm.store.registry import Registry
from hplm.text import TextEncoder
from hplm.triton.server import Ports, free_ports
from hplm.triton.stubs import stubs_of
from tests import tiny
from tests.waiting import until
from tests.watching import runs

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(280)]
ONE_EPOCH = {"epochs": 1, "learning_rates": [0.003]}
TARGETS = ("worker", "hbert_plot", "hbert_upper", "manager", "manager_watch", "triton", "serve")
STEADY, LANES = ("alpha", "beta", "gamma"), ("lane-0", "lane-1")
TEXTS = tiny.sentences(3, seed=5, words=(3, 12))
TOLERANCE = 1e-2
SOON_S = 60.0


def children(parent: int) -> dict[int, str]:
    """Process id -> command line, of those that still run."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,stat=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )
    rows = (line.split(None, 2) for line in listed.stdout.splitlines())
    return {int(pid): command for pid, state, command in rows if not state.startswith("Z")}


@dataclass
class Service:
    """`hplm serve` as an operator runs it, under something that starts it again."""

    models: Path
    ports: Ports
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Return when it serves."""
        flags = [f"--{name}-port={getattr(self.ports, name)}" for name in ("http", "grpc", "metrics")]
        command = [sys.executable, "-m", "hplm_cli", "serve", "--models", str(self.models), *flags]
        with (self.models.parent / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self.pid("worker") is not None)

    def pid(self, what: str) -> int | None:
        """Of `serve`, of its child `triton` or `worker`, or of the stub of a model."""
        if what == "serve":
            return self.process.pid
        commands = {"triton": "bin/tritonserver ", "worker": "hplm_cli worker "}
        for child, command in children(self.process.pid).items():
            if what in commands and commands[what] in command:
                return child
            if what not in commands and commands["triton"] in command:
                return next((stub for stub, model in stubs_of(child).items() if model == what), None)
        return None

    def kill(self, what: str) -> None:
        """And start what starts nothing again by itself: when `serve` ends, whoever runs it starts it again."""
        until(lambda: self.pid(what) is not None)
        pid = self.pid(what)
        assert pid is not None
        everything = {pid for child in children(self.process.pid) for pid in (child, *children(child))}
        os.kill(pid, signal.SIGKILL)
        if what in ("triton", "serve"):
            assert self.process.wait(SOON_S) != 0
            # Nobody is left who holds the ports, a job or memory.
            until(lambda: not any(runs(one) for one in everything))
            self.start()
        else:
            until(lambda: self.pid(what) not in (None, pid) or self.process.poll() is not None)
            if self.process.returncode is not None:
                # Killed while it held a lock that Triton shares with it, a stub takes Triton along.
                assert self.process.returncode == 1
                assert "lock_exception" in (self.models.parent / "triton.log").read_text()
                until(lambda: not any(runs(one) for one in everything))
                self.start()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(SOON_S) == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tiny.make_repository(tmp_path, manager_settings={}), free_ports())
    made.start()
    yield made
    if made.process.poll() is None:
        made.stop()


def change(service: Service, name: str, rows: Path, done: threading.Event) -> int:
    """Create, update, roll back and delete a tenant, over and over; what a kill spoils is left for the next turn."""
    finished = 0
    while not done.is_set():
        with ManageClient(service.ports.grpc_url) as manage:
            for step in (
                lambda: manage.wait(manage.create_tenant(name, train=manage.upload(rows), settings=ONE_EPOCH)),
                lambda: manage.wait(manage.update_tenant(name, train=manage.upload(rows), settings=ONE_EPOCH)),
                lambda: manage.rollback_tenant(name),
                lambda: manage.delete_tenant(name),
            ):
                try:
                    step()
                    finished += 1
                except HplmError:
                    # Nobody answered, or the request had come through before its answer was lost.
                    time.sleep(0.1)
    return finished


@dataclass
class Answers:
    """What was asked all the while, and what came back."""

    logits: list[tuple[str, int, np.ndarray]] = field(default_factory=list)
    refused: set[tuple[str, type[HplmError]]] = field(default_factory=set)

    def ask(self, service: Service, done: threading.Event) -> None:
        rng = np.random.default_rng(0)
        names = (*STEADY, *LANES)
        while not done.is_set():
            with Client(service.ports.grpc_url, timeout_s=10) as client:
                while not done.is_set():
                    name, text = str(rng.choice(names)), int(rng.integers(len(TEXTS)))
                    try:
                        found = client.predict(name, TEXTS[text], logits=True).logits
                    except HplmError as error:
                        self.refused.add((name, type(error)))
                        time.sleep(0.05)
                        break
                    assert found is not None
                    self.logits.append((name, text, found))


class Published:
    """Every version that was ever in the registry."""

    def __init__(self, store: Store) -> None:
        self._store, self._base = store, bases.load(store.base("tiny"))
        self.members: dict[str, list[tenants.Tenant]] = {}
        self._seen: set[str] = set()

    def follow(self, done: threading.Event) -> None:
        with closing(Registry.open_read_only(self._store)) as registry:
            last = False
            while not last:
                last = done.is_set()
                for path in registry.known_paths() - self._seen:
                    self._seen.add(path)
                    if path.startswith("tenants/"):
                        name = path.split("/")[1]
                        member = tenants.load(self._store.path(path), name=name, fingerprint=self._base.fingerprint)
                        self.members.setdefault(name, []).append(member)
                time.sleep(0.05)

    def logits(self) -> dict[tuple[str, int], list[np.ndarray]]:
        """By tenant and text: what its versions answer."""
        levels, lower = reference.lineage(self._store, self._base, ["plots/general"], "compute")
        encoder = TextEncoder(self._base.tokenizer_path, self._base.config.max_tokens)
        upper = self._base.load_upper()
        found = {}
        for number, text in enumerate(TEXTS):
            ids = encoder.encode([text])[0].ids
            merged = reference.merged(ids.tolist(), self._base.config, levels, lower)
            for name, members in self.members.items():
                found[name, number] = [reference.logits(upper, merged, one)[0].numpy() for one in members]
        return found


def test_whatever_is_killed_while_tenants_change_nothing_half_done_is_served_or_left(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"{t},{'cat' if 'cat' in t else 'none'}\n" for t in tiny.sentences(40)))
    answers, published, done, finished = Answers(), Published(store), threading.Event(), [0, 0]

    def lane(number: int) -> None:
        finished[number] = change(service, LANES[number], rows, done)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(2)]
    threads += [threading.Thread(target=answers.ask, args=(service, done))]
    threads += [threading.Thread(target=published.follow, args=(done,))]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    try:
        for what in rng.permutation(TARGETS):
            time.sleep(rng.uniform(0.2, 2.0))
            service.kill(str(what))
            with closing(Registry.open_read_only(store)) as registry:
                assert caretaker.verify(store, registry, time.time()).problems == (), what
            with Client(service.ports.grpc_url) as client:
                until(lambda client=client: answered(client))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    service.stop()
    assert min(finished) > 0
    wanted = published.logits()
    for name, text, logits in answers.logits:
        off = min(float(np.abs(logits - one).max()) for one in wanted[name, text])
        assert off < TOLERANCE, f"{name} got the answer of no published version, {off} from the nearest"
    # No server, one that stops, or a stage that is dead; a tenant of a lane may be deleted just then.
    away = {errors.UnreachableError, errors.StoppingError, errors.InternalError}
    assert {kind for _, kind in answers.refused} <= {*away, errors.UnknownTenantError}, answers.refused
    assert {kind for name, kind in answers.refused if name in STEADY} <= away, answers.refused
    with capsys.disabled():
        print(f"\n{len(TARGETS)} kills, {sum(finished)} changes done, {len(answers.logits)} answers")
    with closing(Registry.open(store)) as registry:
        caretaker.collect(store, registry, time.time() + 1e6, grace_s=0.0)
        assert caretaker.verify(store, registry, time.time()) == caretaker.Verdict((), ())
        for path in store.root.rglob("*"):
            if path.is_file() and not path.name.startswith("registry.sqlite"):
                name = store.relative(path)
                assert any(name.startswith(f"{known}/") for known in registry.known_paths()), name


def test_triton_killed_while_it_loads_a_model_again_ends_hplm_serve(service: Service) -> None:
    stub, triton = service.pid("hbert_upper"), service.pid("triton")
    assert stub is not None
    assert triton is not None
    os.kill(stub, signal.SIGKILL)
    # The next look is a fifth of a second away, loading takes seconds.
    time.sleep(0.6)
    started = stubs_of(triton)
    os.kill(triton, signal.SIGKILL)
    assert service.process.wait(20) == 1
    until(lambda: not any(runs(one) for one in started))


def test_stubs_end_when_triton_and_hplm_serve_are_killed_at_once(service: Service) -> None:
    triton = service.pid("triton")
    assert triton is not None
    started = stubs_of(triton)
    assert len(started) == 4
    segments = set(re.findall(r"/dev/shm/(hplm-triton-[^./]+)\.", Path(f"/proc/{triton}/maps").read_text()))
    for pid in (service.process.pid, triton):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(runs(one) for one in started), 10)
    # Nobody is left who would remove them.
    for name in segments:
        for path in Path("/dev/shm").glob(f"{name}.*"):
            path.unlink()
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)


def answered(client: Client) -> bool:
    with suppress(errors.ServerError):
        return all(client.predict(name, TEXTS[0]).label for name in STEADY)
    return False
