"""Send requests with a deadline; a request that cannot meet it is refused at once: .venv/bin/python examples/deadlines.py"""

import os
import time

from hplm_client import Client

from hplm.errors import DeadlineError

with Client(os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001")) as client:
    for deadline_s in (5.0, 1e-6):
        start_s = time.perf_counter()
        try:
            outcome = client.predict("films", "A moving, beautifully acted film.", deadline_s=deadline_s).label
        except DeadlineError as error:
            outcome = error.code
        print(f"deadline {deadline_s:g} s: {outcome} after {1000 * (time.perf_counter() - start_s):.1f} ms")
