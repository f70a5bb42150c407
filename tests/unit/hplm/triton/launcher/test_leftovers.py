"""What servers leave behind when they are killed, and the logs they write."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from hplm.errors import StartError
from hplm.runtime.process import BACKLOG, STOPPING, backlogs_of
from hplm.triton.launcher import leftovers, log_files
from tests.waiting import until
from tests.watching import runs


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def leave(shared: Path, server: int) -> tuple[Path, set[Path]]:
    """As a server does, whose mark is closed: its folder and its files in shared memory."""
    folder, mark = leftovers.make_folder()
    leftovers.tell(mark, server)
    mark.close()
    files = {shared / f"{folder.name}.region", shared / f"{backlogs_of(server)}x.1.json"}
    for file in files:
        file.touch()
    return folder, files


def test_what_a_dead_server_left_is_removed_and_nothing_of_one_that_lives_or_begins(shared: Path) -> None:
    # Its number is beyond what the system gives.
    dead, of_dead = leave(shared, 1 << 23)
    alive, of_alive = leave(shared, 1)
    begun, mark = leftovers.make_folder()
    with mark, (alive / leftovers.MARK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        leftovers.sweep()
        assert not dead.exists()
        assert alive.exists()
        assert begun.exists()
        assert {*shared.iterdir()} == of_alive
        assert not of_dead & of_alive
    leftovers.sweep()
    assert not alive.exists()
    # Another process has its number by now.
    assert [path.name for path in shared.iterdir()] == [f"{backlogs_of(1)}x.1.json"]


def test_what_a_container_of_before_left_is_removed_with_what_is_named_after_its_process(shared: Path) -> None:
    folder, mark = leftovers.make_folder()
    with mark:
        mark.write("4026000000-1")
    for name in (f"{folder.name}.region", f"{BACKLOG}4026000000-1-x.1.json"):
        (shared / name).touch()
    (shared / f"{STOPPING}4026000000-1").symlink_to("123")
    (shared / f"{BACKLOG}4026000000-11-x.1.json").touch()
    leftovers.sweep()
    assert not folder.exists()
    assert os.listdir(shared) == [f"{BACKLOG}4026000000-11-x.1.json"]


def test_stubs_that_hold_the_mark_of_a_triton_that_is_gone_are_ended(shared: Path) -> None:
    folder, mark = leftovers.make_folder()
    with mark:
        stub = "trap '' TERM; while :; do sleep 1; done"
        with subprocess.Popen(
            ["bash", "-c", f'bash -c "{stub}" & echo $!'],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[mark.fileno()],
        ) as triton:
            assert triton.stdout
            left = int(triton.stdout.readline())
            leftovers.tell(mark, triton.pid)
            mark.close()
            triton.wait()
            try:
                assert runs(left)
                leftovers.sweep()
                until(lambda: not runs(left))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(triton.pid, signal.SIGKILL)
    # The next start removes what this one found held too long.
    leftovers.sweep()
    assert not folder.exists()


def test_a_group_that_has_the_number_of_a_triton_that_is_gone_and_not_its_mark_is_left_alone(shared: Path) -> None:
    # Its leader has ended, as that of `a | b` does.
    with subprocess.Popen(
        ["bash", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout
        other = int(leader.stdout.readline())
        leader.wait()
        folder, _ = leave(shared, leader.pid)
        try:
            leftovers.sweep()
            assert runs(other)
        finally:
            os.kill(other, signal.SIGKILL)
    assert not folder.exists()


def test_a_folder_whose_server_never_told_its_number_is_removed_when_it_is_old(shared: Path) -> None:
    folder, mark = leftovers.make_folder()
    mark.close()
    leftovers.sweep()
    assert folder.exists()
    os.utime(folder / leftovers.MARK, (0, 0))
    leftovers.sweep()
    assert not folder.exists()


def test_what_is_killed_while_it_removes_a_folder_leaves_one_that_is_found_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = leave(shared, 1 << 23)
    (folder / "backends").mkdir()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", killed)
        with pytest.raises(KeyboardInterrupt):
            leftovers.sweep()
    assert (folder / leftovers.MARK).exists()
    leftovers.sweep()
    assert not folder.exists()


def test_a_folder_that_is_held_is_locked_for_who_ages_temporary_folders(shared: Path) -> None:
    folder, mark = leftovers.make_folder()
    with mark:
        held, asked = leftovers.hold(folder), os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
        fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(asked)


def test_what_others_put_in_the_temporary_folder_is_not_taken_for_a_server(shared: Path, tmp_path: Path) -> None:
    dead, of_dead = leave(shared, 1 << 23)
    moved = dead.rename(tmp_path / "moved")
    (tmp_path / "tmp" / f"{leftovers.PREFIX}*").symlink_to(moved, target_is_directory=True)
    leftovers.sweep()
    assert moved.exists()
    assert {*shared.iterdir()} == of_dead


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
    # Also before anything is written.
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
        # Another one had it meanwhile: what is called so now is its own.
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
    watch = log_files.CrashWatch(log)
    assert not watch.has_crashed()
    with log.open("ab") as file:
        for byte in said:
            file.write(bytes([byte]))
            file.flush()
            watch.has_crashed()
    assert watch.has_crashed() == has_crashed


def test_a_crash_is_seen_in_a_log_that_was_cut_short(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_bytes(b"started\n" * 100)
    watch = log_files.CrashWatch(log)
    assert not watch.has_crashed()
    log.write_bytes(b"Signal (6) received.\n")
    assert watch.has_crashed()
    assert not log_files.CrashWatch(Path("/dev/stdout")).has_crashed()
