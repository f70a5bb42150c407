"""A stopped benchmark leaves no process and no folder behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import until

BENCHMARK = """
import tempfile, time
from hplm_loadtest.scenarios.grpc_load import _PROCESSES
from hplm_loadtest.scenarios.stop_signals import stop_on_signals
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__main__":
    stop_on_signals("bench")
    with tempfile.TemporaryDirectory(prefix="hplm-variant-"), ProcessPoolExecutor(1, _PROCESSES) as pool:
        pool.submit(print, "begun", flush=True).result()
        pool.submit(time.sleep, 300).result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_generators_and_removes_folders_with_one_line_and_a_status(
    tmp_path: Path, number: signal.Signals
) -> None:
    script, said = tmp_path / "benchmark.py", tmp_path / "said"
    script.write_text(BENCHMARK)
    with (
        # Not below tmp_path, because the path of a generator's socket would be too long.
        tempfile.TemporaryDirectory() as folder,
        said.open("w") as out,
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        ) as running,
    ):
        until(lambda: said.read_text() == "begun\n")
        running.send_signal(number)
        _, errors = running.communicate(timeout=30)
        assert running.returncode == 128 + number
        assert errors == f"hplm bench: stopped by {number.name}\n"
        assert not [*Path(folder).glob("hplm-variant-*")]
