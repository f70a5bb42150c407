"""Threads that the interpreter's end does not wait for."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest

from hplm.daemons import Daemons
from tests.waiting import until

SOON_S = 60


def test_what_is_given_runs_side_by_side_up_to_so_many_and_in_order() -> None:
    daemons, go = Daemons(2, "test"), threading.Event()
    began: list[int] = []

    def work(number: int) -> None:
        began.append(number)
        assert go.wait(SOON_S)

    for number in range(5):
        daemons.run(lambda number=number: work(number))
    until(lambda: len(began) == 2)
    assert sorted(began) == [0, 1]
    go.set()
    until(lambda: len(began) == 5)
    assert sorted(began[2:4]) == [2, 3]
    daemons.close()


def test_a_free_thread_is_used_before_another_is_started() -> None:
    daemons = Daemons(8, "test")
    names: list[str] = []
    for done in range(1, 20):
        daemons.run(lambda: names.append(threading.current_thread().name))
        until(lambda done=done: len(names) == done and daemons._free == 1)
    assert set(names) == {"test_0"}
    daemons.close()


def test_an_error_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    daemons, done = Daemons(1, "test"), threading.Event()
    daemons.run(lambda: 1 / 0)
    daemons.run(done.set)
    assert done.wait(SOON_S)
    assert "division by zero" in caplog.text
    daemons.close()


def test_what_has_run_is_not_held() -> None:
    class Weights:
        def load(self) -> None:
            pass

    daemons, weights = Daemons(1, "test"), Weights()
    held = weakref.ref(weights)
    daemons.run(weights.load)
    del weights
    until(lambda: held() is None)
    daemons.close()


def test_once_closed_what_runs_goes_on_what_waits_is_dropped_and_nothing_is_taken() -> None:
    daemons, go = Daemons(1, "test"), threading.Event()
    began, ended = threading.Event(), threading.Event()
    dropped: list[int] = []

    def work() -> None:
        began.set()
        go.wait(SOON_S)
        ended.set()

    daemons.run(work)
    assert began.wait(SOON_S)
    daemons.run(lambda: dropped.append(1))
    daemons.close()
    with pytest.raises(RuntimeError, match="closed"):
        daemons.run(go.set)
    go.set()
    assert ended.wait(SOON_S)
    until(lambda: "test_0" not in {thread.name for thread in threading.enumerate()})
    assert not dropped


def test_where_no_thread_can_be_started_those_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    daemons, go, done = Daemons(2, "test"), threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(RuntimeError, match="start new thread"):
            daemons.run(go.set)
    daemons.run(lambda: go.wait(SOON_S))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        daemons.run(done.set)
    go.set()
    assert done.wait(SOON_S)
    daemons.close()


def test_a_load_that_hangs_does_not_keep_the_process() -> None:
    code = """
import threading
from hplm.adapters.host_cache import HostCache
began = threading.Event()
def load(key):
    began.set()
    threading.Event().wait()
cache = HostCache(load, len, capacity=1)
cache.fetch("a")
began.wait()
cache.close(within_s=0.1)
print("closed")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON_S, check=True)
    assert ended.stdout == "closed\n"
