"""Tenants on nodes, and the proxy's hash."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.cluster import Node
from hplm.placement.search.proxy_hash import OpenRequests, ProxyHash, ProxyServer, load_shares
from hplm.placement.search.tenants import TenantLoad, place_tenants
from tests.waiting import until

SERVERS = [ProxyServer("n1", 1, 4), ProxyServer("n2", 2, 4), ProxyServer("n3", 7, 6)]
NODES = tuple(Node(f"n{number}", 1, 1, 10_000) for number in range(4))


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def haproxy(folder: Path, ports: list[int], more: str) -> Iterator[int]:
    """Run a real HAProxy in front of SERVERS, which listen on `ports`. Yields its port."""
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    front, config = free_port(), folder / "haproxy.cfg"
    lines = [
        "defaults\n  mode http\n  timeout client 5s\n  timeout server 5s\n  timeout connect 5s",
        f"listen front\n  bind 127.0.0.1:{front}\n  balance hdr(hplm-tenant)\n  hash-type consistent\n{more}",
        *(
            f"  server {server.name} 127.0.0.1:{port} id {server.number} weight {server.weight}"
            for server, port in zip(SERVERS, ports, strict=True)
        ),
    ]
    config.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([program, "-db", "-f", str(config)])
    try:
        until(lambda: is_open(front))
        yield front
    finally:
        process.terminate()
        process.wait()


@contextmanager
def named_servers(hold: threading.Event | None) -> Iterator[tuple[list[int], Queue[str]]]:
    """Run a server for each of SERVERS. Yields their ports, and a queue of the server that each request came to.

    A server answers with its name, after `hold` is set if it is given.
    """
    came: Queue[str] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = names[self.server.server_address[1]]
            came.put(name)
            if hold is not None:
                hold.wait()
            self.send_response(200)
            self.send_header("content-length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *args: object) -> None:
            """Write nothing."""

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in SERVERS]
    ports = [int(server.server_address[1]) for server in servers]
    names = {port: server.name for port, server in zip(ports, SERVERS, strict=True)}
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield ports, came
    finally:
        if hold is not None:
            hold.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def sent(port: int, tenant: str) -> socket.socket:
    """Send a request of a tenant, and do not wait for the answer."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"GET / HTTP/1.1\r\nhost: proxy\r\nhplm-tenant: {tenant}\r\n\r\n".encode())
    return connection


def test_the_owner_of_a_tenant_is_the_server_that_a_real_haproxy_picks(tmp_path: Path) -> None:
    ring = ProxyHash(SERVERS)
    names = [f"tenant-{number}" for number in range(100)] + ["a b", "x", "a-very-long-name" * 4]
    with named_servers(None) as (ports, came), haproxy(tmp_path, ports, "") as port:
        picked = []
        for name in names:
            with sent(port, name):
                picked.append(came.get(timeout=10))
    assert picked == [ring.servers[owner].name for owner in ring.owners(names)]


def test_a_node_with_too_many_open_requests_passes_on_those_that_a_real_haproxy_passes_on(tmp_path: Path) -> None:
    ring = ProxyHash(SERVERS)
    names = [("hot", "hot", "b", "hot", "c")[number % 5] for number in range(40)]
    with (
        named_servers(threading.Event()) as (ports, came),
        haproxy(tmp_path, ports, "  hash-balance-factor 125\n") as port,
        ExitStack() as opened,
    ):
        picked = []
        for name in names:
            opened.enter_context(sent(port, name))
            picked.append(came.get(timeout=10))
    rule = OpenRequests(ring.servers, 125)
    expected = [ring.servers[rule.start(ring.order(name), 0.0, 1.0)].name for name in names]
    assert picked == expected
    assert picked != [ring.servers[owner].name for owner in ring.owners(names)]


def test_few_tenants_change_their_node_when_a_node_is_lost() -> None:
    names = [f"t{number}" for number in range(1000)]
    four = ProxyHash([ProxyServer(f"n{number}", number + 1, 16) for number in range(4)])
    three = ProxyHash([ProxyServer(f"n{number}", number + 1, 16) for number in range(3)])
    before, after = four.owners(names), three.owners(names)
    assert (before[before < 3] == after[before < 3]).all()


