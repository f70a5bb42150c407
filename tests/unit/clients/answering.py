"""Something that speaks Triton's HTTP and answers every text alike, as late as a test wants."""

from __future__ import annotations

import json
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
    """`late(text)` waits as long as that text's answer is to take, or raises OSError where the connection is to be dropped, and
    ValueError where that text is to be refused in such words.

    `texts` has what has come, and `is_ready` what is said of the model.
    """

    daemon_threads = True
    request_queue_size = 1000

    def __init__(self, late: Callable[[str], object]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.late = late
        self.texts: list[str] = []
        self.is_ready = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def do_GET(self) -> None:
        self._answer(b"", 0, 200 if self.server.is_ready or not self.path.endswith("/ready") else 400)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        # Behind the JSON the text comes first, as its length and its bytes.
        text_at = int(self.headers["Inference-Header-Content-Length"])
        (text_bytes,) = struct.unpack_from("<I", sent, text_at)
        text = sent[text_at + 4 :][:text_bytes].decode()
        self.server.texts.append(text)
        outputs = [
            {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
            for name, kind, shape, raw in OUTPUTS
        ]
        head = json.dumps({"model_name": "hbert", "model_version": "1", "outputs": outputs}).encode()
        try:
            self.server.late(text)
            self._answer(head + b"".join(raw for *_, raw in OUTPUTS), len(head))
        except ValueError as error:
            self._answer(json.dumps({"error": str(error)}).encode(), 0, 400)
        except OSError:  # who asked may have gone
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
def answering(late: Callable[[str], object] = lambda text: None) -> Iterator[Answering]:
    """It, in a thread of its own."""
    with Answering(late) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
