"""Makes malformed requests one by one, each from a seed and its number."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hplm.core import wire
from hplm_loadtest.benchmarks.attacks.encodings import Encoding, grpc_message, http_body
from hplm_loadtest.benchmarks.attacks.manage_requests import manage_request
from hplm_loadtest.benchmarks.attacks.model_inputs import DATATYPES, OPEN_LENGTH
from hplm_loadtest.benchmarks.attacks.mutations import (
    ODD_INTEGERS,
    ODD_TEXTS,
    Pairs,
    Raw,
    changed_bytes,
    mutated,
    odd_value,
    repeated,
    to_json,
)
from hplm_loadtest.benchmarks.attacks.near_misses import near_miss
from hplm_loadtest.benchmarks.attacks.target import Caller, Target

TEXTS = ("A moving film.", "the red cat sings", "", "Paris", "one two " * 40, "Zoë läuft 🙂")
ENCODINGS: tuple[Encoding, ...] = ("HTTP JSON", "HTTP binary", "gRPC")
# Parameters that Triton or hplm knows.
PARAMETERS = (
    *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"),
    *("binary_data_size", "binary_data", "classification", "shared_memory_region", "shared_memory_offset"),
    *("shared_memory_byte_size", "triton_enable_empty_final_response", "triton_final_response", "authorization"),
    *(wire.INNER, wire.PROBE, "max_tokens", ""),
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "post", "POST /", "CONNECT")
# Paths of Triton's other APIs. The proxy answers 404 or 400.
PATHS = (
    *(
        "/v2",
        "/metrics",
        "/v2/health/ready",
        "/v2/models/stats",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/repository/index",
    ),
    *("/v2/repository/models/hbert/unload", "/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/status"),
    *(
        "/v2/models/hbert/config",
        "/v2/models/hbert/stats",
        "/v2/models/hbert/generate",
        "/v2/models/hbert/generate_stream",
    ),
    *(
        "/v2/models/hbert/versions/1/infer",
        "/v2/models/manager/infer",
        "/v2/models/hbert_upper/infer",
        "/v2/models//infer",
    ),
    *("/v2/models/hbert/../manager/infer", "/v2/models/hbert%2f..%2fmanager/infer", "/v2/models/hbert/infer/../../x"),
    *("/v2/models/hbert/infer?a=b", "//v2/models/hbert/infer", "/v2/models/hbert/infer%00", "/V2/MODELS/HBERT/INFER"),
)
ODD_HEADERS = (
    *(("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "multipart/form-data; boundary=x")),
    *(("Content-Encoding", "gzip"), ("Content-Encoding", "deflate"), ("Content-Encoding", "identity, gzip")),
    *(("Accept-Encoding", "gzip"), ("Accept-Encoding", "deflate, gzip;q=1.0, *;q=0.5"), ("Expect", "200-ok")),
    *(("Transfer-Encoding", "chunked"), ("Connection", "close"), ("Connection", "upgrade"), ("Upgrade", "h2c")),
    *(("Range", "bytes=0-1"), ("X-Forwarded-For", "127.0.0.1"), ("Host", "other"), ("Cookie", "a" * 5000)),
    *(("hplm_probe", "1"), ("triton-grpc-protocol-admin", "x"), ("admin", "SECRET"), ("X", "\x01\x7f"), ("", "x")),
)
HEADER = "authorization"
# Models that the example proxy publishes over HTTP.
PUBLISHED = (wire.MODEL, wire.ROUTER, wire.CASCADE)


@dataclass(frozen=True)
class Attack:
    """A malformed request. Over gRPC `body` is the message, and `method` and `path` are not used.

    `changes` says what is wrong, `headers` are sent as they are. `secrets` are the secrets of the valid keys in it, and
    `is_well_formed` a request that must be answered.
    """

    number: int
    encoding: Encoding
    model: str
    changes: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)
    method: str = "POST"
    path: str = ""
    said_length: int | None = None
    hangs_up: bool = False
    is_well_formed: bool = False

    @property
    def raw(self) -> bytes:
        """The headers and the body."""
        return b"\n".join(
            [*(f"{name}: {value}".encode("latin-1", "replace") for name, value in self.headers), self.body]
        )


class AttackPlan:
    """Makes the attacks of a run. Safe to use from several threads."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target, self._seed = target, seed
        self._bases = sorted({caller.model for caller in target.callers})
        models = list(target.inputs)
        managing = [name for name in (wire.MANAGER,) if name in target.inputs]
        first = [name for name in (*self._bases, wire.ROUTER, wire.CASCADE) if name in target.inputs]
        # The models that clients call get most of the requests.
        self._models = [*first * 6, *managing[:1] * 14, *models]

    def attack(self, number: int) -> Attack:
        """Return attack `number`, the same each time."""
        rng = random.Random(f"{self._seed}-{number}")
        target = self._target
        encoding = rng.choices(ENCODINGS, (30, 25, 45))[0]
        model = rng.choice(self._models)
        if encoding != "gRPC" and model.startswith(wire.MANAGER) and rng.random() < 0.9:
            # The proxy publishes the manager over gRPC alone.
            encoding = "gRPC"
        caller = rng.choice(target.callers_of(model))
        values = target.values(model, caller, rng.choice(TEXTS[:2]))
        is_published = model in PUBLISHED if encoding != "gRPC" else model in (*PUBLISHED, caller.model, wire.MANAGER)
        is_well_formed = is_published and rng.random() < 0.05
        changes: list[str] = []
        if wire.REQUEST in values and not is_well_formed:
            values[wire.REQUEST] = self._manage(rng, changes)
        headers = [
            self._credentials(model, caller, values, changes, rng, is_right=is_well_formed or rng.random() < 0.6)
        ]
        request: Any = target.inputs[model].well_formed(values, rng)
        # Requests that are right for Triton reach hplm: manage requests with other changes, and requests with an odd text.
        is_right_for_triton = is_well_formed or rng.random() < (0.65 if wire.REQUEST in values else 0.25)
        if not is_right_for_triton:
            request = self._changed(request, changes, rng)
        elif wire.TEXT in values and not is_well_formed:
            changes.append("text")
            request = _text_value(request, rng)
        method, path, said_length, hangs_up = "POST", f"/v2/models/{model}/infer", None, False
        if encoding == "gRPC":
            body = grpc_message(request, rng, is_changed=not is_right_for_triton)
        else:
            extra, body = http_body(request, rng, binary=encoding == "HTTP binary", is_changed=not is_right_for_triton)
            headers += extra.items()
            if not is_well_formed and rng.random() < 0.12:
                kind = rng.randrange(4)
                changes.append(("method", "path", "header", "length")[kind])
                if kind == 0:
                    method = rng.choice(METHODS)
                elif kind == 1:
                    path = rng.choice(PATHS)
                elif kind == 2:
                    headers.append(rng.choice(ODD_HEADERS))
                else:
                    said_length = rng.choice((0, max(0, len(body) - 1), len(body) + 10, -1, 2**31, 2**63))
                    hangs_up = said_length > len(body)
        return Attack(
            number,
            encoding,
            model,
            tuple(changes),
            tuple(headers),
            body,
            method,
            path,
            said_length,
            hangs_up,
            is_well_formed,
        )

    def _manage(self, rng: random.Random, changes: list[str]) -> bytes:
        request: Any = manage_request(rng, list(self._target.victims), self._bases)
        for _ in range(rng.choice((0, 1, 1, 2))):
            request = mutated(request, rng)
            changes.append("manage request")
        raw = to_json(request)
        if rng.random() < 0.1:
            changes.append("manage bytes")
            raw = changed_bytes(raw, rng)
        return raw

    def _credentials(
        self,
        model: str,
        caller: Caller,
        values: dict[str, bytes],
        changes: list[str],
        rng: random.Random,
        *,
        is_right: bool,
    ) -> tuple[str, str]:
        """Return the header of the request, and set KEY and PROOF of `values`, right or wrong."""
        keys = self._target.keys
        right = caller.key
        if model.startswith(wire.MANAGER):
            right = rng.choice([keys.operators["admin"], *keys.operators.values(), *keys.managing.values()])
            if not changes:
                right = keys.operators["admin"]
        if is_right:
            return HEADER, f"Bearer {right}"
        changes.append("key")
        wrong = rng.choice(
            (
                near_miss(right, rng)[1],
                rng.choice(list(keys.of_strangers.values())),
                keys.revoked[caller.tenant],
                keys.expired[caller.tenant],
                rng.choice(list(keys.operators.values())) if right == caller.key else caller.key,
            )
        )
        place = rng.randrange(5)
        shown = wrong if wrong.isascii() and wrong.isprintable() else "x"
        if place == 0:
            return HEADER, f"Bearer {shown}"
        if place == 1:
            # KEY counts before the header.
            values[wire.KEY] = wrong.encode()
            return HEADER, f"Bearer {right}"
        if place == 2:
            return HEADER, rng.choice(
                (f"Basic {shown}", shown, f"Proof {shown}", "Bearer", f"Bearer {shown} {shown}", "," * 2000)
            )
        if place == 3:
            values[wire.PROOF] = wrong.encode()
            return HEADER, f"Bearer {rng.choice(list(keys.of_strangers.values()))}"
        values[wire.KEY] = rng.choice(ODD_TEXTS).encode("utf-8", "replace")
        return HEADER, f"Bearer {right}"

    def _changed(self, request: dict[str, Any], changes: list[str], rng: random.Random) -> Any:
        """Return the request with one to three changes that know Triton's protocol, or any JSON."""
        changed: Any = request
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if changes else rng.choice((1, 1, 2, 3))):
            if not isinstance(changed, dict) or rng.random() < 0.3:
                changes.append("any value")
                changed = mutated(changed, rng)
                continue
            name = rng.choice(list(_CHANGES))
            changes.append(name)
            changed = _CHANGES[name](changed, rng)
        return changed


