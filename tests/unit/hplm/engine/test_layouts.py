"""Every batching mode gives the same logits as the slow reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from hplm.adapters.packed import Place
from hplm.engine import layouts
from hplm.engine.adapter_plan import OWN_PRODUCT_TOKENS, plan_adapters
from hplm.engine.adapter_slots import AdapterSlots
from hplm.engine.kernels.run_layers import RunLayers
from hplm.engine.kernels.scripted import scripted
from hplm.engine.layouts import Batching
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.layers import layer_weights, packed_attention
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.engine.test_encode import CPU, requests_of, wanted

LENGTHS = {
    "identical": [7] * 6,
    "distinct": [1, 40, 3, 17, 9, 26],
    "single": [5],
    "skewed": [40, 1, 1, 1, 1, 1, 1, 2],
    "no-token-alone": [2, 40, 3, 17, 9, 26],
}


Stored = tuple[Base, Store]


@pytest.fixture(scope="module", params=["absolute", "relative"])
def stored(request: pytest.FixtureRequest, tiny_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A base with absolute positions as BERT, and a base with relative positions too; with tenants."""
    if request.param == "absolute":
        return bases.load(tiny_store.base("tiny")), tiny_store
    store = Store(tmp_path_factory.mktemp("relative"))
    base = tiny.make_base(store, replace(tiny.config(), relative_buckets=16))
    tiny.name_root(store, base)
    for seed, name in enumerate(tiny.TASKS, 1):
        tiny.make_tenant(store, base, name, seed)
    return base, store


@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat", "slotted"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("num_slots", [2, 8])
def test_each_batching_mode_gives_the_references_logits(
    stored: Stored, batching: Batching, lengths: list[int], num_slots: int
) -> None:
    base, store = stored
    engine = tiny.engine_of(base, num_slots, batching=batching, row_tokens=48)
    requests = requests_of(base, store, lengths)
    wide = tiny.fleet_of(base, 2, factors=(4,))
    requests[::3] = [replace(one, tenant=wide[i % 2]) for i, one in enumerate(requests[::3])]
    for request, got in zip(requests, engine.run(requests, slot_tokens=20), strict=True):
        np.testing.assert_allclose(got, wanted(base, request), atol=2e-4, rtol=2e-4)
    engine.close()


@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat", "slotted"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_layout_has_every_text_once_and_none_over_another(batching: Batching, lengths: list[int]) -> None:
    found: list[int] = []
    for layout in layouts.lay_out(batching, lengths, row_tokens=48, slot_tokens=20):
        found += layout.texts
        taken = sorted((s, s + n) for s, n in zip(layout.starts, layout.lengths, strict=True))
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(taken))
        assert taken[-1][1] <= layout.size
        assert layout.lengths == tuple(lengths[i] for i in layout.texts)
    assert sorted(found) == list(range(len(lengths)))


def test_packed_wastes_nothing_and_turbo_less_than_naive() -> None:
    lengths = LENGTHS["skewed"] * 8
    size = {mode: sum(la.size for la in layouts.lay_out(mode, lengths, 100)) for mode in ("packed", "naive", "turbo")}  # type: ignore[arg-type]
    assert size["packed"] == sum(lengths)
    assert size["packed"] <= size["turbo"] < size["naive"]


@pytest.mark.parametrize("factors", [(16,), (4,), (16, 4, 16), (4, 16)], ids=str)
@pytest.mark.parametrize("fine_prefetch", [True, False])
@pytest.mark.parametrize(
    ("gathered", "own_tokens"),
    [(True, OWN_PRODUCT_TOKENS), (True, None), (False, None)],
    ids=["gathered", "gathered-as-on-a-gpu", "text-by-text"],
)
@pytest.mark.parametrize("lengths", [[1, 2, 3], [33, 32, 31, 64], [200, 5, 150], [130], [4] * 20])
def test_a_layer_with_all_tenants_together_equals_the_readable_layer_with_a_loop_over_texts(
    tiny_base: Base,
    lengths: list[int],
    gathered: bool,
    own_tokens: int | None,
    fine_prefetch: bool,
    factors: tuple[int, ...],
) -> None:
    slots = AdapterSlots(tiny_base.config, 8, 12, CPU, torch.float32, fine_prefetch=fine_prefetch)
    members = tiny.fleet_of(tiny_base, 5, factors=factors)
    tenants = [members[i % len(members)] for i in range(len(lengths))]
    hidden = torch.randn(sum(lengths), tiny_base.config.hidden_size, generator=torch.Generator().manual_seed(0))
    encoder = tiny_base.load_upper().requires_grad_(False)
    attend = packed_attention(tiny_base.config.num_heads, lengths)
    (layout,) = layouts.packed(lengths)
    with slots.assigned(tenants) as assigned:
        plans = [
            plan_adapters(assigned.at(place), lengths, CPU, num_slots=8, gathered=gathered, own_tokens=own_tokens)
            for place in get_args(Place)
        ]
        slow = slots.reference_adapt(assigned, lengths)
        fast = RunLayers(
            [layer_weights(layer) for layer in encoder.layers], slots.parts, 1e-12, tiny_base.config.num_heads, None
        )
        for index in range(tiny_base.config.upper_layers):
            wanted = encoder.layer(index, hidden, attend, slow)
            for run in (fast, scripted(fast)):
                run.begin(hidden, layout.attention.counts, layout.attention.lengths, None, *plans, None, plans[1])
                run(index, index + 1)
                got = run.end()
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    slots.close()


def test_text_by_text_neighbours_of_one_tenant_go_together() -> None:
    plan = plan_adapters([2, 2, 0, 3, 2], [3, 4, 1, 5, 6], CPU, num_slots=8, gathered=False, own_tokens=None)
    assert (plan.own_slots, plan.own_sizes) == ([2, 0, 3, 2], [7, 1, 5, 6])
    assert plan_adapters([2, 3], [4, 5], CPU, num_slots=8, gathered=False, own_tokens=None).own_sizes == [4, 5]
    assert plan_adapters([2, 3], [4, 5], CPU, num_slots=8, gathered=True, own_tokens=None).own_sizes == []


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [9, 2, 2, 30]])
def test_attention_gives_the_same_with_and_without_gradients(stored: Stored, lengths: list[int]) -> None:
    encoder = stored[0].load_upper().requires_grad_(False)
    heads, hidden = encoder.config.num_heads, encoder.config.hidden_size
    inputs = torch.randn(3, sum(lengths), hidden, generator=torch.Generator().manual_seed(0))
    attend = packed_attention(heads, lengths, encoder.relative)
    served = attend(*inputs)
    trained = attend(*inputs.clone().requires_grad_())
    assert trained.requires_grad
    assert not served.requires_grad
    torch.testing.assert_close(trained, served, atol=1e-5, rtol=1e-5)


def test_slots_whose_filling_thread_has_ended_are_filled_by_the_batch_itself(
    tiny_base: Base, tiny_store: Store
) -> None:
    engine = tiny.engine_of(tiny_base, 3, reduced_size=3)
    engine.close()
    (request,) = requests_of(tiny_base, tiny_store, [7])
    np.testing.assert_allclose(engine.run([request])[0], wanted(tiny_base, request), atol=2e-4, rtol=2e-4)
