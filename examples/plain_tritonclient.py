"""The same without our client, for programs that speak to Triton already: python examples/plain_tritonclient.py"""

import os

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

address = os.environ.get("HPLM_HTTP", "http://127.0.0.1:8000").removeprefix("http://")
client = triton.InferenceServerClient(address)
inputs = []
for name, value in (("TEXT", "A moving, beautifully acted film."), ("TENANT", "films")):
    tensor = triton.InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=np.object_))
    inputs.append(tensor)
outputs = [triton.InferRequestedOutput(name) for name in ("LABEL", "SCORE", "SPAN", "LOGITS")]
try:
    # Microseconds that the server has: what it cannot answer by then it refuses at once.
    result = client.infer("hbert", inputs, outputs=outputs, timeout=2_000_000)
except InferenceServerException as error:
    # "... CODE: message", see the README's table of codes.
    raise SystemExit(f"refused: {error.message()}") from None
for name in ("LABEL", "SCORE", "SPAN", "LOGITS"):
    print(name, result.as_numpy(name)[0].tolist())
client.close()
