"""What waits in Triton is told from full calls alone: nothing while they are not, and not for longer than all can wait."""

from __future__ import annotations

import pytest

from hplm.serving.intake import Intake


def test_calls_that_are_not_full_have_waited_for_nothing() -> None:
    intake = Intake(64, 1024)
    assert [intake.waited_s(count, float(now)) for now, count in enumerate((1, 63, 64, 12, 64))] == [0.0] * 5


def test_full_calls_one_after_another_have_waited_since_the_first_of_them() -> None:
    intake = Intake(64, 1024)
    assert [intake.waited_s(64, now) for now in (10.0, 10.1, 10.2)] == pytest.approx([0.0, 0.1, 0.2])
    assert intake.waited_s(63, 10.3) == 0.0
    assert intake.waited_s(64, 10.4) == 0.0


def test_nobody_waits_longer_than_those_in_front_take() -> None:
    intake = Intake(64, 128)
    # 640 requests a second are taken: two full calls wait for 0.2 s.
    waited = [intake.waited_s(64, 0.1 * call) for call in range(100)]
    assert waited[-1] == pytest.approx(0.2, rel=0.02)
    assert max(waited) <= 0.2


def test_where_nothing_bounds_what_waits_nothing_is_told() -> None:
    intake = Intake(64, 0)
    assert [intake.waited_s(64, 0.1 * call) for call in range(10)] == [0.0] * 10
