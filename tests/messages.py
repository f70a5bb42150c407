"""Requests as bytes, and what the server must make of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import torch
import tritonclient.grpc
import tritonclient.http
from hplm_client.infer_tensors import input_tensors
from hplm_loadtest.scenarios.infer_messages import METHOD
from tritonclient.grpc import service_pb2

from hplm.core import wire
from hplm.core.roles import load_serving_settings
from hplm.engine.open_domain import open_lineage
from hplm.models.device import CPU, choose_dtype
from hplm.triton.launcher.server import TritonServer
from tests import tiny

TEXTS = tiny.sentences(3, seed=5, words=(3, 12))
# Of served fp32 logits against the reference on the same hidden states; two tenants differ thousands of times as much.
TOLERANCE = 1e-4


def message(tenant: str, text: str, model: str = wire.MODEL) -> bytes:
    """An infer request that asks for LABEL and LOGITS alone."""
    made = service_pb2.ModelInferRequest(model_name=model)
    for name, value in ((wire.TEXT, text), (wire.TENANT, tenant)):
        made.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        made.raw_input_contents.append(len(value.encode()).to_bytes(4, "little") + value.encode())
    for name in (wire.LABEL, wire.LOGITS):
        made.outputs.add(name=name)
    return bytes(made.SerializeToString())


def read(answer: bytes) -> tuple[str, npt.NDArray[np.float32]]:
    """Label and logits of the bytes of an answer."""
    parsed = service_pb2.ModelInferResponse.FromString(answer)
    raw = dict(zip((output.name for output in parsed.outputs), parsed.raw_output_contents, strict=True))
    return raw[wire.LABEL][4:].decode(), np.frombuffer(raw[wire.LOGITS], np.float32)


def ask_all(server: TritonServer, messages: Sequence[bytes], in_flight: int, channels: int = 4) -> list[bytes]:
    """Answers in order, `in_flight` requests under way over several connections; raises where one fails."""
    answers = [b""] * len(messages)
    left = iter(enumerate(messages))

    async def work(channel: Any) -> None:
        call = channel.unary_unary(METHOD)
        for index, one in left:
            answers[index] = await call(one, timeout=60)

    async def run() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{server.ports.grpc}"
        made = [grpc.aio.insecure_channel(address, options=options) for _ in range(channels)]
        await asyncio.gather(*(work(made[i % channels]) for i in range(in_flight)))
        for channel in made:
            await channel.close()

    asyncio.run(run())
    return answers


def looked_up(models: Path, texts: Sequence[str]) -> list[torch.Tensor]:
    """What is looked up over the root for texts."""
    settings = load_serving_settings(models).look_up
    store, base = tiny.opened(models.parent)
    root = store.table(settings.table, "root").parent
    domain = open_lineage(store, base, [root], miss=settings.miss, dtype=choose_dtype(settings.dtype, CPU))
    ids = [encoded.ids for encoded in base.load_text_encoder().encode(texts)]
    return [torch.from_numpy(domain.hidden_states(one, [len(one)]).astype(np.float32)) for one in ids]


def served_hidden(server: TritonServer, tenant: str, text: str) -> torch.Tensor:
    """What the second stage is handed for a text."""
    with closing(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")) as triton:
        result = triton.infer("hbert_plot", input_tensors(tritonclient.grpc, [(tenant, text, None)]))
        return torch.from_numpy(result.as_numpy(wire.HIDDEN)[0].astype(np.float32))
