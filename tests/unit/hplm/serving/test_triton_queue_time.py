"""The estimate of waits inside Triton: from the last call and from full calls, bounded by the queue's size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from hplm.serving.triton_queue_time import TritonQueueTime


def waited(
    queue_time: TritonQueueTime,
    counts: Sequence[int],
    every_s: float,
    start_s: float = 10.0,
    pause_s: float = 0.0,
    own_s: float = -math.inf,
) -> list[float]:
    """Return the estimates for calls one after another: each begins `every_s` after the last, and `pause_s` after its end.

    At each call, a request of the stage's own has waited for `own_s`.
    """
    estimates = []
    for call, count in enumerate(counts):
        estimates.append(queue_time.waited_s(count, now_s := start_s + call * every_s, now_s - own_s))
        queue_time.returned(start_s + (call + 1) * every_s - pause_s)
    return estimates


def test_a_call_that_comes_after_a_while_has_waited_for_nothing() -> None:
    assert waited(TritonQueueTime(64, 1024), (1, 63, 12, 64), 1.0, pause_s=0.004) == [0.0] * 4


def test_a_call_that_comes_at_once_may_have_waited_while_the_last_lasted() -> None:
    assert waited(TritonQueueTime(64, 1024), (1, 63, 12), 0.01, pause_s=0.002) == pytest.approx([0.0, 0.01, 0.01])


def test_full_calls_one_after_another_have_waited_since_the_first_of_them() -> None:
    queue_time = TritonQueueTime(64, 1024)
    assert waited(queue_time, (64, 64, 64, 63, 64), 0.1) == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.1])


def test_no_request_has_waited_for_a_stage_that_was_idle() -> None:
    queue_time = TritonQueueTime(64, 1024)
    assert waited(queue_time, (64, 64), 0.1) == pytest.approx([0.0, 0.1])
    assert waited(queue_time, (64, 64), 0.1, start_s=20.0) == pytest.approx([0.0, 0.1])


def test_full_calls_that_triton_is_late_with_have_waited_all_the_longer() -> None:
    # On busy cores there is a pause between calls, and half a second if Triton misses that the stage is ready.
    assert waited(TritonQueueTime(64, 1024), (64, 64, 64), 0.04, pause_s=0.02) == pytest.approx([0.0, 0.04, 0.08])
    assert waited(TritonQueueTime(64, 1024), (64, 64, 64), 0.5, pause_s=0.47) == [0.0] * 3, (
        "many requests at a time, and none was kept"
    )


def test_requests_of_a_full_call_have_waited_for_longer_than_a_request_of_the_stage_s_own_that_waits() -> None:
    kept = waited(TritonQueueTime(64, 1024), (64, 64, 63, 64), 0.5, pause_s=0.47, own_s=1.2)
    assert kept == pytest.approx([1.2, 1.2, 0.0, 1.2])


def test_full_calls_follow_each_other_over_a_pause_in_which_a_request_of_the_stage_s_own_waits() -> None:
    kept = waited(TritonQueueTime(64, 1024), (64, 64, 64), 0.5, pause_s=0.47, own_s=0.3)
    assert kept == pytest.approx([0.3, 0.5, 1.0])


def test_no_request_waits_longer_than_the_requests_before_it_took() -> None:
    queue_time = TritonQueueTime(64, 128)
    # Two full calls may wait: a request that is taken came when the call before the last began.
    assert waited(queue_time, [64] * 5, 0.1) == pytest.approx([0.0, 0.1, 0.2, 0.2, 0.2])
    assert waited(queue_time, [64] * 4, 0.01, start_s=10.5) == pytest.approx([0.2, 0.11, 0.02, 0.02])


@pytest.mark.parametrize(("most", "queue_size"), [(64, 0), (1, 1024)])
def test_if_a_full_call_says_nothing_the_estimate_is_the_last_call(most: int, queue_size: int) -> None:
    assert waited(TritonQueueTime(most, queue_size), [most] * 10, 0.1) == pytest.approx([0.0] + [0.1] * 9)


def test_processes_that_take_turns_at_a_queue_empty_it_so_much_sooner() -> None:
    flood = [64] * 40
    alone, one_of_four = (waited(TritonQueueTime(64, 1024, processes), flood, 0.04)[-1] for processes in (1, 4))
    assert alone == pytest.approx(16 * 0.04)
    assert one_of_four == pytest.approx(4 * 0.04)
