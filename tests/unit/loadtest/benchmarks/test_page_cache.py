"""Bank files are read into the page cache before a benchmark, if they fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hplm_loadtest.benchmarks import page_cache
from hplm_loadtest.benchmarks.page_cache import CHUNK, into_page_cache

SIZE = 3 * CHUNK + 5


@pytest.fixture
def store(tmp_path: Path) -> Path:
    bank = tmp_path / "banks" / "fleet"
    bank.mkdir(parents=True)
    (bank / "adapters.bin").write_bytes(bytes(SIZE))
    return tmp_path


def test_only_the_parts_that_the_page_cache_lacks_are_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_is_cached", lambda handle, offset: offset != CHUNK)
    assert into_page_cache(store) == CHUNK
    monkeypatch.setattr(page_cache, "_is_cached", lambda handle, offset: False)
    assert into_page_cache(store) == SIZE


def test_a_bank_is_in_the_page_cache_after_it_was_read(store: Path) -> None:
    into_page_cache(store)
    with (store / "banks" / "fleet" / "adapters.bin").open("rb") as file:
        if not page_cache._is_cached(file.fileno(), 0):
            pytest.skip("the file system cannot tell")
    assert into_page_cache(store) == 0


def test_a_bank_that_does_not_fit_is_not_read_and_a_warning_is_logged(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_cache, "_available_bytes", lambda: CHUNK)
    monkeypatch.setattr(page_cache, "_is_cached", lambda handle, offset: False)
    with caplog.at_level(logging.WARNING):
        assert into_page_cache(store) == 0
    assert "do not fit into the page cache" in caplog.text


def test_a_store_without_banks_has_nothing_to_read(tmp_path: Path) -> None:
    assert into_page_cache(tmp_path) == 0
