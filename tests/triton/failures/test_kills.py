"""Killed without warning, whatever it is: the store opens sound, nobody is served what was not published, no file stays."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_client import Client, ManageClient
from hplm_client.transport.retry import with_retries
from hplm_client.transport.time_limits import DEADLINE_GRACE_S
from tritonclient.grpc import InferenceServerClient, InferInput

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.engine import reference
from hplm.errors import HplmError
from hplm.housekeeping import garbage_collection
from hplm.models import base as bases
from hplm.registry.registry import Registry
from hplm.runtime.process import SHARED_MEMORY, backlogs_of
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm.triton.workarounds.hung_crash import CRASH_ENDS_S
from tests import tiny, unlike
from tests.triton.failures.serve_process import SOON_S, Service, children
from tests.waiting import until
from tests.watching import runs

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(900)]
# At such a rate a text differs between a domain and the root by more than the tolerance of its answers.
QUICK_DOMAIN = {"tokens": 400, "warmup_tokens": 400, "learning_rate": 2e-3, "top_percent": 20.0}
WORKER = "worker"
OTHERS = ("hbert_plot", "hbert_upper", "manager", "triton", "serve")
STEADY = ("alpha", "beta", "gamma")
# A tenant over the root, and one over a domain that comes and goes with it.
LANES, DOMAIN, ROOT = ("lane-0", "lane-1"), "field", f"plots/{tiny.PLOT}"
KINDS = (
    *("create tenant", "update tenant", "roll back tenant", "delete tenant"),
    *("create domain", "update domain", "delete domain"),
)
TEXTS = tiny.sentences(3, seed=5, words=(3, 12))
TOLERANCE = 1e-2
# Any two versions' answers to a text differ by so much.
APART = 2 * TOLERANCE
# Triton tells of a dead stage after 1 to 4 s.
DEADLINE_S = 10.0
# Kills of a stub; about one of fifteen takes Triton along.
TRIES = 6
# Seconds that a busy machine may take to run what is due.
SLACK_S = 1.0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`hplm serve`, which tests use one after another. A test may end it."""
    folder = tmp_path_factory.mktemp("kills")
    models = tiny.make_repository(folder, manager_settings={"min_corpus_tokens": 300})
    made = Service(models, free_ports())
    try:
        made.start()
        yield made
    except BaseException:
        made.process.kill()
        raise
    if made.process.poll() is None:
        made.stop()


@pytest.fixture
def service(kept: Service) -> Service:
    """`kept`, started again if the test before has ended it, with nothing in the log of `hplm serve`."""
    if kept.process.poll() is not None:
        kept.start()
    kept.await_ready()
    (kept.models.parent / "serve.log").write_bytes(b"")
    return kept


@dataclass
class Lane:
    """Creates, updates, rolls back and deletes a tenant, and its `domain` where it has one, over and over.

    What a kill spoils is left for the next turn. `finished` and `failed`: what was done, and what was not for which error.
    """

    number: int
    folder: Path
    domain: str | None = None
    now: str = ""
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return LANES[self.number]

    def run(self, service: Service, done: threading.Event) -> None:
        turn = 1000 * self.number
        while not done.is_set():
            turn += 2
            with ManageClient(service.ports.grpc_url) as manage:
                for kind, step in self._steps(manage, turn):
                    if done.is_set():
                        break
                    self.now = kind
                    try:
                        step()
                        self.finished[kind] += 1
                    except HplmError as error:
                        # Nobody answered, or the request had come through before its answer was lost.
                        self.failed[f"{kind}: {error.code}"] += 1
                        time.sleep(0.1)

    def _steps(self, manage: ManageClient, turn: int) -> list[tuple[str, Callable[[], Any]]]:
        def train(number: int, update: bool) -> None:
            made = {"train": self._upload(manage, "csv", unlike.rows(self.name, number))}
            given = {**made, "settings": unlike.settings(number, update=update)}
            manage.wait(
                manage.update_tenant(self.name, **given)
                if update
                else manage.create_tenant(self.name, domain=self.domain, **given)
            )

        def pretrain(make: Callable[..., str], number: int) -> None:
            texts = tiny.sentences(60, seed=number, words=(8, 20))
            manage.wait(make(DOMAIN, corpus=self._upload(manage, "txt", "\n".join(texts)), settings=QUICK_DOMAIN))

        steps: dict[str, Callable[[], Any]] = {
            "create domain": lambda: pretrain(manage.create_domain, turn),
            "create tenant": lambda: train(turn, update=False),
            "update domain": lambda: pretrain(manage.update_domain, turn + 1),
            "update tenant": lambda: train(turn + 1, update=True),
            "roll back tenant": lambda: manage.rollback_tenant(self.name),
            "delete tenant": lambda: manage.delete_tenant(self.name),
            "delete domain": lambda: manage.delete_domain(DOMAIN),
        }
        return [(kind, step) for kind, step in steps.items() if self.domain or kind.endswith("tenant")]

    def _upload(self, manage: ManageClient, ending: str, content: str) -> dict[str, str]:
        file = self.folder / f"{self.name}.{ending}"
        file.write_text(content)
        return manage.upload(file)


