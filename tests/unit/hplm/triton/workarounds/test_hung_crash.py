"""A crash of Triton is seen in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.triton.workarounds.hung_crash import CrashLog


@pytest.mark.parametrize(
    ("said", "has_crashed"),
    [
        (b"Signal (6) received.\n 0# 0x00\n", True),
        (b"Signal (11) received.\n", True),
        (b"Signal (15) received.\n", False),
        (b"Signal (2) received.\n", False),
        (b"I1128 a text that says Signal (6) received.\n", False),
    ],
)
def test_a_crash_is_seen_in_the_log_as_it_grows(tmp_path: Path, said: bytes, has_crashed: bool) -> None:
    log = tmp_path / "triton.log"
    log.write_bytes(b"started\n")
    watch = CrashLog(log)
    assert not watch.says_crash()
    with log.open("ab") as file:
        for byte in said:
            file.write(bytes([byte]))
            file.flush()
            watch.says_crash()
    assert watch.says_crash() == has_crashed


def test_a_crash_is_seen_in_a_log_that_was_cut_short(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_bytes(b"started\n" * 100)
    watch = CrashLog(log)
    assert not watch.says_crash()
    log.write_bytes(b"Signal (6) received.\n")
    assert watch.says_crash()
    assert not CrashLog(None).says_crash()
