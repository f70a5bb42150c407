"""Each server has a log of its own, and earlier logs stay."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from hplm.errors import StartError
from hplm.triton.launcher import log_files


def test_a_log_that_another_server_writes_is_not_taken_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "FREE_WITHIN_S", 0.2)
    log = tmp_path / "triton.log"
    with log_files.fresh(log) as first:
        first.write(b"first\n")
        first.flush()
        with pytest.raises(StartError, match="another server writes"):
            log_files.fresh(log)
        assert log.read_text() == "first\n"
    with log_files.fresh(log):
        assert (tmp_path / "triton.log.1").read_text() == "first\n"


def test_of_two_servers_that_start_at_once_one_has_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "FREE_WITHIN_S", 0.2)
    # This holds also before anything is written.
    with log_files.fresh(tmp_path / "triton.log"), pytest.raises(StartError, match="another server writes"):
        log_files.fresh(tmp_path / "triton.log")


def test_who_waited_for_a_log_does_not_take_that_of_another_who_waited_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "FREE_WITHIN_S", 60.0)
    log = tmp_path / "triton.log"
    got: list[IO[bytes]] = []
    with log_files.fresh(log) as first:
        first.write(b"first\n")
        first.flush()
        waiting = threading.Thread(target=lambda: got.append(log_files.fresh(log)))
        waiting.start()
        time.sleep(0.3)
        # Another server had the log meanwhile, and the file of this name is that server's.
        log.rename(tmp_path / "triton.log.1")
        second = log_files.fresh(log)
    time.sleep(0.3)
    assert not got
    second.close()
    waiting.join()
    assert os.path.samestat(os.fstat(got[0].fileno()), log.stat())
    got[0].close()


def test_a_device_and_a_pipe_are_written_and_never_renamed(tmp_path: Path) -> None:
    link = tmp_path / "out"
    link.symlink_to("/dev/null")
    for log in (Path("/dev/null"), Path("/dev/stderr"), link):
        log_files.fresh(log).close()
        assert log_files.set_apart(log) == log
        assert log_files.errors_in(log) == "" or log.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_log_that_cannot_be_written_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory; choose another place with --log"):
        log_files.fresh(tmp_path / "nowhere" / "triton.log")


def test_starts_that_fail_push_out_no_log_of_a_server_that_served(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_text("Signal (11) received\n")
    for number in range(log_files.KEPT + 2):
        with log_files.fresh(log) as file:
            file.write(f"start {number}\n".encode())
        assert log_files.set_apart(log) == tmp_path / "triton.log.failed"
    assert (tmp_path / "triton.log.1").read_text() == "Signal (11) received\n"
    assert {path.name for path in tmp_path.iterdir()} == {"triton.log.1", "triton.log.failed"}


def test_of_a_failed_start_what_every_start_says_is_left_out_and_nothing_is_said_twice(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    usual = "I1 Started\nE1 CudaDriverHelper has not been initialized.\nW1 Failed to initialize NVML\n"
    log.write_text(usual + 1000 * "[warn] Error from accept() call: Too many open files\n" + "E2 no stub\n")
    assert log_files.errors_in(log) == "[warn] Error from accept() call: Too many open files\nE2 no stub"
    log.write_text(usual + "still loading\n")
    assert log_files.errors_in(log) == "I1 Started\nstill loading"
