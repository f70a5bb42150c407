"""What several tests share: a tiny store on disk, its repository, and one real Triton over it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hplm_client import ManageClient
from hypothesis import HealthCheck, settings

import hplm_cli
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.runtime import rate_limited_log
from hplm.store.layout import Store
from hplm.triton.launcher import ports
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import managed, tiny
from tests.postgres import PostgresServer, find_postgres
from tests.submitting import Started

# A suite that runs in the background of a shell has SIGINT ignored, and would hand that on to the servers that it interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine any example may be paused for longer than hypothesis lets one take.
settings.register_profile("hplm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hplm")


@pytest.fixture(autouse=True)
def fresh_complaints(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test had in the log is said again."""
    monkeypatch.setattr(rate_limited_log, "PROCESS_LOG", rate_limited_log.RateLimitedLog())


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Undo what commands that run in the test's process, such as `hplm serve` and `hplm bench`, set for signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def hplm(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], restored_signals: None
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `hplm ARGUMENTS` in the test's own process: a new one would import torch for seconds."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["hplm", *arguments])
        umask = os.umask(0o077)
        os.umask(umask)
        try:
            with pytest.raises(SystemExit) as ended:
                hplm_cli.main()
        finally:
            os.umask(umask)
        code = 0 if ended.value.code is None else ended.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, *capfd.readouterr())

    return run


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """For a test that sets with how many threads torch computes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def started() -> Iterator[Started]:
    with Started() as stages:
        yield stages


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> Iterator[None]:
    """Of several processes of pytest each draws from its own: from the draw until a server has a port pass many seconds."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with pytest.MonkeyPatch.context() as patch:
        # One that takes the place of a crashed one has a higher number.
        patch.setattr(ports, "PORTS", ports.PORTS[number % count :: count])
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_may_start_slowly() -> Iterator[None]:
    """On a machine that is busy with something else: within a test's 300 seconds, so that it is said what was too slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonServer.wait_ready, "__defaults__", (240.0,))
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_end_at_once() -> Iterator[None]:
    """Triton takes two seconds to end. Tests of an orderly end call `stop` themselves."""

    def end(server: TritonServer, *_: object) -> None:
        if not server.has_ended:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.ends(60)
        # Nothing of it is returned: what is true would hide what failed beside the server.
        server.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonServer, "__exit__", end)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install 'hplm[postgres]'")
    server = PostgresServer(programs)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Model folders of a tiny base in fp32, miss mode `compute`, fewer slots than tenants.

    The lower layers have the default form, or the form that a test gives: see `tiny.BOTH_FORMS`.
    """
    form = getattr(request, "param", NgramEncoder.form)
    return tiny.make_repository(tmp_path_factory.mktemp("tiny"), shape=tiny.config(form=form))


@pytest.fixture(scope="session")
def tiny_store(tiny_models: Path) -> Store:
    return Store(tiny_models.parent / "store")


@pytest.fixture(scope="session")
def tiny_base(tiny_store: Store) -> Base:
    return bases.load(tiny_store.base("tiny"))


@pytest.fixture(scope="session")
def server(tiny_models: Path) -> Iterator[TritonServer]:
    """A real Triton over `tiny_models`."""
    with TritonServer(tiny_models, free_ports(), log=tiny_models.parent / "triton.log") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[managed.Place]:
    """A real Triton that is managed."""
    with managed.serving(tmp_path_factory.mktemp("managed")) as made:
        yield made


@pytest.fixture(params=["http", "grpc"])
def manage(request: pytest.FixtureRequest, place: managed.Place) -> Iterator[ManageClient]:
    """A client of `place`, over either protocol."""
    with ManageClient(place.url(request.param)) as client:
        yield client
