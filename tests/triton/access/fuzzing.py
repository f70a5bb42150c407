"""The server under attack, and strategies of hypothesis that draw malformed requests for its models."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from hplm.cascade.dispatch import DispatchInput
from hplm.cascade.plan import Dispatch
from hplm.core import wire
from hplm.manage.service import ManageService
from hplm.quotas.limits import Limits
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.runtime.process import stat_of
from hplm.triton.launcher.ports import Ports
from hplm.triton.workarounds.dead_stubs import stubs_over
from tests.triton.access.near_misses import near_misses

Draw = Callable[[st.SearchStrategy[Any]], Any]
Encoding = Literal["HTTP JSON", "HTTP binary", "gRPC"]
ENCODINGS: tuple[Encoding, ...] = ("HTTP JSON", "HTTP binary", "gRPC")
HEADER, HEADER_LENGTH = "authorization", "Inference-Header-Content-Length"
# Models that the example proxy publishes over HTTP; over gRPC it publishes every first model.
PUBLISHED = (wire.MODEL, wire.ROUTER, wire.CASCADE)
# Limits that no attack reaches, so that the default limit does not refuse the good requests.
AMPLE = Limits(requests_per_s=1e6, tokens_per_s=1e9, concurrent=100_000)
OPEN_LENGTH = 3  # of a dimension that a model leaves open
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"),
    *("BYTES", "BF16", "STRING", "TYPE_STRING", "bytes", "", "INVALID"),
)
ODD_INTEGERS = (0, -1, 1, 255, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1)
ODD_TEXTS = (
    *("", " ", "\0", "\n", "a\0b", "../../../etc/passwd", "%s%n%x", "' OR 1=1 --", "-1", "null", "\u202e\ufeff"),
    *("\ud800", "é" * 300, "🙂" * 100, "TEXT", "hbert", "__class__", "A" * 4096, "*", "{}", "word " * 40_000),
)
# Bytes that stand in JSON as they are, whether they are JSON or not.
ODD_TOKENS = (
    *(b"NaN", b"Infinity", b"1e999", b"0x10", b"01", b"+1", b".5", b"1.", b"'text'", b"nul", b"", b",", b"]", b'"'),
    *(
        b'"\xff\xfe"',
        b'"\xc0\xaf"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"\\x"',
        b"9" * 400,
        b"\xef\xbb\xbf1",
    ),
    *(b"[" * 600 + b"]" * 600, b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"1" + b"0" * 5000),
)
PARAMETERS = (
    *("sequence_id", "sequence_start", "priority", "timeout", "headers", "binary_data_output", "binary_data_size"),
    *("classification", "shared_memory_region", "shared_memory_byte_size", "triton_final_response", "authorization"),
    *(wire.INNER, wire.PROBE, "max_tokens", ""),
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "post", "POST /", "CONNECT")
PATHS = (
    *("/v2", "/metrics", "/v2/health/ready", "/v2/models/stats", "/v2/logging", "/v2/trace/setting"),
    *("/v2/repository/index", "/v2/repository/models/hbert/unload", "/v2/cudasharedmemory/status"),
    *("/v2/models/hbert/config", "/v2/models/hbert/generate", "/v2/models/hbert/generate_stream"),
    *("/v2/models/hbert/versions/1/infer", "/v2/models/manager/infer", "/v2/models/hbert_upper/infer"),
    *("/v2/models/hbert/../manager/infer", "/v2/models/hbert%2f..%2fmanager/infer", "/v2/models/hbert/infer?a=b"),
    *("//v2/models/hbert/infer", "/v2/models/hbert/infer%00", "/V2/MODELS/HBERT/INFER"),
)
ODD_HEADERS = (
    *(("Content-Type", "application/x-www-form-urlencoded"), ("Content-Encoding", "gzip"), ("Range", "bytes=0-1")),
    *(("Content-Encoding", "identity, gzip"), ("Accept-Encoding", "gzip"), ("Expect", "200-ok"), ("Host", "other")),
    *(("Transfer-Encoding", "chunked"), ("Connection", "close"), ("Upgrade", "h2c"), ("Cookie", "a" * 5000)),
    *(("X-Forwarded-For", "127.0.0.1"), ("hplm_probe", "1"), ("admin", "SECRET"), ("X", "\x01\x7f"), ("", "x")),
)


@dataclass(frozen=True)
class InputTensor:
    """An input of a model. `shape` is that of a request of one text."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool


