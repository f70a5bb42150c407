"""A stage that waits in place of computing: its queue, and the time that it reserves for later stages."""

from __future__ import annotations

import pytest
from hplm_loadtest.emulation.settings import WaitingSettings
from hplm_loadtest.emulation.waiting_stage import TOKEN_S, WaitingStage, emulated_queue, tokens_of

from hplm.errors import UnknownTenantError
from hplm.scheduling.policy import Waiting

SETTINGS = WaitingSettings({"a": (0.1, 0.2, 0.3), "b": (0.2, 0.2, 0.2)}, 0, hop_s=0.01, way_back_s=0.05)


def test_the_first_stage_reserves_the_later_stages_and_the_ways() -> None:
    assert SETTINGS.reserved_s("a") == pytest.approx(0.2 + 0.3 + 2 * 0.01 + 0.05)
    assert not SETTINGS.is_last


def test_the_queue_knows_a_stages_times() -> None:
    cost = emulated_queue(SETTINGS).cost
    assert cost.predict(tokens_of(0.2), tokens_of(0.2) ** 2) == pytest.approx(0.2, rel=1e-3)


def test_the_queue_refuses_what_cannot_end_in_time() -> None:
    queue = emulated_queue(SETTINGS)
    late = Waiting(0, "all", tokens_of(0.1), 0.0, 0.09)
    assert [refused.reason for refused in queue.offer(late, 0.0)] == ["deadline"]
    assert queue.offer(Waiting(1, "all", tokens_of(0.1), 0.0, 0.11), 0.0) == []


def test_a_short_time_is_one_token() -> None:
    assert tokens_of(TOKEN_S / 100) == 1


def test_a_model_that_the_group_does_not_hold_is_refused() -> None:
    stage = WaitingStage(SETTINGS)
    try:
        with pytest.raises(UnknownTenantError):
            stage.item_of("c", 0.0)
    finally:
        stage.stop()
