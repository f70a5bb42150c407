"""tritonclient's and its transports' exceptions as our typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tritonclient.utils import InferenceServerException

from hplm.errors import BadInputError, HplmError, InternalError, UnreachableError, from_wire


@contextmanager
def typed_errors(url: str) -> Iterator[None]:
    """Raise HplmError instead of what the transport raises."""
    try:
        yield
    except HplmError:
        raise
    except InferenceServerException as error:
        raise from_triton(error, url) from None
    except Exception as error:
        # gevent, aiohttp and grpc each have their own family of "cannot connect"; nothing else can come from a call.
        raise UnreachableError(f"{url} does not answer: {error or type(error).__name__}") from None


def from_triton(error: Any, url: str) -> HplmError:
    """The typed error that Triton's message carries, else one by its status."""
    message, status = str(error.message()), str(error.status() or "")
    if found := from_wire(message):
        return found
    if any(word in status.upper() for word in ("UNAVAILABLE", "DEADLINE", "503", "499", "504")):
        return UnreachableError(f"{url}: {message}")
    if any(word in status.upper() for word in ("INVALID", "NOT_FOUND", "400", "404")):
        return BadInputError(message)
    return InternalError(f"{url}: {message}")
