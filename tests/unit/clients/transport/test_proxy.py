"""Answers of a proxy in front of a server become typed errors."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hplm_client import AsyncClient, Client, ManageClient

from hplm.errors import BadInputError, ForbiddenError, HplmError, InternalError, UnreachableError

PAGE = b"<html><body>no</body></html>"


@pytest.fixture
def proxy() -> Iterator[ThreadingHTTPServer]:
    """A proxy that answers with the status `answer`, `headers` and `page`; `asked` lists the paths that were asked for."""

    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            asked.append(self.path)
            self.send_response(self.server.answer)  # type: ignore[attr-defined]
            self.send_header("Location", "/elsewhere")
            for name, value in self.server.headers.items():  # type: ignore[attr-defined]
                self.send_header(name, value)
            page = self.server.page  # type: ignore[attr-defined]
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        # By default five of sixteen simultaneous connections are accepted, and the others try again a second later.
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Proxy) as server:
        # The server checks every 10 ms whether it should end; the default is 500 ms.
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.asked, server.answer, server.headers, server.page = asked, 200, {}, PAGE  # type: ignore[attr-defined]
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, InternalError),
        (302, ForbiddenError),
        (308, ForbiddenError),
        (400, BadInputError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, UnreachableError),
        (413, BadInputError),
        (429, UnreachableError),
        (500, InternalError),
        (502, UnreachableError),
        (503, UnreachableError),
        (504, UnreachableError),
    ],
)
def test_a_proxys_answer_is_a_typed_error(proxy: ThreadingHTTPServer, status: int, error: type[HplmError]) -> None:
    url = f"http://127.0.0.1:{proxy.server_port}"
    proxy.answer = status  # type: ignore[attr-defined]

    async def ask() -> None:
        async with AsyncClient(url, model="hbert") as client:
            await client.predict("films", "good")

    with Client(url, model="hbert") as client:
        for refused in (lambda: client.predict("films", "good"), lambda: asyncio.run(ask())):
            with pytest.raises(error, match=re.escape(url)) as raised:
                refused()
            assert "html" not in str(raised.value)
    # A redirect is not followed, because it would take headers and text elsewhere.
    # Each client first asks for the model's outputs.
    assert proxy.asked == ["/v2/models/hbert", "/v2/models/hbert/infer"] * 2  # type: ignore[attr-defined]


def outputs(**fields: object) -> bytes:
    """Return Triton's JSON with a LABEL of these fields and no other output."""
    return json.dumps({"outputs": [{"name": "LABEL", "datatype": "BYTES", **fields}]}).encode()


@pytest.mark.parametrize(
    ("page", "headers"),
    [
        (b"{}", {}),
        (b"[]", {}),
        (b"null", {}),
        (b'{"outputs": 1}', {}),
        (b'{"outputs": [{}]}', {}),
        (outputs(shape=[1, 1], data=["a"]), {}),
        (outputs(shape=[1, 7], data=["a"]), {}),
        (outputs(shape=[1, 1], parameters={"binary_data_size": 2}) + b"ab", {"Inference-Header-Content-Length": "109"}),
        (b'{"outputs": []}', {"Inference-Header-Content-Length": "9999"}),
        (b'{"outputs": []}', {"Inference-Header-Content-Length": "x"}),
    ],
    ids=["empty", "list", "null", "number", "nameless", "one", "shape", "cut", "long-head", "no-number"],
)
def test_json_that_is_not_tritons_is_a_typed_error(
    proxy: ThreadingHTTPServer, page: bytes, headers: dict[str, str]
) -> None:
    url = f"http://127.0.0.1:{proxy.server_port}"
    proxy.page, proxy.headers = page, headers  # type: ignore[attr-defined]
    words = re.escape(f"the answer of {url} is not one of Triton's")

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.predict("films", "good")

    with Client(url) as client, ManageClient(url) as manage:
        for refused in (
            lambda: client.predict("films", "good"),
            lambda: list(client.predict_many([("films", "good")])),
            lambda: asyncio.run(ask()),
            lambda: manage.show_tenant("films"),
        ):
            with pytest.raises(InternalError, match=words):
                refused()
        many = list(client.predict_many([("films", "good")] * 40, on_error="yield"))
        assert [type(answer) for answer in many] == [InternalError] * 40


def test_an_answer_in_json_alone_is_read(proxy: ThreadingHTTPServer) -> None:
    outputs = [
        {"name": "LABEL", "datatype": "BYTES", "shape": [1, 1], "data": ["süß"]},
        {"name": "SCORE", "datatype": "FP32", "shape": [1, 1], "data": [0.5]},
        {"name": "SPAN", "datatype": "INT32", "shape": [1, 1, 2], "data": [0, 4]},
        {"name": "TRUNCATED", "datatype": "BOOL", "shape": [1, 1], "data": [False]},
    ]
    proxy.page = json.dumps({"model_name": "hbert", "outputs": outputs}).encode()  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{proxy.server_port}"
    with Client(url) as client:
        answer = client.predict("films", "good")

    async def ask() -> object:
        async with AsyncClient(url) as client:
            return await client.predict("films", "good")

    assert (answer.label, answer.score, answer.spans[0].end, answer.truncated) == ("süß", 0.5, 4, False)
    assert asyncio.run(ask()) == answer


def test_no_proxy_of_the_environment_is_asked_for_a_server_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for listener in (proxy, server):
            listener.settimeout(60)
        url = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(lambda: server.accept()[0].close())
            with Client(url, timeout_s=30) as client, pytest.raises(UnreachableError):
                client.predict("alpha", "x")
            accepted.result()
        proxy.settimeout(0.1)
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_an_http_1_answer_over_grpc_is_unreachable(proxy: ThreadingHTTPServer) -> None:
    with Client(f"grpc://127.0.0.1:{proxy.server_address[1]}") as client, pytest.raises(UnreachableError):
        client.predict("alpha", "x")
