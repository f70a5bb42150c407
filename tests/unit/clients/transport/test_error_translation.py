"""Triton's messages become typed errors, which say whether the request or the server is at fault."""

from __future__ import annotations

import asyncio

import pytest
from hplm_client.transport.error_translation import from_triton, typed_errors
from hplm_client.transport.retry import is_temporary
from tritonclient.utils import InferenceServerException

from hplm import errors

STOPPED = "Server is stopping, scheduler for model has stopped accepting new inference requests"


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ("Request for unknown model: 'hbert' is not found", "StatusCode.NOT_FOUND", errors.UnreachableError),
        # The second stage is loaded again while the request is between the stages.
        ("in ensemble 'hbert', Request for unknown model: 'x' is not found", "404", errors.UnreachableError),
        (f"in ensemble 'hbert', [request id: 1] {STOPPED}", "StatusCode.UNAVAILABLE", errors.UnreachableError),
        # A stage's process has died, so the request is not at fault and may be sent again.
        ("in ensemble 'hbert', unexpected deadlock", "StatusCode.INVALID_ARGUMENT", errors.StageDownError),
        ("in ensemble 'hbert', Stub process is not healthy.", "StatusCode.INTERNAL", errors.StageDownError),
        ("in ensemble 'hbert', Stub process 'hbert_upper_0_0' is not healthy.", "500", errors.StageDownError),
        (
            "Failed to process the request(s) for model instance 'manager_0_0', message: Stub process 'manager_0_0' is "
            "not healthy.",
            "StatusCode.INTERNAL",
            errors.StageDownError,
        ),
        ("in ensemble 'hbert', Failed to obtain the health mutex.", "500", errors.StageDownError),
        ("Failed to increase the shared memory pool size for key 'x'", "StatusCode.INTERNAL", errors.InternalError),
        ("in ensemble 'hbert', Request timeout expired", "StatusCode.UNAVAILABLE", errors.DeadlineError),
        ("[request id: 1] Request timeout expired", "503", errors.DeadlineError),
        ("in ensemble 'hbert', Exceeds maximum queue size", "StatusCode.UNAVAILABLE", errors.QueueFullError),
        ("[request id: 1] unexpected shape for input 'TEXT'", "400", errors.BadInputError),
        (f"in ensemble 'hbert', {errors.EmptyTextError('no text').wire()}", "400", errors.EmptyTextError),
        # A message of gRPC itself contains INTERNAL: the port does not speak gRPC.
        (
            "failed to connect to all addresses; last error: INTERNAL: ipv4:1.2.3.4:80: Failed parsing HTTP/2",
            "StatusCode.UNAVAILABLE",
            errors.UnreachableError,
        ),
        # A proxy in front of gRPC answered with an HTTP status.
        ("Received http2 header with status: 401", "StatusCode.UNAUTHENTICATED", errors.ForbiddenError),
        ("Received http2 header with status: 404", "StatusCode.UNIMPLEMENTED", errors.UnreachableError),
        ("Received http2 header with status: 413", "StatusCode.UNKNOWN", errors.BadInputError),
        ("Received http2 header with status: 502", "StatusCode.UNAVAILABLE", errors.UnreachableError),
    ],
)
def test_the_error_says_whose_fault_it_is(message: str, status: str, kind: type[errors.HplmError]) -> None:
    assert type(from_triton(InferenceServerException(message, status), "grpc://host:1")) is kind


def test_a_dead_stage_is_worth_a_retry_and_the_error_holds_tritons_message() -> None:
    message = "in ensemble 'hbert', Stub process 'hbert_plot_0_0' is not healthy."
    error = from_triton(InferenceServerException(message, "500"), "http://host:1")
    assert (error.code, error.status) == ("STAGE_DOWN", "UNAVAILABLE")
    assert is_temporary(error)
    assert message in str(error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.TimeoutError(), "no answer within the client's timeout"),
        (
            InferenceServerException("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED"),
            "no answer within the client's",
        ),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_an_error_without_a_useful_message_gets_one(error: Exception, words: str) -> None:
    with pytest.raises(errors.UnreachableError, match=f"does not answer: {words}"), typed_errors("http://h"):
        raise error
