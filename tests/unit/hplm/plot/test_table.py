"""PLOT tables on disk."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.core.settings import BaseConfig
from hplm.errors import CorruptArtifactError, MissingArtifactError, StoreUnavailableError, WrongBaseError
from hplm.plot import keys, table
from hplm.plot.table import PlotTable
from tests import tiny

HIDDEN = 6


def shape(n: int, vocab_size: int) -> BaseConfig:
    """Return the shape of a base with that vocabulary and n-grams of up to `n` tokens."""
    return replace(
        tiny.config(window=max(2, n), form="windows"), hidden_size=HIDDEN, num_heads=1, vocab_size=vocab_size
    )


def find(opened: PlotTable, grams: np.ndarray) -> np.ndarray:
    """Return the rows of all of `grams`, searched in their own order."""
    return opened.find(grams, np.arange(len(grams)), keys.pack(grams, opened.vocab_size))


def write(folder: Path, grams: np.ndarray, vocab_size: int, fingerprint: str = "base") -> np.ndarray:
    """Write a table of random vectors; return the vectors."""
    grams = table.sort_grams(grams, vocab_size)
    values = np.random.default_rng(0).normal(size=(*grams.shape, HIDDEN)).astype(np.float16)
    chunks = [values[i : i + 3] for i in range(0, len(values), 3)]
    table.write(folder, "root", grams, chunks, config=shape(grams.shape[1], vocab_size), fingerprint=fingerprint)
    return values


@settings(max_examples=30)
@given(st.sampled_from([2, 3, 5]), st.sampled_from([40, 30_522, 250_000]), st.integers(1, 60), st.randoms())
def test_what_was_written_is_found_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, n: int, vocab_size: int, rows: int, random: object
) -> None:
    rng = np.random.default_rng(abs(hash(str(random))) % 2**32)
    grams = np.unique(rng.integers(0, vocab_size, (rows, n)), axis=0)
    folder = tmp_path_factory.mktemp("table") / "t"
    values = write(folder, grams, vocab_size)
    opened = table.load(folder, fingerprint="base")
    found = find(opened, grams)
    assert sorted(found) == list(range(len(grams)))
    assert np.array_equal(opened.values, values)
    stored = {tuple(gram) for gram in grams.tolist()}
    others = [gram for gram in rng.integers(0, vocab_size, (50, n)).tolist() if tuple(gram) not in stored]
    if others:
        assert (find(opened, np.array(others)) == -1).all()


def test_five_ids_of_a_small_vocabulary_fit_and_of_berts_do_not() -> None:
    assert keys.fits(5, 4096)
    assert not keys.fits(5, 30_522)
    assert keys.fits(4, 30_522)


@pytest.mark.parametrize(("n", "vocab_size"), [(3, 30_522), (5, 4_096), (5, 30_522), (1, 7), (4, 65_536)])
def test_a_table_gives_its_ngrams_back(tmp_path: Path, n: int, vocab_size: int) -> None:
    rng = np.random.default_rng(n)
    grams = table.sort_grams(rng.integers(0, vocab_size, (50, n)), vocab_size)
    values = np.zeros((len(grams), n, HIDDEN), np.float16)
    table.write(tmp_path / "t", "t", grams, [values], config=shape(n, vocab_size), fingerprint="f")
    np.testing.assert_array_equal(table.load(tmp_path / "t", fingerprint="f").ngrams(), grams)


def test_two_ngrams_with_one_hash_never_answer_for_each_other() -> None:
    asked = np.array([[1, 2, 3, 4, 5]])
    other = np.array([[9, 9, 9, 9, 9]], dtype=np.uint32)
    memory = np.ones((5, HIDDEN), dtype=np.float16)
    forged = PlotTable("root", 5, 5, 30_522, keys.pack(asked, 30_522), memory, 0, other)
    assert find(forged, asked).tolist() == [-1]


def test_an_empty_table_finds_nothing() -> None:
    empty = PlotTable("branch", 3, 3, 100, np.zeros(0, np.uint64), np.zeros((0, HIDDEN), np.float16), 0, None)
    assert find(empty, np.array([[1, 2, 3]])).tolist() == [-1]


def test_tables_in_one_memory_keep_their_own_rows_and_the_room_behind_them_is_empty(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wanted = []
    for number, (rows, n) in enumerate([(700, 3), (1, 2), (40, 1)]):
        grams = np.unique(rng.integers(0, 90, (rows, n)), axis=0)
        wanted.append((grams, write(tmp_path / str(number), grams, 100)))
    folders = [tmp_path / str(number) for number in range(3)]
    opened, room = table.load_together(folders, fingerprint="base", spare_vectors=50)
    for one, (grams, values) in zip(opened, wanted, strict=True):
        assert np.array_equal(one.values, values)
        assert np.array_equal(one.memory[one.first + find(one, grams) * one.vectors_per_ngram], values[:, 0])
    assert len(room.memory) == room.first + 50
    assert not room.memory[room.first :].any()


def test_tables_stay_readable_when_their_files_are_deleted_and_their_memory_goes_with_the_last_view(
    tmp_path: Path,
) -> None:
    grams = np.arange(30_000).reshape(10_000, 3)
    values = write(tmp_path / "t", grams, 30_522)
    opened = table.load(tmp_path / "t", fingerprint="base")
    shutil.rmtree(tmp_path / "t")
    view = opened.values[5_000:]
    del opened
    assert np.array_equal(view, values[5_000:])
    deleted = f"{tmp_path}/t/values.f16 (deleted)"
    assert deleted in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert deleted not in Path("/proc/self/maps").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "root", np.arange(30).reshape(10, 3), 100)
    return tmp_path / "root"


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    with (folder / "values.f16").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptArtifactError, match="cut short"):
        table.load(folder, fingerprint="base")


def test_of_several_tables_the_one_whose_file_is_cut_short_is_named_though_nobody_verifies(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("root", "bigram", "unigram")]
    for folder in folders:
        write(folder, np.arange(30).reshape(10, 3), 100)
    with (folders[1] / "values.f16").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptArtifactError, match=r"/bigram cannot be mapped \(values.f16 has 100 bytes of 360\)"):
        table.load_together(folders, fingerprint="base", verify=False)


def test_memory_that_the_system_lacks_is_no_fault_of_the_tables(folder: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="cannot be mapped now"):
        table.load_together([folder], fingerprint="base", spare_vectors=2**56)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EMFILE, StoreUnavailableError),
        (errno.ENOMEM, StoreUnavailableError),
        (errno.EACCES, CorruptArtifactError),
    ],
)
def test_keys_that_cannot_be_mapped_now_are_no_fault_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(np, "memmap", failing)
    with pytest.raises(kind, match="cannot be mapped"):
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


def test_a_full_disk_is_said_as_one() -> None:
    with pytest.raises(OSError, match="No space left") as error:
        table._write(Path("/dev/full"), [np.zeros(1_000_000, np.uint64)])
    assert error.value.errno == errno.ENOSPC
