"""The attention that tokens receive, as the packed engine computes it for some texts of a batch, against the slow reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hplm.adapters.tenant import Tenant
from hplm.core.settings import Batching
from hplm.engine import reference
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.importance import KeptAttention
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.engine.token_domain import random_features
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import has_bfloat16
from hplm.store.layout import Store
from tests import tiny

LENGTHS = [1, 2, 7, 7, 7, 13, 40, 3, 7]


def members_of(base: Base, store: Store) -> list[Tenant]:
    """Return tenants whose heads read the mean, `[CLS]`, and every token."""
    members = [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)]
    return [members[0], replace(members[1], card=replace(members[1].card, pooling="cls")), *members[2:]]


def requests_of(base: Base, members: list[Tenant]) -> list[EngineRequest]:
    rng = np.random.default_rng(0)
    return [
        EngineRequest(members[i % len(members)], random_features(base.config, n, rng)) for i, n in enumerate(LENGTHS)
    ]


def check_equal(engine: EncodeEngine, base: Base, requests: list[EngineRequest], tolerance: float) -> None:
    upper = base.load_upper()
    plain = engine.run(requests)
    for request, logits, (kept_logits, got) in zip(requests, plain, engine.run_with_importance(requests), strict=True):
        wanted = reference.importance(upper, torch.from_numpy(request.features), request.tenant)
        np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)
        # Every query of every layer and head gives weights whose sum is 1.
        whole = len(got) * base.config.num_heads * base.config.upper_layers
        assert got.sum() == pytest.approx(whole, rel=1e-3)
        # Keeping attention does not change a bit of an answer.
        np.testing.assert_array_equal(kept_logits, logits)


@tiny.BASES_OF_BOTH_KINDS
@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat", "slotted"])
@pytest.mark.parametrize("reads_cls", [False, True], ids=["mixed-heads", "cls-alone"])
def test_importances_equal_the_reference_in_every_batching_mode(
    tiny_base: Base, tiny_store: Store, batching: Batching, reads_cls: bool
) -> None:
    members = members_of(tiny_base, tiny_store)
    engine = tiny.engine_of(tiny_base, batching=batching)
    check_equal(engine, tiny_base, requests_of(tiny_base, members[1:2] if reads_cls else members), 2e-4)


@pytest.mark.parametrize(("num_slots", "tolerance", "changed"), [(2, 2e-4, {}), (8, 0.05, {"dtype": torch.bfloat16})])
def test_importances_equal_the_reference_in_parts_and_in_bfloat16(
    tiny_base: Base, tiny_store: Store, num_slots: int, tolerance: float, changed: dict[str, Any]
) -> None:
    if changed and not has_bfloat16():
        pytest.skip("this processor has no bfloat16")
    engine = tiny.engine_of(tiny_base, num_slots, **changed)
    check_equal(engine, tiny_base, requests_of(tiny_base, members_of(tiny_base, tiny_store)), tolerance)


def test_importances_equal_the_reference_in_int8(tiny_base: Base, tiny_store: Store) -> None:
    try:
        check_int8(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    ranges = measure_ranges(tiny_base, load_lower(tiny_base), tiny_base.load_upper())
    engine = tiny.engine_of(tiny_base, int8=ranges)
    check_equal(engine, tiny_base, requests_of(tiny_base, members_of(tiny_base, tiny_store)), 0.1)


def test_some_texts_of_a_batch_have_the_importances_of_all(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, members_of(tiny_base, tiny_store))
    engine = tiny.engine_of(tiny_base)
    wanted = [importance for _, importance in engine.run_with_importance(requests)]
    (part,) = engine.run_each([replace(request, keeps_attention=index == 3) for index, request in enumerate(requests)])
    assert part.attention is not None
    places = [part.texts.index(index) for index in (6, 2, 8)]
    for index, got in zip((6, 2, 8), part.attention.importances(places), strict=True):
        np.testing.assert_allclose(got, wanted[index], rtol=1e-5)
    assert part.attention.importances([]) == []


def test_a_batch_that_keeps_no_attention_has_none(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, members_of(tiny_base, tiny_store))
    assert [part.attention for part in tiny.engine_of(tiny_base).run_each(requests)] == [None]


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_scores_of_any_size_have_weights(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(12, 24, generator=generator) * size**0.5 for _ in range(2)]
    relative = torch.randn(2, 7, 7, generator=generator)
    (long, short) = KeptAttention(qkv, [3, 0], [7, 3], 2, relative).importances([0, 1])
    for got, start, length in ((long, 3, 7), (short, 0, 3)):
        wanted = torch.zeros(length)
        for layer in qkv:
            query, key, _ = (part.view(-1, 2, 4).transpose(0, 1) for part in layer[start : start + length].chunk(3, 1))
            scores = query @ key.transpose(1, 2) / 2 + relative[:, :length, :length]
            wanted += scores.softmax(-1).sum((0, 1))
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
