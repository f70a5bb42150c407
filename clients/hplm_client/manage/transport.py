"""How manage requests reach the server: JSON bytes there, JSON bytes back, and over gRPC a stream of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from hplm.core import wire
from hplm.errors import UnreachableError
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import Owner
from hplm_client.transport.connection import bounded, connect
from hplm_client.transport.faults import from_triton, typed_answer, typed_errors

# The server closes each stream after 2 s; one that is still open after this long has been lost, and gRPC says so. Of one that
# ended without a last answer, as where a server is shut down, it says nothing: what has not come a second later never does.
STREAM_S = 10.0
GRACE_S = 1.0


class Transport(Protocol):
    """Carries manage requests. Raises the errors of `hplm.errors`."""

    streams: bool

    def ask(self, request: bytes) -> bytes:
        """The one answer."""
        ...

    def events(self, request: bytes) -> Iterator[bytes]:
        """Answers as they come, without end; only where it `streams`."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class TritonTransport:
    """Triton's infer calls, and over gRPC its streams. Raises ConfigError for no address as `split_url` takes it."""

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        address = split_url(url)
        self.streams = address.protocol == "grpc"
        self._url, self._timeout_s = url, timeout_s
        # Over HTTP the call is bounded from outside.
        self._bounded = {"client_timeout": timeout_s} if self.streams else {}
        self._owner = Owner(is_bound_to_thread=not self.streams)
        self._opened = partial(connect, address, headers, timeout_s=timeout_s)
        self._module, self._triton = self._opened()

    def ask(self, request: bytes) -> bytes:
        self._owner.check()
        inputs = _inputs(self._module, request)
        in_time: AbstractContextManager[Any] = nullcontext() if self.streams else bounded(self._timeout_s)
        with typed_answer(self._url), self._owner.calling(), in_time:
            return _answer_of(self._triton.infer(wire.MANAGER, inputs, **self._bounded))

    def events(self, request: bytes) -> Iterator[bytes]:
        self._owner.check()
        # tritonclient has one stream a client; streams of one program may run side by side.
        _, triton = self._opened()
        try:
            while True:
                # The server closes a watch after some seconds. A new stream each time: an old one, though it is idle, would
                # keep the server from shutting down.
                yield from self._stream(triton, request)
        finally:
            triton.close()

    def _stream(self, triton: Any, request: bytes) -> Iterator[bytes]:
        """The answers to one request, until the server has given its last."""
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        is_last = False
        try:
            with typed_errors(self._url):
                triton.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=STREAM_S)
                triton.async_stream_infer(wire.MANAGER_WATCH, _inputs(self._module, request))
            while not is_last:
                try:
                    result, error = answers.get(timeout=STREAM_S + GRACE_S)
                except Empty:
                    raise UnreachableError(f"{self._url}: the stream of a job's changes has broken off") from None
                is_last = error is not None or result.get_response().parameters["triton_final_response"].bool_param
                if error is not None:
                    raise from_triton(error, self._url)
                yield _answer_of(result)
        finally:
            # Where nobody reads on, the server is told that this client has gone. A stream that has ended is not cancelled:
            # Triton 24.10 may then keep the model for good.
            stream = triton._stream
            triton.stop_stream(cancel_requests=not is_last)
            if stream is not None:
                # tritonclient leaves a thread of gRPC waiting for the next request of a stream that it cancels.
                stream._request_queue.put(None)

    def close(self) -> None:
        if self._owner.is_here:
            self._owner.is_closed = True
            self._triton.close()
            self._owner.leave()


def _inputs(module: Any, request: bytes) -> list[Any]:
    tensor = module.InferInput(wire.REQUEST, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([request], dtype=np.object_))
    return [tensor]


def _answer_of(result: Any) -> bytes:
    return bytes(result.as_numpy(wire.RESPONSE)[0])
