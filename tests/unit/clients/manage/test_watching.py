"""A watch over gRPC continues or ends whatever happens to its stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from hplm_client import ManageClient
from hplm_client.manage.transport import TritonTransport
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from hplm.core import wire
from hplm.errors import UnreachableError
from tests.unit.clients.transport.frozen import frozen_grpc
from tests.waiting import until

EVENT = {"state": "done", "step": "train", "progress": 1.0, "eta_s": None, "result": {}, "error": None}
JOB = {"id": "j1", "kind": "tenant.create", "subject": "tenant:acme", **EVENT}


@pytest.fixture
def ending() -> Iterator[str]:
    """The address of a server whose streams end without an answer, as during a shutdown. It answers other requests."""

    class Ending(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
            yield from ()

        def ModelInfer(self, request: Any, context: Any) -> Any:
            answer = service_pb2.ModelInferResponse()
            answer.outputs.add(name=wire.RESPONSE, datatype="BYTES", shape=[1])
            reply = json.dumps({"ok": True, "job": JOB}).encode()
            answer.raw_output_contents.append(serialize_byte_tensor(np.array([reply], dtype=np.object_)).item())
            return answer

    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Ending(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client waits for the sum. The first alone is the time in which gRPC must connect.
    monkeypatch.setattr("hplm_client.manage.transport.STREAM_S", 30.0)
    monkeypatch.setattr("hplm_client.manage.transport.STREAM_GRACE_S", -28.8)


def test_a_stream_that_ends_without_an_answer_is_an_error(ending: str) -> None:
    transport = TritonTransport(ending, 5.0)
    with pytest.raises(UnreachableError, match=f"{ending}: the stream of the job's changes has broken off"):
        next(transport.events(b"{}"))
    transport.close()


def test_a_job_is_polled_if_its_stream_breaks_off(ending: str) -> None:
    with ManageClient(ending) as manage:
        assert [event.state for event in manage.watch("j1")] == ["done"]


def test_an_abandoned_watch_leaves_no_thread_behind() -> None:
    def new_threads() -> set[threading.Thread]:
        # The server's own threads stay.
        return {thread for thread in threading.enumerate() if "ThreadPoolExecutor" not in thread.name} - before

    with frozen_grpc() as server, closing(TritonTransport(server.url, 5.0)) as transport:
        before = set(threading.enumerate())
        for _ in range(3):
            with pytest.raises(UnreachableError):
                next(transport.events(b"{}"))
        until(lambda: not new_threads())
