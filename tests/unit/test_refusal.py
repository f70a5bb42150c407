"""What of an error is for the client and what for the log."""

from __future__ import annotations

import pytest

from hplm.errors import CorruptArtifactError, InternalError, UnknownTenantError
from hplm.serving import refusal
from hplm.serving.refusal import MOST_SAID, SAY_AGAIN_S, Complaints, for_the_wire
from tests.doubles import ManualClock


def test_a_fault_that_each_request_has_is_in_the_log_once_in_half_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    complaints = Complaints(clock)
    for _ in range(1000):
        complaints.say("tenant acme: torn")
    complaints.say("tenant other: torn", ValueError("so"))
    assert [record.getMessage() for record in caplog.records] == ["tenant acme: torn", "tenant other: torn"]
    assert "ValueError: so" in caplog.text
    clock.now_s = SAY_AGAIN_S
    complaints.say("tenant acme: torn")
    assert caplog.records[-1].getMessage() == "tenant acme: torn (999 times more since it was said last)"


def test_faults_beyond_number_are_not_remembered_for_ever() -> None:
    complaints = Complaints(ManualClock())
    for number in range(MOST_SAID + 10):
        complaints.say(str(number))
    assert len(complaints._said) == 10


def test_what_is_wrong_with_files_or_our_code_is_for_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "COMPLAINTS", Complaints())
    told = for_the_wire(CorruptArtifactError("/srv/store/acme is torn"), b"acme\xff")
    assert isinstance(told, CorruptArtifactError)
    assert "/srv" not in str(told)
    assert "/srv/store/acme is torn" in caplog.text
    told = for_the_wire(ZeroDivisionError("ours"), b"acme")
    assert isinstance(told, InternalError)
    assert "ours" not in str(told)
    assert "ZeroDivisionError: ours" in caplog.text
    known = UnknownTenantError("there is no tenant")
    assert for_the_wire(known, b"acme") is known
