"""Records in shared memory that several processes change."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
from contextlib import closing
from pathlib import Path

import pytest

from hplm.runtime.shared_records import HEADER_BYTES, SharedRecords
from tests.limits import run_with_mounts
from tests.waiting import until

FORK = multiprocessing.get_context("fork")
COUNT = struct.Struct("=Q")


def add(path: Path, times: int) -> None:
    with closing(SharedRecords(path, COUNT.size, 100)) as records:
        for number in range(times):
            index = records.find_or_add(f"t{number % 20}")
            assert index is not None
            with records.locked_record(index):
                (count,) = COUNT.unpack_from(records.memory, records.body_at(index))
                COUNT.pack_into(records.memory, records.body_at(index), count + 1)
            records.mark(index)


def test_no_change_of_several_processes_is_lost(tmp_path: Path) -> None:
    adders = [FORK.Process(target=add, args=(tmp_path / "records", 400)) for _ in range(6)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    with closing(SharedRecords(tmp_path / "records", COUNT.size, 100)) as records:
        marked = records.take_marks()
        assert {records.name_of(index) for index in marked} == {f"t{number}" for number in range(20)}
        for index in marked:
            assert COUNT.unpack_from(records.memory, records.body_at(index)) == (120,)
        assert records.take_marks() == []


def hold(path: Path, held: Path) -> None:
    records = SharedRecords(path, COUNT.size, 100)
    index = records.find_or_add("acme")
    assert index is not None
    with records.locked_record(index):
        held.touch()
        time.sleep(60)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_killed_process_leaves_no_lock_and_a_stopped_one_is_said(tmp_path: Path, death: signal.Signals) -> None:
    holder = FORK.Process(target=hold, args=(tmp_path / "records", tmp_path / "held"))
    holder.start()
    assert holder.pid is not None
    until((tmp_path / "held").exists)
    os.kill(holder.pid, death)
    with closing(SharedRecords(tmp_path / "records", COUNT.size, 100)) as records:
        index = records.find("acme")
        assert index is not None
        if death == signal.SIGKILL:
            holder.join()
            with records.locked_record(index):
                pass
        else:
            with pytest.raises(TimeoutError, match="stopped"), records.locked_record(index):
                pass
            os.kill(holder.pid, signal.SIGKILL)
            holder.join()


def test_names_beyond_the_capacity_have_no_record(tmp_path: Path) -> None:
    with closing(SharedRecords(tmp_path / "records", COUNT.size, 3)) as records:
        assert {records.find_or_add(name) for name in "abc"} == {0, 1, 2}
        assert records.find_or_add("d") is None
        assert records.find_or_add("b") == records.find("b")


def test_a_file_of_another_form_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with closing(SharedRecords(path, 16, 3)) as old:
        old.find_or_add("a")
        with closing(SharedRecords(path, 8, 3)) as new:
            assert new.find("a") is None
            assert old.find("a") is not None


def test_a_lock_is_seen_until_its_file_is_closed(tmp_path: Path) -> None:
    with closing(SharedRecords(tmp_path / "records", 8, 3)) as one:
        with closing(SharedRecords(tmp_path / "records", 8, 3)) as other:
            assert other.try_keep(HEADER_BYTES - 1)
            assert not one.try_keep(HEADER_BYTES - 1)
            assert one.is_locked(HEADER_BYTES - 1)
            assert not other.is_locked(HEADER_BYTES - 1)
        assert not one.is_locked(HEADER_BYTES - 1)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "records").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        SharedRecords(tmp_path / "records", 8, 3)


def test_records_with_a_name_are_found_in_a_table_of_any_size(tmp_path: Path) -> None:
    with closing(SharedRecords(tmp_path / "records", 1000, 5000)) as records:
        added = {records.find_or_add(f"t{number}") for number in range(50)}
        assert set(records.used()) == added


def test_full_shared_memory_ends_no_process(tmp_path: Path) -> None:
    done = run_with_mounts("tests.unit.hplm.runtime.full_shared_memory", tmp_path / "disk", 60)
    assert done.returncode == 0, done
