"""Without our client, many requests at once over gRPC: .venv/bin/python examples/plain_tritonclient_grpc.py"""

import asyncio
import os

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

TEXTS = ("A moving, beautifully acted film.", "Two hours I will never get back.", "")


async def classify(client: triton.InferenceServerClient, tenant: str, text: str) -> str:
    """The label, or why there is none."""
    inputs = []
    for name, value in (("TEXT", text), ("TENANT", tenant)):
        tensor = triton.InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=np.object_))
        inputs.append(tensor)
    outputs = [triton.InferRequestedOutput("LABEL")]
    try:
        # `timeout`: microseconds that the server has. `client_timeout`: seconds until we give up; over gRPC that cancels, so
        # it is well above what answers take.
        result = await client.infer("hbert", inputs, outputs=outputs, timeout=2_000_000, client_timeout=10.0)
    except InferenceServerException as error:
        # Here `status()` is gRPC's name, such as StatusCode.NOT_FOUND, and the message begins with hplm's code.
        return f"{error.status()} {error.message()}"
    return str(result.as_numpy("LABEL")[0, 0].decode())


async def main() -> None:
    scheme, _, host = os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001").partition("://")
    async with triton.InferenceServerClient(host, ssl=scheme == "grpcs") as client:
        for text, said in zip(TEXTS, await asyncio.gather(*(classify(client, "films", t) for t in TEXTS)), strict=True):
            print(f"{text!r}: {said}")


asyncio.run(main())
