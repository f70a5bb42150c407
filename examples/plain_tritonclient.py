"""Call hplm over HTTP with Triton's own client, not hplm's: .venv/bin/python examples/plain_tritonclient.py"""

import os

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

OUTPUTS = ("LABEL", "SCORE", "SPAN", "TRUNCATED", "LOGITS")

scheme, _, host = os.environ.get("HPLM_HTTP", "http://127.0.0.1:8000").partition("://")
client = triton.InferenceServerClient(host, ssl=scheme == "https")
inputs = []
for name, value in (("TEXT", "A moving, beautifully acted film."), ("TENANT", "films")):
    tensor = triton.InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=np.object_))
    inputs.append(tensor)
outputs = [triton.InferRequestedOutput(name) for name in OUTPUTS]
try:
    # `timeout` is the server's time in microseconds. A request that it cannot answer in this time is refused at once.
    result = client.infer("hbert", inputs, outputs=outputs, timeout=2_000_000)
except InferenceServerException as error:
    # The message is "CODE: ...", perhaps after Triton's own words. docs/calling.md lists the codes.
    raise SystemExit(f"refused: {error.message()}") from None
except OSError as error:
    raise SystemExit(f"no server answers at {scheme}://{host}: {error}") from None
for name in OUTPUTS:
    print(name, result.as_numpy(name)[0].tolist())
client.close()
