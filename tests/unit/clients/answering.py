"""A server that speaks Triton's HTTP and gives every text the same answer, as late as a test wants."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

LABEL = b"ok"
OUTPUTS = [
    ("LABEL", "BYTES", [1, 1], struct.pack("<I", len(LABEL)) + LABEL),
    ("SCORE", "FP32", [1, 1], np.float32(0.5).tobytes()),
    ("SPAN", "INT32", [1, 1, 2], np.array([0, 1], dtype=np.int32).tobytes()),
    ("TRUNCATED", "BOOL", [1, 1], b"\0"),
]


class Answering(ThreadingHTTPServer):
    """The server. `before_answer(text)` runs before each answer.

    The callback waits as long as the answer should take. It raises OSError to drop the connection, or ValueError to refuse the
    text with that message. `texts` are the texts received, `tenant_headers` the header `hplm-tenant` of each request.
    `is_ready` is the answer whether the model is ready. `students` is the output STUDENTS; if it is None, the model lacks the
    output and refuses requests for it.
    """

    daemon_threads = True
    request_queue_size = 1000

    def __init__(self, before_answer: Callable[[str], object]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.before_answer = before_answer
        self.texts: list[str] = []
        self.tenant_headers: list[str | None] = []
        self.is_ready = True
        self.students: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def do_GET(self) -> None:
        if re.fullmatch("/v2/models/[a-z]+", self.path):
            metadata = json.dumps({"name": "hbert", "outputs": [{"name": name} for name, *_ in self._outputs()]})
            self._answer(metadata.encode(), 0)
            return
        self._answer(b"", 0, 200 if self.server.is_ready or not self.path.endswith("/ready") else 400)

    def _outputs(self) -> list[tuple[str, str, list[int], bytes]]:
        if self.server.students is None:
            return OUTPUTS
        return [*OUTPUTS, ("STUDENTS", "INT32", [1, 1], np.int32(self.server.students).tobytes())]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # Behind the JSON stand the length and the bytes of the text.
        text_at = int(self.headers["Inference-Header-Content-Length"])
        (text_bytes,) = struct.unpack_from("<I", body, text_at)
        text = body[text_at + 4 :][:text_bytes].decode()
        self.server.texts.append(text)
        self.server.tenant_headers.append(self.headers["hplm-tenant"])
        if self.server.students is None and b"STUDENTS" in body[:text_at]:
            message = "unexpected inference output 'STUDENTS' for model 'hbert'"
            self._answer(json.dumps({"error": message}).encode(), 0, 400)
            return
        given = self._outputs()
        outputs = [
            {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
            for name, kind, shape, raw in given
        ]
        head = json.dumps({"model_name": "hbert", "model_version": "1", "outputs": outputs}).encode()
        try:
            self.server.before_answer(text)
            self._answer(head + b"".join(raw for *_, raw in given), len(head))
        except ValueError as error:
            self._answer(json.dumps({"error": str(error)}).encode(), 0, 400)
        except OSError:  # the client may have closed the connection
            self.close_connection = True

    def _answer(self, body: bytes, head_bytes: int, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Inference-Header-Content-Length", str(head_bytes))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def answering(before_answer: Callable[[str], object] = lambda text: None) -> Iterator[Answering]:
    """Run the server in a thread."""
    with Answering(before_answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
