"""Serialises infer requests to the bytes that go over gRPC, before a load starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hplm_client.infer_tensors import deadline_us
from tritonclient.grpc import service_pb2

from hplm.core import wire
from hplm_loadtest.workloads.load_plan import Requests

METHOD = "/inference.GRPCInferenceService/ModelInfer"


def infer_messages(requests: Requests, model: str = wire.MODEL, outputs: Sequence[str] = ()) -> list[bytes]:
    """Return one message to `model` per request, in order, with the outputs that `hplm_client` asks for, and with `outputs`.

    Requests have single texts.
    """
    assert not requests.pairs
    common = service_pb2.ModelInferRequest(model_name=model)
    for name in (wire.TEXT, wire.TENANT, *([wire.KEY] if requests.keys else [])):
        common.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
    for name in (wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, *outputs):
        common.outputs.add(name=name)
    head = common.SerializeToString()
    messages = []
    keys: Sequence[str | None] = requests.keys or [None] * len(requests)
    columns = (requests.tenants, requests.texts, requests.deadlines_s.tolist(), keys)
    for tenant, text, deadline_s, key in zip(*columns, strict=True):
        values = (text, tenant) if key is None else (text, tenant, key)
        own = service_pb2.ModelInferRequest(raw_input_contents=[_bytes_tensor(value) for value in values])
        if not math.isnan(deadline_s):
            own.parameters["timeout"].int64_param = deadline_us(deadline_s)
        # Two serialised messages, one after the other, are the merged message.
        messages.append(head + own.SerializeToString())
    return messages


def _bytes_tensor(value: str) -> bytes:
    encoded = value.encode()
    return len(encoded).to_bytes(4, "little") + encoded