@dataclass(frozen=True)
class ModelInputs:
    """A model, its inputs and the names of its outputs."""

    name: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[str, ...]

    @classmethod
    def ask(cls, url: str, name: str) -> ModelInputs:
        """Ask the server for a model's description."""
        with LOCAL_HTTP.open(urllib.request.Request(f"{url}/v2/models/{name}/config"), timeout=30) as answer:
            config = json.load(answer)
        batch = [1] if config.get("max_batch_size") else []
        inputs = tuple(
            InputTensor(
                given["name"],
                given["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES"),
                tuple([*batch, *(OPEN_LENGTH if int(size) < 0 else int(size) for size in given["dims"])]),
                bool(given.get("optional")),
            )
            for given in config["input"]
        )
        return cls(name, inputs, tuple(given["name"] for given in config["output"]))

    def well_formed(self, values: Mapping[str, bytes]) -> dict[str, Any]:
        """Return a request in the form of Triton's JSON, with the model's name. `values` are those of BYTES inputs."""
        inputs = []
        for tensor in self.inputs:
            if tensor.datatype == "BYTES" and tensor.name in values:
                shape, data = [1] * len(tensor.shape), [values[tensor.name].decode("utf-8", "replace")]
            elif tensor.is_optional:
                continue
            else:
                shape, data = list(tensor.shape), [1] * int(np.prod(tensor.shape))
                if tensor.name == wire.DISPATCH:
                    data = DispatchInput.of(Dispatch(2.0, 0.5, 8.0), 0.5, is_last=True).to_array().tolist()
            inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data})
        return {"model_name": self.name, "id": "1", "inputs": inputs, "outputs": [{"name": self.outputs[0]}]}


