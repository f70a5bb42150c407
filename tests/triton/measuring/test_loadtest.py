"""Load on a real server: no request is lost, and the server gets the planned requests."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_client import AsyncClient, Client
from hplm_client.manage.client import ManageClient
from hplm_loadtest.benchmarks.served_repository import example_texts, single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.workloads.load_plan import RequestMix
from hplm_loadtest.workloads.texts import mean_tokens

from hplm.errors import ConfigError, UnreachableError
from hplm.models import base as bases
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.arrivals import BurstArrivals, PoissonArrivals
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import UniformTenants, ZipfTenants
from tests import managed, tiny
from tests.waiting import until

pytestmark = pytest.mark.triton
# These tests look for lost requests and not for a late generator, because the machine is busy with other tests.
MEMBERS = list(tiny.TASKS)
TIMEOUT_S = 100.0


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def mix() -> RequestMix:
    return RequestMix(
        ZipfTenants(MEMBERS), tiny.sentences(50), DeadlineClasses({"short": (25.0, 0.5), "long": (60.0, 0.5)})
    )


def test_the_open_loop_loses_nothing(server: TritonServer, mix: RequestMix) -> None:
    plan = mix.plan(PoissonArrivals(60), 3.0, rng())
    run = open_loop(server.ports.grpc_url, plan, timeout_s=TIMEOUT_S)
    assert len(run) == len(plan.times_s)
    assert run.kinds == {"answered": len(run)}
    np.testing.assert_array_equal(run.planned_s, plan.times_s)
    assert np.all(run.sent_s >= run.planned_s - 1e-3)
    assert np.all(run.done_s > run.sent_s)


def test_the_open_loop_counts_a_refused_request_by_its_code(server: TritonServer) -> None:
    plan = RequestMix(UniformTenants(["alpha", "nobody"]), ["the red cat"]).plan(PoissonArrivals(100), 1.0, rng())
    run = open_loop(server.ports.grpc_url, plan)
    unknown = sum(name == "nobody" for name in plan.requests.tenants)
    assert run.row()["errors"] == {"UNKNOWN_TENANT": unknown}
    assert run.kinds == {"answered": len(run) - unknown, "failed": unknown}


def test_the_open_loop_counts_a_request_that_took_too_long_as_lost(
    tiny_models: Path, tmp_path: Path, mix: RequestMix
) -> None:
    plan = mix.plan(PoissonArrivals(100), 0.5, rng())
    # A server of its own, because Triton may crash if a request is cancelled just when its answer leaves.
    with TritonServer(tiny_models, free_ports(), log=tmp_path / "log") as server:
        server.wait_ready()
        run = open_loop(server.ports.grpc_url, plan, timeout_s=0.0001)
    assert run.kinds["lost"] > 0
    assert set(run.kinds) <= {"lost", "answered"}


def test_the_closed_loop_answers_every_request(server: TritonServer, mix: RequestMix) -> None:
    run = closed_loop(server.ports.grpc_url, mix.draw(300, rng()), 16, timeout_s=TIMEOUT_S)
    assert run.kinds == {"answered": 300}
    assert run.kept_up
    assert run.row()["offered_per_s"] > 0


def test_the_loops_refuse_servers_that_they_cannot_reach(server: TritonServer, mix: RequestMix) -> None:
    plan = mix.plan(PoissonArrivals(100), 0.1, rng())
    with pytest.raises(UnreachableError):
        open_loop(free_ports().grpc_url, plan)
    with pytest.raises(ConfigError, match="gRPC only"):
        open_loop(server.ports.http_url, plan)


@pytest.mark.parametrize(
    ("protocol", "names", "scenario", "planned"),
    [
        ("http", "--models", ["steady", "--rate", "30", "--duration", "2", "--deadlines", "a=60:0.5,b=90:0.5"], None),
        ("grpc", "--models", ["steady", "--rate", "30", "--duration", "2", "--deadlines", "a=60:0.5,b=90:0.5"], None),
        ("http", "--tenants", ["burst", "--clients", "10", "--count", "3", "--every", "0.5", "--zipf", "1"], 30),
        ("grpc", "NAME,NAME", ["ramp", "--from", "5", "--to", "40", "--duration", "2"], None),
        ("http", "--tenants", ["steady", "--rate", "30", "--cv", "4", "--duration", "2"], None),
        (
            "grpc",
            "--tenants",
            ["replay", "--trace", "TRACE", "--rate", "30", "--burstiness", "1.5", "--duration", "2"],
            60,
        ),
        (
            "grpc",
            "--tenants",
            ["replay", "--trace", "TRACE", "--rate", "30", "--window", "60", "--cv-scale", "2", "--duration", "2"],
            None,
        ),
        ("grpc", "--tenants", ["mmpp", "--state", "20:0.5", "--state", "60:0.2", "--duration", "2"], None),
    ],
    ids=["steady-http", "steady-grpc", "burst", "ramp", "gamma", "replay", "replay-windows", "mmpp"],
)
def test_locust_loses_nothing(
    server: TritonServer,
    tiny_models: Path,
    tmp_path: Path,
    protocol: str,
    names: str,
    scenario: list[str],
    planned: int | None,
) -> None:
    url = server.ports.http_url if protocol == "http" else server.ports.grpc_url
    (tmp_path / "texts.txt").write_text("\n".join(tiny.sentences(20)))
    trace = tmp_path / "trace.csv"
    # A spreadsheet's separator. A pause of 30 days in the middle must not change how many requests a run has.
    times = enumerate(np.cumsum(rng().gamma(0.25, 4.0, 500)))
    recorded = (f"2023-{11 + i // 250}-16 18:{int(s) // 60:02}:{s % 60:010.7f};1\n" for i, s in times)
    trace.write_text("sep=;\nTimestamp;ContextTokens\n" + "".join(recorded))
    scenario = [str(trace) if one == "TRACE" else one for one in scenario]
    (tmp_path / "names.txt").write_text("\n".join(MEMBERS))
    tenants = {
        "--models": ["--models", str(tiny_models)],
        "--tenants": ["--tenants", str(tmp_path / "names.txt")],
        "NAME,NAME": ["--tenants", ",".join(MEMBERS)],
    }[names]
    options = [*tenants, "--text", str(tmp_path / "texts.txt"), "--json", str(tmp_path / "r.json")]
    command = [str(Path(sys.executable).parent / "hplm"), "loadtest", *scenario, "--url", url, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "MonkeyPatchWarning" not in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    everything, *others = report["rows"]
    classes = [row for row in others if "requests_of" in row]
    assert everything["requests"] == (planned or everything["requests"]) > 0
    assert ("warning: the gap after arrival 250 is" in done.stderr) == ("replay" in scenario)
    assert (everything["lost"], everything["failed"], everything["refused"]) == (0, 0, 0)
    assert sum(row["requests"] for row in classes) == (everything["requests"] if "--deadlines" in scenario else 0)
    assert report["settings"]["tenants"] == len(MEMBERS)
    # On a busy machine the load may fall behind its plan; then the command must print that.
    assert (done.returncode, "fell behind" in done.stderr) == ((0, False) if report["goals"][1]["met"] else (1, True))


def test_locust_ends_with_status_1_when_requests_fail(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("alpha\nnobody\n")
    (tmp_path / "texts.txt").write_text("the red cat\n")
    files = ["--tenants", str(tmp_path / "names.txt"), "--text", str(tmp_path / "texts.txt")]
    options = ["--url", server.ports.grpc_url, "--rate", "20", "--duration", "1", *files]
    command = [str(Path(sys.executable).parent / "hplm"), "loadtest", "steady", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert " failed: the row `errors` has their codes" in done.stderr or "failed. These figures" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_options_all_listed_tenants_get_requests_and_tenants_of_pairs_get_pairs(
    place: managed.Place, tmp_path: Path, protocol: str
) -> None:
    tiny.make_tenant(place.store, bases.load(place.store.base("tiny")), f"pairs-{protocol}", 9, "follows")
    place.await_seen()
    (tmp_path / "texts").write_text("the red cat\n")
    (tmp_path / "empty").mkdir()
    files = ["--text", str(tmp_path / "texts"), "--json", str(tmp_path / "r.json")]
    options = ["--url", place.url(protocol), "--rate", "20", "--duration", "1", *files]
    command = [str(Path(sys.executable).parent / "hplm"), "loadtest", "steady", *options]
    with ManageClient(place.url(protocol)) as manage:
        listed = manage.list_tenants(limit=1000)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path / "empty")
    tiny.delete_tenant(place.store, f"pairs-{protocol}")
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["tenants"] == len(listed)
    assert report["settings"]["of_pairs"] == sum(tenant.texts == 2 for tenant in listed) > 0
    assert report["rows"][0]["errors"] == {}


def test_a_server_without_a_manager_is_refused_with_the_option_that_names_tenants(server: TritonServer) -> None:
    command = [str(Path(sys.executable).parent / "hplm"), "loadtest", "steady", "--url", server.ports.grpc_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the server's manager does not list its tenants: name them with --tenants NAME,NAME" in done.stderr
    assert "or does not have the model" in done.stderr
    assert done.stderr.count("\n") == 1


def ask_page(port: int, path: str, body: bytes | None = None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body, timeout=60) as answer:
        return str(answer.read().decode())


def test_the_web_page_starts_a_run_and_shows_every_request(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("alpha\nbeta\n")
    (tmp_path / "texts.txt").write_text("the red cat\n")
    files = ["--tenants", str(tmp_path / "names.txt"), "--text", str(tmp_path / "texts.txt")]
    port, url = free_ports().http, server.ports.grpc_url
    options = ["--clients", "10", "--count", "2", "--url", url, "--web-port", str(port), *files]
    report = tmp_path / "report.json"
    command = [str(Path(sys.executable).parent / "hplm"), "loadtest", "burst", *options, "--json", str(report)]

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ask_page(port, "/stats/requests"))
        return found

    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        try:
            until(listening)
            assert "Locust" in ask_page(port, "/")
            ask_page(port, "/swarm", f"user_count=3&spawn_rate=1&host={url}".encode())
            until(lambda: shown()["state"] == "stopped" and shown()["stats"][-1]["num_requests"] == 20)
            assert shown()["stats"][-1]["num_failures"] == 0
        finally:
            running.send_signal(signal.SIGINT)
            try:
                _, errors = running.communicate(timeout=90)
            finally:
                running.kill()
    assert "Traceback" not in errors
    assert json.loads(report.read_text())["rows"][0]["requests"] == 20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_deadline_is_accepted_by_every_call(server: TritonServer, protocol: str) -> None:
    url = server.ports.http_url if protocol == "http" else server.ports.grpc_url
    with Client(url) as client:
        label = client.predict("alpha", "the red cat", deadline_s=20).label
        assert [a.label for a in client.predict_many([("alpha", "the red cat")] * 3, deadline_s=20)] == [label] * 3

    async def ask() -> str | None:
        async with AsyncClient(url) as waiting:
            return (await waiting.predict("alpha", "the red cat", deadline_s=20)).label

    assert asyncio.run(ask()) == label


def test_a_benchmark_reads_tenants_and_texts_of_a_repository(tiny_models: Path) -> None:
    assert single_text_tenants(tiny_models) == sorted(MEMBERS)
    assert example_texts(tiny_models) == ["Anna sings in Paris"]
    assert mean_tokens(["the red cat", "a"], tiny_models) == 4.0


def test_a_burst_is_answered_whole(server: TritonServer, mix: RequestMix) -> None:
    arrivals = BurstArrivals(clients=20, stagger_s=0.02, period_s=0.3, count=5)
    run = open_loop(server.ports.grpc_url, mix.plan(arrivals, arrivals.duration_s, rng()), timeout_s=TIMEOUT_S)
    assert run.kinds == {"answered": 100}
