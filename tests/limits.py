"""Limits that a test meets on purpose: of the process, lowered for a while, or of a small disk of its own that is full."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@contextmanager
def limited(limit: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def run_with_mounts(module: str, disk: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE DISK` where it may mount a disk at DISK. Skips the test if this machine does not allow that."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own, and no other disk can be filled")
    disk.mkdir()
    command = [*unshare, sys.executable, "-m", module, str(disk)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def mount(disk: Path, options: str, *, check: bool = True) -> bool:
    """Whether it could be."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
    return subprocess.run(command, check=check).returncode == 0


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not a byte is left."""
    with (disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    (disk / "fill").unlink()
