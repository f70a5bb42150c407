"""The documented requests that end Triton 24.10, or fill its memory. The rules of the example proxy keep them out."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from hplm.core import wire
from tests.triton.access.fuzzing import Caller, Target, raw_bytes
from tests.triton.access.nginx import HOST, Proxy, port_of
from tests.triton.access.raw_connections import Answer, GrpcConnection, HttpConnection
from tests.triton.access.verdicts import refusal

NOT_REFUSED = "nothing"
PIECES = 300_000
# Large enough to be refused. A proxy that lets them pass costs some hundred MB, and not the machine.
LARGE_SHAPES = ([1, 2**24], [9_999, 9_999], [-1, -(2**24)], [64, 2, 2**15])
NESTED = 1_000_000


@dataclass(frozen=True)
class Outcome:
    """A documented request, what refused it (`by`), and the code. An answered request has the `by` NOT_REFUSED."""

    request: str
    over: str
    by: str
    code: str

    @property
    def is_kept_out(self) -> bool:
        """Whether the proxy refused the request, or Triton did because the proxy had made it harmless."""
        return self.by == "proxy" or (self.by == "Triton" and self.request in HARMLESS)


# Requests that the proxy passes on in another form, which Triton refuses.
HARMLESS = frozenset({"deeply nested JSON, compressed"})


def send_known_crashes(target: Target, proxy: Proxy) -> Iterator[Outcome]:
    """Send each documented request through the proxy."""
    caller = target.callers[0]
    path = f"/v2/models/{wire.MODEL if wire.MODEL in target.inputs else caller.model}/infer"
    key = ("authorization", f"Bearer {caller.key}")
    http = HttpConnection(HOST, port_of(proxy.https_url), proxy.certificate)
    channel = GrpcConnection(HOST, port_of(proxy.grpcs_url), proxy.certificate)
    body = _body(caller)

    def post(request: str, content: bytes, *headers: tuple[str, str], to: str = path) -> Outcome:
        return _outcome(request, "HTTP", http.send("POST", to, [key, *headers], content))

    def call(request: str, message: bytes, **options: Any) -> Outcome:
        return _outcome(request, "gRPC", channel.send(message, [key], **options))

    wanted = {**body, "outputs": [{"name": wire.LABEL, "parameters": {"classification": 1}}]}
    plain = json.dumps(wanted).encode()
    yield post("classification", plain)
    yield post("classification, escaped", plain.replace(b'"classification"', b'"\\u0063l\\u0061ssific\\u0061tion"'))
    yield post("classification, binary", *_binary(caller, wanted))
    yield post("classification, in pieces", _chunked(plain, 7), ("Transfer-Encoding", "chunked"))
    message = _message(caller)
    message.outputs.add(name=wire.LABEL).parameters["classification"].int64_param = 1
    written = message.SerializeToString()
    yield call("classification", written)
    # The same with the length, and with the tag, in more bytes than they need.
    yield call("classification, long length", _message_with(caller, b"\x0a\x8e\x80\x00classification"))
    yield call("classification, long tag", _message_with(caller, b"\x8a\x80\x00\x0eclassification"))
    for shape in LARGE_SHAPES:
        sized = {**body, "inputs": [*body["inputs"], {"name": "X", "shape": shape, "datatype": "INT64", "data": [1]}]}
        yield post("JSON data of a large shape", json.dumps(sized).encode())
    yield post(
        "deeply nested JSON, compressed", gzip.compress(b'{"inputs":' + b"[" * NESTED), ("Content-Encoding", "gzip")
    )
    yield post("deeply nested JSON", b'{"inputs":' + b"[" * NESTED)
    yield _outcome("a body in many pieces", "HTTP", _in_pieces(proxy, path, f"authorization: Bearer {caller.key}"))
    large = {**body, "inputs": [{**body["inputs"][0], "data": ["word " * 1_200_000]}, body["inputs"][1]]}
    yield post(
        "a large body as a form", json.dumps(large).encode(), ("Content-Type", "application/x-www-form-urlencoded")
    )
    huge = _message(caller, "word " * 1_200_000)
    yield call("a large text", huge.SerializeToString())
    yield call(
        "a compressed message",
        _message(caller, "word " * 40_000).SerializeToString(),
        compression=grpc.Compression.Gzip,
    )
    yield post("shared memory", b'{"key": "/x", "byte_size": 4}', to="/v2/systemsharedmemory/region/x/register")
    service = "/inference.GRPCInferenceService"
    yield call("shared memory", b"", method=f"{service}/SystemSharedMemoryRegister")
    yield call("streams, as of job.watch", b"", method=f"{service}/ModelStreamInfer")
    yield call("unloading a model", b"", method=f"{service}/RepositoryModelUnload")
    http.close()
    channel.close()


def _outcome(request: str, over: str, answer: Answer) -> Outcome:
    if answer.is_ok:
        return Outcome(request, over, NOT_REFUSED, "")
    if answer.status is None:
        return Outcome(request, over, "no answer", answer.content.decode())
    by, code = refusal(answer)
    return Outcome(request, over, by, code)


def _body(caller: Caller) -> dict[str, Any]:
    values = ((wire.TEXT, "A moving film."), (wire.TENANT, caller.tenant))
    return {
        "inputs": [{"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]} for name, value in values],
    }


def _binary(caller: Caller, wanted: dict[str, Any]) -> tuple[bytes, tuple[str, str]]:
    tensors = b""
    inputs = []
    for tensor in wanted["inputs"]:
        raw = raw_bytes("BYTES", tensor["data"])
        inputs.append(
            {**{k: v for k, v in tensor.items() if k != "data"}, "parameters": {"binary_data_size": len(raw)}}
        )
        tensors += raw
    head = json.dumps({**wanted, "inputs": inputs}).encode()
    return head + tensors, ("Inference-Header-Content-Length", str(len(head)))


def _message(caller: Caller, text: str = "A moving film.") -> Any:
    message = service_pb2.ModelInferRequest(model_name=caller.model)
    for name, value in ((wire.TEXT, text), (wire.TENANT, caller.tenant)):
        message.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        message.raw_input_contents.append(raw_bytes("BYTES", [value]))
    return message


def _message_with(caller: Caller, name: bytes) -> bytes:
    """Return a message with an output whose parameter has a name that is written as given, and the value 1."""

    def field(number: int, content: bytes) -> bytes:
        length, written = len(content), b""
        while length > 127:
            written += bytes([length & 127 | 128])
            length >>= 7
        return bytes([number << 3 | 2]) + written + bytes([length]) + content

    entry = name + field(2, b"\x10\x01")
    output = field(1, wire.LABEL.encode()) + field(2, entry)
    return _message(caller).SerializeToString() + field(6, output)


def _chunked(content: bytes, size: int) -> bytes:
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


def _in_pieces(proxy: Proxy, path: str, header: str) -> Answer:
    """Send a body of PIECES pieces of a byte until the proxy refuses it, and return the refusal."""
    trust = ssl.create_default_context(cafile=str(proxy.certificate))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        socket.create_connection((HOST, port_of(proxy.https_url)), timeout=60) as plain,
        trust.wrap_socket(plain, server_hostname=HOST) as connection,
    ):
        with suppress(OSError):
            connection.sendall(head.encode())
            for _ in range(PIECES // 1000):
                connection.sendall(b"1\r\n \r\n" * 1000)
            connection.sendall(b"0\r\n\r\n")
        received = b""
        with suppress(OSError):
            while part := connection.recv(4096):
                received += part
    status = received[9:12]
    return Answer(int(status) if status.isdigit() else None, received)