@dataclass
class Answers:
    """What was asked all the while, and what came back: name, number of the text, logits; of errors what was said last."""

    logits: list[tuple[str, int, np.ndarray]] = field(default_factory=list)
    refused: dict[tuple[str, type[HplmError]], str] = field(default_factory=dict)

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
                        self.refused[name, type(error)] = str(error)
                        time.sleep(0.05)
                        break
                    assert found is not None
                    self.logits.append((name, text, found))


class Published:
    """Every tenant's version that was ever in the registry, with what it was made over, by its path."""

    def __init__(self, store: Store) -> None:
        self._store, self._base = store, bases.load(store.base("tiny"))
        self._upper = self._base.load_upper()
        self._encoder = self._base.load_text_encoder()
        self._members: dict[str, tenants.Tenant] = {}
        self._seen: set[str] = set()
        # Read at once: a domain version may be gone when its tenants' answers are looked at.
        self._lineages = {ROOT: self._lineage(ROOT)}

    def follow(self, done: threading.Event) -> None:
        with closing(Registry.open_read_only(self._store)) as registry:
            last = False
            while not last:
                last = done.is_set()
                for path in sorted(registry.snapshot().paths - self._seen):
                    self._seen.add(path)
                    if path.startswith("domains/"):
                        self._lineages[path] = self._lineage(path, ROOT)
                    elif path.startswith("tenants/"):
                        name, fingerprint = path.split("/")[1], self._base.fingerprint
                        self._members[path] = tenants.load(self._store.path(path), name=name, fingerprint=fingerprint)
                time.sleep(0.05)

    def _lineage(self, *folders: str) -> Any:
        return reference.lineage(self._store, self._base, folders, "compute")

    def over_domains(self) -> list[str]:
        return [path for path, one in self._members.items() if _domain(one) != ROOT]

    def trained(self) -> list[str]:
        """All but those that kept the weights of the version before: nobody could tell them from it."""
        return [path for path, one in self._members.items() if one.card.about.get("best_epoch") != 0]

    def logits(self, text: str, over: str | None = None) -> dict[str, np.ndarray]:
        """What each answers over its own domain version, or over another."""
        ids = self._encoder.encode([text])[0].ids.tolist()
        found = {}
        for path, one in self._members.items():
            levels, lower = self._lineages[over or _domain(one)]
            merged = reference.merged(ids, self._base.config, levels, lower)
            found[path] = reference.logits(self._upper, merged, one).numpy()
        return found


def _domain(member: tenants.Tenant) -> str:
    """The path of the domain version that it was made over."""
    return str(member.card.about.get("domain", ROOT))


