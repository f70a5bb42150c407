"""The health endpoint says of each model whether it answers, and `hplm health` reads it."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from hplm.core.roles import models_of
from hplm.errors import StartError
from hplm.triton.launcher.kept_server import State
from hplm.triton.launcher.ports import free_ports
from hplm_cli.health.endpoint import MOST_CONNECTIONS, HealthEndpoint
from hplm_cli.health.questions import outcome_of_error
from hplm_cli.health.readiness import ModelHealth, Readiness, Verdict
from tests import tiny

Run = Callable[..., subprocess.CompletedProcess[str]]
# What a model says about a tenant that does not exist, and about one whose files are damaged.
UNKNOWN = (404, "UNKNOWN_TENANT: there is no tenant")
DAMAGED = (500, "CORRUPT_ARTIFACT: this tenant's model cannot be loaded; the server's log says why")


class SmallTriton:
    """Answers questions with a status and an error by the tenant that is asked about; notes which models were asked."""

    def __init__(self) -> None:
        self.errors: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str]] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = body[: int(self.headers.get("Inference-Header-Content-Length", len(body)))]
                inputs = {tensor["name"]: tensor for tensor in json.loads(body)["inputs"]}
                tenant = inputs["TENANT"]["data"][0]
                small.asked.append((self.path.split("/")[3], tenant))
                status, error = small.errors.get(tenant, (200, ""))
                content = json.dumps({"error": error} if error else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@dataclass
class Server:
    """What is known of a server beside what its models answer."""

    models: set[str]
    state: State = "serving"
    restarts: int = 0
    dead_models: set[str] = field(default_factory=set)


@dataclass
class Place:
    triton: SmallTriton
    server: Server
    readiness: Readiness


@pytest.fixture
def place(tiny_models: Path) -> Iterator[Place]:
    triton, server = SmallTriton(), Server(set(models_of(tiny_models)))
    readiness = Readiness(tiny_models)
    readiness.follow(server, triton.url)
    yield Place(triton, server, readiness)
    readiness.close()
    triton.server.shutdown()
    triton.server.server_close()


@pytest.mark.parametrize(
    ("status", "message", "answer", "words"),
    [
        (503, "QUEUE_FULL: too many requests of alpha wait", "QUEUE_FULL", ""),
        (503, "[request id: 1] Exceeds maximum queue size", "QUEUE_FULL", ""),
        (503, "DEADLINE_UNMEETABLE: it cannot be met", "DEADLINE_UNMEETABLE", ""),
        (503, "REGISTRY_UNAVAILABLE: try again later", "REGISTRY_UNAVAILABLE", ""),
        (500, "in ensemble 'hbert', INTERNAL: tenant alpha failed", None, "it answers INTERNAL"),
        (500, "Stub process 'hbert_plot_0_0' is not healthy.", None, "has died or hangs"),
        (404, "Request for unknown model: 'hbert' is not found", None, "does not have it now"),
        (403, "This API is restricted, expecting header 'guard'", None, "HPLM_HEADERS"),
        (500, "an error about alpha", None, "it answers with HTTP status 500"),
    ],
)
def test_an_error_counts_as_an_answer_only_if_the_model_works(
    status: int, message: str, answer: str | None, words: str
) -> None:
    outcome = outcome_of_error(status, message)
    assert outcome.answer == answer
    assert words in outcome.why
    assert "alpha" not in outcome.why


def test_every_loaded_model_is_asked_and_many_probes_cost_one_question_each(place: Place) -> None:
    verdicts = [place.readiness.verdict() for _ in range(5)]
    assert all(verdict.ready for verdict in verdicts)
    assert sorted(place.triton.asked) == sorted((name, "alpha") for name in place.server.models)
    assert set(verdicts[0].models) == place.server.models


def test_a_damaged_or_deleted_tenant_makes_no_model_unready_if_another_answers(place: Place) -> None:
    place.triton.errors = {"alpha": DAMAGED, "beta": UNKNOWN}
    assert place.readiness.verdict().ready
    assert ("hbert", "gamma") in place.triton.asked


def test_a_model_is_not_ready_if_the_files_of_all_its_tenants_are_damaged(place: Place) -> None:
    place.triton.errors = dict.fromkeys(tiny.TASKS, DAMAGED)
    verdict = place.readiness.verdict()
    assert not verdict.ready
    assert verdict.models["hbert"].as_dict() == {"ready": False, "why": "it answers CORRUPT_ARTIFACT"}


def test_a_server_without_tenants_is_ready_if_its_models_say_that_there_are_none(place: Place) -> None:
    place.triton.errors = dict.fromkeys((*tiny.TASKS, "no-tenant"), UNKNOWN)
    place.readiness.verdict()
    place.readiness._known_until_s = 0.0
    verdict = place.readiness.verdict()
    assert verdict.ready
    assert verdict.models["hbert"].outcome.answer == "UNKNOWN_TENANT"


def test_a_model_of_which_one_process_has_died_is_not_ready_though_another_process_answers(place: Place) -> None:
    assert place.readiness.verdict().ready
    place.server.dead_models = {"hbert_plot"}
    verdict = place.readiness.verdict()
    assert not verdict.ready
    assert verdict.models["hbert"].outcome.answer == "ok"
    assert "has died" in verdict.models["hbert_plot"].outcome.why


@pytest.mark.parametrize("state", ["starting", "restarting", "draining"])
def test_a_server_that_does_not_serve_is_not_ready_at_once(place: Place, state: State) -> None:
    assert place.readiness.verdict().ready
    place.server.state = state
    assert place.readiness.verdict().as_dict() == {
        "ready": False,
        "state": state,
        "why": place.readiness.verdict().why,
        "restarts": 0,
        "models": {},
    }
    assert place.readiness.verdict().why


def test_a_triton_that_does_not_answer_makes_every_model_unready(place: Place) -> None:
    place.readiness.follow(place.server, f"http://127.0.0.1:{free_ports().http}")
    healths = place.readiness.verdict().models
    assert {name for name, health in healths.items() if health.outcome.why == "Triton does not answer"} == set(healths)
    assert set(healths) == place.server.models


@dataclass
class Endpoint:
    url: str
    verdict: Verdict = field(default_factory=lambda: Verdict("starting", "Triton is starting"))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    ports = free_ports()
    assert ports.health is not None
    made = Endpoint(ports.health_url)
    listening = HealthEndpoint("127.0.0.1", ports.health, lambda: made.verdict)
    yield made
    listening.close()


def answering(restarts: int = 0) -> Verdict:
    return Verdict("serving", "", restarts, {"hbert": ModelHealth(outcome_of_error(503, "QUEUE_FULL: wait"), 0.25)})


def fetch(url: str, method: str = "GET") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_endpoint_says_whether_the_server_is_ready_and_always_that_it_lives(endpoint: Endpoint) -> None:
    assert fetch(f"{endpoint.url}/ready")[0] == 503
    assert fetch(f"{endpoint.url}/live") == (200, b'{"live": true}\n')
    endpoint.verdict = answering()
    status, content = fetch(f"{endpoint.url}/ready?probe=1")
    assert (status, json.loads(content)) == (200, endpoint.verdict.as_dict())
    assert fetch(f"{endpoint.url}/ready", "HEAD") == (200, b"")
    assert fetch(f"{endpoint.url}/metrics")[0] == 404


def test_connections_beyond_the_most_are_closed_and_do_not_keep_probes_away_for_good(endpoint: Endpoint) -> None:
    address = ("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection(address))
        with socket.create_connection(address) as one_more:
            one_more.settimeout(30)
            assert one_more.recv(1) == b""
    assert fetch(f"{endpoint.url}/live")[0] == 200


def test_a_taken_port_is_named_with_its_flag(endpoint: Endpoint) -> None:
    with pytest.raises(StartError, match="--health-port"):
        HealthEndpoint("127.0.0.1", int(endpoint.url.rpartition(":")[2]), answering)


def test_hplm_health_ends_with_status_0_only_if_every_model_answers(hplm: Run, endpoint: Endpoint) -> None:
    done = hplm("health", "--url", endpoint.url)
    assert (done.returncode, done.stdout) == (1, "not ready: Triton is starting\n")
    assert hplm("health", "--live", "--url", endpoint.url).returncode == 0
    endpoint.verdict = answering(restarts=2)
    done = hplm("health", "--url", endpoint.url)
    assert (done.returncode, done.stdout) == (
        0,
        "ready, Triton was started again 2 times\n  hbert: QUEUE_FULL, 250.0 ms\n",
    )
    done = hplm("health", "--json", "--url", f"{endpoint.url}/")
    assert json.loads(done.stdout) == endpoint.verdict.as_dict()


def test_hplm_health_names_an_address_where_no_health_endpoint_answers(hplm: Run, place: Place) -> None:
    for url, words in (
        (free_ports().health_url, "UNREACHABLE: http://127.0.0.1:"),
        (place.triton.url, "INTERNAL: "),
        ("grpc://127.0.0.1:8001", "BAD_CONFIG: 'grpc://127.0.0.1:8001' is not an address of a health endpoint"),
    ):
        done = hplm("health", "--url", url)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_hplm_health_asks_the_host_that_hplm_url_names(hplm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPLM_HEALTH_URL", raising=False)
    for server, asked in (
        ("grpc://127.0.0.9:8001", "http://127.0.0.9:8003"),
        ("http://[::1]:8000", "http://[::1]:8003"),
    ):
        monkeypatch.setenv("HPLM_URL", server)
        assert f"UNREACHABLE: {asked} does not answer" in hplm("health", "--timeout", "2").stderr
    monkeypatch.setenv("HPLM_URL", "localhost:8001")
    assert "BAD_CONFIG: 'localhost:8001' is not an address" in hplm("health").stderr
    monkeypatch.setenv("HPLM_HEALTH_URL", "http://127.0.0.8:1")
    assert "UNREACHABLE: http://127.0.0.8:1 does not answer" in hplm("health").stderr
