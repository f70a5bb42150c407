"""Forks of a client, tested in a new process: a process that has served gRPC, as other tests do, cannot fork safely."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKS = Path(__file__).with_name("forks.py")


def test_clients_and_forks() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FORKS)]
    done = subprocess.run(command, cwd=FORKS.parents[4], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
