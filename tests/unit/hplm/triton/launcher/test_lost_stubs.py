"""A process that its parent does not reap is seen as lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hplm.triton.launcher.lost_stubs import LOST_S, LostStubs

# Starts a process, says so, ends the process, and reaps it when a line comes.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("started", flush=True)
input()
child.kill()
import os
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print("ended", flush=True)
input()
child.wait()
print("reaped", flush=True)
input()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_start_is_lost_while_a_dead_process_is_not_reaped(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    now_s = 0.0
    lost = LostStubs(parent.pid, lambda: now_s)

    def after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return lost.are_waited_for()

    def next_step() -> str:
        assert parent.stdin is not None
        assert parent.stdout is not None
        print(file=parent.stdin, flush=True)
        return parent.stdout.readline().strip()

    assert parent.stdout.readline().strip() == "started"
    assert not after(LOST_S)
    assert not after(LOST_S)
    assert next_step() == "ended"
    assert not after(LOST_S)
    assert not after(LOST_S - 1.0)
    assert after(1.0)
    assert next_step() == "reaped"
    assert not after(LOST_S)
