"""Profiles: times between measured lengths, and keeping them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.errors import ConfigError, CorruptArtifactError
from hplm.profiles.profile import Timing
from hplm.profiles.profile_store import KEPT, find_profile, read_profiles, write_profile
from hplm.store.layout import Store
from tests.unit.hplm.profiles.made_profiles import CONDITIONS, made_profile


@pytest.mark.parametrize(
    ("tokens", "ms"), [(1, 4.0), (8, 4.0), (20, 5.0), (32, 6.0), (80, 13.0), (128, 20.0), (224, 34.0)]
)
def test_latency_is_interpolated_between_measured_lengths(tokens: int, ms: float) -> None:
    assert made_profile().latency_ms(tokens) == pytest.approx(ms)


def test_a_longer_text_never_takes_less_time() -> None:
    noisy = made_profile(request=tuple(Timing(1, 8 * n, ms) for n, ms in enumerate((5.0, 9.0, 4.0, 5.0, 12.0), 1)))
    found = [noisy.latency_ms(tokens) for tokens in (8, 16, 24, 32, 40, 48)]
    assert found == pytest.approx([5.0, 6.0, 6.0, 6.0, 12.0, 18.0])


def test_text_that_tables_know_saves_its_look_up_but_not_its_encode_stage() -> None:
    profile = made_profile(look_up=(Timing(1, 8, 1.5),), known=(Timing(1, 8, 0.5),))
    assert profile.latency_ms(8, new_share=1.0) == 4.0
    assert profile.latency_ms(8, new_share=0.5) == 3.5
    assert profile.latency_ms(8, new_share=0.0) == 3.0
    slow_look_up = made_profile(look_up=(Timing(1, 8, 100.0),), known=(Timing(1, 8, 0.5),))
    assert slow_look_up.latency_ms(8, new_share=0.0) == 2.0


def test_each_student_computes_the_text_once_more_in_the_encode_stage_alone() -> None:
    profile = made_profile(encode=(Timing(1, 8, 2.0), Timing(1, 32, 5.0)))
    assert profile.latency_ms(8, students=1) == profile.latency_ms(8)
    assert profile.latency_ms(8, students=4) == profile.latency_ms(8) + 3.0


def test_samples_of_the_cost_model_count_the_tokens_of_the_whole_batch() -> None:
    assert made_profile().cost_samples() == [(8, 64, 0.002), (256, 8192, 0.016)]


@pytest.mark.parametrize(
    "request_timings", [(), (Timing(1, 8, 1.0), Timing(1, 8, 1.0)), (Timing(2, 8, 1.0),), (Timing(1, 8, float("nan")),)]
)
def test_a_profile_without_usable_requests_is_refused(request_timings: tuple[Timing, ...]) -> None:
    with pytest.raises(ConfigError):
        made_profile(request=request_timings)


def test_a_kept_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_profile(store, made_profile())
    assert find_profile(store, "tiny", CONDITIONS) == made_profile()


@pytest.mark.parametrize(
    "other", [{"fingerprint": "f" * 16}, {"processor": "another"}, {"cores": 4}, {"dtype": "float32"}, {"threads": 2}]
)
def test_a_profile_under_other_conditions_is_not_found(tmp_path: Path, other: dict[str, object]) -> None:
    store = Store(tmp_path)
    write_profile(store, made_profile())
    assert find_profile(store, "tiny", replace(CONDITIONS, **other)) is None  # type: ignore[arg-type]


def test_the_newest_profile_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for day in (1, 3, 2):
        write_profile(store, made_profile(measured_at=f"2026-01-0{day}T12:00:00Z", load_s=float(day)))
    found = find_profile(store, "tiny", CONDITIONS)
    assert found is not None
    assert found.load_s == 3.0
    assert [profile.load_s for profile in read_profiles(store, "tiny")] == [3.0, 2.0, 1.0]


def test_a_quick_profile_is_no_full_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_profile(store, made_profile(kind="quick"))
    assert find_profile(store, "tiny", CONDITIONS) is not None
    assert find_profile(store, "tiny", CONDITIONS, full=True) is None


def test_only_the_last_profiles_of_equal_conditions_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_profile(store, made_profile(conditions=replace(CONDITIONS, cores=64)))
    for day in range(1, KEPT + 3):
        write_profile(store, made_profile(measured_at=f"2026-02-0{day}T12:00:00Z"))
    profiles = read_profiles(store, "tiny")
    assert len(profiles) == KEPT + 1
    assert profiles[-1].conditions.cores == 64


def test_a_damaged_profile_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write_profile(store, made_profile())
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "kind": "imagined"}))
    with pytest.raises(CorruptArtifactError, match=path.name):
        find_profile(store, "tiny", CONDITIONS)
    with pytest.raises(CorruptArtifactError, match="hplm profile"):
        read_profiles(store, "tiny")
