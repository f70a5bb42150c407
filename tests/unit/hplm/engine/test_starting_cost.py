"""The costs with which an encode stage starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.core.settings import EncodeSettings
from hplm.engine.encode import EncodeEngine
from hplm.engine.served_engine import conditions_of, make_engine
from hplm.engine.starting_cost import starting_cost
from hplm.models.base import Base
from hplm.models.device import CPU
from hplm.profiles.profile import Conditions, Timing
from hplm.profiles.profile_store import write_profile
from hplm.store.layout import Store
from tests.unit.hplm.profiles.made_profiles import made_profile

SETTINGS = EncodeSettings(store="", base="tiny", dtype="float32", num_slots=3)


@pytest.fixture(scope="module")
def engine(tiny_base: Base) -> Iterator[EncodeEngine]:
    engine = make_engine(tiny_base, SETTINGS, CPU)
    yield engine
    engine.close()


@pytest.fixture
def conditions(tiny_base: Base) -> Conditions:
    return conditions_of(tiny_base, SETTINGS, CPU, threads=1)


def test_a_stage_starts_from_the_profile_of_its_machine_and_settings(
    engine: EncodeEngine, conditions: Conditions, tmp_path: Path
) -> None:
    # Batches that take a second and 10 ms a token: nothing that the tiny base could have measured.
    slow = tuple(Timing(1, tokens, 1000.0 + 10 * tokens) for tokens in (8, 32, 128))
    write_profile(Store(tmp_path), made_profile(conditions=conditions, encode=slow))
    cost, origin = starting_cost(engine, Store(tmp_path), "tiny", conditions)
    assert cost.predict(64, 64 * 64) == pytest.approx(1.64, rel=0.02)
    assert "profile of 2026-01-31T12:00:00Z" in origin


def test_a_stage_measures_if_the_profile_is_of_other_settings(
    engine: EncodeEngine, conditions: Conditions, tmp_path: Path
) -> None:
    write_profile(Store(tmp_path), made_profile(conditions=replace(conditions, threads=7)))
    cost, origin = starting_cost(engine, Store(tmp_path), "tiny", conditions)
    assert cost.predict(64, 64) > 0
    assert "no profile" in origin


def test_a_damaged_profile_is_logged_and_the_stage_measures(
    engine: EncodeEngine, conditions: Conditions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_profile(Store(tmp_path), made_profile(conditions=conditions))
    path.write_text("{")
    _, origin = starting_cost(engine, Store(tmp_path), "tiny", conditions)
    assert "no profile" in origin
    assert path.name in caplog.text


def test_measuring_leaves_no_counts(engine: EncodeEngine, conditions: Conditions, tmp_path: Path) -> None:
    starting_cost(engine, Store(tmp_path), "tiny", conditions)
    assert (engine.computed_tokens, engine.slots.loads) == (0, 0)


def test_a_rebuilt_base_does_not_start_from_the_old_bases_profile(
    engine: EncodeEngine, conditions: Conditions, tmp_path: Path
) -> None:
    write_profile(Store(tmp_path), made_profile(conditions=replace(conditions, fingerprint="0" * 16)))
    assert "no profile" in starting_cost(engine, Store(tmp_path), "tiny", conditions)[1]
