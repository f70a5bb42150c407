"""`hplm serve` tells the truth about its models, starts a Triton again that was killed, and loses no request when it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hplm_client import Client

from hplm.errors import HplmError, StoppingError, UnreachableError
from hplm.store.layout import Store
from hplm.triton.launcher.kept_server import MOST_LOST_STARTS
from hplm.triton.launcher.ports import free_ports
from hplm.triton.workarounds.dead_stubs import stubs_of
from tests import tiny
from tests.triton.failures.serve_process import SOON_S, START_S, Service
from tests.waiting import until
from tests.watching import runs

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(600)]
MODELS = {"hbert", "hbert_plot", "hbert_upper", "hbert_dispatch", "manager", "hplm", "cascade"}
TEXTS = tiny.sentences(64, seed=5, words=(15, 25))
# Requests that were sent so long before a signal have arrived at Triton, also on a busy machine.
ARRIVED_S = 0.5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Tests follow one another on the same `hplm serve`; the last one ends it."""
    folder = tmp_path_factory.mktemp("restarts")
    # Many texts may wait: a request that is refused because too many wait would be no request that the server accepted.
    settings = {"queue_capacity": 20_000}
    models = tiny.make_repository(
        folder, manager_settings={}, route=True, plot_settings=settings, upper_settings=settings
    )
    made = Service(models, free_ports(), ["--drain-timeout=60"])
    made.start()
    yield made
    if made.process.poll() is None:
        made.stop()


@dataclass
class Load:
    """Clients that send requests of 64 texts, one after another, until the first that is not answered.

    `times`: when each answered request was sent and answered. `ends`: when each other request was sent, and its error.
    """

    times: list[tuple[float, float]] = field(default_factory=list)
    ends: list[tuple[float, HplmError]] = field(default_factory=list)

    def send(self, url: str, model: str, done: threading.Event) -> None:
        requests = [(name, text) for name, text in zip(("alpha", "beta", "gamma", "tagger") * 16, TEXTS, strict=True)]
        with Client(url, model=model, timeout_s=SOON_S) as client:
            while not done.is_set():
                sent_s = time.monotonic()
                try:
                    client.predict_batch(requests)
                except HplmError as error:
                    self.ends.append((sent_s, error))
                    return
                self.times.append((sent_s, time.monotonic()))


def test_every_model_answers_a_question_and_no_tenant_is_named(service: Service) -> None:
    status, answer = service.health()
    assert (status, answer["ready"], answer["state"], answer["restarts"]) == (200, True, "serving", 0)
    assert {name for name, model in answer["models"].items() if model["ready"]} == MODELS
    assert {name: model["answer"] for name, model in answer["models"].items()} == {
        **dict.fromkeys(MODELS, "ok"),
        "manager": "UNKNOWN_JOB",
    }
    assert not [name for name in tiny.TASKS if name in str(answer)]
    assert service.health("live") == (200, {"live": True})
    assert service.health("nothing")[0] == 404


@pytest.mark.parametrize("model", ["hbert_upper", "hbert_plot", "manager", "hplm"])
def test_readiness_is_false_while_a_stub_is_dead_and_true_again_after(service: Service, model: str) -> None:
    stub, triton = service.pid(model), service.pid("triton")
    assert stub is not None
    service.await_ready()
    os.kill(stub, signal.SIGKILL)
    until(lambda: not runs(stub))
    status, answer = service.health()
    assert (status, answer["ready"]) == (503, False)
    if service.pid("triton") == triton and answer["state"] == "serving":
        assert answer["models"][model]["ready"] is False
        assert answer["models"][model]["why"]
    assert service.health("live") == (200, {"live": True})
    service.await_ready()
    assert service.pid(model) not in (None, stub)


def test_a_model_that_hangs_is_not_ready_within_a_bounded_time(service: Service) -> None:
    stub = service.pid("hbert_upper")
    assert stub is not None
    service.await_ready()
    os.kill(stub, signal.SIGSTOP)
    try:
        until(lambda: service.health()[0] == 503)
        _, answer = service.health()
        assert answer["models"]["hbert_upper"]["why"] in (
            "no answer within 3 s",
            "a process of it, or of a model that it calls, has died or hangs",
        )
        assert answer["models"]["hbert_plot"]["ready"]
    finally:
        os.kill(stub, signal.SIGCONT)
    service.await_ready()


