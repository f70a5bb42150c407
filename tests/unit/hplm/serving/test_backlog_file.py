"""The file of backlogs: read only if the same user wrote it a short time ago, and no fault of it stops a stage."""

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

BACKLOG = Backlog(100.0, 100.5, 64, 0.25, 99.5, (101.0, 102.0), (10, 30), {"films": 30})
STORE = Path("/srv/store")


def file_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_published_backlog_is_read_until_it_is_old_or_removed(tmp_path: Path) -> None:
    writer, reader = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    assert reader.read(100.0) is None
    writer.publish(BACKLOG)
    assert reader.read(100.0 + READ_EVERY_S / 2) is None
    assert reader.read(100.01 + READ_EVERY_S) == BACKLOG
    writer.publish(later := replace(BACKLOG, at_s=101.0))
    assert reader.read(101.0) == later
    assert reader.read(101.1 + OLD_AFTER_S) is None
    writer.remove()
    assert reader.read(103.5) is None
    assert not list(tmp_path.iterdir())


def test_if_no_more_files_can_be_opened_there_is_no_backlog_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    writer.publish(BACKLOG)
    with limited(resource.RLIMIT_NOFILE, 3):
        assert reader.read(100.0) is None
        assert reader.read(101.0) is None
    assert caplog.text.count("cannot be looked into") == 1
    assert reader.read(101.1) == BACKLOG


def test_the_file_of_a_killed_stage_is_removed_after_a_while(tmp_path: Path) -> None:
    writer, reader = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    writer.publish(BACKLOG)
    assert reader.read(BACKLOG.at_s + OLD_AFTER_S + 1) is None
    assert list(tmp_path.iterdir())
    assert reader.read(BACKLOG.at_s + REMOVED_AFTER_S + 1) is None
    assert not list(tmp_path.iterdir())
    # A stage that was only stopped publishes again.
    writer.publish(later := replace(BACKLOG, at_s=200.0))
    assert reader.read(200.0) == later


def test_the_backlog_of_a_queue_before_its_first_request_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = RequestQueue(
        Fcfs(), Budget(1, 8, 8, 8), CostModel.fit([(1, 1, 1e-6)]), capacity=8, weights={}, starve_after_s=1.0
    )
    BacklogFile(STORE, "minilm", tmp_path).publish(queue.backlog(queue.snapshot(), 100.0))
    # The backlog says nothing yet.
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    assert not caplog.records


def test_other_stores_and_bases_have_files_of_their_own(tmp_path: Path) -> None:
    BacklogFile(STORE, "minilm", tmp_path).publish(BACKLOG)
    assert BacklogFile(STORE, "bert", tmp_path).read(100.0) is None
    assert BacklogFile(STORE / "other", "minilm", tmp_path).read(100.0) is None


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"at_s": "now"}', "\x00\xff"])
def test_a_file_that_holds_no_backlog_is_logged_once_and_ignored(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = BacklogFile(STORE, "minilm", tmp_path)
    BacklogFile(STORE, "minilm", tmp_path).publish(BACKLOG)
    file_in(tmp_path).write_text(content)
    assert reader.read(100.0) is None
    assert reader.read(101.0) is None
    assert len(caplog.records) == 1


def test_a_file_of_another_user_or_behind_a_link_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BacklogFile(STORE, "minilm", tmp_path).publish(BACKLOG)
    path = file_in(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) == BACKLOG
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    path.unlink()
    # A pipe without a writer: to open it may hang.
    os.mkfifo(path)
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None
    path.unlink()
    path.mkdir()
    assert BacklogFile(STORE, "minilm", tmp_path).read(100.0) is None


def test_a_backlog_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = BacklogFile(STORE, "minilm", tmp_path / "missing")
    writer.publish(BACKLOG)
    writer.publish(BACKLOG)
    assert len(caplog.records) == 1


def test_the_half_written_file_of_a_killed_process_is_no_hindrance(tmp_path: Path) -> None:
    writer = BacklogFile(STORE, "minilm", tmp_path)
    writer.publish(BACKLOG)
    file_in(tmp_path).with_suffix(".new").write_text("{")
    writer.publish(replace(BACKLOG, at_s=101.0))
    writer.publish(later := replace(BACKLOG, at_s=102.0))
    assert BacklogFile(STORE, "minilm", tmp_path).read(102.0) == later


def test_each_process_of_a_stage_has_its_own_file_and_all_are_read_as_one_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, one = BacklogFile(STORE, "minilm", tmp_path), BacklogFile(STORE, "minilm", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        other = BacklogFile(STORE, "minilm", tmp_path)
    one.publish(BACKLOG)
    other.publish(newer := replace(BACKLOG, at_s=101.0, tokens=(7, 8)))
    assert reader.read(101.0) == combine([BACKLOG, newer])
    # Old backlogs no longer count, nor do those of ended stages.
    other.publish(newer := replace(newer, at_s=103.0))
    assert reader.read(99.9 + OLD_AFTER_S) == combine([BACKLOG, newer]) != newer
    assert reader.read(100.1 + OLD_AFTER_S) == newer
    one.remove()
    other.remove()
    assert reader.read(103.5) is None
