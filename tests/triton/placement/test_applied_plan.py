"""An applied plan of two nodes behind a real HAProxy: a node is killed under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hplm_builder.placement.apply_plan import Source, apply_plan
from hplm_builder.placement.observed_load import served_bases_on, texts_of_bases
from hplm_builder.placement.plan_file import write_plan
from hplm_builder.placement.proxy_config import TRITON_READY, ProxiedNode, ProxyAddress, proxy_files
from hplm_builder.placement.proxy_process import find_haproxy, running_proxy
from hplm_client import Client
from hplm_loadtest.scenarios.server_metrics import metric_value, metrics_page

from hplm.placement.plan import Plan
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.triton.placement import making
from tests.waiting import until

HAPROXY = find_haproxy()
pytestmark = [pytest.mark.triton, pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")]
TENANTS = tuple(tiny.TASKS)
# Seconds of load before and after the kill.
LOAD_S = 2.0
# Threads for each protocol and model.
LOADERS = 3
ANSWERED = 'nv_inference_request_success{model="hbert"}'


@dataclass(frozen=True)
class Placed:
    """Two running nodes behind HAProxy."""

    servers: dict[str, TritonServer]
    http_url: str
    grpc_url: str


@pytest.fixture(scope="module")
def placed(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placed]:
    assert HAPROXY is not None
    folder = tmp_path_factory.mktemp("placed")
    plan = making.make_plan()
    own = free_ports()
    listen = ProxyAddress("127.0.0.1", own.http, own.grpc)
    source = Source.read(tiny_models)
    apply_plan(plan, source, folder / "applied", listen)
    with ExitStack() as stack:
        servers = {
            node: stack.enter_context(
                TritonServer(folder / "applied" / node / "models", free_ports(), log=folder / f"{node}.log", tied=True)
            )
            for node in making.NODES
        }
        nodes = [
            ProxiedNode(name, number, "127.0.0.1", ports.http, ports.grpc, ports.http, ["hbert"])
            for number, (name, ports) in enumerate(((name, server.ports) for name, server in servers.items()), 1)
        ]
        files = proxy_files(nodes, source.model_of_tenant(), plan.tenants, listen, TRITON_READY)
        for server in servers.values():
            server.wait_ready()
        stack.enter_context(running_proxy(HAPROXY, folder / "proxy", files, listen))
        yield Placed(servers, f"http://127.0.0.1:{own.http}", f"grpc://127.0.0.1:{own.grpc}")


class Load:
    """Threads that ask the tenants through the proxy, over both protocols, until the end."""

    def __init__(self, placed: Placed) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self._ended = threading.Event()
        urls = (placed.http_url, placed.grpc_url)
        self._threads = [
            threading.Thread(target=self._ask, args=(url, model, number))
            for url in urls
            for model in ("hbert", "hplm")
            for number in range(LOADERS)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, model: str, number: int) -> None:
        with Client(url, model=model) as client:
            while not self._ended.is_set():
                number += 1
                try:
                    client.predict(TENANTS[number % len(TENANTS)], f"the red cat {number}")
                except Exception as error:
                    self.errors.append(error)
                else:
                    self.answers[url] += 1


def test_a_node_without_a_request_so_far_names_its_base_on_its_metrics_page(placed: Placed) -> None:
    until(lambda: "hplm_" in metrics_page(placed.servers["west"]), 20)
    assert served_bases_on(metrics_page(placed.servers["west"]), ["hbert", "mpnet"]) == {"hbert"}


def test_no_request_is_lost_when_a_node_is_killed_under_load(placed: Placed) -> None:
    with Load(placed) as load:
        time.sleep(LOAD_S)
        before = dict(load.answers)
        by_node = {node: metric_value(placed.servers[node], ANSWERED) for node in making.NODES}
        os.killpg(placed.servers["east"].process.pid, signal.SIGKILL)
        time.sleep(LOAD_S)
    assert load.errors == []
    assert all(by_node.values()), by_node
    assert all(load.answers[url] > before[url] > 0 for url in (placed.http_url, placed.grpc_url))


def test_a_node_counts_the_texts_of_its_base_for_watch(placed: Placed) -> None:
    with Client(placed.servers["west"].ports.grpc_url, model="hbert") as client:
        client.predict("alpha", "the red cat")
    # The page has counts by tenant every five seconds.
    until(lambda: texts_of_bases(metrics_page(placed.servers["west"]), ["hbert"]).total() > 0, 20)


def test_a_check_measures_the_plan_and_notes_the_error_in_its_file(tiny_models: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(making.make_plan([("east", [0], {"hbert": [2]})], rate=20.0), path)
    command = [sys.executable, "-m", "hplm_cli", "place", "check", str(path), "--models", str(tiny_models)]
    done = subprocess.run([*command, "--seconds", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check = Plan.load(path).check
    assert check is not None
    assert check.requests > 20
    assert "behind HAProxy" in check.where
    assert f"error {check.error:.3f}" in done.stdout
    # Deadlines of 0.5 s are far longer than a tiny base takes.
    assert check.measured > 0.5
