"""A server that speaks gRPC and answers nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]


class Frozen(NamedTuple):
    url: str


@contextmanager
def frozen_grpc() -> Iterator[Frozen]:
    """Run the server in threads."""
    ended = threading.Event()

    class Silent(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: ended.wait())

    server = grpc.server(ThreadPoolExecutor(8), handlers=[Silent()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Frozen(f"grpc://127.0.0.1:{port}")
    ended.set()
    server.stop(None).wait()