def test_a_triton_that_is_killed_under_load_answers_again_and_its_successor_is_looked_after(service: Service) -> None:
    triton, worker, restarts = service.pid("triton"), service.pid("worker"), service.health()[1]["restarts"]
    assert triton is not None
    stubs = stubs_of(triton)
    loads, done = Load(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        urls = [service.ports.http_url, service.ports.grpc_url] * 2
        sending = [pool.submit(loads.send, url, "hplm", done) for url in urls]
        until(lambda: len(loads.times) > 4)
        os.kill(triton, signal.SIGKILL)
        for one in sending:
            one.result(SOON_S)
    assert {type(error) for _, error in loads.ends} == {UnreachableError}
    assert service.health("live") == (200, {"live": True})
    service.await_answers()
    service.await_ready()
    assert service.health()[1]["restarts"] == restarts + 1
    assert not any(runs(stub) for stub in stubs)
    assert service.pid("worker") == worker
    assert "by signal 9 (SIGKILL)" in service.said()
    assert "Triton serves again" in service.said()
    # What looks for dead stubs has followed the new Triton.
    stub = service.pid("hbert_plot")
    assert stub is not None
    os.kill(stub, signal.SIGKILL)
    until(lambda: not runs(stub))
    until(lambda: service.pid("hbert_plot") not in (None, stub))
    service.await_ready()


def test_sigterm_under_load_loses_no_request_and_readiness_is_false_before_the_first_refusal(service: Service) -> None:
    service.await_ready()
    load, done = Load(), threading.Event()
    first_not_ready_s: list[float] = []

    def probe() -> None:
        while not first_not_ready_s:
            if service.health()[0] != 200:
                first_not_ready_s.append(time.monotonic())

    def lives() -> bool:
        with suppress(OSError):
            return service.health("live") == (200, {"live": True})
        return False

    with ThreadPoolExecutor(17) as pool:
        urls = [service.ports.http_url, service.ports.grpc_url]
        models = ["hplm", "cascade", "hbert", "hbert"]
        sending = [pool.submit(load.send, url, model, done) for url in urls for model in models * 2]
        until(lambda: len(load.times) > 32)
        pool.submit(probe)
        time.sleep(1.0)
        signalled_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert lives()
        assert service.process.wait(120) == 0
        for one in sending:
            one.result(SOON_S)
    refused = [error for _, error in load.ends]
    assert len(refused) == 16
    assert {type(error) for error in refused} <= {UnreachableError, StoppingError}
    # Refused with words of the server: no connection was broken, no answer was lost.
    assert all("unknown model" in str(error) or isinstance(error, StoppingError) for error in refused), refused
    # What Triton had accepted is answered, and is most of what was under way.
    accepted = [one for one in load.times if one[0] < signalled_s < one[1]]
    assert not [sent_s for sent_s, _ in load.ends if sent_s < signalled_s - ARRIVED_S]
    assert len(accepted) >= 8
    assert first_not_ready_s[0] <= min(sent_s for sent_s, _ in load.ends) + ARRIVED_S


def test_what_is_killed_while_triton_starts_is_started_again(tmp_path: Path) -> None:
    service = Service(tiny.make_repository(tmp_path), free_ports(), ["--no-worker"])
    service.launch()
    try:
        # Triton itself in the first start, a stub that loads its model in the second.
        until(lambda: bool(stubs_of(service.pid("triton") or 0)), START_S)
        first = service.pid("triton")
        assert first is not None
        assert service.health()[1] == {
            "ready": False,
            "state": "starting",
            "why": "Triton is starting",
            "restarts": 0,
            "models": {},
        }
        os.kill(first, signal.SIGKILL)
        until(lambda: service.pid("triton") not in (None, first), START_S)
        second = service.pid("triton")
        assert second is not None
        until(lambda: "hbert_upper" in stubs_of(second).values(), START_S)
        os.kill(next(stub for stub, model in stubs_of(second).items() if model == "hbert_upper"), signal.SIGKILL)
        service.await_answers()
        said = service.said()
        assert "Triton ended while starting, by signal 9 (SIGKILL)" in said
        # Triton notices no death of a stub that has just begun.
        assert (
            "Stub process 'hbert_upper_0_0' is not healthy" in said or "Triton waited for a stub that had died" in said
        )
        assert said.count("starting it again in") == 2
        # The base is damaged while it is served. The next start cannot be mended by another.
        store = Store(tmp_path / "store")
        tiny.flip_last_byte(store.base("tiny") / "upper.safetensors")
        third = service.pid("triton")
        assert third is not None
        os.kill(third, signal.SIGKILL)
        assert service.process.wait(SOON_S) == 1
        assert "START_FAILED: Triton ended while starting, with status 1" in service.said()
        assert "checksum" in service.said()
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


def test_a_triton_that_is_killed_in_five_starts_in_a_row_ends_hplm_serve_with_its_error(tiny_models: Path) -> None:
    log = tiny_models.parent / "five-starts.log"
    service = Service(tiny_models, free_ports(), ["--no-worker", f"--log={log}"])
    service.launch()
    killed: set[int] = set()
    try:
        while service.process.poll() is None:
            if (triton := service.pid("triton")) is not None:
                killed.add(triton)
                with suppress(ProcessLookupError):
                    os.kill(triton, signal.SIGKILL)
            time.sleep(0.05)
        assert service.process.returncode == 1
        assert len(killed) == MOST_LOST_STARTS
        assert f"TRITON_ENDED: in {MOST_LOST_STARTS} starts in a row: Triton ended while starting" in service.said()
        assert "Traceback" not in service.said()
    finally:
        service.process.kill()
        service.process.wait()
