"""A watch over gRPC goes on or ends, whatever becomes of its stream."""

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
    """The address of one whose streams end at once without a word, as of a server that is shut down; it answers the rest."""

    class Ending(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
            yield from ()

        def ModelInfer(self, request: Any, context: Any) -> Any:
            answer = service_pb2.ModelInferResponse()
            answer.outputs.add(name=wire.RESPONSE, datatype="BYTES", shape=[1])
            said = json.dumps({"ok": True, "job": JOB}).encode()
            answer.raw_output_contents.append(serialize_byte_tensor(np.array([said], dtype=np.object_)).item())
            return answer

    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Ending(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is waited for is their sum; the first alone is what gRPC has to connect in.
    monkeypatch.setattr("hplm_client.manage.transport.STREAM_S", 30.0)
    monkeypatch.setattr("hplm_client.manage.transport.STREAM_GRACE_S", -28.8)


def test_a_stream_that_ends_without_a_word_is_an_error_and_no_wait_without_end(ending: str) -> None:
    transport = TritonTransport(ending, 5.0)
    with pytest.raises(UnreachableError, match=f"{ending}: the stream of the job's changes has broken off"):
        next(transport.events(b"{}"))
    transport.close()


def test_a_job_is_looked_up_where_its_stream_breaks_off(ending: str) -> None:
    with ManageClient(ending) as manage:
        assert [event.state for event in manage.watch("j1")] == ["done"]


def test_a_watch_that_nobody_reads_on_leaves_no_thread_behind() -> None:
    def left() -> set[threading.Thread]:
        # Not the server's own, which are there for good.
        return {thread for thread in threading.enumerate() if "ThreadPoolExecutor" not in thread.name} - before

    with frozen_grpc() as server, closing(TritonTransport(server.url, 5.0)) as transport:
        before = set(threading.enumerate())
        for _ in range(3):
            with pytest.raises(UnreachableError):
                next(transport.events(b"{}"))
        until(lambda: not left())
