"""Translates between Triton's requests and plain values.

Only this module, `metrics` and two workarounds import Triton's Python module.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.core import wire
from hplm.errors import BadInputError, ConfigError, HplmError, InternalError
from hplm.serving.request import Answer, Client
from hplm.triton.workarounds import full_shared_memory
from hplm.triton.workarounds.finished_requests import RequestSender
from hplm.triton.workarounds.unasked_outputs import asked_for

Input = TypeVar("Input")
# A request's tensors by name.
Inputs = Mapping[str, Any]


def version_folder(args: dict[str, str]) -> Path:
    """Return the folder of the model's version, which has its settings."""
    return Path(args["model_repository"]) / args["model_version"]


def instances(args: dict[str, str]) -> int:
    """Return how many processes of the model this server runs side by side for each device."""
    return sum(group["count"] for group in json.loads(args["model_config"])["instance_group"])


def check_tensors(args: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ConfigError if the model's config lacks one of these tensors."""
    config = json.loads(args["model_config"])
    known = {tensor["name"] for tensor in (*config["input"], *config["output"])}
    if missing := [name for name in names if name not in known]:
        raise ConfigError(
            f"{args['model_name']} has no tensor {missing[0]}, because another version of hplm exported it: "
            "run `hplm build export --models MODELS --keep-settings --name NAME`, then start the server again"
        )


def queue_policy(args: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what the model's config says about requests that wait in Triton, by the config's names. Defaults are left out."""
    return json.loads(args["model_config"]).get("dynamic_batching", {}).get("default_queue_policy", {})


def queue_size(args: Mapping[str, str]) -> int:
    """Return how many requests may wait in Triton for the model, 0 for any number."""
    return int(queue_policy(args).get("max_queue_size", 0))


def log(message: str) -> None:
    """Write a line into Triton's log that is no warning."""
    pb_utils.Logger.log_info(message)


def inputs(request: Any) -> Inputs:
    """Return a request's tensors by name. Triton's own look-up of one tensor makes a list of all of them each time."""
    return {tensor.name(): tensor for tensor in request.inputs()}


def tensor(inputs: Inputs, name: str) -> npt.NDArray[Any]:
    """Return a tensor with its batch dimension. Triton takes its memory back when `execute` returns."""
    if name not in inputs:
        # Triton 24.10 counts the inputs of a request: another input that is there twice passes for a missing one.
        raise BadInputError(f"the input {name} is missing")
    return inputs[name].as_numpy()


def texts(inputs: Inputs, name: str) -> list[list[bytes]]:
    """Return the BYTES elements of each row of a tensor."""
    return tensor(inputs, name).tolist()


def single(request: Any, name: str) -> bytes:
    """Return the one BYTES element of a tensor without a batch dimension. Raises BadInputError if there is no such tensor."""
    return bytes(tensor(inputs(request), name)[0])


def optional(inputs: Inputs, name: str) -> npt.NDArray[Any] | None:
    """Return a tensor as `tensor` does, None if the client did not send it."""
    return tensor(inputs, name) if name in inputs else None


def wants(request: Any, name: str) -> bool:
    """Return whether the client asked for an output."""
    return name in request.requested_output_names()


def responder(request: Any) -> Callable[[Mapping[str, npt.NDArray[Any]]], Any]:
    """Return what makes a response to a request of output tensors by name, without those that the client did not ask for.

    Call it before `execute` returns. The function that it returns may be called from any thread.
    """
    names = frozenset(request.requested_output_names())

    def respond(outputs: Mapping[str, npt.NDArray[Any]]) -> Any:
        tensors = [
            pb_utils.Tensor(name, np.ascontiguousarray(value)) for name, value in asked_for(outputs, names).items()
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    return respond


def refuse(error: HplmError) -> Any:
    """Return a response with an error's code and message, never a traceback."""
    code = getattr(pb_utils.TritonError, error.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire(), code))


def parameters(request: Any) -> str:
    """Return a request's parameters as JSON. Raises BadInputError for bytes that are no UTF-8, which Triton takes over HTTP."""
    try:
        return request.parameters() or "{}"
    except UnicodeDecodeError:
        raise BadInputError("a parameter of the request is not UTF-8") from None


def is_inner(request: Any) -> bool:
    """Return whether another model of this server has sent the request, see `wire.INNER`. Any client may claim it."""
    return wire.INNER in parameters(request)


def is_probe(request: Any) -> bool:
    """Return whether `hplm serve` itself has sent the request, see `wire.PROBE`. Any client may claim it."""
    return wire.PROBE in parameters(request)


def deadline_s(request: Any) -> float | None:
    """Return the seconds of the request's own `timeout`, None if the client set none."""
    microseconds = request.timeout()
    return microseconds / 1e6 if microseconds > 0 else None


def submit_all(
    requests: Sequence[Any],
    read: Callable[[Any], Input],
    submit: Callable[[Input, Client[Answer]], None],
    writer: Callable[[Any], Callable[[Answer], Any]],
    count: Callable[[HplmError], object],
    *,
    hold_s: float | None = None,
) -> list[Any] | None:
    """Hand the requests of one `execute` over to be answered by other threads. Raises nothing.

    `read` returns a request's input. `submit` takes the input, replies to the client when its answer is ready, and may raise an
    HplmError that it has counted; `count` is called with every other refusal. `writer(request)` is called before this function
    returns, because Triton then takes the request's memory back; the function that it returns makes a response of an
    answer. A request to a model that is not decoupled gets exactly one answer.

    Without `hold_s` each response is sent by itself, which costs a round trip to the server. With `hold_s`, for models that
    are not decoupled, this function waits up to that many seconds until all requests are answered. It returns the responses
    that are ready, refusals included, as far as shared memory has room. Triton sends these together at the price of one
    round trip; the others are sent one by one. Requests that arrive meanwhile wait in Triton for the next call, which is
    fuller.

    An exception would end all requests of the call in Triton, also those that another thread answers later.
    """
    call = _Call(len(requests), takes_responses=hold_s is not None and full_shared_memory.has_room())
    for index, request in enumerate(requests):
        try:
            client: _SenderClient[Answer] = _SenderClient(request.get_response_sender(), partial(call.take, index))
            _submit(client, request, read, submit, writer, count)
        except Exception:
            # Not even an error could be sent.
            log_failure()
    return call.end(hold_s or 0.0)


class _Call:
    """The requests of one `execute`, and the responses that leave with it. Several threads use it."""

    def __init__(self, count: int, *, takes_responses: bool) -> None:
        self._responses: list[Any] = [None] * count
        self._unanswered = count
        self._bytes = 0
        self._takes_responses = takes_responses
        self._changed = threading.Condition()

    def take(self, index: int, response: Any) -> bool:
        """Take a request's response to let it leave with the call. Return False if the response has to be sent."""
        with self._changed:
            self._unanswered -= 1
            if not self._unanswered:
                self._changed.notify()
            if not self._takes_responses:
                return False
            num_bytes = sum(tensor.as_numpy().nbytes for tensor in response.output_tensors())
            if self._bytes + num_bytes > full_shared_memory.MOST_BYTES:
                return False
            self._bytes += num_bytes
            self._responses[index] = response
            return True

    def end(self, within_s: float) -> list[Any] | None:
        """Wait up to `within_s` seconds for all answers. Return the responses that were taken, None if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered, within_s)
            self._takes_responses = False
            # Senders of unanswered requests keep this object; it must not keep the shared memory of the responses.
            responses, self._responses = self._responses, []
        return responses if any(response is not None for response in responses) else None


def _submit(
    client: _SenderClient[Answer],
    request: Any,
    read: Callable[[Any], Input],
    submit: Callable[[Input, Client[Answer]], None],
    writer: Callable[[Any], Callable[[Answer], Any]],
    count: Callable[[HplmError], object],
) -> None:
    """Submit one request as `submit_all` says. Raises if not even an error could be sent."""

    def refuse_and_count(error: HplmError) -> None:
        count(error)
        client.send(refuse(error))

    try:
        value = read(request)
        client.write = writer(request)
    except HplmError as error:
        refuse_and_count(error)
        return
    except Exception:
        log_failure()
        refuse_and_count(BadInputError("the inputs of this request cannot be read"))
        return
    try:
        submit(value, client)
    except HplmError as error:
        client.send(refuse(error))
    except Exception:
        log_failure()
        refuse_and_count(InternalError("the server failed on this request; its log says why"))


class _SenderClient(RequestSender, Client[Answer]):
    """The client of one Triton request, behind that request's response sender. Safe to use from several threads."""

    write: Callable[[Answer], Any]

    def reply(self, answer: Answer | HplmError, *, is_last: bool = True) -> None:
        """Write and send an answer. A request to a decoupled model may have several; the last has `is_last`."""
        try:
            response = refuse(answer) if isinstance(answer, HplmError) else self.write(answer)
        except Exception:
            self.send(refuse(InternalError("the answer could not be written; the server's log says why")))
            # The caller logs and counts that its answer was not sent.
            raise
        self.send(response, is_last=is_last)


def log_failure() -> None:
    """Write the current exception and its traceback into Triton's log, or to standard error if Triton refuses it."""
    trace = traceback.format_exc()
    try:
        pb_utils.Logger.log_error(trace)
    except Exception:
        logging.getLogger(__name__).error("%s", trace)