def check_answers(answers: Answers, published: Published) -> None:
    """Each is that of one of the tenant's own versions; refused was only what was dead, or deleted."""
    for text in range(len(TEXTS)):
        wanted = published.logits(TEXTS[text])
        # Else the answer of another tenant, version or domain could pass for the right one.
        assert unlike.least_difference([wanted[path] for path in published.trained()]) > APART
        over_the_root = published.logits(TEXTS[text], over=ROOT)
        for path in published.over_domains():
            assert unlike.difference(wanted[path], over_the_root[path]) > APART
        for name, logits in ((name, found) for name, asked, found in answers.logits if asked == text):
            off, path = min((unlike.difference(logits, one), path) for path, one in wanted.items())
            assert off < TOLERANCE, f"{name} got the answer of no published version, {off} from that of {path}"
            assert path.startswith(f"tenants/{name}/"), f"{name} got the answer of {path}"
    # No server, one that stops, or a stage that is dead; a tenant of a lane may be deleted just then, or not known yet to a
    # stage whose look at the registry takes long.
    away = {errors.UnreachableError, errors.StoppingError, errors.StageDownError}
    not_there = {errors.UnknownTenantError, errors.RegistryUnavailableError}
    refused = answers.refused.items()
    strange = {(name, kind): why for (name, kind), why in refused if kind not in {*away, *not_there}}
    assert not strange, strange
    lost = {(name, kind): why for (name, kind), why in refused if name in STEADY and kind not in away}
    assert not lost, lost


def test_whatever_is_killed_while_tenants_and_domains_change_nothing_half_done_is_served_or_left(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(service.models.parent / "store")
    answers, published, done = Answers(), Published(store), threading.Event()
    lanes = [Lane(0, tmp_path), Lane(1, tmp_path, DOMAIN)]
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "big"))
    met = []

    def await_change(what: str, kind: str) -> None:
        """Any time while a lane does it; or another thing, where it does not come to it soon."""
        deadline_s = time.monotonic() + 2.5
        while kind not in [lane.now for lane in lanes] and time.monotonic() < deadline_s:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.02 if kind.startswith(("roll", "delete")) else 1.5))
        met.append(f"{what} ({', '.join(lane.now for lane in lanes)})")

    def missing() -> set[str]:
        """Kinds of changes that were not done yet, and tenants that did not answer."""
        done_kinds = {kind for lane in lanes for kind in lane.finished}
        return ({*KINDS} - done_kinds) | ({*STEADY, *LANES} - {name for name, _, _ in answers.logits})

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(lane.run, service, done) for lane in lanes]
        running += [pool.submit(answers.ask, service, done), pool.submit(published.follow, done)]
        try:
            # Before its first job a worker imports for seconds: all kills would meet that.
            until(lambda: all(lane.finished for lane in lanes) or any(one.done() for one in running), 200)
            # The worker first: its job's lease runs out while the others are killed.
            for what, kind in zip((WORKER, *rng.permutation(OTHERS)), rng.permutation(KINDS), strict=False):
                service.kill(str(what), partial(await_change, str(what), str(kind)))
                with closing(Registry.open_read_only(store)) as registry:
                    assert garbage_collection.verify(store, registry, time.time()).problems == (), what
                with Client(service.ports.grpc_url) as client:
                    until(lambda client=client: answered(client))
            # What the kills have spoilt comes through now; a lost worker's job waits for its lease to end.
            until(lambda: not missing() or any(one.done() for one in running), 300)
        finally:
            done.set()
    for one in running:
        one.result()
    with ManageClient(service.ports.grpc_url) as manage:
        # One whose lane has lost sight of it would keep its files.
        until(lambda: not manage.list_jobs(["queued", "running"]))
    service.stop()
    assert missing() == set()
    check_answers(answers, published)
    with capsys.disabled():
        print(f"\nkilled {', '.join(met)}; {len(answers.logits)} answers")
        for lane in lanes:
            print(f"{lane.name}: done {dict(lane.finished)}, spoilt {dict(lane.failed)}")
    with closing(Registry.open(store)) as registry:
        garbage_collection.collect(store, registry, time.time() + 1e6, grace_s=0.0)
        assert garbage_collection.verify(store, registry, time.time()) == garbage_collection.Verdict((), ())
        for path in store.root.rglob("*"):
            if path.is_file() and not path.name.startswith("registry.sqlite"):
                name = store.relative(path)
                assert any(name.startswith(f"{known}/") for known in registry.snapshot().paths), name