def _at_input(request: dict[str, Any], rng: random.Random, **new: Any) -> dict[str, Any]:
    """Return the request with values of one of its inputs replaced."""
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        return {**request, "inputs": [{"name": wire.TEXT, **new}]}
    at = rng.randrange(len(inputs))
    old = inputs[at] if isinstance(inputs[at], dict) else {}
    return {**request, "inputs": [*inputs[:at], {**old, **new}, *inputs[at + 1 :]]}


def _inputs(request: dict[str, Any]) -> list[Any]:
    inputs = request.get("inputs")
    return list(inputs) if isinstance(inputs, list) else []


def _datatype(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return _at_input(
        request, rng, datatype=rng.choice((*DATATYPES, "STRING", "TYPE_STRING", "bytes", "FP8", "", "INVALID"))
    )


def _shape(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    size = rng.choice((*ODD_INTEGERS, 2, 64, 65, 4096))
    shape: list[Any] = rng.choice(([], [size], [1, size], [size, 1], [size, size], [1] * 9, [1, 1, size], [64, size]))
    return _at_input(request, rng, shape=shape)


def _batch(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the request with each input repeated, so that it has more texts than the model takes, or inputs differ."""
    count = rng.choice((2, 3, 64, 65, 1000))
    inputs = []
    for tensor in _inputs(request):
        if isinstance(tensor, dict) and isinstance(tensor.get("data"), list) and isinstance(tensor.get("shape"), list):
            times = count if rng.random() < 0.85 else 1
            shape = [times, *tensor["shape"][1:]] if tensor["shape"] else [times]
            tensor = {**tensor, "shape": shape, "data": repeated(tensor["data"], times)}
        inputs.append(tensor)
    return {**request, "inputs": inputs}


def _missing_input(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    inputs = _inputs(request)
    if inputs:
        del inputs[rng.randrange(len(inputs))]
    return {**request, "inputs": inputs}


def _repeated_input(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    inputs = _inputs(request)
    return {**request, "inputs": [*inputs, rng.choice(inputs)]} if inputs else request


def _further_input(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = (
        wire.PROOF,
        wire.KEY,
        wire.DISPATCH,
        wire.HIDDEN,
        wire.REQUEST_META,
        wire.REQUEST,
        "X",
        "",
        "KEY\0",
        "text",
    )
    datatype = rng.choice(DATATYPES)
    length = rng.choice((1, 5, 69, 70, 71, 140))
    data: list[Any] = [rng.choice(ODD_TEXTS)] if datatype == "BYTES" else [1] * length
    shape = [1, 1] if datatype == "BYTES" else [1, length]
    added = {"name": rng.choice(names), "datatype": datatype, "shape": shape, "data": data}
    return {**request, "inputs": [*_inputs(request), added]}


def _data(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return _at_input(
        request, rng, data=rng.choice(([], [odd_value(rng)], odd_value(rng), [None], ["a", "b"], "text", [["a"]]))
    )


def _text_value(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    long = "word " * rng.choice((300, 3000, 40_000))
    value = rng.choice((*ODD_TEXTS, long, Raw(b'"\xff\xfe\x80"'), b"\xc3\x28", "\x00" * 500, "\ud83d"))
    return _at_input(request, rng, data=[value])


def _parameter(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    value = rng.choice((odd_value(rng), *ODD_INTEGERS[:6], "1", True, 0.5, 1, 1000, "region"))
    added = {rng.choice(PARAMETERS): value}
    place = rng.randrange(3)
    if place == 0:
        return {**request, "parameters": added}
    if place == 1:
        return _at_input(request, rng, parameters=added)
    outputs = request.get("outputs")
    name = (
        outputs[0].get("name") if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict) else wire.LABEL
    )
    return {**request, "outputs": [{"name": name, "parameters": added}]}


def _outputs(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = (wire.LABEL, wire.LOGITS, wire.HIDDEN, wire.RESPONSE, "X", "", "LABEL\0", wire.LABEL)
    outputs: Any = [{"name": rng.choice(names)} for _ in range(rng.choice((0, 1, 2, 2, 40)))]
    return {**request, "outputs": rng.choice((outputs, outputs, odd_value(rng)))}


def _model(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {**request, "model_version": rng.choice(("1", "2", "-1", "0", "x", "9" * 40, "1.0", " 1"))}
    return {
        **request,
        "model_name": rng.choice(("", "nothing", "../hbert", "hbert\0", "HBERT", "a" * 5000, "manager", "hbert_upper")),
    }


def _id(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return {**request, "id": rng.choice((odd_value(rng), "a" * 10_000, "\r\nX: y", "\0"))}


def _again(request: dict[str, Any], rng: random.Random) -> Any:
    """Return the request with one of its keys twice."""
    key = rng.choice(list(request))
    return Pairs((*request.items(), (key, rng.choice((request[key], odd_value(rng))))))


def _open_length(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the request with an input of numbers whose length fits no other input."""
    length = rng.choice((0, 1, OPEN_LENGTH - 1, 500, 5000))
    return _at_input(
        request, rng, shape=[1, length], data=[1] * length, datatype=rng.choice(("INT32", "FP16", "FP32", "UINT8"))
    )


_CHANGES: Mapping[str, Any] = {
    "datatype": _datatype,
    "shape": _shape,
    "batch": _batch,
    "missing input": _missing_input,
    "repeated input": _repeated_input,
    "further input": _further_input,
    "data": _data,
    "text": _text_value,
    "parameter": _parameter,
    "outputs": _outputs,
    "model": _model,
    "id": _id,
    "repeated key": _again,
    "open length": _open_length,
}
