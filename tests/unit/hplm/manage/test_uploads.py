"""Uploads: chunks in order, once or twice, a checksum at the end, a quota, and nothing left behind."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hplm.core.settings import ManagerSettings
from hplm.errors import QueueFullError, StoreUnavailableError, UnknownUploadError, UploadError
from hplm.housekeeping.garbage_collection import UNFINISHED_UPLOAD_S, UPLOAD_S, drop_expired, remove_uploads
from hplm.manage import uploads as uploading
from hplm.manage.requests import StartUpload, UploadChunk
from hplm.manage.uploads import Uploads
from hplm.registry.registry import Registry
from hplm.store.layout import Store

NOW_S = 1_000_000.0
LIMITS = ManagerSettings(store="", base="tiny", domain="general", max_upload_bytes=1000, max_uploads_bytes=1500)
CHUNK_BYTES = 64


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with closing(Registry.open(Store(tmp_path), create=True)) as opened:
        yield opened


@pytest.fixture
def uploads(tmp_path: Path, registry: Registry) -> Uploads:
    return Uploads(Store(tmp_path), registry)


def start(uploads: Uploads, raw: bytes, name: str = "train.csv", now_s: float = NOW_S) -> str:
    return uploads.start(StartUpload(len(raw), hashlib.sha256(raw).hexdigest(), name), LIMITS, now_s).id


def send(uploads: Uploads, upload: str, raw: bytes, offset: int = 0) -> int:
    return uploads.receive(UploadChunk(upload, offset, base64.b64encode(raw).decode()), CHUNK_BYTES)


def left(root: Path) -> list[Path]:
    """What lies in the store's folder of uploads."""
    return sorted((root / "uploads").rglob("*"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(raw=st.binary(min_size=1, max_size=200), data=st.data())
def test_whatever_chunks_come_again_or_overlap_the_file_is_what_was_sent(
    uploads: Uploads, raw: bytes, data: st.DataObject
) -> None:
    upload = start(uploads, raw)
    received = 0
    while received < len(raw):
        offset = data.draw(st.integers(0, received))
        size = data.draw(st.integers(16, CHUNK_BYTES))
        found = send(uploads, upload, raw[offset : offset + size], offset)
        assert found == max(received, min(len(raw), offset + size))
        received = found
    uploads.finish(upload)
    path = uploads.path(upload)
    assert path.read_bytes() == raw
    assert path.name == "train.csv"
    uploads.drop([upload])


def test_a_chunk_out_of_order_is_refused_with_where_to_go_on(uploads: Uploads) -> None:
    upload = start(uploads, b"0123456789")
    send(uploads, upload, b"01234")
    with pytest.raises(UploadError, match="5 bytes have arrived: go on there"):
        send(uploads, upload, b"89", 8)
    assert send(uploads, upload, b"56789", 5) == 10


@pytest.mark.parametrize(
    ("raw", "offset", "words"),
    [
        (b"", 0, "1 to 64 bytes"),
        (b"x" * 65, 0, "1 to 64 bytes"),
        (b"x" * 11, 0, "10 bytes were announced"),
        (b"x", 10**18, "10 bytes were announced"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(uploads: Uploads, raw: bytes, offset: int, words: str) -> None:
    with pytest.raises(UploadError, match=words):
        send(uploads, start(uploads, b"0123456789"), raw, offset)


def test_what_is_not_what_was_announced_is_dropped_whole(uploads: Uploads, registry: Registry, tmp_path: Path) -> None:
    upload = start(uploads, b"good")
    send(uploads, upload, b"evil")
    with pytest.raises(UploadError, match="the checksum is not the one announced"):
        uploads.finish(upload)
    assert not registry.uploads()
    assert not left(tmp_path)
    with pytest.raises(UnknownUploadError):
        send(uploads, upload, b"good")


def test_an_unfinished_upload_is_no_file_yet_and_finishing_twice_is_once(uploads: Uploads) -> None:
    upload = start(uploads, b"good")
    send(uploads, upload, b"go")
    with pytest.raises(UploadError, match="2 of 4 bytes have arrived"):
        uploads.finish(upload)
    with pytest.raises(UploadError, match="not finished"):
        uploads.path(upload)
    send(uploads, upload, b"od", 2)
    assert uploads.finish(upload) == uploads.finish(upload)


def test_a_chunk_that_was_cut_short_is_written_again(uploads: Uploads, registry: Registry, tmp_path: Path) -> None:
    upload = start(uploads, b"0123456789")
    send(uploads, upload, b"0123")
    with (tmp_path / "uploads" / upload / "train.csv").open("ab") as file:
        file.write(b"torn")
    assert registry.upload(upload).received == 4
    send(uploads, upload, b"456789", 4)
    uploads.finish(upload)
    assert uploads.path(upload).read_bytes() == b"0123456789"


def test_too_large_a_file_and_too_many_of_them_are_refused(uploads: Uploads) -> None:
    with pytest.raises(UploadError, match="at most 1,000 are accepted"):
        start(uploads, b"x" * 1001)
    first = start(uploads, b"x" * 1000)
    with pytest.raises(QueueFullError, match="uploads of 1,000 bytes wait already"):
        start(uploads, b"x" * 501)
    uploads.drop([first])
    start(uploads, b"x" * 501)


def test_too_many_files_are_refused_however_small_they_are(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "MOST_UPLOADS", 2)
    first, _ = start(uploads, b"x"), start(uploads, b"x")
    with pytest.raises(QueueFullError, match="2 uploads wait or are on their way"):
        start(uploads, b"x")
    uploads.drop([first])
    start(uploads, b"x")


def test_a_file_for_which_there_never_will_be_room_is_refused_for_good(uploads: Uploads) -> None:
    narrow = replace(LIMITS, max_uploads_bytes=500)
    with pytest.raises(UploadError, match="at most 500 are accepted"):
        uploads.start(StartUpload(501, "0" * 64, "train.csv"), narrow, NOW_S)


def test_room_on_the_disk_is_promised_once(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    first = start(uploads, b"x" * 600)
    with pytest.raises(StoreUnavailableError, match="1,000 bytes left, 1,100 are needed"):
        start(uploads, b"x" * 500)
    send(uploads, first, b"x" * 50)
    send(uploads, first, b"x" * 50, 50)
    # These lie on the disk, so they are among what is not free.
    start(uploads, b"x" * 500)


def test_an_upload_that_finds_no_place_on_the_disk_takes_no_room(
    uploads: Uploads, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(uploads, b"x")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(StoreUnavailableError, match="Read-only"):
        start(uploads, b"x" * 900)
    monkeypatch.undo()
    assert len(registry.uploads()) == 1
    start(uploads, b"x" * 900)


@pytest.mark.usefixtures("patience")
def test_the_quota_holds_when_many_start_at_once(uploads: Uploads, registry: Registry) -> None:
    def attempt(number: int) -> bool:
        try:
            start(uploads, bytes([number]) * 400)
        except QueueFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 3
    assert sum(upload.bytes for upload in registry.uploads()) == 1200


def collect(uploads: Uploads, registry: Registry, now_s: float) -> None:
    """What garbage collection does with uploads."""
    remove_uploads(uploads._store, drop_expired(registry, now_s))


def test_an_upload_that_no_job_waits_for_expires(uploads: Uploads, registry: Registry, tmp_path: Path) -> None:
    all_of_them = _, wanted, new = [start(uploads, b"x", now_s=NOW_S + at) for at in (0, 0, 10)]
    for upload in all_of_them:
        send(uploads, upload, b"x")
        uploads.finish(upload)
    registry.submit_job("tenant.create", "tenant:a", {"data": {"train": {"upload": wanted}}}, NOW_S)
    collect(uploads, registry, NOW_S + UPLOAD_S + 5)
    assert {upload.id for upload in registry.uploads()} == {wanted, new}
    assert {path.name for path in (tmp_path / "uploads").iterdir()} == {wanted, new}


def test_an_upload_that_nobody_finishes_gives_its_room_back_soon(uploads: Uploads, registry: Registry) -> None:
    started, whole = (start(uploads, b"good", now_s=NOW_S) for _ in range(2))
    send(uploads, started, b"go")
    send(uploads, whole, b"good")
    uploads.finish(whole)
    collect(uploads, registry, NOW_S + UNFINISHED_UPLOAD_S - 5)
    assert {upload.id for upload in registry.uploads()} == {started, whole}
    collect(uploads, registry, NOW_S + UNFINISHED_UPLOAD_S + 5)
    assert [upload.id for upload in registry.uploads()] == [whole]


def test_an_upload_of_which_nothing_comes_gives_its_room_back_sooner(uploads: Uploads, registry: Registry) -> None:
    begun = start(uploads, b"x" * 500)
    send(uploads, begun, b"x")
    start(uploads, b"x" * 1000)
    with pytest.raises(QueueFullError, match="uploads of 1,500 bytes wait already"):
        start(uploads, b"x" * 1000, now_s=NOW_S + 1500)
    other = start(uploads, b"x" * 1000, now_s=NOW_S + 2000)
    assert {upload.id for upload in registry.uploads()} == {begun, other}


def test_bytes_that_are_gone_say_so(uploads: Uploads, tmp_path: Path) -> None:
    upload = start(uploads, b"good")
    (tmp_path / "uploads" / upload / "train.csv").unlink()
    with pytest.raises(UnknownUploadError, match="gone: start again"):
        send(uploads, upload, b"good")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_a_chunk_and_not_the_upload(uploads: Uploads, registry: Registry, tmp_path: Path) -> None:
    upload = start(uploads, b"good")
    file = tmp_path / "uploads" / upload / "train.csv"
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(StoreUnavailableError, match="No space left"):
        send(uploads, upload, b"good")
    assert registry.upload(upload).received == 0
    file.unlink()
    file.touch()
    assert send(uploads, upload, b"good") == 4
