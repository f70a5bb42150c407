"""What of an error is for the client and what for the log."""

from __future__ import annotations

import pytest

from hplm.errors import CorruptArtifactError, InternalError, UnknownTenantError
from hplm.serving.refusal import for_the_wire


def test_what_is_wrong_with_files_or_our_code_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
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