@dataclass(frozen=True)
class Caller:
    """A tenant with a key, and the model of its base. `labels` are those that an answer may have."""

    tenant: str
    model: str
    key: str = field(repr=False)
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Keys:
    """The texts of keys other than those of the callers."""

    operators: Mapping[str, str] = field(repr=False)  # by role
    managing: Mapping[str, str] = field(repr=False)  # of tenants that may manage themselves
    revoked: Mapping[str, str] = field(repr=False)
    expired: Mapping[str, str] = field(repr=False)
    of_strangers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Target:
    """A running server with keys. Attacks may change or delete `victim`, which has no key."""

    ports: Ports
    models: Path
    log: Path
    inputs: Mapping[str, ModelInputs]
    callers: Sequence[Caller]
    keys: Keys
    victim: str

    @property
    def secrets(self) -> list[bytes]:
        """The secrets of all keys, which no answer and no log may hold."""
        held = self.keys
        named = (held.operators, held.managing, held.revoked, held.expired, held.of_strangers)
        texts = [*(caller.key for caller in self.callers), *(key for keys in named for key in keys.values())]
        return [secret_of(text) for text in texts]

    @property
    def names(self) -> list[bytes]:
        """The names of tenants that an answer may hold only if its request does."""
        return [name.encode() for name in (*(caller.tenant for caller in self.callers), *self.keys.of_strangers)]

    @property
    def called_models(self) -> list[str]:
        """The models that clients may call: encode stages refuse every client."""
        return [name for name in self.inputs if not name.endswith("_upper")]

    def caller_of(self, model: str) -> Caller:
        """Return a tenant that a model answers: one of its base, any for a model that routes."""
        own = [caller for caller in self.callers if re.fullmatch(f"{caller.model}(_[a-z]+)?", model)]
        return (own or list(self.callers))[0]

    def right_key(self, model: str) -> str:
        """Return a key that the model accepts."""
        return self.keys.operators["admin"] if model == wire.MANAGER else self.caller_of(model).key

    def wrong_keys(self, model: str) -> st.SearchStrategy[str]:
        """Draw keys that are nearly right, and right keys of someone else."""
        keys, caller = self.keys, self.caller_of(model)
        others = [*keys.of_strangers.values(), keys.revoked[caller.tenant], keys.expired[caller.tenant]]
        others += [one.key for one in self.callers if one.tenant != caller.tenant]
        others += [caller.key] if model == wire.MANAGER else keys.operators.values()
        return st.sampled_from(others) | near_misses(self.right_key(model)) | near_misses(self.right_key(model))

    def values(self, model: str, text: str = "A moving film.") -> dict[str, bytes]:
        """Return the values of the BYTES inputs of a good request."""
        if wire.REQUEST in (tensor.name for tensor in self.inputs[model].inputs):
            return {wire.REQUEST: b'{"action": "tenant.list", "limit": 3}'}
        return {wire.TEXT: text.encode(), wire.TENANT: self.caller_of(model).tenant.encode()}

    def processes(self) -> dict[str, int]:
        """Return the process ids of Triton and of its stubs. Several stubs of a model are numbered."""
        stubs = sorted(stubs_over(self.models).items())
        found = {f"{model} {number}": pid for model, pids in stubs for number, pid in enumerate(sorted(pids), 1)}
        return {"Triton": int(stat_of(next(iter(found.values())))[1]), **found} if found else {}


def secret_of(key: str) -> bytes:
    """Return the secret part of a key."""
    return key.split("_", 2)[2].encode()


def is_header(text: str) -> bool:
    """Return whether a header can hold a text."""
    return text.isascii() and text.isprintable()


@dataclass(frozen=True)
class Attack:
    """A request, in the bytes that are sent. Over gRPC `body` is the message, and `method` and `path` are not used.

    The server must answer a request that `is_well_formed`.
    """

    encoding: Encoding
    model: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    body: bytes
    method: str = "POST"
    path: str = ""
    said_length: int | None = None
    is_well_formed: bool = False

    @property
    def hangs_up(self) -> bool:
        return self.said_length is not None and self.said_length > len(self.body)

    @property
    def raw(self) -> bytes:
        """The headers and the body."""
        lines = [f"{name}: {value}".encode("latin-1", "replace") for name, value in self.headers]
        return b"\n".join([*lines, self.body])


ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(ODD_INTEGERS),
    st.sampled_from(ODD_TEXTS),
    st.sampled_from(ODD_TOKENS),
    st.sampled_from(
        (None, True, False, 1e308, 1e-320, -0.0, 10**30, [], {}, [[]], [None], {"": 0}, [1, "a", None, {}])
    ),
)


