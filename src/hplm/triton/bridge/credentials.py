"""Reads what a stage's gate checks from a Triton request: the header `authorization`, the tensors KEY and PROOF."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hplm.access.gate import SERVER, Credentials, Gate
from hplm.access.key_ring import REFUSED
from hplm.access.keys import HEADER, from_header
from hplm.access.quotas import Charge
from hplm.core import wire
from hplm.errors import BadInputError, ConfigError, ForbiddenError
from hplm.triton.bridge import translate
from hplm.triton.bridge.translate import Inputs


def check_model(args: Mapping[str, str]) -> None:
    """Raise ConfigError if a model cannot serve with keys: its config has no PROOF or KEY, or keeps answers in a cache."""
    config = json.loads(args["model_config"])
    if {wire.KEY, wire.PROOF}.isdisjoint(tensor["name"] for tensor in config["input"]):
        raise ConfigError(
            f"{args['model_name']} has no input for keys, because an earlier version of hplm exported it: "
            "run `hplm build export --models MODELS --keep-settings --name NAME`, then start the server again"
        )
    if config.get("response_cache", {}).get("enable"):
        raise ConfigError(
            f"{args['model_name']} has response_cache, which would answer clients without a key: take it out of config.pbtxt"
        )


def admit(gate: Gate, request: Any, inputs: Inputs, tenants: Sequence[bytes]) -> list[str]:
    """Return the id of each text's key, see `Gate.admit`. Raises ForbiddenError."""
    if not gate.needs_keys:
        return _admitted(gate, request, tenants)
    keys, proofs = translate.optional(inputs, wire.KEY), translate.optional(inputs, wire.PROOF)
    shown = Credentials(
        header_of(request),
        None if keys is None else [bytes(key) for (key,) in keys.tolist()],
        None if proofs is None else [row.tobytes() for row in proofs],
    )
    return gate.admit(tenants, shown)


def admit_inner(
    gate: Gate, request: Any, inputs: Inputs, tenants: Sequence[bytes], versions: Sequence[int]
) -> list[str]:
    """Return the id of each text's key, see `Gate.admit_inner`. Raises ForbiddenError.

    With keys, also if a client claims that another model of this server asks.
    """
    if not gate.needs_keys:
        return _admitted(gate, request, tenants)
    proofs = translate.optional(inputs, wire.PROOF)
    shown = None if proofs is None else [row.tobytes() for row in proofs]
    return gate.admit_inner(tenants, versions, shown, is_inner=translate.is_inner(request))


def _admitted(gate: Gate, request: Any, tenants: Sequence[bytes]) -> list[str]:
    """Return the ids of a server without keys: SERVER for a question of `hplm serve` itself."""
    return [SERVER] * len(tenants) if translate.is_probe(request) else gate.admit(tenants, Credentials())


def inner_charges(gate: Gate, request: Any, inputs: Inputs, count: int) -> list[Charge] | None:
    """Return what another model of this server, which asks, has charged for each of `count` texts; None if a client asks.

    The request is one that `admit` has admitted. With keys, raise ForbiddenError if a client claims to be a model: only our
    models have proofs. Raises BadInputError.
    """
    if not translate.is_inner(request):
        return None
    if gate.needs_keys and wire.PROOF not in inputs:
        raise ForbiddenError(REFUSED)
    charges = [Charge.parse(written) for written in str(_parameters(request).get(wire.INNER)).split(",")]
    if len(charges) != count:
        raise BadInputError(f"{len(charges)} texts were charged, and {count} came")
    return charges


def single_key(request: Any) -> bytes:
    """Return the text of the key of a request that is not batched: its KEY, else the key in its header; empty without both."""
    inputs = translate.inputs(request)
    if wire.KEY in inputs:
        return translate.single(request, wire.KEY)
    return from_header(header_of(request))


def header_of(request: Any) -> bytes:
    """Return the header `authorization` that Triton has forwarded, empty without one.

    Over HTTP Triton keeps the capitals of the header's name. It puts headers behind the request's own parameters, so the
    last value is the header's. Raises BadInputError for parameters that cannot be read.
    """
    value = ""
    for name, given in _parameters(request).items():
        if name.lower() == HEADER and isinstance(given, str):
            value = given
    return value.encode("utf-8", "replace")


def _parameters(request: Any) -> dict[str, Any]:
    try:
        parameters: dict[str, Any] = json.loads(translate.parameters(request))
    except ValueError:
        raise BadInputError("the parameters of the request are not JSON") from None
    return parameters
