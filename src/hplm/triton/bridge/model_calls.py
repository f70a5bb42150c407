"""Calls from a stub to another model of the same server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.access.quotas import Charge
from hplm.core import wire
from hplm.errors import (
    DeadlineError,
    HplmError,
    InternalError,
    QueueFullError,
    StageDownError,
    UnreachableError,
    from_wire,
)


def call_model(
    model: str,
    inputs: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str],
    timeout_s: float | None,
    charges: Sequence[Charge],
) -> dict[str, npt.NDArray[Any]]:
    """Return outputs of a model by name. The calling thread waits for the answer, and other threads run meanwhile.

    `timeout_s` is Triton's timeout of the request, None for none. `charges`: what each text was charged.
    Raises the HplmError that the model answers, or a ServerError in place of a message of Triton itself.
    """
    response = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
        requested_output_names=list(outputs),
        parameters={wire.INNER: ",".join(map(str, charges))},
        timeout=0 if timeout_s is None else max(1, round(timeout_s * 1e6)),
    ).exec()
    if response.has_error():
        raise error_of(response.error().message(), model)
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def error_of(message: str, model: str) -> HplmError:
    """Return the error of a model's message. Clients make the same classes of Triton's own messages."""
    if (typed := from_wire(message)) is not None:
        return typed
    if wire.TRITON_FULL in message:
        return QueueFullError("too many requests wait before a stage; try again later")
    if wire.TRITON_EXPIRED in message:
        return DeadlineError("the request waited for a stage until its deadline; it was not computed")
    if wire.DEAD_STUB.search(message):
        return StageDownError(
            f"a stage's process has died; `hplm serve` loads the stage again within seconds: try again then (Triton: {message})"
        )
    if wire.ENSEMBLE_PREFIX.sub("", message, count=1).startswith(wire.UNKNOWN_MODEL):
        return UnreachableError(f"the model {model} is starting, is stopping, or is loaded again (Triton: {message})")
    return InternalError(f"the model {model} failed (Triton: {message})")