@st.composite
def changed(draw: Draw, value: Any) -> Any:
    """Draw the value with one change somewhere in it: another value, or an item that is missing, doubled or added."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else list(range(min(12, len(value))))
        at = draw(st.sampled_from(keys))
        made = dict(value) if isinstance(value, dict) else list(value)
        made[at] = draw(changed(value[at]))
        return made
    if isinstance(value, dict):
        kind = draw(st.integers(0, 3))
        name = draw(st.sampled_from([*value, "unknown", "", "action", "__proto__", "x" * 300, "\0"]))
        if kind == 0:
            return {key: one for key, one in value.items() if key != name}
        # A key that differs in a character JSON leaves out, so that the written object has it twice.
        return {**value, (Twice(name) if kind == 1 else name): draw(ODD_VALUES)}
    if isinstance(value, list):
        return draw(st.sampled_from(([], value[:-1], value * 2, value * 70, [value], [*value, None])))
    if isinstance(value, str):
        return draw(st.sampled_from(ODD_TEXTS) | st.sampled_from((value[:-1], value * 40, value.swapcase(), [value])))
    return draw(ODD_VALUES)


class Twice(str):
    """A key of an object that is not equal to the same key, so that the JSON has the key twice."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def to_json(value: Any) -> bytes:
    """Return a value in JSON; bytes stand in it as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return (
            b"{" + b",".join(json.dumps(str(key)).encode() + b":" + to_json(one) for key, one in value.items()) + b"}"
        )
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    return json.dumps(value).encode()


@st.composite
def changed_bytes(draw: Draw, content: bytes) -> bytes:
    """Draw the bytes with a piece of them changed, left out, put in or repeated."""
    at = draw(st.integers(0, len(content)))
    end = min(len(content), at + draw(st.sampled_from((1, 4, 30))))
    put_in = draw(st.sampled_from((b"", content[at:end] * 2, b"\xff", b"\0\0\0\0", b"\x80\x80\x80")))
    return content[:at] + put_in + content[end if draw(st.booleans()) else at :]


@st.composite
def manage_requests(draw: Draw, victim: str, bases: list[str]) -> dict[str, Any]:
    """Draw a request of any action with its required fields and some of the others.

    The tenant is the victim or unknown, so that the request harms no other tenant.
    """
    names = {"tenant": [victim, "nobody"], "base": bases, "levels": bases, "domain": ["nowhere"], "parent": ["root"]}
    action = draw(st.sampled_from(sorted(ManageService.REQUESTS)))
    return {"action": action, **draw(fields_of(ManageService.REQUESTS[action], names))}


def fields_of(kind: type[Any], names: Mapping[str, list[str]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the JSON of a class of manage requests: the required fields, and some of the others."""
    hints = get_type_hints(kind)
    drawn = {one.name: value_of(one.name, hints[one.name], names) for one in dataclasses.fields(kind)}
    required = {one.name for one in dataclasses.fields(kind) if is_required(one)}
    optional = {name: drawn[name] for name in drawn if name not in required}
    return st.fixed_dictionaries({name: drawn[name] for name in drawn if name in required}, optional=optional)


