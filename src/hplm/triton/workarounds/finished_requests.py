"""Triton crashes if a stub asks whether a finished request was cancelled.

Behaviour: Triton forgets a request with its last response. A later question about it ends the whole server
(triton-inference-server/server#8192).
Switched off: harmless; the guard only remembers whether the last response was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils


class RequestSender:
    """The response sender of one request, for several threads. It never asks Triton about a finished request."""

    def __init__(self, sender: Any, takes_last: Callable[[Any], bool]) -> None:
        """`takes_last` is called with the last response; if it returns True, the response leaves with its call."""
        self._sender = sender
        self._takes_last = takes_last
        self._lock = threading.Lock()
        self._is_finished = False

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request. False once the request is finished."""
        with self._lock:
            return not self._is_finished and bool(self._sender.is_cancelled())

    def send(self, response: Any, *, is_last: bool = True) -> None:
        """Send a response. Do nothing after a last response, also if that one could not be sent: Triton counts it."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = is_last
            if not (is_last and self._takes_last(response)):
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
