"""Translation of the exceptions of tritonclient and its transports to the errors of `hplm.errors`."""

from __future__ import annotations

import asyncio
import re
import struct
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from hplm.core import wire
from hplm.errors import (
    BadInputError,
    DeadlineError,
    ForbiddenError,
    HplmError,
    InternalError,
    QueueFullError,
    StageDownError,
    UnreachableError,
    from_wire,
)

# Raised by gevent and aiohttp if no server answers. gRPC raises InferenceServerException.
CONNECTION_ERRORS = (OSError, asyncio.TimeoutError, aiohttp.ClientError, HTTPParseError)
# Raised by tritonclient and by our reading of its results if an answer is not Triton's JSON or lacks outputs of the model.
UNREADABLE_ANSWER_ERRORS = (TypeError, AttributeError, ValueError, LookupError, EOFError, struct.error, zlib.error)
# Beginnings of tritonclient's messages for an answer that is not Triton's JSON.
UNREADABLE_ANSWER = ("an exception occurred in the client while decoding", "client received an empty response")
# HTTP statuses that only a proxy sends, never Triton.
PROXY_STATUS = re.compile("3..|408|413|429")
# gRPC's message for a call that the client has given up.
GRPC_TIMED_OUT = "Deadline Exceeded"
TIMED_OUT = "no answer within the client's timeout"
# Triton's messages if a header is missing that its options require.
RESTRICTED = ("This protocol is restricted", "This API is restricted")
# The message of geventhttpclient if a port does not speak HTTP.
NOT_HTTP = "Expected HTTP/"
# Messages of gRPC if a port does not speak gRPC. A socket is also closed if a server ends.
GRPC_NOT_CONNECTED = "failed to connect "
NOT_GRPC = re.compile(
    f"{GRPC_NOT_CONNECTED}.*Socket closed|.*(Trying to connect an http1.x server|Failed parsing HTTP/2)", re.DOTALL
)
# gRPC's message for an answer that is not gRPC, such as a page of a proxy.
PAGE_OVER_GRPC = re.compile(r"Received http2 header with status: (\d{3})")


@contextmanager
def typed_errors(url: str) -> Iterator[None]:
    """Raise HplmError instead of what the transport raises."""
    try:
        yield
    except HplmError:
        raise
    except InferenceServerException as error:
        raise from_triton(error, url) from None
    except CONNECTION_ERRORS as error:
        if NOT_HTTP in str(error):
            raise UnreachableError(
                f"{url} does not speak HTTP; if it is the gRPC port, write grpc://HOST:8001"
            ) from None
        reason = TIMED_OUT if isinstance(error, asyncio.TimeoutError) and not str(error) else str(error)
        raise UnreachableError(f"{url} does not answer: {reason or type(error).__name__}") from None


@contextmanager
def typed_answer(url: str) -> Iterator[None]:
    """Raise what `typed_errors` raises, and InternalError if the answer is not Triton's. For asking and reading an answer."""
    with typed_errors(url):
        try:
            yield
        except CONNECTION_ERRORS:
            # The error of an untrusted certificate is a ValueError too.
            raise
        except UNREADABLE_ANSWER_ERRORS as error:
            # tritonclient's frames hold the connection, which would stay in use for as long as the caller keeps this error.
            traceback.clear_frames(error.__traceback__)
            raise InternalError(f"the answer of {url} is not one of Triton's: check the address") from error


def from_triton(error: Any, url: str) -> HplmError:
    """Return the typed error whose code Triton's message carries, or else one by the status."""
    message, status = str(error.message()), str(error.status() or "")
    if status.isdigit() and (message.startswith(UNREADABLE_ANSWER) or PROXY_STATUS.fullmatch(status)):
        # An error of Triton is JSON with an "error". Without one, tritonclient's message is the whole page.
        return _from_proxy(int(status), url)
    if page := PAGE_OVER_GRPC.fullmatch(message):
        return _from_proxy(int(page[1]), url)
    # A message of gRPC itself may contain "INTERNAL: ", which is also one of our codes.
    if not message.startswith(GRPC_NOT_CONNECTED) and (typed := from_wire(message)):
        return typed
    if message == GRPC_TIMED_OUT:
        return UnreachableError(f"{url} does not answer: {TIMED_OUT}")
    if wire.TRITON_FULL in message:
        return QueueFullError(f"{url}: too many requests wait before a stage; try again later")
    if wire.TRITON_EXPIRED in message:
        return DeadlineError("the request waited for a stage until its deadline; it was not computed")
    if wire.DEAD_STUB.search(message):
        return StageDownError(
            f"{url}: a stage's process has died; `hplm serve` loads the stage again within seconds: try again then "
            f"(Triton: {message})"
        )
    if message.startswith(RESTRICTED) or _has_any(status, "UNAUTH", "PERMISSION", "401", "403"):
        return ForbiddenError(f"{url} refuses this client: {message}")
    step_message = wire.ENSEMBLE_PREFIX.sub("", message, count=1)
    hint = ""
    if NOT_GRPC.match(message):
        hint = "; if it is the HTTP port, write http://HOST:8000"
    elif step_message.startswith(wire.UNKNOWN_MODEL):
        hint = ": the server is starting, is stopping, loads the model again, or does not have the model"
    if hint or _has_any(status, "UNAVAILABLE", "DEADLINE", "499", "502", "503", "504"):
        return UnreachableError(f"{url}: {message}{hint}")
    if status == "405":
        return UnreachableError(f"{url} takes no requests; it may be the port of Triton's metrics")
    # An error of a step without one of our codes is the server's fault, because the server has checked the request before.
    if step_message == message and _has_any(status, "INVALID", "NOT_FOUND", "400", "404"):
        return BadInputError(message)
    return InternalError(f"{url}: {message}")


def _has_any(status: str, *words: str) -> bool:
    return any(word in status.upper() for word in words)


def _from_proxy(status: int, url: str) -> HplmError:
    """Return the error for an answer of a proxy, by its HTTP status."""
    answer = f"{url} answers with status {status}"
    if status in (401, 403):
        return ForbiddenError(f"{url} refuses this client: status {status}")
    if status in (400, 413, 415):
        return BadInputError(f"{answer}: it refuses such a request{', or one as large' if status == 413 else ''}")
    if 300 <= status < 400:
        return ForbiddenError(
            f"{answer}, a redirect: write the address that it leads to, or send the headers that the proxy wants"
        )
    if status in (404, 408, 429, 499, 502, 503, 504):
        return UnreachableError(f"{answer}: the proxy has no server to ask, or accepts no requests for now")
    return InternalError(f"{answer}, and the answer is not one of Triton's")
