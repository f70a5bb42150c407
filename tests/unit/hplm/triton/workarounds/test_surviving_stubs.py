"""The reaper kills what a killed server leaves. The processes here are no Triton."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hplm.runtime.process import begun, state_of
from hplm.triton.workarounds import surviving_stubs
from hplm.triton.workarounds.surviving_stubs import start_reaper
from tests.waiting import until
from tests.watching import runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hplm-triton-x" / "work").mkdir(parents=True)
    return tmp_path / "hplm-triton-x"


@pytest.mark.parametrize("is_asked_how_it_ended", [True, False])
def test_who_is_left_of_a_killed_server_s_group_ends_and_its_folder_goes(
    folder: Path, is_asked_how_it_ended: bool
) -> None:
    # The second process leaves its parent, and ignores every signal that can be ignored.
    stub = "trap '' TERM; while :; do sleep 1; done"
    command = ["bash", "-c", f'bash -c "{stub}" & echo $!; wait']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout
        left = int(server.stdout.readline())
        beside = start_reaper(server.pid, folder, folder / "work")
        with pytest.raises(subprocess.TimeoutExpired):
            beside.wait(1.5)
        assert runs(left)
        assert folder.exists()
        server.kill()
        if is_asked_how_it_ended:
            server.wait()
        assert beside.wait(60) == 0
        until(lambda: not runs(left))
        assert not folder.exists()


def test_of_a_server_that_has_gone_already_the_folder_goes_too(folder: Path) -> None:
    with subprocess.Popen(["true"], start_new_session=True) as server:
        assert start_reaper(server.pid, folder, folder / "work").wait(60) == 0
    assert not folder.exists()


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as running:
        yield running
        running.kill()


def test_a_server_that_cannot_be_looked_at_for_want_of_files_lives(
    server: subprocess.Popen[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(3 * [OSError(errno.ENFILE, "Too many open files in system")])

    def look(pid: int, since: str) -> str:
        for failure in failures:
            raise failure
        lived.append(runs(pid))
        server.kill()
        return state_of(pid, since)

    lived: list[bool] = []
    monkeypatch.setattr(surviving_stubs, "PERIOD_S", 0.01)
    monkeypatch.setattr(surviving_stubs, "state_of", look)
    surviving_stubs._main(server.pid, begun(server.pid), os.getppid(), folder)
    assert lived[0]
    assert not folder.exists()


def test_who_has_the_number_of_a_server_that_is_gone_is_left_alone(
    server: subprocess.Popen[bytes], folder: Path
) -> None:
    surviving_stubs._main(server.pid, "0", os.getppid(), folder)
    assert server.poll() is None
    assert not folder.exists()


@pytest.mark.parametrize("is_launcher_gone", [True, False])
def test_a_server_that_does_not_end_though_its_launcher_is_gone_is_ended(
    server: subprocess.Popen[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch, is_launcher_gone: bool
) -> None:
    monkeypatch.setattr(surviving_stubs, "PERIOD_S", 0.01)
    monkeypatch.setattr(surviving_stubs, "ALONE_S", 0.5)
    launcher = -1 if is_launcher_gone else os.getppid()
    watching = threading.Thread(target=surviving_stubs._main, args=(server.pid, begun(server.pid), launcher, folder))
    watching.start()
    watching.join(60 if is_launcher_gone else 2.0)
    assert watching.is_alive() != is_launcher_gone
    if is_launcher_gone:
        assert server.wait(60) == -signal.SIGKILL
    else:
        assert server.poll() is None
        server.kill()
        watching.join(60)
    assert not folder.exists()
