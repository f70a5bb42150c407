"""What stands before a server may answer for it, in words that are not Triton's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hplm_client import AsyncClient, Client

from hplm.errors import ForbiddenError, HplmError, UnreachableError

PAGE = b"<html><body>no</body></html>"


@pytest.fixture
def proxy() -> Iterator[ThreadingHTTPServer]:
    """Answers everything with the status that its `answer` has."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(self.server.answer)  # type: ignore[attr-defined]
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, ForbiddenError),
        (403, ForbiddenError),
        (502, UnreachableError),
        (503, UnreachableError),
        (504, UnreachableError),
    ],
)
def test_a_proxys_answer_is_a_typed_error(proxy: ThreadingHTTPServer, status: int, error: type[HplmError]) -> None:
    url = f"http://127.0.0.1:{proxy.server_port}"
    proxy.answer = status  # type: ignore[attr-defined]

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.predict("films", "good")

    with Client(url) as client, pytest.raises(error, match=f"{url}"):
        client.predict("films", "good")
    with pytest.raises(error, match=f"{url}"):
        asyncio.run(ask())
