"""How long a level is expected to take for a tenant beside others."""

from __future__ import annotations

from hplm.cascade.level_times import LEAST_TIMES, MOST_TIMES
from hplm.serving.cascade.recent_times import MOST_TENANTS, RecentTimes


def test_the_long_waits_of_a_tenants_flood_keep_no_other_tenants_texts_from_the_level() -> None:
    times = RecentTimes()
    for number in range(10 * MOST_TIMES):
        times.add("large", "flood", 5.0, number / 1000)
    assert times.expected_s("large", "quiet", 2.5, 0.02) == 0.02
    assert times.expected_s("large", "flood", 2.5, 0.02) == 5.0


def test_a_level_that_is_slow_for_many_tenants_is_expected_to_be_slow_for_another() -> None:
    times = RecentTimes()
    for number in range(LEAST_TIMES):
        times.add("large", f"tenant-{number}", 5.0, 0.0)
    assert times.expected_s("large", "new", 0.1, 0.02) == 5.0
    assert times.expected_s("other", "new", 0.1, 0.02) == 0.02


def test_times_are_kept_of_a_bounded_number_of_tenants() -> None:
    times = RecentTimes()
    for tenant in ("first", *(f"tenant-{number}" for number in range(MOST_TENANTS))):
        for _ in range(LEAST_TIMES):
            times.add("large", tenant, 5.0 if tenant == "first" else 0.1, 0.0)
    assert times.expected_s("large", "first", 0.0, 9.0) == 0.1
