"""The way of manage requests to the server: a JSON request, a JSON answer, and over gRPC a stream of answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from hplm.core import wire
from hplm.errors import UnreachableError
from hplm_client.infer_tensors import bytes_tensor
from hplm_client.transport.access_keys import AccessKeys
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import ClientOwnership
from hplm_client.transport.connection import connect
from hplm_client.transport.error_translation import from_triton, typed_answer, typed_errors
from hplm_client.transport.time_limits import time_limit

# The server closes each stream after 2 s. gRPC reports a stream that is still open after this many seconds as lost.
STREAM_S = 10.0
# gRPC does not report a stream that ended without a last answer, as when a server is shut down. So the client stops waiting
# this many seconds after STREAM_S.
STREAM_GRACE_S = 1.0


class Transport(Protocol):
    """A carrier of manage requests. Its methods raise the errors of `hplm.errors`."""

    streams: bool

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        ...

    def events(self, request: bytes) -> Iterator[bytes]:
        """Yield answers as they arrive, without end. Only for a transport that `streams`."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class TritonTransport:
    """A transport over Triton's infer calls, and over gRPC its streams. Raises ConfigError if address or key are malformed."""

    def __init__(
        self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None, key: str | None = None
    ) -> None:
        address = split_url(url)
        self.streams = address.protocol == "grpc"
        self._url, self._timeout_s = url, timeout_s
        # Over HTTP `time_limit` applies the timeout.
        self._timeout_option = {"client_timeout": timeout_s} if self.streams else {}
        self._ownership = ClientOwnership(is_bound_to_thread=not self.streams)
        self._keys = AccessKeys(key, headers)
        self._connect = partial(connect, address, self._keys.headers, timeout_s=timeout_s)
        self._module, self._triton = self._connect()

    def ask(self, request: bytes) -> bytes:
        self._ownership.check_caller()
        limit: AbstractContextManager[Any] = nullcontext() if self.streams else time_limit(self._timeout_s)
        with typed_answer(self._url), self._ownership.closed_as_unreachable(), limit:
            return _response(self._triton.infer(wire.MANAGER, self._inputs(request), **self._timeout_option))

    def _inputs(self, request: bytes) -> list[Any]:
        key = self._keys.of_operator()
        further = [] if key is None else [bytes_tensor(self._module, wire.KEY, [key])]
        return [bytes_tensor(self._module, wire.REQUEST, [request]), *further]

    def events(self, request: bytes) -> Iterator[bytes]:
        self._ownership.check_caller()
        # A tritonclient client has one stream, and a program may read several streams at the same time.
        _, triton = self._connect()
        try:
            while True:
                # The server closes a watch after 2 s. Each round needs a new stream, because even an idle stream would keep the
                # server from shutting down.
                yield from self._stream(triton, request)
        finally:
            triton.close()

    def _stream(self, triton: Any, request: bytes) -> Iterator[bytes]:
        """Yield the answers to one request, up to the server's last."""
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        is_last = False
        try:
            with typed_errors(self._url):
                triton.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=STREAM_S)
                triton.async_stream_infer(wire.MANAGER_WATCH, self._inputs(request))
            while not is_last:
                try:
                    result, error = answers.get(timeout=STREAM_S + STREAM_GRACE_S)
                except Empty:
                    raise UnreachableError(f"{self._url}: the stream of the job's changes has broken off") from None
                is_last = error is not None or result.get_response().parameters["triton_final_response"].bool_param
                if error is not None:
                    raise from_triton(error, self._url)
                yield _response(result)
        finally:
            # Cancelling tells the server that the client has gone. A stream that has ended must not be cancelled: Triton 24.10
            # may then never unload the model.
            stream = triton._stream
            triton.stop_stream(cancel_requests=not is_last)
            if stream is not None:
                # tritonclient leaves a gRPC thread that waits for another request of a cancelled stream. None ends that thread.
                stream._request_queue.put(None)

    def close(self) -> None:
        if self._ownership.is_own_process:
            self._ownership.is_closed = True
            self._triton.close()
            self._ownership.release_hubs()


def _response(result: Any) -> bytes:
    return bytes(result.as_numpy(wire.RESPONSE)[0])
