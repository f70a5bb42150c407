"""tritonclient's and its transports' exceptions as our typed errors."""

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

# What gevent and aiohttp raise where nobody answers; grpc's come as InferenceServerException.
UNANSWERED = (OSError, asyncio.TimeoutError, aiohttp.ClientError, HTTPParseError)
# What tritonclient, and who takes its results apart, stumble with over what is not Triton's JSON, or not the model's outputs.
UNREADABLE = (TypeError, AttributeError, ValueError, LookupError, EOFError, struct.error, zlib.error)
# tritonclient's own words.
NOT_TRITONS = ("an exception occurred in the client while decoding", "client received an empty response")
NEVER_TRITONS = re.compile("3..|408|413|429")
# What Triton puts before the words of a step of the ensemble; and its words where a model is not there, and where one of its
# headers is missing.
STEP = re.compile(r"\Ain ensemble '[^']*', ")
UNKNOWN_MODEL = "Request for unknown model"
# What Triton 24.10 says, with the status INTERNAL, of a model whose process has died. The second text is for a process that
# died while it held the lock of its health. The third is for a step of the ensemble that ended without an answer.
DEAD_STUB = re.compile(
    r"Stub process ('[^']*' )?is not healthy|Failed to obtain the health mutex|in ensemble '[^']*', unexpected deadlock"
)
# gRPC's own words of a call that its client has given up.
GRPC_TIMED_OUT = "Deadline Exceeded"
TIMED_OUT = "no answer within the client's timeout"
RESTRICTED = ("This protocol is restricted", "This API is restricted")
# What the transports say of a port that speaks something else; a socket is closed too where a server ends.
NO_HTTP = "Expected HTTP/"
UNCONNECTED = "failed to connect "
NO_GRPC = re.compile(
    f"{UNCONNECTED}.*Socket closed|.*(Trying to connect an http1.x server|Failed parsing HTTP/2)", re.DOTALL
)
# And what gRPC says of an answer that is none of gRPC's, as a proxy's page.
PAGE = re.compile(r"Received http2 header with status: (\d{3})")


@contextmanager
def typed_errors(url: str) -> Iterator[None]:
    """Raise HplmError instead of what the transport raises."""
    try:
        yield
    except HplmError:
        raise
    except InferenceServerException as error:
        raise from_triton(error, url) from None
    except UNANSWERED as error:
        if NO_HTTP in str(error):
            raise UnreachableError(f"{url} speaks no HTTP: is it gRPC's port? That is grpc://HOST:8001") from None
        said = TIMED_OUT if isinstance(error, asyncio.TimeoutError) and not str(error) else str(error)
        raise UnreachableError(f"{url} does not answer: {said or type(error).__name__}") from None


@contextmanager
def typed_answer(url: str) -> Iterator[None]:
    """As `typed_errors`, around what asks for an answer and reads it: InternalError where it is none of Triton's."""
    with typed_errors(url):
        try:
            yield
        except UNANSWERED:
            # A certificate that nobody trusts is a ValueError too.
            raise
        except UNREADABLE as error:
            # tritonclient's frames hold the connection, which would be taken for as long as somebody keeps this error.
            traceback.clear_frames(error.__traceback__)
            raise InternalError(
                f"{url} answers with what is no answer of Triton's: is it the right address?"
            ) from error


def from_triton(error: Any, url: str) -> HplmError:
    """The typed error that Triton's message carries, else one by its status."""
    message, status = str(error.message()), str(error.status() or "")
    if status.isdigit() and (message.startswith(NOT_TRITONS) or NEVER_TRITONS.fullmatch(status)):
        # Triton's is JSON with an "error"; where tritonclient found none, its message has the whole page.
        return _from_proxy(int(status), url)
    if page := PAGE.fullmatch(message):
        return _from_proxy(int(page[1]), url)
    # gRPC has an INTERNAL of its own.
    if not message.startswith(UNCONNECTED) and (found := from_wire(message)):
        return found
    if message == GRPC_TIMED_OUT:
        return UnreachableError(f"{url} does not answer: {TIMED_OUT}")
    if wire.TRITON_FULL in message:
        return QueueFullError(f"{url}: more requests wait before a stage than Triton takes; try again later")
    if wire.TRITON_EXPIRED in message:
        return DeadlineError("the request waited for a stage until its deadline; it was not computed")
    if DEAD_STUB.search(message):
        return StageDownError(
            f"{url}: a stage's process has died; `hplm serve` loads the stage again within seconds: try again then "
            f"(Triton: {message})"
        )
    if message.startswith(RESTRICTED) or any(word in status.upper() for word in ("UNAUTH", "PERMISSION", "401", "403")):
        return ForbiddenError(f"{url} refuses who asks: {message}")
    said = STEP.sub("", message, count=1)
    hint = ""
    if NO_GRPC.match(message):
        hint = "; if it is HTTP's port, that is http://HOST:8000"
    elif said.startswith(UNKNOWN_MODEL):
        hint = ": the server is starting, stopping, reviving it, or has none"
    if hint or any(word in status.upper() for word in ("UNAVAILABLE", "DEADLINE", "499", "502", "503", "504")):
        return UnreachableError(f"{url}: {message}{hint}")
    if status == "405":
        return UnreachableError(f"{url} takes no requests: is it the port of Triton's metrics?")
    # What comes from a step without a code of ours is no fault of the request: the server has checked it before.
    if said == message and any(word in status.upper() for word in ("INVALID", "NOT_FOUND", "400", "404")):
        return BadInputError(message)
    return InternalError(f"{url}: {message}")


def _from_proxy(status: int, url: str) -> HplmError:
    """Of an answer that is not Triton's own, by its status of HTTP."""
    said = f"{url} answers with status {status}"
    if status in (401, 403):
        return ForbiddenError(f"{url} refuses who asks: status {status}")
    if status in (400, 413, 415):
        return BadInputError(f"{said}: it takes no such request{', or none as large' if status == 413 else ''}")
    if 300 <= status < 400:
        return ForbiddenError(f"{said}, which leads elsewhere: give the address behind it, or headers that it wants")
    if status in (404, 408, 429, 499, 502, 503, 504):
        return UnreachableError(
            f"{said}: what stands before the server has none to ask, or lets nobody through for now"
        )
    return InternalError(f"{said}, with what is no answer of Triton's")
