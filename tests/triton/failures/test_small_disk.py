"""A real server on a disk that is full, and on one that nobody may write on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]


def test_a_full_disk_and_a_read_only_one_are_said_cost_no_version_and_no_answer(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own, and no other disk can be filled")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*unshare, sys.executable, "-m", "tests.triton.failures.small_disk", str(disk)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
