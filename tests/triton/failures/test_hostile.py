"""HTTP bodies that end a Triton whose threads have stacks of the usual size: it goes on, and the next request is answered."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hplm_client import Client

from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer

pytestmark = pytest.mark.triton

PATH = "/v2/models/hbert/infer"


@pytest.fixture(scope="module")
def server(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    with TritonServer(tiny_models, free_ports(), log=log) as started:
        started.wait_ready()
        yield started


def post(server: TritonServer, body: bytes, headers: dict[str, str]) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=200)
    connection.request("POST", PATH, body=body, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def still_answers(server: TritonServer) -> bool:
    with Client(server.ports.http_url) as client:
        return client.predict("alpha", "zebra xylophone").label in ("yes", "no")


@pytest.mark.parametrize("levels", [200_000, 1_000_000])
def test_json_nested_a_million_deep_is_refused(server: TritonServer, levels: int) -> None:
    body = gzip.compress(b'{"inputs":' + b"[" * levels)
    assert post(server, body, {"Content-Encoding": "gzip"}) >= 400
    assert still_answers(server)


def test_a_large_body_that_is_said_to_be_a_form_is_read_as_json(server: TritonServer) -> None:
    # As `curl -d` says it is, unless it is told otherwise.
    inputs = [
        {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["zebra " * 1_000_000]},
        {"name": "TENANT", "shape": [1, 1], "datatype": "BYTES", "data": ["alpha"]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    assert post(server, body, {"Content-Type": "application/x-www-form-urlencoded"}) >= 400
    assert still_answers(server)


def test_a_body_in_a_million_pieces_is_refused(server: TritonServer) -> None:
    pieces = 1_000_000
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=200) as connection:
        connection.sendall(head.encode())
        for _ in range(pieces // 1000):
            connection.sendall(b"1\r\n \r\n" * 1000)
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 500")
    assert still_answers(server)