def test_the_order_of_a_tenant_begins_with_its_owner_and_has_every_server() -> None:
    ring = ProxyHash(SERVERS)
    for name in ("a", "b", "c"):
        order = ring.order(name)
        assert (order[0], sorted(order)) == (ring.owners([name])[0], [0, 1, 2])


def test_a_busy_tenant_overflows_to_the_next_node_and_an_idle_tenant_stays() -> None:
    ring = ProxyHash([ProxyServer(f"n{number}", number + 1, 16) for number in range(3)])
    shares = load_shares(ring, {"hot": 900.0, "cold": 1.0}, load_factor=125, request_s=0.1, requests=5000)
    owner, following = ring.order("hot")[:2]
    assert 0.3 < shares["hot"][owner] < 0.5
    assert shares["hot"][following] > 0.3
    assert load_shares(ring, {"hot": 900.0}, load_factor=0, request_s=0.1, requests=500)["hot"][owner] == 1.0


def test_no_node_gets_more_than_the_load_factor_allows() -> None:
    ring = ProxyHash([ProxyServer(f"n{number}", number + 1, 16) for number in range(4)])
    rates = {f"t{number}": 1000.0 / (number + 1) for number in range(50)}
    shares = load_shares(ring, rates, load_factor=125, request_s=0.1)
    load = sum(rates[name] * shares[name] for name in rates)
    # A small excess: a node is full for an instant, not for the mean.
    assert np.max(load) <= 1.3 * np.mean(load)


@settings(max_examples=30, deadline=None)
@given(
    rates=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    sizes=st.integers(1, 5_000),
    caches=st.lists(st.integers(0, 20_000), min_size=4, max_size=4),
)
def test_every_tenant_has_a_node_of_its_base_and_no_cache_overflows(
    rates: list[float], sizes: int, caches: list[int]
) -> None:
    nodes = [Node(node.name, 1, 1, cache) for node, cache in zip(NODES, caches, strict=True)]
    tenants = [TenantLoad(f"t{number}", f"b{number % 2}", rate, sizes) for number, rate in enumerate(rates)]
    bases = {"b0": ["n0", "n1", "n2"], "b1": ["n2", "n3"]}
    placed = place_tenants(tenants, nodes, bases)
    for tenant in tenants:
        assert placed.nodes_of[tenant.name]
        assert set(placed.nodes_of[tenant.name]) <= set(bases[tenant.base])
    for node in nodes:
        assert len(placed.cached[node.name]) * sizes <= node.host_cache_bytes
        assert all(node.name in placed.nodes_of[name] for name in placed.cached[node.name])
    assert sum(placed.node_rates.values()) == pytest.approx(sum(rates))
    assert 0 <= placed.uncached_share <= 1


def test_the_hot_tenant_is_on_several_nodes_and_the_cold_are_on_one() -> None:
    tenants = [TenantLoad("hot", "b", 500, 10), *(TenantLoad(f"t{number}", "b", 1, 10) for number in range(50))]
    placed = place_tenants(tenants, NODES, {"b": [node.name for node in NODES]}, request_s=0.1)
    assert list(placed.rule.hot) == ["hot"]
    assert len(placed.rule.hot["hot"]) > 1
    assert all(len(placed.nodes_of[f"t{number}"]) == 1 for number in range(50))
    assert placed.uncached_share < 0.05


def test_a_node_with_a_smaller_cache_gets_fewer_tenants() -> None:
    nodes = [Node("large", 1, 1, 8_000), Node("small", 1, 1, 2_000)]
    tenants = [TenantLoad(f"t{number}", "b", 1, 10) for number in range(900)]
    placed = place_tenants(tenants, nodes, {"b": ["large", "small"]})
    assert placed.rule.weights == {"large": 64, "small": 16}
    assert len(placed.cached["large"]) > 3 * len(placed.cached["small"])
    assert placed.uncached_share < 0.05


def test_a_tenant_whose_base_is_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node serves it"):
        place_tenants([TenantLoad("t", "b", 1, 1)], NODES, {})


@pytest.mark.parametrize("weight", [0, 257])
def test_a_weight_that_haproxy_refuses_is_refused(weight: int) -> None:
    with pytest.raises(ConfigError, match="weight of 1 to 256"):
        ProxyServer("n", 1, weight)
