"""Daemon threads delay the end of the interpreter only for a limited time."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from hplm.adapters.host_cache import HostCache
from hplm.runtime.daemon_threads import DaemonThreads
from tests.waiting import until

SOON_S = 60


def test_what_is_given_runs_side_by_side_up_to_so_many() -> None:
    daemons, go = DaemonThreads(2, "test"), threading.Event()
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
    daemons.close()


def test_what_is_given_runs_in_order() -> None:
    daemons, go, done = DaemonThreads(1, "test"), threading.Event(), threading.Event()
    began: list[int] = []
    daemons.run(lambda: go.wait(SOON_S))
    for number in range(5):
        daemons.run(lambda number=number: began.append(number))
    daemons.run(done.set)
    assert not began
    go.set()
    assert done.wait(SOON_S)
    assert began == [0, 1, 2, 3, 4]
    daemons.close()


def test_a_free_thread_is_used_before_another_is_started() -> None:
    daemons = DaemonThreads(8, "test")
    names: list[str] = []
    for done in range(1, 20):
        daemons.run(lambda: names.append(threading.current_thread().name))
        until(lambda done=done: len(names) == done and daemons._free == 1)
    assert set(names) == {"test_0"}
    daemons.close()


@pytest.mark.parametrize("error", [ValueError("no such weights"), SystemExit("no such weights")])
def test_an_error_is_logged_and_the_thread_goes_on(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    daemons = DaemonThreads(1, "test")
    done = threading.Event()

    def fail() -> None:
        raise error

    daemons.run(fail)
    daemons.run(done.set)
    assert done.wait(SOON_S)
    assert "no such weights" in caplog.text
    daemons.close()


def test_what_has_run_is_not_held() -> None:
    class Weights:
        def load(self) -> None:
            pass

    daemons, weights = DaemonThreads(1, "test"), Weights()
    held = weakref.ref(weights)
    daemons.run(weights.load)
    del weights
    until(lambda: held() is None)
    daemons.close()


def test_once_closed_what_runs_goes_on_what_waits_is_dropped_and_nothing_is_taken() -> None:
    daemons, go = DaemonThreads(1, "test"), threading.Event()
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


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError("no room")])
def test_where_no_thread_can_be_started_those_there_are_do_the_work(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(_: threading.Thread) -> None:
        raise error

    daemons, go, done = DaemonThreads(2, "test"), threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(RuntimeError, match=f"no thread could be started: {error}"):
            daemons.run(go.set)
    daemons.run(lambda: go.wait(SOON_S))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        daemons.run(done.set)
    go.set()
    assert done.wait(SOON_S)
    daemons.close()


def test_threads_of_a_cache_that_nobody_closed_end_with_it() -> None:
    cache = HostCache(str.upper, len, capacity=30)
    assert cache.fetch("a").result(SOON_S) == "A"
    threads = list(cache._threads._threads)
    assert threads
    del cache
    # An object that refers to itself is freed by the garbage collector.
    gc.collect()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()


LOAD = """
import threading, time
import torch
import hplm.runtime.daemon_threads
from hplm.adapters.host_cache import HostCache

began = threading.Event()

def hang(key):
    began.set()
    threading.Event().wait()

def compute(key):
    began.set()
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s:
        torch.randn(200, 200) @ torch.randn(200, 200)

hplm.runtime.daemon_threads.END_S = {end_s}
cache = HostCache({load}, len, capacity=1)
cache.fetch("a")
began.wait()
cache.close(within_s=0.1)
print("closed")
"""


def ended(load: str, end_s: float) -> subprocess.CompletedProcess[str]:
    code = LOAD.format(load=load, end_s=end_s)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON_S, check=False)


def test_a_load_that_hangs_keeps_the_process_for_a_while_only() -> None:
    done = ended("hang", end_s=0.1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_a_load_that_computes_when_the_process_ends_does_not_abort_it() -> None:
    done = ended("compute", end_s=SOON_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


INTERRUPTED = """
import os, signal, threading, time
from hplm.runtime.daemon_threads import DaemonThreads

daemons = DaemonThreads(1, "test")

def interrupt():
    while not daemons._is_closed:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

daemons.run(threading.Event().wait)
threading.Thread(target=interrupt, daemon=True).start()
"""


def test_an_interrupt_while_the_process_waits_for_what_runs_ends_it_without_a_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=SOON_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