def test_triton_killed_while_it_loads_a_model_again_is_started_again(service: Service) -> None:
    triton = loading_again(service, "hbert_upper")
    started = stubs_of(triton)
    os.kill(triton, signal.SIGKILL)
    log = service.models.parent / "triton.log"
    words = rf"Triton ended by itself, by signal 9 \(SIGKILL\), \d+ s after it was ready; its log is kept as {log}.1; starting"
    until(lambda: re.search(words, service.said()) is not None)
    service.await_answers()
    assert not any(runs(one) for one in started)
    assert "by signal 9" in log.read_text().splitlines()[0]


@pytest.mark.parametrize("model", ["hbert_plot", "hbert_upper"])
def test_requests_under_way_when_a_stage_dies_get_stage_down_by_their_deadline(service: Service, model: str) -> None:
    check_stage_down(service, model)


def check_stage_down(service: Service, model: str) -> None:
    """Kill a stub under load, and check what the clients get."""
    urls = [service.ports.http_url, service.ports.grpc_url]

    def until_refused(url: str) -> tuple[HplmError, float]:
        """Return the first error that our client gets, and how long it took."""
        with Client(url) as client:
            while True:
                sent_s = time.monotonic()
                try:
                    client.predict("alpha", TEXTS[0], deadline_s=DEADLINE_S)
                except HplmError as error:
                    return error, time.monotonic() - sent_s

    def plainly() -> tuple[int, str] | None:
        """Return the first error that a program without our client gets over HTTP, None where no answer comes."""
        inputs = [
            {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}
            for name, value in (("TEXT", TEXTS[0]), ("TENANT", "alpha"))
        ]
        request = urllib.request.Request(f"{urls[0]}/v2/models/hbert/infer", json.dumps({"inputs": inputs}).encode())
        while True:
            try:
                urllib.request.urlopen(request, timeout=DEADLINE_S).close()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())["error"]
            except OSError:
                return None

    def after_its_death(stub: int, url: str) -> tuple[HplmError, float]:
        """The same of a client that begins when the stub is dead, so that its requests cannot be taken and forgotten."""
        until(lambda: not runs(stub))
        return until_refused(url)

    # A stub that is killed while it holds a lock takes Triton along: then another one is killed.
    seen = []
    for _ in range(TRIES):
        service.await_ready()
        triton, stub = service.pid("triton"), service.pid(model)
        assert stub is not None
        with ThreadPoolExecutor(16) as pool:
            ours = [pool.submit(until_refused, url) for url in urls * 4]
            later = [pool.submit(after_its_death, stub, url) for url in urls * 2]
            plain = [pool.submit(plainly) for _ in range(4)]
            service.kill(model, lambda: time.sleep(1.0))
            found, found_later = [[one.result(SOON_S) for one in asked] for asked in (ours, later)]
            plainly_found = {one.result(SOON_S) for one in plain}
        took_triton = service.pid("triton") != triton
        seen.append((took_triton, found, found_later))
        if took_triton:
            continue
        # Triton forgets a request now and then: our client ends that one at its deadline.
        assert {type(error) for error, _ in found} <= {errors.StageDownError, errors.DeadlineError}, found
        # A busy machine may come to these only when the stage is loaded again.
        late_kinds = {errors.StageDownError, errors.DeadlineError, errors.UnreachableError}
        assert {type(error) for error, _ in found_later} <= late_kinds, found_later
        if errors.StageDownError not in {type(error) for error, _ in found_later}:
            continue
        # Without an ensemble Triton forgets all that the process has taken and does not hold a call open for.
        told = [type(error) for error, _ in found].count(errors.StageDownError)
        if model != "hbert" and told <= len(found) // 2:
            # On a busy machine Triton forgets more requests than now and then: the next kill has to be as expected.
            continue
        assert max(taken_s for _, taken_s in found + found_later) <= DEADLINE_S + DEADLINE_GRACE_S + SLACK_S
        of_ensemble = "" if model == "hbert" else "in ensemble 'hbert', "
        said = (500, f"{of_ensemble}Stub process '{model}_0_0' is not healthy.")
        assert ({said} if told else set()) <= plainly_found <= {said, None}
        break
    else:
        pytest.fail(f"each of {TRIES} kills took Triton along, or left most requests without STAGE_DOWN: {seen}")
    # The retry that the page recommends is answered.
    with Client(urls[1]) as client:
        assert with_retries(lambda: client.predict("alpha", TEXTS[0])).label


