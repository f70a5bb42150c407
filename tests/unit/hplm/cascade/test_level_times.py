"""How long a level is expected to take."""

from __future__ import annotations

from hplm.cascade.level_times import EVERY_S, KEEP_S, LEAST_TIMES, LevelTime


def test_with_few_recent_times_the_default_is_expected() -> None:
    time = LevelTime()
    for _ in range(LEAST_TIMES - 1):
        time.add(5.0, 0.0)
    assert time.expected_s(0.0, 0.25) == 0.25


def test_nine_in_ten_recent_texts_have_taken_at_most_the_expected_time() -> None:
    time = LevelTime()
    for number in range(100):
        time.add(number / 100, 0.0)
    assert time.expected_s(0.0, 9.0) == 0.89


def test_a_single_slow_text_does_not_count() -> None:
    time = LevelTime()
    for number in range(LEAST_TIMES):
        time.add(60.0 if number == 3 else 0.01, 0.0)
    assert time.expected_s(0.0, 9.0) == 0.01


def test_a_level_that_was_slow_long_ago_is_tried_again() -> None:
    time = LevelTime()
    for _ in range(100):
        time.add(60.0, 0.0)
    assert time.expected_s(EVERY_S, 0.1) == 60.0
    assert time.expected_s(KEEP_S + 1, 0.1) == 0.1
