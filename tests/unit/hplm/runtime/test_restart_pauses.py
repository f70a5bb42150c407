"""A process that keeps ending soon is started after longer and longer pauses."""

from __future__ import annotations

from hplm.runtime.restart_pauses import SETTLED_S, RestartPauses


def test_pauses_double_up_to_the_longest() -> None:
    pauses = RestartPauses(first_s=0.5, longest_s=3.0)
    assert [pauses.after(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_process_has_run_well_the_next_pause_is_the_first_again() -> None:
    pauses = RestartPauses(first_s=0.5, longest_s=3.0)
    pauses.after(0.0)
    pauses.after(0.0)
    assert pauses.after(SETTLED_S) == 0.5
    assert pauses.after(SETTLED_S - 0.1) == 1.0
