"""Between Triton's requests and plain values. With `metrics`, the only library code that imports Triton's Python module."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.errors import BadInputError, BatchShapeError, HplmError, InternalError

Input = TypeVar("Input")
Answer = TypeVar("Answer")


def version_folder(args: dict[str, str]) -> Path:
    """The folder of the model's version, where its settings lie."""
    return Path(args["model_repository"]) / args["model_version"]


def tensor(request: Any, name: str) -> npt.NDArray[Any]:
    """One request's tensor without its batch dimension, copied: Triton takes the memory back when `execute` returns."""
    value = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    if value.shape[0] != 1:
        raise BatchShapeError(
            f"{name} has a batch of {value.shape[0]}: send one text a request, many at a time; the server batches them"
        )
    return np.array(value[0])


def text(request: Any, name: str) -> bytes:
    """One request's single BYTES element."""
    return bytes(tensor(request, name)[0])


def wants(request: Any, name: str) -> bool:
    """Whether the client asked for an output."""
    return name in request.requested_output_names()


def respond(**outputs: npt.NDArray[Any]) -> Any:
    """A response whose tensors get their batch dimension."""
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(value[None])) for name, value in outputs.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def refuse(error: HplmError) -> Any:
    """A response that carries an error's code and message, never a traceback."""
    code = getattr(pb_utils.TritonError, error.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire(), code))


def answer_all(
    requests: Sequence[Any],
    read: Callable[[Any], Input],
    run: Callable[[list[Input]], list[Answer | HplmError]],
    write: Callable[[Any, Answer], Any],
) -> list[Any]:
    """One response a request: read them, run those that could be read as one batch, write the answers.

    A failure of ours is logged with its traceback and answered as INTERNAL to the whole batch.
    """
    responses: list[Any] = [None] * len(requests)
    inputs: dict[int, Input] = {}
    for index, request in enumerate(requests):
        try:
            inputs[index] = read(request)
        except HplmError as error:
            responses[index] = refuse(error)
        except Exception:
            log_failure()
            responses[index] = refuse(BadInputError("the inputs of this request cannot be read"))
    try:
        answers = run(list(inputs.values())) if inputs else []
        for index, answer in zip(inputs, answers, strict=True):
            responses[index] = refuse(answer) if isinstance(answer, HplmError) else write(requests[index], answer)
    except Exception:
        log_failure()
        internal = InternalError("the server failed on this batch; its log says why")
        responses = [refuse(internal) if response is None else response for response in responses]
    return responses


def log_failure() -> None:
    """The current exception with its traceback, in Triton's log."""
    pb_utils.Logger.log_error(traceback.format_exc())
