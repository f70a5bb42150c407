"""A real server on a disk that is full, and on one that nobody may write on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limits import run_with_mounts

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]


def test_a_full_disk_and_a_read_only_one_are_said_cost_no_version_and_no_answer(tmp_path: Path) -> None:
    done = run_with_mounts("tests.triton.failures.small_disk", tmp_path / "disk", 800)
    assert done.returncode == 0, done.stderr
