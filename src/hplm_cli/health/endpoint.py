"""The HTTP endpoint of `hplm serve`: GET /ready and GET /live, for orchestrators and load balancers."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hplm.errors import StartError
from hplm.triton.launcher.ports import family_of
from hplm_cli.health.readiness import Verdict

# Connections at once. Further connections are closed without an answer, so that nobody uses up the threads.
MOST_CONNECTIONS = 32
# Seconds that a client may take to send its request.
REQUEST_S = 5.0


class HealthEndpoint:
    """Answers `/ready` with the present verdict, and `/live` as long as the process runs, in threads of its own.

    The status is 200, or 503 if the server is not ready.
    """

    def __init__(self, host: str, port: int, verdict: Callable[[], Verdict]) -> None:
        """Listen at once. Raises StartError if the port cannot be had."""
        try:
            self._server = _Server((host, port), verdict)
        except OSError as error:
            raise StartError(
                f"port {port} of {host} is not free ({error.strerror}); choose another with --health-port"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="hplm-health", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], verdict: Callable[[], Verdict]) -> None:
        self.verdict = verdict
        self.address_family = family_of(address[0])
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer looks up the host's name, which takes long if the name server does not answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that has gone, or about a thread that could not be started."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/live":
            self._send(200, {"live": True})
        elif path == "/ready":
            verdict = self.server.verdict()
            self._send(200 if verdict.ready else 503, verdict.as_dict())
        else:
            self._send(404, {"error": "there are /ready and /live"})

    do_HEAD = do_GET

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "hplm"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a probe comes every few seconds."""
