"""Translate between Triton's requests and plain values.

Only this module, `metrics` and `triton_wakeup` import Triton's Python module.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.errors import BadInputError, ConfigError, HplmError, InternalError
from hplm.runtime.process import SHARED_MEMORY
from hplm.serving.request import Answer, Client

Input = TypeVar("Input")
# Of answers that leave with one call: all of them lie in shared memory at once. Where that has no room for one of them, all of
# the call fail; so where little of it is left, each is sent by itself.
MOST_BYTES = 4_000_000
LEAST_ROOM = 4 * MOST_BYTES
# Triton's tensors by name.
Inputs = Mapping[str, Any]


def version_folder(args: dict[str, str]) -> Path:
    """The folder of the model's version, where its settings lie."""
    return Path(args["model_repository"]) / args["model_version"]


def instances(args: dict[str, str]) -> int:
    """How many processes of the model this server runs beside each other, for each device."""
    return sum(group["count"] for group in json.loads(args["model_config"])["instance_group"])


def check_tensors(args: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises ConfigError where the model's config lacks one of the tensors that it is to have."""
    of_model = json.loads(args["model_config"])
    there = {one["name"] for one in (*of_model["input"], *of_model["output"])}
    if lacking := [name for name in names if name not in there]:
        raise ConfigError(
            f"{args['model_name']} has no {lacking[0]}: it was exported by another version of hplm; "
            "`hplm build export --keep-settings` makes it anew"
        )


def queue_policy(args: Mapping[str, str]) -> Mapping[str, Any]:
    """What the model's config says of requests that wait in Triton, by the names there; of what it leaves out, Triton's."""
    batching = json.loads(args["model_config"]).get("dynamic_batching", {})
    given: Mapping[str, Any] = batching.get("default_queue_policy", {})
    return given


def queue_size(args: Mapping[str, str]) -> int:
    """How many requests may wait in Triton for the model, 0 for any number."""
    return int(queue_policy(args).get("max_queue_size", 0))


def log(message: str) -> None:
    """A line of Triton's log that is no warning."""
    pb_utils.Logger.log_info(message)


def inputs(request: Any) -> Inputs:
    """One request's tensors by name. Asked for one by one, Triton's module makes a list of all of them for each."""
    return {one.name(): one for one in request.inputs()}


def tensor(given: Inputs, name: str) -> npt.NDArray[Any]:
    """A tensor with its batch dimension, in memory that Triton takes back when `execute` returns."""
    found: npt.NDArray[Any] = given[name].as_numpy()
    return found


def texts(given: Inputs, name: str) -> list[list[bytes]]:
    """BYTES elements of each text."""
    found: list[list[bytes]] = tensor(given, name).tolist()
    return found


def single(request: Any, name: str) -> bytes:
    """The BYTES element of a request to a model without a batch dimension, which Triton has seen to be one."""
    return bytes(inputs(request)[name].as_numpy()[0])


def is_decoupled(args: dict[str, str]) -> bool:
    """Whether the model's config lets a request have many answers."""
    return bool(pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"])))


def optional(given: Inputs, name: str) -> npt.NDArray[Any] | None:
    """As `tensor`, None where the client sent none."""
    return tensor(given, name) if name in given else None


def wants(request: Any, name: str) -> bool:
    """Whether the client asked for an output."""
    return name in request.requested_output_names()


def respond(**outputs: npt.NDArray[Any]) -> Any:
    """A response."""
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(value)) for name, value in outputs.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def refuse(error: HplmError) -> Any:
    """A response that carries an error's code and message, never a traceback."""
    code = getattr(pb_utils.TritonError, error.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire(), code))


def deadline_s(request: Any) -> float | None:
    """Triton's own `timeout` of an infer call, in seconds; None where the client set none."""
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
    """Read and submit the requests of one call; each gets exactly one answer, unless the model is decoupled.

    `submit` replies to the client from any thread, or raises an HplmError that it has counted. `count` counts other refusals.

    Without `hold_s` every response is sent by itself, a round trip to the server each. With it, for a model that is not
    decoupled, this waits until all requests are answered, at most `hold_s`. It returns the responses that are ready, as far as
    shared memory allows: what `execute` returns leaves together at the price of one. Each other response is sent by itself.
    Requests that come meanwhile wait in Triton for the next call, which is fuller.

    `writer(request)` is called before this returns, because Triton then takes the request's memory back. Raises nothing: Triton
    would end all requests of the call, also those that another thread answers later.
    """
    takes_answers = hold_s is not None and _has_room()
    call = _Call(len(requests), takes_answers=takes_answers)
    for index, request in enumerate(requests):
        try:
            client: _SenderClient[Answer] = _SenderClient(request.get_response_sender(), partial(call.take, index))
            _submit(client, request, read, submit, writer, count)
        except Exception:
            # Not even an error could be sent.
            log_failure()
    return call.end(hold_s or 0.0)


