"""How one stage tells another what waits: believed only where the same user wrote it of late, and never in the way."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import Backlog, combine
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Budget
from hplm.scheduling.queue import RequestQueue
from hplm.serving.backlog_file import OLD_AFTER_S, READ_EVERY_S, REMOVED_AFTER_S, BacklogFile
from tests.limits import limited

TOLD = Backlog(100.0, 100.5, 64, 0.25, 99.5, (101.0, 102.0), (10, 30), {"films": 30})
STORE = Path("/srv/store")


def file_in(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_what_is_told_is_read_until_it_is_old_or_gone(tmp_path: Path) -> None:
    told, heard = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    assert heard.read(100.0) is None
    told.publish(TOLD)
    assert heard.read(100.0 + READ_EVERY_S / 2) is None
    assert heard.read(100.01 + READ_EVERY_S) == TOLD
    told.publish(later := replace(TOLD, at_s=101.0))
    assert heard.read(101.0) == later
    assert heard.read(101.1 + OLD_AFTER_S) is None
    told.remove()
    assert heard.read(103.5) is None
    assert not list(tmp_path.iterdir())


def test_where_no_more_files_can_be_opened_nothing_is_told_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, heard = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    told.publish(TOLD)
    with limited(resource.RLIMIT_NOFILE, 3):
        assert heard.read(100.0) is None
        assert heard.read(101.0) is None
    assert caplog.text.count("cannot be looked into") == 1
    assert heard.read(101.1) == TOLD


def test_what_a_stage_that_was_killed_left_is_removed_after_a_while(tmp_path: Path) -> None:
    told, heard = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    told.publish(TOLD)
    assert heard.read(TOLD.at_s + OLD_AFTER_S + 1) is None
    assert list(tmp_path.iterdir())
    assert heard.read(TOLD.at_s + REMOVED_AFTER_S + 1) is None
    assert not list(tmp_path.iterdir())
    # One that was only stopped goes on.
    told.publish(later := replace(TOLD, at_s=200.0))
    assert heard.read(200.0) == later


def test_what_a_queue_tells_before_its_first_request_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = RequestQueue(
        Fcfs(), Budget(1, 8, 8, 8), CostModel.fit([(1, 1, 1e-6)]), capacity=8, weights={}, starve_after_s=1.0
    )
    BacklogFile(STORE, "minilm", tmp_path).publish(queue.backlog(queue.snapshot(), 100.0))
    # Nothing to go by so far, which is no fault.
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    assert not caplog.records


def test_other_stores_and_bases_have_files_of_their_own(tmp_path: Path) -> None:
    BacklogFile(STORE, "minilm", tmp_path).publish(TOLD)
    assert BacklogFile(STORE, "bert", tmp_path).read(100.0) is None
    assert BacklogFile(STORE / "other", "minilm", tmp_path).read(100.0) is None


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"at_s": "now"}', "\x00\xff"])
def test_what_is_no_backlog_is_logged_once_and_not_believed(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = BacklogFile(STORE, "minilm", tmp_path)
    BacklogFile(STORE, "minilm", tmp_path).publish(TOLD)
    file_in(tmp_path).write_text(content)
    assert heard.read(100.0) is None
    assert heard.read(101.0) is None
    assert len(caplog.records) == 1


def test_what_another_user_wrote_or_a_link_leads_to_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BacklogFile(STORE, "minilm", tmp_path).publish(TOLD)
    path = file_in(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) == TOLD
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    path.unlink()
    # Nobody ever writes to it.
    os.mkfifo(path)
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    path.unlink()
    path.mkdir()
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None


def test_where_nothing_can_be_written_that_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = BacklogFile(STORE, "minilm", tmp_path / "missing")
    told.publish(TOLD)
    told.publish(TOLD)
    assert len(caplog.records) == 1


def test_what_a_killed_process_left_half_written_is_no_hindrance(tmp_path: Path) -> None:
    told = BacklogFile(STORE, "minilm", tmp_path)
    told.publish(TOLD)
    file_in(tmp_path).with_suffix(".new").write_text("{")
    told.publish(replace(TOLD, at_s=101.0))
    told.publish(later := replace(TOLD, at_s=102.0))
    assert BacklogFile(STORE, "minilm", tmp_path).read(102.0) == later


def test_stages_beside_each_other_tell_each_its_own_and_are_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, one = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        other = BacklogFile(STORE, "minilm", tmp_path)
    one.publish(TOLD)
    other.publish(beside := replace(TOLD, at_s=101.0, tokens=(7, 8)))
    assert heard.read(101.0) == combine([TOLD, beside])
    # One that says nothing any more counts no longer; nor does one that has ended.
    other.publish(beside := replace(beside, at_s=103.0))
    assert heard.read(99.9 + OLD_AFTER_S) == combine([TOLD, beside]) != beside
    assert heard.read(100.1 + OLD_AFTER_S) == beside
    one.remove()
    other.remove()
    assert heard.read(103.5) is None
