"""`hplm store`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hplm.errors import CorruptRegistryError, MissingArtifactError, MissingRegistryError
from hplm.registry.registry import Registry
from hplm.store.cascade_outputs import outputs_of
from hplm.store.layout import Store
from hplm_cli import make_app
from tests.unit.hplm.registry.making import NOW_S, put_bank, put_base, put_plot, put_tenant


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store from before the registry."""
    made = Store(tmp_path / "store")
    base = put_base(made)
    put_plot(made, "general", base)
    put_tenant(made, "tenants/films/1", base)
    put_bank(made, "fleet", base, ["a", "b"])
    return made


def hplm_store(store: Store, command: str, *options: str) -> Result:
    return CliRunner().invoke(make_app("store"), ["store", command, "--store", str(store.root), *options])


def test_a_store_from_before_the_registry_is_adopted_checked_and_shown(store: Store) -> None:
    done = hplm_store(store, "adopt")
    assert done.output == "1 bases, 1 domain versions, 3 tenant versions adopted\n"
    assert hplm_store(store, "adopt").output == "0 bases, 0 domain versions, 0 tenant versions adopted\n"
    done = hplm_store(store, "verify")
    assert (done.exit_code, done.output) == (0, "0 problems, 0 unused files\n")
    shown = hplm_store(store, "show").output
    assert "3 tenants" in shown
    assert "general" in shown
    assert "last jobs: none" in shown


def test_adopt_names_tenants_whose_cascade_was_lost_with_the_registry(store: Store) -> None:
    outputs_of(store.path("tenants/films/1")).mkdir()
    assert "tenant films: its cascade and promise are lost" in " ".join(hplm_store(store, "adopt").output.split())


def test_verify_lists_what_is_wrong_and_ends_with_status_1(store: Store) -> None:
    hplm_store(store, "adopt")
    (store.path("tenants/films/1") / "weights").write_text("other")
    done = hplm_store(store, "verify")
    assert done.exit_code == 1
    assert "tenants/films/1: CORRUPT_ARTIFACT" in done.output
    assert "1 problems" in done.output
    assert "put it back from a backup" in done.output


def test_gc_names_what_it_removes(store: Store) -> None:
    hplm_store(store, "adopt")
    with closing(Registry.open(store)) as registry:
        registry.delete_tenant("films", NOW_S)
        upload = registry.start_upload(1, "a", NOW_S)
    assert hplm_store(store, "gc", "--grace-s", "1000").output.splitlines() == [
        f"uploads/{upload.id}: not used in time",
        "1 removed",
    ]
    assert hplm_store(store, "gc", "--grace-s", "0").output == "tenants/films/1: retired\n1 removed\n"
    assert hplm_store(store, "gc", "--grace-s", "0").output == "0 removed\n"
    assert not store.path("tenants/films/1").exists()


def test_what_cannot_be_adopted_is_said(store: Store) -> None:
    put_plot(store, "law", "another base")
    done = hplm_store(store, "adopt")
    assert done.exit_code == 0
    assert "plots/law: not adopted, it was made over base another base, which is not in the store" in done.output


def test_without_a_registry_it_says_what_makes_one(store: Store, tmp_path: Path) -> None:
    for command in ("verify", "gc", "show"):
        assert isinstance(hplm_store(store, command).exception, MissingRegistryError)
    assert isinstance(hplm_store(Store(tmp_path / "typo"), "adopt").exception, MissingArtifactError)
    assert not (tmp_path / "typo").exists()
    (tmp_path / "above").mkdir()
    assert isinstance(hplm_store(Store(tmp_path / "above"), "adopt").exception, MissingArtifactError)
    assert not any((tmp_path / "above").iterdir())
    (store.root / "registry.sqlite").write_bytes(b"x" * 10_000)
    assert isinstance(hplm_store(store, "adopt").exception, CorruptRegistryError)