def _has_room() -> bool:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > LEAST_ROOM
    except OSError:
        return False


class _Call:
    """The requests of one `execute`, and those of their responses that leave with it. Several threads answer."""

    def __init__(self, count: int, *, takes_answers: bool) -> None:
        self._responses: list[Any] = [None] * count
        self._missing = count
        self._bytes = 0
        self._takes_answers = takes_answers
        self._changed = threading.Condition()

    def take(self, index: int, response: Any) -> bool:
        """Whether a request's response leaves with the call; False where it has to be sent."""
        with self._changed:
            self._missing -= 1
            if not self._missing:
                self._changed.notify()
            if not self._takes_answers:
                return False
            size = sum(one.as_numpy().nbytes for one in response.output_tensors())
            if self._bytes + size > MOST_BYTES:
                return False
            self._bytes += size
            self._responses[index] = response
            return True

    def end(self, within_s: float) -> list[Any] | None:
        """Those taken until all are answered, within so much time; None where there is none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, within_s)
            self._takes_answers = False
            # Senders of what is not answered yet keep the call, which must not keep the others' shared memory.
            responses, self._responses = self._responses, []
        return responses if any(one is not None for one in responses) else None


def _submit(
    client: _SenderClient[Answer],
    request: Any,
    read: Callable[[Any], Input],
    submit: Callable[[Input, Client[Answer]], None],
    writer: Callable[[Any], Callable[[Answer], Any]],
    count: Callable[[HplmError], object],
) -> None:
    """Submit one request of `submit_all`. Raises an error if not even an error could be sent."""

    def refuse_uncounted(error: HplmError) -> None:
        count(error)
        client.send(refuse(error))

    try:
        content = read(request)
        client.write = writer(request)
    except HplmError as error:
        refuse_uncounted(error)
        return
    except Exception:
        log_failure()
        refuse_uncounted(BadInputError("the inputs of this request cannot be read"))
        return
    try:
        submit(content, client)
    except HplmError as error:
        client.send(refuse(error))
    except Exception:
        log_failure()
        refuse_uncounted(InternalError("the server failed on this request; its log says why"))


class _SenderClient(Client[Answer]):
    """The client of one Triton request, behind that request's response sender. Safe to use from several threads.

    A last response that `leaves` with its call is not sent. Triton forgets a request with its last response. If Triton is asked
    about the request afterwards, the whole server dies (seen on 24.10).
    """

    write: Callable[[Answer], Any]

    def __init__(self, sender: Any, leaves: Callable[[Any], bool]) -> None:
        self._sender = sender
        self._leaves = leaves
        self._using = threading.Lock()
        self._has_ended = False

    def is_cancelled(self) -> bool:
        with self._using:
            return not self._has_ended and bool(self._sender.is_cancelled())

    def reply(self, answer: Answer | HplmError, *, is_last: bool = True) -> None:
        """Write and send an answer; the last one of a decoupled model's request is so marked."""
        try:
            response = refuse(answer) if isinstance(answer, HplmError) else self.write(answer)
        except Exception:
            self.send(refuse(InternalError("the answer could not be written; the server's log says why")))
            # The caller logs and counts that the answer was not sent.
            raise
        self.send(response, is_last=is_last)

    def send(self, response: Any, *, is_last: bool = True) -> None:
        """Send a response, but nothing after the last one. A last response counts for Triton even if it cannot be sent."""
        with self._using:
            if self._has_ended:
                return
            self._has_ended = is_last
            if not (is_last and self._leaves(response)):
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)


def log_failure() -> None:
    """The current exception with its traceback, in Triton's log; on standard error where Triton takes nothing now."""
    said = traceback.format_exc()
    try:
        pb_utils.Logger.log_error(said)
    except Exception:
        logging.getLogger(__name__).error("%s", said)
