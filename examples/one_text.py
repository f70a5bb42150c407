"""Classify one text over HTTP. Run this while `make serve` runs: .venv/bin/python examples/one_text.py"""

import os

from hplm_client import Client

with Client(os.environ.get("HPLM_HTTP", "http://127.0.0.1:8000")) as client:
    answer = client.predict("films", "A moving, beautifully acted film.")
    print(f"{answer.label} ({answer.score:.3f})")
