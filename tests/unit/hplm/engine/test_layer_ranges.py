"""Engines of some layers each, one after another, compute as one engine of all layers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig, EncodeSettings
from hplm.engine.adapter_slots import adapter_rows
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.served_engine import make_engine
from hplm.engine.token_domain import random_features
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import CPU
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni

# Bases with the cuts to try: a whole base, whose first two of four layers have no adapters, and a hierarchical base.
SHAPES = [
    (tiny.config(form="whole"), [(1, 1, 2), (2, 2), (3, 1)]),
    (tiny.config(upper_layers=3), [(1, 2), (1, 1, 1)]),
    (replace(tiny.config(upper_layers=3), relative_buckets=8), [(2, 1)]),
]
CASES = [(shape, cut) for shape, cuts in SHAPES for cut in cuts]


def base_of(tmp_path: Path, shape: BaseConfig) -> Base:
    return tiny.make_base(Store(tmp_path), shape)


def tenants_of(base: Base) -> list[Tenant]:
    return [tiny.tenant_of(base, name, seed) for seed, name in enumerate(tiny.TASKS)]


def asked_of(base: Base) -> list[EngineRequest]:
    rng, tenants = np.random.default_rng(0), tenants_of(base)
    lengths = [3, 17, 1, 40, 17, 8]
    return [
        EngineRequest(tenants[i % len(tenants)], random_features(base.config, length, rng))
        for i, length in enumerate(lengths)
    ]


def run_parts(engines: list[EncodeEngine], requests: list[EngineRequest]) -> list[np.ndarray]:
    """Run requests through engines of some layers each, as their stages do."""
    for engine in engines:
        cut = [
            replace(each, tenant=each.tenant.with_adapters([engine.slots.in_layers(each.tenant.packed)]))
            for each in requests
        ]
        outputs = engine.run(cut)
        requests = [replace(each, features=states) for each, states in zip(requests, outputs, strict=True)]
    return outputs


def parts_of(base: Base, cut: tuple[int, ...], **settings: str) -> list[EncodeEngine]:
    given = EncodeSettings(store="", base="tiny", num_slots=8, **{"dtype": "float32", **settings})
    bounds = pairwise(accumulate(cut, initial=0))
    return [make_engine(base, given, CPU, layers=range(*each)) for each in bounds]


@pytest.mark.parametrize(
    ("shape", "cut"), CASES, ids=lambda value: value.lower_form if isinstance(value, BaseConfig) else ""
)
@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat"])
def test_engines_of_some_layers_compute_as_one_engine_of_all(
    shape: BaseConfig, cut: tuple[int, ...], batching: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path, shape)
    requests = asked_of(base)
    with ExitStack() as opened:
        given = EncodeSettings(store="", base="tiny", dtype="float32", num_slots=8)
        whole = opened.enter_context(closing(make_engine(base, given, CPU)))
        parts = [opened.enter_context(closing(part)) for part in parts_of(base, cut, batching=batching)]
        assert [part.has_heads for part in parts] == [False] * (len(parts) - 1) + [True]
        wanted = whole.run(requests)
        for found, logits in zip(run_parts(parts, requests), wanted, strict=True):
            np.testing.assert_allclose(found, logits, atol=2e-5, rtol=0)


@needs_vnni
def test_engines_of_some_layers_have_the_ranges_of_all_layers_in_int8(tmp_path: Path) -> None:
    base = base_of(tmp_path, tiny.config(upper_layers=3))
    requests = asked_of(base)
    with ExitStack() as opened:
        given = EncodeSettings(store="", base="tiny", num_slots=8, quantization="int8")
        whole = opened.enter_context(closing(make_engine(base, given, CPU)))
        parts = [opened.enter_context(closing(part)) for part in parts_of(base, (1, 2), quantization="int8")]
        for found, logits in zip(run_parts(parts, requests), whole.run(requests), strict=True):
            np.testing.assert_allclose(found, logits, atol=1e-3, rtol=0)


def test_an_engine_of_some_layers_loads_no_other_layers_and_no_word_embeddings_behind_the_first(tmp_path: Path) -> None:
    base = base_of(tmp_path, tiny.config(form="whole"))
    first, last = base.load_upper(range(1)), base.load_upper(range(1, 4))
    assert (len(first.layers), len(last.layers)) == (1, 3)
    assert hasattr(first, "words")
    assert not hasattr(last, "words")
    every = base.load_upper()
    for number, layer in enumerate(last.layers, 1):
        for name, tensor in layer.state_dict().items():
            torch.testing.assert_close(tensor, every.layers[number].state_dict()[name], rtol=0, atol=0)


def test_slots_hold_the_adapters_of_their_layers_alone() -> None:
    config = tiny.config(form="whole")
    assert adapter_rows(config, None) == range(2)
    parts = [adapter_rows(config, layers) for layers in (range(2), range(1, 3), range(2, 4), range(3, 4))]
    assert [list(rows) for rows in parts] == [[], [0], [0, 1], [1]]


def test_tenants_with_students_and_trunks_want_all_layers_in_one_process(tmp_path: Path) -> None:
    base = base_of(tmp_path, tiny.config(upper_layers=3))
    with (
        closing(parts_of(base, (1, 2))[1]) as engine,
        pytest.raises(ConfigError, match="students want a single encode"),
    ):
        engine.check(tiny.students_of(base, "many", 1, 3))
    trunk = tiny.make_base(Store(tmp_path), tiny.config(name="trunk"), trunk_of="tiny")
    with pytest.raises(ConfigError, match="is a trunk, which has a single encode stage"):
        parts_of(trunk, (1, 1))
