"""Writes a request, well-formed or not, as HTTP with JSON, as HTTP with binary tensors, or as a gRPC message."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal

from tritonclient.grpc import service_pb2

from hplm_loadtest.benchmarks.attacks.model_inputs import raw_bytes
from hplm_loadtest.benchmarks.attacks.mutations import ODD_INTEGERS, Pairs, changed_bytes, to_json

Encoding = Literal["HTTP JSON", "HTTP binary", "gRPC"]
HEADER_LENGTH = "Inference-Header-Content-Length"
# Shares of requests whose bytes are changed once more, after they were written.
CHANGED_BYTES, CHANGED_LENGTHS = 0.08, 0.25


def http_body(request: Any, rng: random.Random, *, binary: bool, is_changed: bool) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request over HTTP. `is_changed` allows changes of bytes and lengths."""
    if isinstance(request, dict):
        request = {key: value for key, value in request.items() if key != "model_name"}
    headers: dict[str, str] = {}
    tensors = b""
    if binary:
        request, tensors = _with_binary_inputs(request, rng, is_changed=is_changed)
    body = to_json(request)
    if is_changed and rng.random() < CHANGED_BYTES:
        body = changed_bytes(body, rng)
    if binary:
        length: int | str = len(body)
        if is_changed and rng.random() < CHANGED_LENGTHS:
            length = rng.choice(
                (*ODD_INTEGERS, len(body) + 1, len(body) - 1, len(body + tensors) + 1, "", "x", "1 2", "0x5")
            )
        headers[HEADER_LENGTH] = str(length)
        if is_changed and rng.random() < CHANGED_BYTES:
            tensors = changed_bytes(tensors, rng)
    return headers, body + tensors


def _with_binary_inputs(request: Any, rng: random.Random, *, is_changed: bool) -> tuple[Any, bytes]:
    """Return the request with the data of its inputs taken out, and the bytes of that data."""
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        return request, b""
    inputs, tensors = [], b""
    for tensor in request["inputs"]:
        if not isinstance(tensor, dict) or "data" not in tensor or rng.random() < 0.02 * is_changed:
            inputs.append(tensor)
            continue
        raw = raw_bytes(str(tensor.get("datatype")), tensor["data"])
        size: Any = len(raw)
        if is_changed and rng.random() < CHANGED_LENGTHS:
            change = rng.randrange(3)
            if change == 0:
                size = rng.choice((*ODD_INTEGERS, size + 1, size - 1, str(size), None, [size], 0.5))
            elif change == 1:
                raw = _wrong_length(raw, rng)
                size = len(raw)
            else:
                raw = raw[: rng.randrange(len(raw) + 1)]
        kept = {key: value for key, value in tensor.items() if key != "data"}
        given = kept.get("parameters")
        kept["parameters"] = (
            {**given, "binary_data_size": size} if isinstance(given, dict) else {"binary_data_size": size}
        )
        inputs.append(kept)
        tensors += raw
    return {**request, "inputs": inputs}, tensors


def _wrong_length(raw: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a BYTES tensor whose first text says a wrong length."""
    length = int.from_bytes(raw[:4], "little")
    wrong = rng.choice((0, max(0, length - 1), length + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4))
    return wrong.to_bytes(4, "little") + raw[4:]


def grpc_message(request: Any, rng: random.Random, *, is_changed: bool) -> bytes:
    """Return a message of ModelInfer. A value that no field can hold is left out. `is_changed`: see `http_body`."""
    values = _mapping(request)
    message = service_pb2.ModelInferRequest(
        model_name=_text(values.get("model_name")),
        model_version=_text(values.get("model_version", "")),
        id=_text(values.get("id", "")),
    )
    _set_parameters(message.parameters, values.get("parameters"))
    raws = []
    for given in _items_of(values.get("inputs")):
        tensor = _mapping(given)
        added = message.inputs.add(name=_text(tensor.get("name")), datatype=_text(tensor.get("datatype")))
        added.shape.extend(_integers(tensor.get("shape")))
        _set_parameters(added.parameters, tensor.get("parameters"))
        raw = raw_bytes(str(tensor.get("datatype")), tensor.get("data"))
        if is_changed and raw and rng.random() < CHANGED_LENGTHS:
            raw = rng.choice((_wrong_length(raw, rng), raw[:-1], raw + b"\0", raw * 2, b""))
        if is_changed and rng.random() < 0.1:
            _set_contents(added.contents, tensor.get("data"), rng)
            if rng.random() < 0.8:
                continue
        raws.append(raw)
    for given in _items_of(values.get("outputs")):
        output = _mapping(given)
        added = message.outputs.add(name=_text(output.get("name")))
        _set_parameters(added.parameters, output.get("parameters"))
    if is_changed and rng.random() < 0.05:
        raws = rng.choice((raws[:-1], [*raws, b""], [*raws, *raws], []))
    message.raw_input_contents.extend(raws)
    written = message.SerializeToString()
    return changed_bytes(written, rng) if is_changed and rng.random() < CHANGED_BYTES else written


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Pairs):
        return dict(value.items)
    return value if isinstance(value, dict) else {}


def _items_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Return a value as a text that protobuf takes: without single surrogates."""
    text = value if isinstance(value, str) else to_json(value).decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()


def _integers(value: Any) -> list[int]:
    return [int(one) for one in _items_of(value) if isinstance(one, int) and -(2**63) <= one < 2**63]


def _set_parameters(parameters: Any, values: Any) -> None:
    for key, value in _mapping(values).items():
        parameter = parameters[_text(key)]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            parameter.int64_param = value
        elif isinstance(value, int) and 0 <= value < 2**64:
            parameter.uint64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        elif value is not None:
            # A parameter of None has no value of any type.
            parameter.string_param = _text(value)


def _set_contents(contents: Any, data: Any, rng: random.Random) -> None:
    """Put data in the typed contents of a tensor, at times of a wrong type."""
    for value in _items_of(data):
        if isinstance(value, str):
            contents.bytes_contents.append(value.encode("utf-8", "replace"))
        elif isinstance(value, bool):
            contents.bool_contents.append(value)
        elif isinstance(value, int) and abs(value) < 2**31:
            rng.choice((contents.int_contents, contents.int64_contents, contents.fp32_contents)).append(value)
