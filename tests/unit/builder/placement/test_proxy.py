"""A real HAProxy before small HTTP servers: which node gets a request, and what happens when a node dies."""

from __future__ import annotations

import socket
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from hplm_builder.placement.proxy_config import HPLM_READY, ProxiedNode, ProxyAddress, proxy_files
from hplm_builder.placement.proxy_process import find_haproxy, running_proxy

from hplm.placement.plan import TenantRule
from hplm.triton.launcher.ports import free_ports
from tests.waiting import until

SERVICE = "inference.GRPCInferenceService"
# The field of a gRPC message that names the model `small`.
SMALL = b"\x0a\x05small"

HAPROXY = find_haproxy()
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="needs haproxy")
TENANTS = [f"tenant-{number}" for number in range(60)]
# `small` is on two nodes, `large` on the third alone.
BASES = {"east": ["small"], "west": ["small"], "north": ["large"]}
OF_NORTH = "films"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Node

    def do_GET(self) -> None:
        is_ready = self.path == HPLM_READY and self.server.is_ready
        self._answer(200 if is_ready or self.path != HPLM_READY else 503)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.drops:
            self.connection.close()
            self.close_connection = True
            return
        self._answer(200)

    def _answer(self, status: int) -> None:
        body = self.server.name.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Node(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.is_ready = True
        self.drops = False
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that HAProxy has closed."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Proxied:
    """Three nodes behind HAProxy."""

    def __init__(self, url: str, nodes: dict[str, _Node], socket_path: Path) -> None:
        self.url, self.nodes, self.socket_path = url, nodes, socket_path

    def ask(self, path: str = "/v2/models/small/infer", tenant: str | None = None) -> str:
        headers = {} if tenant is None else {"hplm-tenant": tenant}
        request = urllib.request.Request(self.url + path, b"{}", headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return str(reply.read().decode())

    def command(self, text: str) -> str:
        """The answer of HAProxy's socket."""
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("r") as answer:
            connection.connect(str(self.socket_path))
            connection.sendall(f"{text}\n".encode())
            return answer.read()

    def set_state(self, node: str, state: str) -> None:
        """Set the state of a node in each backend, as docs/placement.md says."""
        for backend in self.command("show backend").splitlines()[1:]:
            self.command(f"set server {backend}/{node} state {state}")

    def status(self, path: str) -> int:
        try:
            self.ask(path)
        except urllib.error.HTTPError as error:
            return error.code
        return 200


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    assert HAPROXY is not None
    nodes = {name: _Node(name) for name in BASES}
    listed = [
        ProxiedNode(name, number, "127.0.0.1", node.server_port, node.server_port, node.server_port, BASES[name])
        for number, (name, node) in enumerate(nodes.items(), 1)
    ]
    ports = free_ports()
    address = ProxyAddress("127.0.0.1", ports.http, ports.grpc)
    models = {OF_NORTH: "large", "hot": "small"}
    files = proxy_files(listed, models, TenantRule({"hot": ("east", "west")}, 150), address)
    with running_proxy(HAPROXY, tmp_path / "proxy", files, address) as sockets:
        socket_path = sockets / f"hplm-proxy-{ports.http}.sock"
        yield Proxied(f"http://127.0.0.1:{ports.http}", nodes, socket_path)
    for node in nodes.values():
        node.end()


@needs_haproxy
def test_requests_of_a_tenant_go_to_one_node_and_tenants_are_spread(proxied: Proxied) -> None:
    nodes = {tenant: {proxied.ask(tenant=tenant) for _ in range(3)} for tenant in TENANTS}
    # HAProxy may count an answered request for a moment more, and then the other node has less load.
    assert sum(len(seen) == 1 for seen in nodes.values()) > len(TENANTS) / 2
    counts = Counter(name for seen in nodes.values() for name in seen)
    assert set(counts) == {"east", "west"}
    assert min(counts.values()) > len(TENANTS) / 5


@needs_haproxy
def test_without_the_header_every_node_with_the_base_answers(proxied: Proxied) -> None:
    assert {proxied.ask() for _ in range(6)} == {"east", "west"}
    assert {proxied.ask("/v2/models/large/infer") for _ in range(3)} == {"north"}
    assert {proxied.ask("/v2/models/hplm/infer") for _ in range(9)} == {"east", "west", "north"}


@needs_haproxy
def test_a_request_for_all_bases_goes_to_a_node_with_the_tenants_base(proxied: Proxied) -> None:
    assert {proxied.ask("/v2/models/hplm/infer", OF_NORTH) for _ in range(6)} == {"north"}


@needs_haproxy
def test_each_node_of_a_hot_tenant_answers_it(proxied: Proxied) -> None:
    assert {proxied.ask("/v2/models/hplm/infer", "hot") for _ in range(6)} == {"east", "west"}


@needs_haproxy
def test_the_proxy_refuses_the_manager_and_triton_s_own_apis(proxied: Proxied) -> None:
    for path in ("/v2/models/manager/infer", "/v2/repository/index", "/v2/models/other/infer", "/metrics"):
        assert proxied.status(path) == 404
    assert proxied.status("/v2/models/small/ready") == 200


@needs_haproxy
def test_another_node_answers_when_a_node_drops_its_requests(proxied: Proxied) -> None:
    proxied.nodes["east"].drops = True
    assert {proxied.ask(tenant=tenant) for tenant in TENANTS[:10]} == {"west"}


@needs_haproxy
def test_another_node_answers_when_a_node_is_gone(proxied: Proxied) -> None:
    proxied.nodes["east"].end()
    assert {proxied.ask(tenant=tenant) for tenant in TENANTS[:10]} == {"west"}


@needs_haproxy
def test_a_node_that_is_not_ready_gets_no_requests(proxied: Proxied) -> None:
    proxied.nodes["east"].is_ready = False
    until(lambda: {proxied.ask() for _ in range(6)} == {"west"}, 20)
    proxied.nodes["east"].is_ready = True
    until(lambda: {proxied.ask() for _ in range(6)} == {"east", "west"}, 20)


@needs_haproxy
def test_a_node_that_is_drained_at_the_socket_gets_no_requests_until_it_is_ready_again(proxied: Proxied) -> None:
    assert stat.S_IMODE(proxied.socket_path.stat().st_mode) == 0o600
    proxied.set_state("east", "drain")
    assert {proxied.ask() for _ in range(6)} == {"west"}
    assert {proxied.ask("/v2/models/hplm/infer") for _ in range(9)} == {"west", "north"}
    proxied.set_state("east", "ready")
    assert {proxied.ask() for _ in range(6)} == {"east", "west"}


@needs_haproxy
def test_haproxy_takes_nodes_and_its_own_address_in_ipv6(tmp_path: Path) -> None:
    node = ProxiedNode("east", 1, "fd00::1", 8000, 8001, 8003, ["small"])
    files = proxy_files([node], {}, TenantRule(), ProxyAddress("::1", 8080, 8081))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert "server east [fd00::1]:8001 " in files["haproxy.cfg"]
    checked = subprocess.run([str(HAPROXY), "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.fixture
def infer(tmp_path: Path) -> Iterator[Callable[[bytes], str]]:
    """Sends a message over gRPC to a node behind HAProxy, and returns `ok` or what the proxy says."""
    assert HAPROXY is not None
    health, server = _Node("east"), grpc.server(ThreadPoolExecutor(2))
    echo = grpc.unary_unary_rpc_method_handler(lambda message, _: message)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports = free_ports()
    address = ProxyAddress("127.0.0.1", ports.http, ports.grpc)
    node = ProxiedNode("east", 1, "127.0.0.1", health.server_port, port, health.server_port, ["small"])
    files = proxy_files([node], {}, TenantRule(), address)
    with (
        running_proxy(HAPROXY, tmp_path / "proxy", files, address),
        grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
    ):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        def ask(message: bytes) -> str:
            try:
                return "ok" if call(message, timeout=20) == message else "another message"
            except grpc.RpcError as error:
                return str(error.details())

        yield ask
    server.stop(None)
    health.end()


def field(number: int, value: bytes) -> bytes:
    """A field of bytes of a gRPC message; the length takes three bytes."""
    size = len(value)
    return bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + value


@needs_haproxy
@pytest.mark.parametrize("length", [0, 65_300, 65_410, 100_000])
@pytest.mark.parametrize("second", [b"\x0a\x07manager", b"\x8a\x80\x00\x87\x80\x00manager"])
def test_a_grpc_message_that_names_the_manager_too_is_refused(
    infer: Callable[[bytes], str], length: int, second: bytes
) -> None:
    # Triton takes the last name.
    assert "403" in infer(SMALL + field(7, b"x" * length) + second)


@needs_haproxy
def test_a_grpc_message_for_answers_passes_whatever_its_texts(infer: Callable[[bytes], str]) -> None:
    assert infer(SMALL) == "ok"
    assert infer(SMALL + field(7, b"\x07\x00\x00\x00manager, a manager\nmanager")) == "ok"
    assert infer(SMALL + field(7, b"\x8a" * 120_000)) == "ok"


@needs_haproxy
def test_a_grpc_message_that_the_proxy_cannot_keep_is_refused_for_its_size(infer: Callable[[bytes], str]) -> None:
    assert "413" in infer(SMALL + field(7, b"x" * 200_000))
