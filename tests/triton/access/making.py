"""A server that needs keys, and direct calls of each of its models over both protocols."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from hplm.access.keys import header_of, new_key
from hplm.cascade.dispatch import DispatchInput
from hplm.cascade.plan import Dispatch
from hplm.core import wire
from hplm.core.settings import ManagerSettings
from hplm.errors import HplmError, from_wire
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_cli.serve_access import choose_access, record_last_uses
from tests import tiny
from tests.triton.cascade.making import Making, levels_over, make_bases, table_of

Inputs = dict[str, npt.NDArray[Any]]
PROTOCOLS = ("http", "grpc")
# A tenant of each base, by the model of the base; and a tenant that all levels of a cascade answer.
OWN = {"small": "ina", "middle": "mia", "hbert": "tia"}
CASCADED = "alpha"
# The models that take texts of a base's tenants.
TEXT_MODELS = {
    "small": ("small", "small_plot", "small_dispatch"),
    "middle": ("middle", "middle_plot", "middle_dispatch"),
    "hbert": ("hbert", "hbert_plot", "hbert_dispatch"),
}
INNER_MODELS = {"small": "small_upper", "middle": "middle_upper", "hbert": "hbert_upper"}
CALLING = ("hplm", "cascade")


@dataclass(frozen=True)
class Place:
    """A running server, its store, and the folder of its models."""

    server: TritonServer
    store: Store
    models: Path

    def add_key(self, tenant: str | None, role: str = "infer", *, expires_s: float | None = None) -> str:
        """Create a key and return its text. `tenant` is None for an operator's key."""
        key = new_key()
        with closing(Registry.open(self.store)) as registry:
            registry.add_key(AccessKey(key.id, tenant, role, key.sha256(), time.time(), expires_s))
        return key.text()

    def revoke(self, key: str) -> None:
        with closing(Registry.open(self.store)) as registry:
            registry.revoke_key(key.split("_")[1], time.time())


@contextmanager
def serving(folder: Path) -> Iterator[Place]:
    """Serve three bases, a manager, and two look-up processes of each base of two stages, with keys."""
    manager = ManagerSettings("", "", "")
    models = make_bases(folder, manager, look_up_instances=2)
    making = Making.over(folder)
    making.cascade(CASCADED, "alpha", 1, levels_over("small", "middle", "tiny", cut_off=0.999))
    for seed, (base, tenant) in enumerate(zip(making.bases.values(), OWN.values(), strict=True), 2):
        tiny.make_tenant(making.store, base, tenant, seed, "alpha", domain=table_of(base.config))
    with keyed_server(models, folder / "triton.log") as server:
        server.wait_ready()
        yield Place(server, making.store, models)


@contextmanager
def keyed_server(models: Path, log: Path) -> Iterator[TritonServer]:
    """Start a Triton that needs keys, as `hplm serve --keys` does."""
    access = choose_access(keys=True, insecure=False, host="127.0.0.1", flags=[])
    uses = record_last_uses(access, models)
    assert uses is not None
    environment = access.environment
    with (
        closing(uses),
        TritonServer(models, free_ports(), log=log, tied=True, flags=access.flags, environment=environment) as server,
    ):
        yield server


def texts(tenants: Sequence[str]) -> Inputs:
    """One text for each tenant."""
    return {wire.TEXT: as_bytes(["the red cat sings"] * len(tenants)), wire.TENANT: as_bytes(tenants)}


def as_bytes(values: Sequence[str]) -> npt.NDArray[Any]:
    return np.array([[value.encode()] for value in values], dtype=np.object_)


def inputs_of(model: str, tenant: str) -> Inputs:
    """Inputs that a model answers if its server needs no keys."""
    if model == wire.MANAGER:
        return {wire.REQUEST: np.array([b'{"action": "tenant.list"}'], dtype=np.object_)}
    if model.endswith("_upper"):
        features: npt.NDArray[Any] = np.zeros((1, 3, 32), np.float16)
        name = wire.HIDDEN
        if model.startswith("middle"):
            features, name = np.ones((1, 3, 2), np.int32), wire.IDS
        return {name: features, wire.TOKENS: np.zeros((1, 3, 3), np.int32), wire.TENANT: as_bytes([tenant])}
    made = texts([tenant])
    if model.endswith("_dispatch"):
        made[wire.DISPATCH] = DispatchInput.of(Dispatch(2.0, 0.5, 8.0), 0.5, is_last=True).to_array()[None]
    return made


def with_key(inputs: Inputs, *keys: str) -> Inputs:
    """The same inputs with a key for each text."""
    given = as_bytes(keys)
    return {**inputs, wire.KEY: given[0] if wire.REQUEST in inputs else given}


def bearer(key: str) -> dict[str, str]:
    return header_of(key)


def ask(
    place: Place,
    protocol: str,
    model: str,
    inputs: Inputs,
    headers: Mapping[str, str] | None = None,
    outputs: Sequence[str] = (),
    class_count: int = 0,
) -> Inputs | HplmError:
    """Call a model directly. Returns its outputs, by default all, or its error. `class_count` is for each of `outputs`."""
    module = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    port = place.server.ports.grpc if protocol == "grpc" else place.server.ports.http
    tensors = []
    for name, value in inputs.items():
        tensor = module.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    wanted = [module.InferRequestedOutput(name, class_count=class_count) for name in outputs] or None
    with closing(module.InferenceServerClient(f"127.0.0.1:{port}")) as triton:
        try:
            result = triton.infer(model, tensors, outputs=wanted, headers=dict(headers or {}))
        except InferenceServerException as error:
            if (typed := from_wire(error.message())) is None:
                raise
            return typed
        response = result.get_response()
        names = (
            [one.name for one in response.outputs]
            if protocol == "grpc"
            else [one["name"] for one in response["outputs"]]
        )
        return {name: result.as_numpy(name) for name in names}


def answered(result: Inputs | HplmError) -> Inputs:
    assert not isinstance(result, HplmError), repr(result)
    return result


def ask_stream(place: Place, model: str, inputs: Inputs, headers: Mapping[str, str]) -> Inputs | HplmError:
    """Do as `ask` over a gRPC stream, and return the first answer alone."""
    first: SimpleQueue[tuple[Any, InferenceServerException | None]] = SimpleQueue()
    tensors = []
    for name, value in inputs.items():
        tensor = tritonclient.grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    with closing(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{place.server.ports.grpc}")) as triton:
        triton.start_stream(lambda result, error: first.put((result, error)), headers=dict(headers))
        triton.async_stream_infer(model, tensors)
        result, error = first.get(timeout=20)
        triton.stop_stream()
    if error is None:
        return {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}
    if (typed := from_wire(error.message())) is None:
        raise error
    return typed


def looked_up(place: Place, base: str, tenant: str, key: str) -> Inputs:
    """The inputs of the encode stage of a base's model: what the look-up stage answers to a client, and the tenant."""
    outputs = answered(ask(place, "grpc", f"{base}_plot", texts([tenant]), bearer(key)))
    del outputs[wire.TRUNCATED]
    return {**outputs, wire.TENANT: as_bytes([tenant])}
