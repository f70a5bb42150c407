"""Measuring the profile of a base in one process, and the profile of a job."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.profiles.base_profile import measure_stages, profile_of
from hplm_builder.profiles.stage_timings import cut, random_text

from hplm.core.roles import served_base
from hplm.core.settings import EncodeSettings
from hplm.engine.open_domain import Domain, open_features
from hplm.engine.served_engine import conditions_of
from hplm.models.base import Base
from hplm.models.device import CPU
from hplm.profiles.profile import Profile
from hplm.profiles.profile_store import write_profile
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.profiles.made_profiles import made_profile

SETTINGS = EncodeSettings(store="", base="tiny", dtype="float32", num_slots=3, num_threads=1)


@pytest.fixture(scope="module")
def domain(tiny_store: Store, tiny_base: Base) -> Domain:
    return open_features(tiny_store, tiny_base, [tiny_store.table(tiny.PLOT, "root").parent])


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("tiny_models", tiny.KINDS, indirect=True)
def test_a_measured_profile_has_every_stage_layer_and_byte(
    tiny_models: Path, tiny_store: Store, tiny_base: Base
) -> None:
    steps: list[str] = []
    measured = measure_stages(tiny_store, served_base(tiny_models), 1, lambda step, _: steps.append(step))
    config = tiny_base.config
    assert Profile.from_json(measured.to_json(), "here") == measured
    assert measured.kind == "quick"
    lengths = [timing.tokens for timing in measured.request]
    assert lengths == [timing.tokens for timing in measured.look_up] == [timing.tokens for timing in measured.known]
    assert lengths[-1] == config.max_tokens
    assert {len(timing.ms) for timing in measured.layers} == {config.upper_layers}
    assert {timing.texts for timing in measured.encode} > {1, 8}
    # A request takes longer than its stages.
    alone = [timing.ms for timing in measured.encode if timing.texts == 1]
    assert all(request.ms > ms for request, ms in zip(measured.request, alone, strict=True))
    memory = measured.memory
    assert memory.slots >= 3 * memory.adapter > 0
    assert memory.weights > 0
    assert (memory.tables == 0) == config.is_whole
    assert measured.swap_ms is not None
    assert measured.tenant_load_ms is not None
    assert set(steps) == {"encode stage", "look-up stage", "layers"}


def test_a_job_without_a_kept_profile_measures_quickly_and_says_so(
    tiny_store: Store, tiny_base: Base, domain: Domain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = profile_of(Store(tmp_path), tiny_base, domain, SETTINGS)
    assert found.kind == "quick"
    assert "no profile of this machine" in caplog.text
    assert all(a.tokens < b.tokens for a, b in pairwise(found.request))
    # A quick profile is not kept: a busy machine may have slowed it.
    assert not list(tmp_path.iterdir())


def test_a_job_takes_the_kept_profile_of_its_settings_before_a_newer_one(
    tiny_base: Base, domain: Domain, tmp_path: Path
) -> None:
    wanted = conditions_of(tiny_base, SETTINGS, CPU, 1)
    equal = made_profile(conditions=wanted)
    newer = made_profile(conditions=replace(wanted, threads=7), measured_at="2026-05-01T00:00:00Z")
    write_profile(Store(tmp_path), newer)
    assert profile_of(Store(tmp_path), tiny_base, domain, SETTINGS) == newer
    write_profile(Store(tmp_path), equal)
    assert profile_of(Store(tmp_path), tiny_base, domain, SETTINGS) == equal


@pytest.mark.parametrize("other", [{"processor": "another"}, {"cores": 99}, {"fingerprint": "0" * 16}])
def test_a_job_does_not_take_a_profile_of_another_machine_or_base(
    tiny_base: Base, domain: Domain, tmp_path: Path, other: dict[str, object]
) -> None:
    conditions = replace(conditions_of(tiny_base, SETTINGS, CPU, 1), **other)  # type: ignore[arg-type]
    write_profile(Store(tmp_path), made_profile(conditions=conditions))
    assert profile_of(Store(tmp_path), tiny_base, domain, SETTINGS).kind == "quick"


def test_sizes_are_cut_to_what_the_base_reads() -> None:
    assert cut([(1, 8), (1, 64), (1, 512), (8, 512)], 64) == [(1, 8), (1, 64), (8, 64)]


def test_random_texts_have_the_tokens_that_were_asked_for(tiny_base: Base) -> None:
    encoder = tiny_base.load_text_encoder()
    texts = [random_text(tokens, np.random.default_rng(0)) for tokens in (3, 8, 16)]
    assert [len(encoded.ids) for encoded in encoder.encode(texts)] == [3, 8, 16]