def test_a_triton_that_crashed_and_hangs_is_started_again(service: Service) -> None:
    triton = service.pid("triton")
    assert triton is not None
    started = stubs_of(triton)
    # What it does when its memory is damaged: it says this, and waits for a lock that it holds itself.
    with (service.models.parent / "triton.log").open("a") as log:
        log.write("Signal (6) received.\n")
    # One that answers has not: somebody else wrote this.
    time.sleep(CRASH_ENDS_S + 3.0)
    assert service.pid("triton") == triton
    os.kill(triton, signal.SIGSTOP)
    until(lambda: "Triton crashed and hung" in service.said())
    service.await_answers()
    assert not any(runs(one) for one in (triton, *started))


def test_a_triton_that_crashes_and_hangs_while_it_loads_a_model_again_is_started_again(service: Service) -> None:
    os.kill(loading_again(service, "hbert_upper"), signal.SIGSTOP)
    with (service.models.parent / "triton.log").open("a") as log:
        log.write("Signal (6) received.\n")
    until(lambda: "Triton crashed and hung" in service.said())
    service.await_answers()


def test_nothing_stays_when_triton_and_hplm_serve_are_killed_at_once(service: Service) -> None:
    check_nothing_stays(service)


def test_nothing_stays_when_triton_and_hplm_serve_are_killed_at_once_while_triton_starts(kept: Service) -> None:
    if kept.process.poll() is None:
        kept.stop()
    kept.launch()
    check_nothing_stays(kept)


def check_nothing_stays(service: Service) -> None:
    """Kill Triton and `hplm serve` at once, and check what is left."""
    until(lambda: len(stubs_of(service.pid("triton") or 0)) == 3)
    triton = service.pid("triton")
    assert triton is not None
    started = stubs_of(triton)
    # What a stub asks of it from now on is never answered: metrics, or what it says as it has loaded its model.
    os.kill(triton, signal.SIGSTOP)
    time.sleep(3.0)
    found = re.search(r"/dev/shm/(hplm-triton-[^./]+)\.", Path(f"/proc/{triton}/maps").read_text())
    assert found
    for pid in (service.process.pid, triton):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(runs(one) for one in started))
    until(lambda: not (Path(tempfile.gettempdir()) / found[1]).exists())
    assert not [*SHARED_MEMORY.glob(f"{found[1]}*"), *SHARED_MEMORY.glob(f"{backlogs_of(triton)}*")]


def test_a_triton_that_a_client_s_open_stream_keeps_ends_after_hplm_serve_was_killed_and_its_reaper_before(
    service: Service,
) -> None:
    before = service.pid("reaper")
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: service.pid("reaper") not in (None, before))
    triton = service.pid("triton")
    assert triton is not None
    everything = [triton, *children(triton)]
    asked = []
    for name, value in {"TEXT": TEXTS[0], "TENANT": "nobody"}.items():
        asked.append(InferInput(name, [1, 1], "BYTES"))
        asked[-1].set_data_from_numpy(np.array([[value]], dtype=object))
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    with InferenceServerClient(service.ports.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(callback=lambda result, error: answers.put(result or error))
        client.async_stream_infer("hbert", asked)
        answers.get(timeout=SOON_S)
        os.kill(service.process.pid, signal.SIGKILL)
        until(lambda: not any(runs(one) for one in everything))
    service.process.wait()


def loading_again(service: Service, model: str) -> int:
    """Kill a model's stub; the pid of its Triton, once that loads the model again."""
    stub, triton = service.pid(model), service.pid("triton")
    assert stub is not None
    assert triton is not None

    def loads() -> int:
        return (service.models.parent / "triton.log").read_text().count(f"loading: {model}")

    before = loads()
    os.kill(stub, signal.SIGKILL)
    until(lambda: loads() > before)
    return triton


def answered(client: Client) -> bool:
    with suppress(errors.ServerError):
        return all(client.predict(name, TEXTS[0]).label for name in STEADY)
    return False
