"""Connections that send whatever bytes they are given, over HTTP and gRPC, with and without TLS."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]
from hplm_loadtest.scenarios.infer_messages import METHOD
from tritonclient.grpc import service_pb2

# Seconds until a request without an answer counts as hanging. A stage answers within its default deadline of 30 s.
HANGING_S = 60.0
OK = 200
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer. `status` is that of HTTP, over gRPC 200 or the name of the error's status; None without an answer.

    `content` is the body, the message of ModelInfer, or the words of an error over gRPC.
    """

    status: int | str | None
    content: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == OK


class HttpConnection:
    """A connection that is kept open while the server lets it. Use it from one thread."""

    def __init__(self, host: str, port: int, certificate: Path | None = None) -> None:
        self._address = (host, port)
        self._tls = None if certificate is None else ssl.create_default_context(cafile=str(certificate))
        self._socket: socket.socket | None = None

    def send(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        *,
        said_length: int | None = None,
        hangs_up: bool = False,
    ) -> Answer:
        """Send a request; `said_length` is its Content-Length if that is not the body's. `hangs_up`: wait for no answer."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._address[0]}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        if not any(name.lower() == "transfer-encoding" for name, _ in headers):
            lines.append(f"Content-Length: {len(body) if said_length is None else said_length}")
        raw = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
        is_new = self._socket is None
        try:
            # The rest of a body that is longer than its header says would be read as the next request.
            is_last = said_length is not None and said_length != len(body)
            return self._exchange(raw, method, hangs_up=hangs_up, is_last=is_last)
        except TimeoutError:
            self.close()
            return Answer(None, b"no answer in time")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_new:
                # The server had closed the connection meanwhile.
                return self.send(method, path, headers, body, said_length=said_length, hangs_up=hangs_up)
            return Answer(None, f"no answer: {error!r}".encode())

    def _exchange(self, raw: bytes, method: str, *, hangs_up: bool, is_last: bool) -> Answer:
        if self._socket is None:
            plain = socket.create_connection(self._address, timeout=HANGING_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = (
                plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname=self._address[0])
            )
        # The server may have refused the body before its end. Its answer may be there.
        with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            self._socket.sendall(raw)
        if hangs_up:
            self.close()
            return Answer(None, b"hung up")
        reply = http.client.HTTPResponse(self._socket, method=method)
        reply.begin()
        content = reply.read()
        if reply.will_close or is_last:
            self.close()
        return Answer(reply.status, content)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        # The connections of a thread end with the thread.
        self.close()


class GrpcConnection:
    """A channel that sends messages of ModelInfer as bytes."""

    def __init__(self, host: str, port: int, certificate: Path | None = None) -> None:
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        address = f"{host}:{port}"
        if certificate is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
            self._channel = grpc.secure_channel(address, trusted, options)
        self._infer = self._channel.unary_unary(METHOD)

    def send(
        self, message: bytes, metadata: Headers, *, method: str = METHOD, compression: grpc.Compression | None = None
    ) -> Answer:
        call = self._infer if method == METHOD else self._channel.unary_unary(method)
        try:
            content = call(message, metadata=list(metadata), timeout=HANGING_S, compression=compression)
        except grpc.RpcError as error:
            status = error.code()
            if status is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in error.details():
                return Answer(None, b"no answer in time")
            return Answer(status.name, (error.details() or "").encode())
        return Answer(OK, content)

    def close(self) -> None:
        self._channel.close()


def outputs_of(message: bytes) -> dict[str, list[bytes]]:
    """Return the BYTES outputs of an answer over gRPC."""
    answer = service_pb2.ModelInferResponse.FromString(message)
    return {
        output.name: list(_texts(raw))
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False)
        if output.datatype == "BYTES"
    }


def _texts(raw: bytes) -> Iterable[bytes]:
    at = 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        yield raw[at + 4 : at + 4 + length]
        at += 4 + length
