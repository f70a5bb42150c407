"""A user's type checker finds wrong calls of a client and accepts right ones."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

PROGRAM = """
from hplm.errors import HplmError
from hplm_client import AsyncClient, Client, ManageClient, Prediction

client = Client("grpc://127.0.0.1:8001", timeout_s=3)
pairs = [["films", "good"]]
mixed = [("films", "good"), ("alike", "one", "two")]
nones = [("films", "good"), ("films", "good", None)]
answer: Prediction = client.predict("films", "good", deadline_s=0.2)
label: str | None = answer.label
for requests in (pairs, mixed, nones):
    client.predict_many(requests)
client.predict_many(pairs)
client.predict_many(mixed)
client.predict_many(nones)
client.predict_many(("films", text) for text in ("a", "b"))
answers: list[Prediction | HplmError] = list(client.predict_many(mixed, on_error="yield"))
Client(timeout=3)  # wrong
client.predict(1, "good")  # wrong
client.predict("films", "good", None, True)  # wrong
client.predict_many(["films"])  # wrong
client.predict_many(mixed, on_error="ignore")  # wrong
AsyncClient(headers=[])  # wrong
answer.labell  # wrong
"""


@pytest.mark.timeout(900)
def test_mypy_finds_the_wrong_calls_of_a_program_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    flagged = {int(number) for number in re.findall(r"program\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert flagged == wrong, done.stdout + done.stderr
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == {"program.py"}


@pytest.mark.parametrize("package", ["hplm", "hplm_cli", "hplm_client", "hplm_builder", "hplm_loadtest"])
def test_a_package_is_marked_as_typed(package: str) -> None:
    assert (files(package) / "py.typed").is_file()