def is_required(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def value_of(name: str, hint: Any, names: Mapping[str, list[str]]) -> st.SearchStrategy[Any]:
    """Draw a JSON value of a field's type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return fields_of(hint, names)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([value_of(name, one, names) for one in inner if one is not types.NoneType])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(value_of(name, inner[0], names), min_size=1, max_size=2)
    if hint is bool:
        return st.booleans()
    if hint in (int, float):
        return st.sampled_from((0.5, 1e-3, 1, 2, 100))
    texts = ("c0ffee", "none", "", "0" * 64, "texts.jsonl", "aGVsbG8=", "/etc/passwd", "../../registry.sqlite", "auto")
    return st.sampled_from(names.get(name) or texts)


@st.composite
def attacks(draw: Draw, target: Target) -> Attack:
    """Draw a malformed request, at times one that is right and must be answered."""
    encoding: Encoding = draw(st.sampled_from(ENCODINGS))
    model = draw(st.sampled_from([*PUBLISHED, *(caller.model for caller in target.callers), *target.inputs]))
    if draw(st.integers(0, 2)) == 0:
        # The proxy publishes the manager over gRPC alone.
        model, encoding = wire.MANAGER, "gRPC"
    is_public = model in PUBLISHED or (encoding == "gRPC" and (model in target.called_models and "_" not in model))
    is_right = is_public and draw(st.integers(0, 11)) == 0
    values, right = target.values(model), target.right_key(model)
    headers = [(HEADER, f"Bearer {right}")]
    if not is_right and draw(st.integers(0, 2)) == 0:
        headers = draw(wrong_credentials(target, model, values))
    if wire.REQUEST in values and not is_right:
        bases = sorted({caller.model for caller in target.callers})
        request = draw(manage_requests(target.victim, bases))
        for _ in range(draw(st.integers(0, 2))):
            request = draw(changed(request))
        values[wire.REQUEST] = to_json(request)
    request = target.inputs[model].well_formed(values)
    # A manage request that is right for Triton reaches hplm with the changes above.
    is_changed = not is_right and (wire.REQUEST not in values or draw(st.booleans()))
    if is_changed:
        for _ in range(draw(st.integers(1, 3))):
            request = draw(st.one_of([change(request) for change in CHANGES])) if isinstance(request, dict) else request
    attack = draw(encoded(encoding, model, headers, request, is_changed=is_changed))
    return dataclasses.replace(attack, is_well_formed=is_right)


@st.composite
def wrong_credentials(draw: Draw, target: Target, model: str, values: dict[str, bytes]) -> list[tuple[str, str]]:
    """Draw a header with a wrong key, or put the key into KEY or PROOF of `values`."""
    wrong, right = draw(target.wrong_keys(model)), target.right_key(model)
    shown = wrong if is_header(wrong) else "x"
    place = draw(st.sampled_from(("header", "KEY", "scheme", "PROOF")))
    if place == "header":
        return [(HEADER, f"Bearer {shown}")]
    if place == "scheme":
        return [(HEADER, draw(st.sampled_from((f"Basic {shown}", shown, f"Proof {shown}", "Bearer", "," * 2000))))]
    values[wire.KEY if place == "KEY" else wire.PROOF] = wrong.encode()
    of_stranger = next(iter(target.keys.of_strangers.values()))
    return [(HEADER, f"Bearer {right if place == 'KEY' else of_stranger}")]


def at_input(new: st.SearchStrategy[dict[str, Any]]) -> Callable[[dict[str, Any]], st.SearchStrategy[Any]]:
    """Return a change that replaces values of one of the inputs."""

    def change(request: dict[str, Any]) -> st.SearchStrategy[Any]:
        inputs = request.get("inputs")
        if not isinstance(inputs, list) or not inputs:
            return new.map(lambda values: {**request, "inputs": [{"name": wire.TEXT, **values}]})

        def replaced(at: int, values: dict[str, Any]) -> dict[str, Any]:
            old = inputs[at] if isinstance(inputs[at], dict) else {}
            return {**request, "inputs": [*inputs[:at], {**old, **values}, *inputs[at + 1 :]]}

        return st.builds(replaced, st.integers(0, len(inputs) - 1), new)

    return change


def batch(request: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Repeat the inputs, so that the request has more texts than the model takes."""

    def repeated(times: int) -> dict[str, Any]:
        inputs = [
            {**one, "shape": [times, *one["shape"][1:]], "data": one["data"] * times}
            for one in request.get("inputs") or ()
            if isinstance(one, dict) and isinstance(one.get("shape"), list) and isinstance(one.get("data"), list)
        ]
        return {**request, "inputs": inputs}

    return st.sampled_from((2, 3, 64, 65, 1000)).map(repeated)


def more_inputs(request: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Add an input: a proof, a key, an input of an inner model, or an unknown input."""
    names = (
        wire.PROOF,
        wire.KEY,
        wire.DISPATCH,
        wire.HIDDEN,
        wire.REQUEST_META,
        wire.REQUEST,
        wire.TEXT,
        "X",
        "",
        "KEY\0",
    )
    inputs = request.get("inputs")
    held = inputs if isinstance(inputs, list) else []
    added = st.builds(
        lambda name, text, length: (
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            if length is None
            else {"name": name, "datatype": "UINT8", "shape": [1, length], "data": [1] * length}
        ),
        st.sampled_from(names),
        st.sampled_from(ODD_TEXTS),
        st.sampled_from((None, 1, 5, 69, 70, 71, 140)),
    )
    return added.map(lambda one: {**request, "inputs": [*held, one]})


SHAPES = st.sampled_from((*ODD_INTEGERS, 2, 64, 65, 4096)).flatmap(
    lambda size: st.sampled_from(([], [size], [1, size], [size, 1], [size, size], [1] * 9, [1, 1, size], [64, size]))
)
PARAMETER = st.dictionaries(st.sampled_from(PARAMETERS), ODD_VALUES | st.integers(0, 1), min_size=1, max_size=2)
NAMES = st.sampled_from(("", "nothing", "../hbert", "hbert\0", "HBERT", "a" * 5000, "manager", "hbert_upper"))
OUTPUTS = st.lists(
    st.builds(
        lambda name, parameters: {"name": name, "parameters": parameters},
        st.sampled_from((wire.LABEL, wire.LOGITS, wire.HIDDEN, wire.RESPONSE, "X", "", "LABEL\0")),
        PARAMETER,
    ),
    max_size=3,
)
# Changes that know Triton's protocol, and any change of the JSON.
CHANGES: tuple[Callable[[dict[str, Any]], st.SearchStrategy[Any]], ...] = (
    changed,
    at_input(st.fixed_dictionaries({"datatype": st.sampled_from(DATATYPES)})),
    at_input(st.fixed_dictionaries({"shape": SHAPES})),
    at_input(st.fixed_dictionaries({"data": ODD_VALUES})),
    at_input(st.fixed_dictionaries({"data": st.sampled_from(ODD_TEXTS).map(lambda text: [text])})),
    at_input(st.fixed_dictionaries({"parameters": PARAMETER})),
    at_input(st.sampled_from((0, 1, 2, 500)).map(lambda n: {"shape": [1, n], "data": [1] * n, "datatype": "INT32"})),
    batch,
    more_inputs,
    lambda request: PARAMETER.map(lambda one: {**request, "parameters": one}),
    lambda request: OUTPUTS.map(lambda outputs: {**request, "outputs": outputs}),
    lambda request: NAMES.map(lambda name: {**request, "model_name": name}),
    lambda request: st.sampled_from(("1", "2", "-1", "x", "9" * 40)).map(lambda v: {**request, "model_version": v}),
    lambda request: (ODD_VALUES | st.just("\r\nX: y")).map(lambda value: {**request, "id": value}),
)


@st.composite
def encoded(
    draw: Draw,
    encoding: Encoding,
    model: str,
    headers: Sequence[tuple[str, str]],
    request: Any,
    *,
    is_changed: bool,
) -> Attack:
    """Write a request in an encoding. `is_changed` allows changes of the bytes, of lengths, and of the rest of HTTP."""
    rare = st.integers(0, 7).map(lambda number: is_changed and number == 0)
    method, path, said_length = "POST", f"/v2/models/{model}/infer", None
    own = list(headers)
    if encoding == "gRPC":
        body = grpc_message(request, wrong_lengths=draw(rare))
    else:
        shown = (
            {key: one for key, one in request.items() if key != "model_name"} if isinstance(request, dict) else request
        )
        body = to_json(shown)
        if encoding == "HTTP binary":
            body, tensors = binary_body(shown, wrong_lengths=draw(rare))
            length: object = draw(st.sampled_from((*ODD_INTEGERS, len(body) + 1, "", "x"))) if draw(rare) else len(body)
            own.append((HEADER_LENGTH, str(length)))
            body += tensors
    if draw(rare):
        body = draw(changed_bytes(body))
    if encoding != "gRPC" and draw(rare):
        kind = draw(st.integers(0, 3))
        method = draw(st.sampled_from(METHODS)) if kind == 0 else method
        path = draw(st.sampled_from(PATHS)) if kind == 1 else path
        own += [draw(st.sampled_from(ODD_HEADERS))] if kind == 2 else []
        lengths = (0, max(0, len(body) - 1), len(body) + 10, -1, 2**31, 2**63)
        said_length = draw(st.sampled_from(lengths)) if kind == 3 else None
    return Attack(encoding, model, tuple(own), body, method, path, said_length)


def raw_bytes(datatype: str, data: Any) -> bytes:
    """Return the binary form of a tensor's values. Values that do not fit the type are left out."""
    values = data if isinstance(data, list) else [data]
    kind = None if datatype in ("BYTES", "BF16") else triton_to_np_dtype(datatype)
    if kind is not None:
        fitting = [value for value in values if isinstance(value, int | float) and abs(value) < 2**31]
        with np.errstate(all="ignore"):
            return np.array(fitting, np.float64).astype(kind).tobytes()
    parts = []
    for value in values:
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if isinstance(content, bytes):
            parts.append(len(content).to_bytes(4, "little") + content)
    return b"".join(parts)


def tensors_of(request: Any, *, wrong_lengths: bool) -> list[tuple[dict[str, Any], bytes]]:
    """Return the inputs of a request, each with its bytes; with a first text that says another length if asked."""
    inputs = request.get("inputs") if isinstance(request, dict) else None
    found = []
    for one in inputs if isinstance(inputs, list) else ():
        tensor = one if isinstance(one, dict) else {}
        raw = raw_bytes(str(tensor.get("datatype")), tensor.get("data"))
        found.append((tensor, (2**32 - 4).to_bytes(4, "little") + raw[4:] if wrong_lengths else raw))
    return found


def binary_body(request: Any, *, wrong_lengths: bool) -> tuple[bytes, bytes]:
    """Return the JSON of a request whose inputs follow in binary form, and the bytes of the inputs."""
    if not isinstance(request, dict):
        return to_json(request), b""
    inputs, tensors = [], b""
    for tensor, raw in tensors_of(request, wrong_lengths=wrong_lengths):
        kept = {key: value for key, value in tensor.items() if key != "data"}
        given = kept.get("parameters")
        kept["parameters"] = {**(given if isinstance(given, dict) else {}), "binary_data_size": len(raw)}
        inputs.append(kept)
        tensors += raw
    return to_json({**request, "inputs": inputs}), tensors


def grpc_message(request: Any, *, wrong_lengths: bool) -> bytes:
    """Return a message of ModelInfer. A value that no field can hold is left out."""
    values = request if isinstance(request, dict) else {}
    message = service_pb2.ModelInferRequest()
    for name in ("model_name", "model_version", "id"):
        setattr(message, name, as_text(values.get(name, "")))
    set_parameters(message.parameters, values.get("parameters"))
    for tensor, raw in tensors_of(values, wrong_lengths=wrong_lengths):
        added = message.inputs.add(name=as_text(tensor.get("name")), datatype=as_text(tensor.get("datatype")))
        shape = tensor.get("shape")
        added.shape.extend(one for one in (shape if isinstance(shape, list) else ()) if fits(one))
        set_parameters(added.parameters, tensor.get("parameters"))
        message.raw_input_contents.append(raw)
    outputs = values.get("outputs")
    for one in outputs if isinstance(outputs, list) else ():
        output = one if isinstance(one, dict) else {}
        set_parameters(message.outputs.add(name=as_text(output.get("name"))).parameters, output.get("parameters"))
    return bytes(message.SerializeToString())


def fits(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def as_text(value: Any) -> str:
    """Return a value as a text that protobuf takes, without single surrogates."""
    text = value if isinstance(value, str) else to_json(value).decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()


def set_parameters(parameters: Any, values: Any) -> None:
    for key, value in values.items() if isinstance(values, dict) else ():
        kind = "bool" if isinstance(value, bool) else "int64" if fits(value) else "double"
        kind = kind if isinstance(value, int | float) else "string"
        with suppress(OverflowError):
            setattr(parameters[as_text(key)], f"{kind}_param", as_text(value) if kind == "string" else value)
