"""The bounded cache between disk and adapter slots."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hplm import errors
from hplm.adapters.host_cache import HostCache


def test_one_cold_key_loads_once_for_all_who_ask_and_keys_do_not_wait_for_each_other() -> None:
    started, go = threading.Event(), threading.Event()
    loads: list[str] = []

    def load(key: str) -> str:
        loads.append(key)
        if key == "slow":
            started.set()
            go.wait()
        return key.upper()

    cache = HostCache(load, len, capacity=100, num_threads=2)
    waiting = [cache.fetch("slow") for _ in range(10)]
    started.wait()
    assert cache.fetch("quick").result(timeout=60) == "QUICK"
    go.set()
    assert {future.result(timeout=60) for future in waiting} == {"SLOW"}
    assert sorted(loads) == ["quick", "slow"]
    cache.close()


def test_the_cache_keeps_to_its_bytes_and_forgets_the_least_recently_used() -> None:
    loads: list[str] = []

    def load(key: str) -> str:
        loads.append(key)
        return key * 10

    cache = HostCache(load, len, capacity=30, num_threads=1)
    for key in ("a", "b", "c", "a", "d", "a", "b"):
        assert cache.fetch(key).result() == key * 10
        assert cache.kept_size <= 30
    assert loads == ["a", "b", "c", "d", "b"]
    cache.close()


def test_the_cache_lets_go_of_what_is_not_wanted_any_more() -> None:
    cache = HostCache(str.upper, len, capacity=30)
    for key in ("a", "bb", "ccc"):
        cache.fetch(key).result()
    cache.drop(["a", "ccc", "d"])
    assert (cache.get("a"), cache.get("bb"), cache.get("ccc")) == (None, "BB", None)
    assert cache.kept_size == 2
    cache.close()


def test_a_value_that_was_dropped_while_it_loaded_is_not_kept() -> None:
    may_go_on = threading.Event()

    def load(key: str) -> str:
        may_go_on.wait(60)
        return key.upper()

    cache = HostCache(load, len, capacity=30)
    loading = cache.fetch("a")
    cache.drop(["a"])
    may_go_on.set()
    assert loading.result() == "A"
    assert (cache.get("a"), cache.kept_size) == (None, 0)
    assert cache.fetch("a").result() == "A"
    assert cache.get("a") == "A"
    cache.close()


def test_a_load_that_hangs_keeps_nobody_waiting_for_the_cache_to_close() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hang(key: str) -> str:
        has_begun.set()
        return str(may_go_on.wait(30))

    cache = HostCache(hang, len, capacity=30, num_threads=1)
    hangs, waits = cache.fetch("a"), cache.fetch("b")
    assert has_begun.wait(30)
    cache.close(within_s=0.1)
    for loading in (hangs, waits, cache.fetch("c")):
        with pytest.raises(errors.StoppingError):
            loading.result(0)
    may_go_on.set()


def test_a_load_that_no_thread_can_be_started_for_is_refused_for_now_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cache = HostCache(str.upper, len, capacity=30)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(errors.QueueFullError):
            cache.fetch("a").result(0)
    assert "can't start new thread" in caplog.text
    assert cache.fetch("a").result(60) == "A"
    cache.close()
    with pytest.raises(errors.StoppingError):
        cache.fetch("b").result(0)


def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    answers = iter([errors.CorruptArtifactError("broken"), "mended"])

    def load(key: str) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache = HostCache(load, len, capacity=100)
    with pytest.raises(errors.CorruptArtifactError):
        cache.fetch("a").result()
    assert cache.loads == 0
    assert cache.fetch("a").result() == "mended"
    assert cache.fetch("a").result() == "mended"
    assert cache.loads == 1
    cache.close()


def test_many_threads_see_one_consistent_cache() -> None:
    cache = HostCache(lambda key: str(key) * 5, len, capacity=40, num_threads=4)
    with ThreadPoolExecutor(8) as pool:
        rng = np.random.default_rng(0)
        keys = [int(k) for k in rng.integers(0, 20, 2000)]
        for key, value in zip(keys, pool.map(lambda k: cache.fetch(k).result(), keys), strict=True):
            assert value == str(key) * 5
    assert cache.kept_size <= 40
    cache.close()
