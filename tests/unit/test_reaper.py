"""The process that ends what a killed server leaves, over processes that are no Triton."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hplm.triton.reaper import start_reaper
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
    # The second gives the first up, and heeds no signal that can be ignored.
    stub = "trap '' TERM; while :; do sleep 1; done"
    command = ["bash", "-c", f'bash -c "{stub}" & echo $!; wait']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout
        left = int(server.stdout.readline())
        reaper = start_reaper(server.pid, folder, folder / "work")
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(1.5)
        assert runs(left)
        assert folder.exists()
        server.kill()
        if is_asked_how_it_ended:
            server.wait()
        assert reaper.wait(60) == 0
        until(lambda: not runs(left))
        assert not folder.exists()


def test_of_a_server_that_has_gone_already_the_folder_goes_too(folder: Path) -> None:
    with subprocess.Popen(["true"], start_new_session=True) as server:
        server.wait()
    assert start_reaper(server.pid, folder, folder / "work").wait(60) == 0
    assert not folder.exists()
