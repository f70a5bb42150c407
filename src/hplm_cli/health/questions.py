"""A real question for each model that a server has: a request that the model's own process has to answer."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hplm.core import wire
from hplm.core.roles import Role
from hplm.errors import from_wire
from hplm.runtime.local_http import LOCAL_HTTP

ANY_TEXT = "A short text, to see an answer."
# A question about a tenant that does not exist, while there is no tenant.
NO_TENANT = "no-tenant"
# DISPATCH of the last level of a cascade: it answers whatever its confidence is, and computes no importances.
LAST_LEVEL = [1.0, -1.0, 1.0, 1.0, 0.0]
# Bytes of an answer that are read: an answer to a short text has some hundred.
MOST_ANSWER_BYTES = 1 << 16
# Codes that are answers of a working model. The first three refuse load: a server that is taken out of a balancer because of
# its load leaves the load to the others. The fourth is for what all servers share. The last answers a question about a job.
SOUND_CODES = frozenset({"QUEUE_FULL", "DEADLINE_UNMEETABLE", "QUOTA", "REGISTRY_UNAVAILABLE", "UNKNOWN_JOB"})
# Codes that are about the tenant of the question: another tenant may have an answer.
TENANT_CODES = frozenset({"UNKNOWN_TENANT", "TEXT_COUNT", "CORRUPT_ARTIFACT", "MISSING_ARTIFACT", "WRONG_BASE"})
ANSWERED = "ok"


@dataclass(frozen=True)
class Subject:
    """The tenant of a question, and the number of texts that it takes: 1, or 2 for pairs."""

    tenant: str = NO_TENANT
    texts: int = 1


@dataclass(frozen=True)
class Question:
    """A request over HTTP, whose path is below the server's address."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a question. If `answer` is None, `why` says what is wrong; else it is ANSWERED or one of SOUND_CODES.

    `code` is the error's code if there is one. Nothing here has the name of a tenant.
    """

    answer: str | None
    why: str = ""
    code: str = ""


def question_of_text(
    role: Role,
    subject: Subject,
    *,
    hidden_size: int = 0,
    is_whole: bool = False,
    is_dispatch: bool = False,
    proof: bytes | None = None,
) -> Question:
    """Return the question for a model of a base, or for a model that calls bases.

    `hidden_size` is the base's, and `is_whole` its kind; only encode stages need them. `is_dispatch`: the model is a level of a
    cascade. `proof` is for an inner stage of a server with keys, an encode stage.
    """
    tenant = _bytes_tensor(wire.TENANT, [subject.tenant])
    if role.backend in ("layers", "upper"):
        return _question_of_features(role, tenant, hidden_size, is_whole, proof)
    inputs: list[dict[str, Any]] = [_bytes_tensor(wire.TEXT, [ANY_TEXT] * subject.texts), tenant]
    if is_dispatch:
        inputs.append({"name": wire.DISPATCH, "shape": [1, len(LAST_LEVEL)], "datatype": "FP32", "data": LAST_LEVEL})
    output = wire.TOKENS if role.backend == "plot" else wire.LABEL
    return Question(_infer_path(role.name), _body(inputs, output))


def _question_of_features(
    role: Role, tenant: dict[str, Any], hidden_size: int, is_whole: bool, proof: bytes | None
) -> Question:
    """Return the question for an encode stage: the input of one token, which is zeros."""
    model, output = role.name, wire.LABEL if role.backend == "upper" else wire.STATES
    tokens = {"name": wire.TOKENS, "shape": [1, 1, 3], "datatype": "INT32", "data": [0, 0, 0]}
    known = [tokens, tenant]
    if proof is not None:
        known.append({"name": wire.PROOF, "shape": [1, len(proof)], "datatype": "UINT8", "data": list(proof)})
    if is_whole and role.stage == 1:
        ids = {"name": wire.IDS, "shape": [1, 1, 2], "datatype": "INT32", "data": [0, 0]}
        return Question(_infer_path(model), _body([ids, *known], output))
    # JSON has no FP16, so the hidden states are bytes after the JSON.
    name, datatype, number_bytes = (wire.HIDDEN, "FP16", 2) if role.stage == 1 else (wire.STATES, "FP32", 4)
    values = bytes(number_bytes * hidden_size)
    hidden = {
        "name": name,
        "shape": [1, 1, hidden_size],
        "datatype": datatype,
        "parameters": {"binary_data_size": len(values)},
    }
    head = _body([hidden, *known], output)
    return Question(_infer_path(model), head + values, {"Inference-Header-Content-Length": str(len(head))})


def question_of_manager(proof: bytes | None = None) -> Question:
    """Return the question for the manager: about a job that does not exist. It reads the registry.

    `proof` takes the place of a key.
    """
    inputs = {wire.REQUEST: json.dumps({"action": "job.show", "job": wire.NO_JOB})}
    if proof is not None:
        inputs[wire.KEY] = proof.decode()
    # The model has no batch dimension.
    tensors = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in inputs.items()]
    return Question(_infer_path(wire.MANAGER), _body(tensors, wire.RESPONSE))


def ask(http_url: str, question: Question, headers: Mapping[str, str], timeout_s: float) -> Outcome:
    """Send a question and return what came of it. Raises nothing."""
    request = urllib.request.Request(f"{http_url}{question.path}", question.body, {**headers, **question.headers})
    try:
        with LOCAL_HTTP.open(request, timeout=timeout_s) as reply:
            reply.read(MOST_ANSWER_BYTES)
        return Outcome(ANSWERED)
    except urllib.error.HTTPError as error:
        with error:
            try:
                message = error.read(MOST_ANSWER_BYTES).decode(errors="replace")
            except (OSError, http.client.HTTPException):
                message = ""
        return outcome_of_error(error.code, message)
    except TimeoutError:
        return no_answer(timeout_s)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            return no_answer(timeout_s)
        return Outcome(None, "Triton does not answer")


def no_answer(timeout_s: float) -> Outcome:
    """Return the outcome of a question that was not answered in time."""
    return Outcome(None, f"no answer within {timeout_s:g} s")


def outcome_of_error(status: int, message: str) -> Outcome:
    """Return the outcome of an error, by its HTTP status and its message. The message itself may name a tenant."""
    if error := from_wire(message):
        code = error.code
        return Outcome(code, code=code) if code in SOUND_CODES else Outcome(None, f"it answers {code}", code)
    if wire.TRITON_FULL in message:
        return Outcome("QUEUE_FULL", code="QUEUE_FULL")
    if wire.DEAD_STUB.search(message):
        return Outcome(None, "a process of it, or of a model that it calls, has died or hangs")
    if wire.UNKNOWN_MODEL in message:
        return Outcome(None, "Triton does not have it now, or a model that it calls: it is being loaded or has failed")
    if status in (401, 403) or "restricted" in message:
        return Outcome(None, "the server's options want headers: set HPLM_HEADERS for `hplm serve`")
    return Outcome(None, f"it answers with HTTP status {status}: see Triton's log")


def _infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def _bytes_tensor(name: str, values: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "shape": [1, len(values)], "datatype": "BYTES", "data": list(values)}


def _body(inputs: Sequence[Mapping[str, Any]], output: str) -> bytes:
    parameters = {wire.PROBE: "1"}
    return json.dumps({"parameters": parameters, "inputs": list(inputs), "outputs": [{"name": output}]}).encode()
