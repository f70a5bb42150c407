"""PLOT tables on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import CorruptArtifactError, MissingArtifactError, WrongBaseError
from hplm.plot import keys, table
from hplm.plot.table import PlotTable

HIDDEN = 6


def write(folder: Path, grams: np.ndarray, vocab_size: int, fingerprint: str = "base") -> np.ndarray:
    """A table whose vectors are random, and those vectors."""
    grams = table.sort_grams(grams, vocab_size)
    values = np.random.default_rng(0).normal(size=(*grams.shape, HIDDEN)).astype(np.float16)
    chunks = [values[i : i + 3] for i in range(0, len(values), 3)]
    table.write(folder, "root", grams, chunks, vocab_size=vocab_size, hidden_size=HIDDEN, fingerprint=fingerprint)
    return values


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 3, 5]), st.sampled_from([40, 30_522, 250_000]), st.integers(1, 60), st.randoms())
def test_what_was_written_is_found_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, n: int, vocab_size: int, rows: int, random: object
) -> None:
    rng = np.random.default_rng(abs(hash(str(random))) % 2**32)
    grams = np.unique(rng.integers(0, vocab_size, (rows, n)), axis=0)
    folder = tmp_path_factory.mktemp("table") / "t"
    values = write(folder, grams, vocab_size)
    opened = table.load(folder, fingerprint="base")
    found = opened.find(grams)
    assert sorted(found) == list(range(len(grams)))
    assert np.array_equal(opened.values, values)
    stored = {tuple(gram) for gram in grams.tolist()}
    others = [gram for gram in rng.integers(0, vocab_size, (50, n)).tolist() if tuple(gram) not in stored]
    if others:
        assert (opened.find(np.array(others)) == -1).all()


def test_five_ids_of_a_small_vocabulary_fit_and_of_berts_do_not() -> None:
    assert keys.fits(5, 4096)
    assert not keys.fits(5, 30_522)
    assert keys.fits(4, 30_522)


def test_two_ngrams_with_one_hash_never_answer_for_each_other() -> None:
    asked = np.array([[1, 2, 3, 4, 5]])
    other = np.array([[9, 9, 9, 9, 9]], dtype=np.uint32)
    values = np.ones((1, 5, HIDDEN), dtype=np.float16)
    forged = PlotTable("root", 5, 30_522, keys.pack(asked, 30_522), values, other)
    assert forged.find(asked).tolist() == [-1]


def test_an_empty_table_finds_nothing() -> None:
    empty = PlotTable("branch", 3, 100, np.zeros(0, np.uint64), np.zeros((0, 3, HIDDEN), np.float16), None)
    assert empty.find(np.array([[1, 2, 3]])).tolist() == [-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "root", np.arange(30).reshape(10, 3), 100)
    return tmp_path / "root"


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    with (folder / "values.f16").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptArtifactError, match="cut short"):
        table.load(folder, fingerprint="base")


def test_a_flipped_byte_is_refused(folder: Path) -> None:
    data = bytearray((folder / "values.f16").read_bytes())
    data[17] ^= 0x40
    (folder / "values.f16").write_bytes(data)
    with pytest.raises(CorruptArtifactError, match="checksum"):
        table.load(folder, fingerprint="base")


def test_a_table_of_another_base_is_refused(folder: Path) -> None:
    with pytest.raises(WrongBaseError, match="built for base base, this base is other"):
        table.load(folder, fingerprint="other")


def test_a_missing_table_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match="hplm build"):
        table.load(tmp_path / "nothing", fingerprint="base")


def test_a_broken_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(CorruptArtifactError, match="not a manifest"):
        table.load(folder, fingerprint="base")
