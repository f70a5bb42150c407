"""Publishing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import CorruptArtifactError
from hplm.store import artifact


def publish(folder: Path, content: str) -> None:
    with artifact.publish(folder, "note", {}) as partial:
        (partial / "note.txt").write_text(content)


def test_a_failure_while_writing_leaves_the_old_artifact_and_no_litter(tmp_path: Path) -> None:
    publish(tmp_path / "a", "old")

    def fail() -> None:
        with artifact.publish(tmp_path / "a", "note", {}) as partial:
            (partial / "note.txt").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "a" / "note.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_second_version_replaces_the_first(tmp_path: Path) -> None:
    publish(tmp_path / "a", "old")
    publish(tmp_path / "a", "new")
    artifact.read(tmp_path / "a", "note").verify()
    assert (tmp_path / "a" / "note.txt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_equal_contents_have_equal_fingerprints(tmp_path: Path) -> None:
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        publish(tmp_path / name, content)
    a, b, c = (artifact.read(tmp_path / name, "note").fingerprint for name in "abc")
    assert a == b != c


def test_an_artifact_of_an_older_store_is_refused_with_the_commands_that_build_it_anew(tmp_path: Path) -> None:
    publish(tmp_path / "a", "x")
    manifest = tmp_path / "a" / artifact.MANIFEST
    manifest.write_text(
        manifest.read_text().replace(f'"format": {artifact.FORMAT}', f'"format": {artifact.FORMAT - 1}')
    )
    with pytest.raises(CorruptArtifactError, match=r"has format 1, this version reads 2: .*`hplm build demo`"):
        artifact.read(tmp_path / "a", "note")


def test_another_kind_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "a", "x")
    with pytest.raises(CorruptArtifactError, match="is a note, a base was expected"):
        artifact.read(tmp_path / "a", "base")
