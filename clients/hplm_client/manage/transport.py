"""The way of manage requests to the server: a JSON request, a JSON answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from hplm.core import wire
from hplm_client.infer_tensors import bytes_tensor
from hplm_client.transport.access_keys import AccessKeys
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import ClientOwnership
from hplm_client.transport.connection import connect
from hplm_client.transport.error_translation import typed_answer
from hplm_client.transport.time_limits import time_limit


class Transport(Protocol):
    """A carrier of manage requests. Its methods raise the errors of `hplm.errors`."""

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class TritonTransport:
    """A transport over Triton's infer calls. Raises ConfigError if address or key are malformed."""

    def __init__(
        self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None, key: str | None = None
    ) -> None:
        address = split_url(url)
        self._is_grpc = address.protocol == "grpc"
        self._url, self._timeout_s = url, timeout_s
        # Over HTTP `time_limit` applies the timeout.
        self._timeout_option = {"client_timeout": timeout_s} if self._is_grpc else {}
        self._ownership = ClientOwnership(is_bound_to_thread=not self._is_grpc)
        self._keys = AccessKeys(key, headers)
        self._connect = partial(connect, address, self._keys.headers, timeout_s=timeout_s)
        self._module, self._triton = self._connect()

    def ask(self, request: bytes) -> bytes:
        self._ownership.check_caller()
        limit: AbstractContextManager[Any] = nullcontext() if self._is_grpc else time_limit(self._timeout_s)
        with typed_answer(self._url), self._ownership.closed_as_unreachable(), limit:
            return _response(self._triton.infer(wire.MANAGER, self._inputs(request), **self._timeout_option))

    def _inputs(self, request: bytes) -> list[Any]:
        key = self._keys.of_operator()
        further = [] if key is None else [bytes_tensor(self._module, wire.KEY, [key])]
        return [bytes_tensor(self._module, wire.REQUEST, [request]), *further]

    def close(self) -> None:
        if self._ownership.is_own_process:
            self._ownership.is_closed = True
            self._triton.close()
            self._ownership.release_hubs()


def _response(result: Any) -> bytes:
    return bytes(result.as_numpy(wire.RESPONSE)[0])
