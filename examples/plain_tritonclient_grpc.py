"""Send many requests at once over gRPC with Triton's own client: .venv/bin/python examples/plain_tritonclient_grpc.py"""

import asyncio
import os

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

TEXTS = ("A moving, beautifully acted film.", "Two hours I will never get back.", "")


async def classify(client: triton.InferenceServerClient, tenant: str, text: str) -> str:
    """Return the label, or the error."""
    inputs = []
    for name, value in (("TEXT", text), ("TENANT", tenant)):
        tensor = triton.InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=np.object_))
        inputs.append(tensor)
    outputs = [triton.InferRequestedOutput("LABEL")]
    try:
        # `timeout` is the server's time in microseconds. `client_timeout` is the client's in seconds; over gRPC it cancels the
        # request, so it is well above the time of an answer.
        result = await client.infer("hbert", inputs, outputs=outputs, timeout=2_000_000, client_timeout=10.0)
    except InferenceServerException as error:
        # `status()` is gRPC's name, such as StatusCode.NOT_FOUND, and the message begins with hplm's code.
        return f"{error.status()} {error.message()}"
    return str(result.as_numpy("LABEL")[0, 0].decode())


async def main() -> None:
    scheme, _, host = os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001").partition("://")
    async with triton.InferenceServerClient(host, ssl=scheme == "grpcs") as client:
        for text, outcome in zip(
            TEXTS, await asyncio.gather(*(classify(client, "films", t) for t in TEXTS)), strict=True
        ):
            print(f"{text!r}: {outcome}")


asyncio.run(main())
