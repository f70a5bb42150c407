"""A dead child that its parent does not reap is seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from hplm.runtime.unreaped import UnreapedChildren

PATIENCE_S = 5.0
# With each line that comes: starts a process, ends it, reaps it.
PARENT = """
import os, subprocess, sys
while True:
    input()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print("started", flush=True)
    input()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    print("ended", flush=True)
    input()
    child.wait()
    print("reaped", flush=True)
"""


class Parent:
    """A process with a child, and a manual clock."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PARENT]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.now_s = 0.0

    def step(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def watch(self) -> Callable[[float], bool]:
        """Return a function that waits for a number of seconds and looks."""
        unreaped = UnreapedChildren(self.process.pid, PATIENCE_S, lambda: self.now_s)

        def after(seconds: float) -> bool:
            self.now_s += seconds
            return unreaped.are_left()

        return after


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.process.kill()
    made.process.communicate()


def test_a_dead_child_is_left_if_it_is_not_reaped_in_time(parent: Parent) -> None:
    after = parent.watch()
    assert parent.step() == "started"
    assert not after(PATIENCE_S)
    assert not after(PATIENCE_S)
    assert parent.step() == "ended"
    assert not after(PATIENCE_S)
    assert not after(PATIENCE_S - 1.0)
    assert after(1.0)


def test_a_child_that_is_reaped_in_time_is_not_left(parent: Parent) -> None:
    after = parent.watch()
    assert [parent.step(), parent.step()] == ["started", "ended"]
    assert not after(PATIENCE_S)
    assert parent.step() == "reaped"
    assert not after(PATIENCE_S)
    assert not after(PATIENCE_S)


def test_a_child_of_before_is_ignored(parent: Parent) -> None:
    assert parent.step() == "started"
    after = parent.watch()
    assert parent.step() == "ended"
    assert not after(PATIENCE_S)
    assert not after(2 * PATIENCE_S)
