"""Files of killed servers are removed, and files of other servers stay."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from hplm.runtime.process import BACKLOG, STOPPING, backlogs_of
from hplm.triton.workarounds import killed_server_files
from tests.waiting import until
from tests.watching import runs


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(killed_server_files, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def leave(shared: Path, server: int) -> tuple[Path, set[Path]]:
    """Make the folder and the files in shared memory that a killed server leaves."""
    folder, mark = killed_server_files.make_folder()
    killed_server_files.write_name(mark, server)
    mark.close()
    files = {shared / f"{folder.name}.region", shared / f"{backlogs_of(server)}x.1.json"}
    for file in files:
        file.touch()
    return folder, files


def test_what_a_dead_server_left_is_removed_and_nothing_of_one_that_lives_or_begins(shared: Path) -> None:
    # The system gives no process such a high number.
    dead, of_dead = leave(shared, 1 << 23)
    alive, of_alive = leave(shared, 1)
    begun, mark = killed_server_files.make_folder()
    with mark, (alive / killed_server_files.MARK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        killed_server_files.sweep()
        assert not dead.exists()
        assert alive.exists()
        assert begun.exists()
        assert {*shared.iterdir()} == of_alive
        assert not of_dead & of_alive
    killed_server_files.sweep()
    assert not alive.exists()
    # Another process has the number now, so this file may be that process's.
    assert [path.name for path in shared.iterdir()] == [f"{backlogs_of(1)}x.1.json"]


def test_what_a_container_of_before_left_is_removed_with_what_is_named_after_its_process(shared: Path) -> None:
    folder, mark = killed_server_files.make_folder()
    with mark:
        mark.write("4026000000-1")
    for name in (f"{folder.name}.region", f"{BACKLOG}4026000000-1-x.1.json"):
        (shared / name).touch()
    (shared / f"{STOPPING}4026000000-1").symlink_to("123")
    (shared / f"{BACKLOG}4026000000-11-x.1.json").touch()
    killed_server_files.sweep()
    assert not folder.exists()
    assert os.listdir(shared) == [f"{BACKLOG}4026000000-11-x.1.json"]


def test_stubs_that_hold_the_mark_of_a_triton_that_is_gone_are_ended(shared: Path) -> None:
    folder, mark = killed_server_files.make_folder()
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
            killed_server_files.write_name(mark, triton.pid)
            mark.close()
            triton.wait()
            try:
                assert runs(left)
                killed_server_files.sweep()
                until(lambda: not runs(left))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(triton.pid, signal.SIGKILL)
    # A later start removes the folder if the lock was still held here.
    killed_server_files.sweep()
    assert not folder.exists()


def test_a_group_that_has_the_number_of_a_triton_that_is_gone_and_not_its_mark_is_left_alone(shared: Path) -> None:
    # The leader of the group has ended, as in `a | b`.
    with subprocess.Popen(
        ["bash", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout
        other = int(leader.stdout.readline())
        leader.wait()
        folder, _ = leave(shared, leader.pid)
        try:
            killed_server_files.sweep()
            assert runs(other)
        finally:
            os.kill(other, signal.SIGKILL)
    assert not folder.exists()


def test_a_folder_whose_server_never_told_its_number_is_removed_when_it_is_old(shared: Path) -> None:
    folder, mark = killed_server_files.make_folder()
    mark.close()
    killed_server_files.sweep()
    assert folder.exists()
    os.utime(folder / killed_server_files.MARK, (0, 0))
    killed_server_files.sweep()
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
            killed_server_files.sweep()
    assert (folder / killed_server_files.MARK).exists()
    killed_server_files.sweep()
    assert not folder.exists()


def test_a_folder_that_is_held_is_locked_for_who_ages_temporary_folders(shared: Path) -> None:
    folder, mark = killed_server_files.make_folder()
    with mark:
        held, asked = killed_server_files.lock_folder(folder), os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
        fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(asked)


def test_what_others_put_in_the_temporary_folder_is_not_taken_for_a_server(shared: Path, tmp_path: Path) -> None:
    dead, of_dead = leave(shared, 1 << 23)
    moved = dead.rename(tmp_path / "moved")
    (tmp_path / "tmp" / f"{killed_server_files.PREFIX}*").symlink_to(moved, target_is_directory=True)
    killed_server_files.sweep()
    assert moved.exists()
    assert {*shared.iterdir()} == of_dead
