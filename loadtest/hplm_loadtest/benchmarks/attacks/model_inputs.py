"""The inputs of served models as Triton describes them, and well-formed requests made from that description."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.cascade.dispatch import DispatchInput
from hplm.cascade.plan import Dispatch
from hplm.core import wire
from hplm.runtime.local_http import LOCAL_HTTP

NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
DATATYPES = (*NUMPY_TYPES, "BYTES", "BF16")
# The length of a dimension that a model leaves open.
OPEN_LENGTH = 3


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
        """Ask the server for a model's description. Raises OSError."""
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

    def well_formed(self, values: Mapping[str, bytes], rng: random.Random) -> dict[str, Any]:
        """Return a request in the form of Triton's JSON, with the model's name. `values` has the bytes of BYTES inputs.

        An optional input without a value is left out. TEXT is one text. The requested outputs are some of the model's.
        """
        inputs = []
        for tensor in self.inputs:
            if tensor.datatype == "BYTES" and tensor.name in values:
                shape = [1] * len(tensor.shape)
                data: list[Any] = [values[tensor.name].decode("utf-8", "replace")]
            elif tensor.is_optional:
                continue
            else:
                shape, data = list(tensor.shape), _numbers(tensor).tolist()
            inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data})
        made: dict[str, Any] = {"model_name": self.name, "id": "1", "parameters": {}, "inputs": inputs}
        wanted = [name for name in self.outputs if rng.random() < 0.5]
        if wanted or wire.LABEL in self.outputs:
            made["outputs"] = [{"name": name} for name in dict.fromkeys((*wanted, *self.outputs[:1]))]
        return made


def _numbers(tensor: InputTensor) -> npt.NDArray[Any]:
    """Return small numbers for an input of numbers, flat, and what a cascade sends as DISPATCH."""
    if tensor.name == wire.DISPATCH:
        return DispatchInput.of(Dispatch(2.0, 0.5, 8.0), 0.5, is_last=True).to_array()
    count = int(np.prod(tensor.shape))
    return (np.arange(count) % 2 + 1).astype(NUMPY_TYPES.get(tensor.datatype, np.int64))


def raw_bytes(datatype: str, data: Any) -> bytes:
    """Return the binary form of a tensor's values. Values that do not fit the type are left out."""
    values = data if isinstance(data, list) else [data]
    if datatype in NUMPY_TYPES:
        fitting = [value for value in values if isinstance(value, int | float) and abs(value) < 2**31]
        with np.errstate(all="ignore"):
            return np.array(fitting, np.float64).astype(NUMPY_TYPES[datatype]).tobytes()
    parts = []
    for value in values:
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if isinstance(content, bytes):
            parts.append(len(content).to_bytes(4, "little") + content)
    return b"".join(parts)
