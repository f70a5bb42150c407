"""The client gets the code of an internal error, the log its cause."""

from __future__ import annotations

import pytest

from hplm.errors import CorruptArtifactError, InternalError, UnknownTenantError
from hplm.serving.stage import for_the_wire


def test_faults_of_files_and_of_our_code_are_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sent = for_the_wire(CorruptArtifactError("/srv/store/acme is torn"), b"acme\xff")
    assert isinstance(sent, CorruptArtifactError)
    assert "/srv" not in str(sent)
    assert "/srv/store/acme is torn" in caplog.text
    sent = for_the_wire(ZeroDivisionError("ours"), b"acme")
    assert isinstance(sent, InternalError)
    assert "ours" not in str(sent)
    assert "ZeroDivisionError: ours" in caplog.text
    known = UnknownTenantError("there is no tenant")
    assert for_the_wire(known, b"acme") is known
