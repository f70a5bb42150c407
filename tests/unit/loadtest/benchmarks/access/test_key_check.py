"""The benchmark of the check of keys."""

from __future__ import annotations

from hplm_loadtest.benchmarks.access.key_check import key_check


def test_each_reason_to_refuse_a_key_is_timed_as_often() -> None:
    report = key_check(checks=60, tenants=3)
    counts = {row["key"]: row["checks"] for row in report.rows}
    assert counts == {
        "valid": 60,
        **dict.fromkeys(
            ("unknown tenant", "another tenant's key", "wrong secret", "unknown key", "revoked", "expired"), 10
        ),
    }
    assert [goal.id for goal in report.goals] == ["58-key-timing"]
