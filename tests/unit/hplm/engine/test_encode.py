"""The packed engine against the slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hplm.adapters.packed import Adapter, pack, packed_width, widen
from hplm.adapters.slots import IDENTITY
from hplm.adapters.tenant import Tenant
from hplm.engine import encode as uppers
from hplm.engine import reference
from hplm.engine.adapter_plan import OWN_PRODUCT_TOKENS, gathers, own_product_tokens, plan_adapters
from hplm.engine.adapter_slots import AdapterSlots
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.kernels.adapt import AdapterPlan, adapt_planned
from hplm.engine.kernels.onednn import can_pack, rounded
from hplm.engine.kernels.run_layers import RunLayers
from hplm.engine.kernels.scripted import scripted
from hplm.engine.token_domain import random_features
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import has_bfloat16
from hplm.store.layout import Store
from tests import tiny

CPU = torch.device("cpu")


def requests_of(base: Base, store: Store, lengths: list[int], seed: int = 0) -> list[EngineRequest]:
    rng = np.random.default_rng(seed)
    members = [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)]
    return [
        EngineRequest(members[i % len(members)], random_features(base.config, n, rng)) for i, n in enumerate(lengths)
    ]


def reading_cls(tenant: Tenant) -> Tenant:
    return replace(tenant, card=replace(tenant.card, pooling="cls"))


def wanted(base: Base, request: EngineRequest) -> np.ndarray:
    return reference.logits(base.load_upper(), torch.from_numpy(request.features), request.tenant).numpy()


@tiny.BASES_OF_BOTH_KINDS
@pytest.mark.parametrize(
    "lengths",
    [[1], [40], [7] * 8, list(range(1, 41)), [40, 1, 40, 1, 3, 3, 3], [1] * 16],
    ids=["one-token", "maximum", "uniform", "all-lengths", "skewed", "single-tokens"],
)
@pytest.mark.parametrize("num_slots", [2, 3, 16])
def test_packed_logits_equal_the_reference_for_any_lengths_and_fewer_slots_than_tenants(
    tiny_base: Base, tiny_store: Store, lengths: list[int], num_slots: int
) -> None:
    requests = requests_of(tiny_base, tiny_store, lengths)
    for request, got in zip(requests, tiny.engine_of(tiny_base, num_slots).run(requests), strict=True):
        np.testing.assert_allclose(got, wanted(tiny_base, request), atol=2e-4, rtol=2e-4)


def test_the_order_of_a_batch_does_not_matter(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, tiny_store, list(range(1, 21)))
    engine = tiny.engine_of(tiny_base, 3)
    first = engine.run(requests)
    order = np.random.default_rng(1).permutation(len(requests))
    for position, got in zip(order, engine.run([requests[i] for i in order]), strict=True):
        np.testing.assert_allclose(got, first[position], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16"),
        ),
        pytest.param(
            torch.float32,
            marks=pytest.mark.skipif(
                torch.backends.cpu.get_cpu_capability() != "AVX512",
                reason="without AVX-512, products in float32 are rounded by their size",
            ),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("tenants", [1, 3, 60], ids=["one-tenant", "few-tenants", "tenants-of-their-own"])
@pytest.mark.parametrize("shortest", [1, 2], ids=["a-token-and-more", "two-tokens-and-more"])
@pytest.mark.parametrize("cls_from", [0, 1, 1000], ids=["all-read-cls", "all-but-one-read-cls", "all-read-the-mean"])
def test_no_neighbour_changes_a_bit_of_an_answer(
    tiny_base: Base, tenants: int, dtype: torch.dtype, cls_from: int, shortest: int
) -> None:
    engine = tiny.engine_of(tiny_base, 64, dtype=dtype)
    check_neighbours_change_nothing(engine, tiny_base, tenants, cls_from, shortest)
    engine.close()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="without AVX-512, products in float32 are rounded by their size",
)
@pytest.mark.parametrize(
    ("hidden", "sizes"), [(312, (24,)), (384, (24,)), (768, (48,)), (384, (24, 96)), (768, (48, 192))], ids=str
)
@pytest.mark.parametrize(("gathered", "threads"), [(False, 1), (True, 2)], ids=["text-by-text", "by-tenant-on-cores"])
def test_adapted_a_token_has_the_same_bits_however_many_go_with_it(
    hidden: int, sizes: tuple[int, ...], gathered: bool, threads: int, restored_threads: None
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(hidden)
    shapes = [shape for r in sizes for shape in ((3, hidden, r), (3, r), (3, r, hidden), (3, hidden))]
    parts = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
    tokens = torch.randn(272, hidden, generator=generator)
    adapt = scripted(adapt_planned)
    # In the last pool, beside tenants of the same pool or of another.
    own, other = 3 * (len(sizes) - 1) + 1, 2
    alone = adapt(
        tokens,
        parts,
        plan_adapters([own], [len(tokens)], CPU, num_slots=3, gathered=gathered, own_tokens=OWN_PRODUCT_TOKENS),
    )
    for count in (1, 2, 3, 4, 5, 8, 17, 33, 64, 200):
        rest = len(tokens) - count
        for lengths, slots in (
            *(([count, rest], slots) for slots in ([own, other], [other, own], [own, 0])),
            ([rest, count], [other, own]),
            ([31, count, rest - 31], [other, own, 0]),
        ):
            found = adapt(
                tokens,
                parts,
                plan_adapters(slots, lengths, CPU, num_slots=3, gathered=gathered, own_tokens=OWN_PRODUCT_TOKENS),
            )
            for slot, got, wanted in zip(slots, found.split(lengths), alone.split(lengths), strict=True):
                assert torch.equal(got, wanted) == (slot == own)


def test_in_float32_on_one_core_adapters_are_applied_text_by_text(
    tiny_base: Base, tiny_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[AdapterPlan] = []

    def planning(
        slots: Sequence[int], lengths: Sequence[int], device: torch.device, *, gathered: bool, **more: Any
    ) -> AdapterPlan:
        plans.append(plan_adapters(slots, lengths, device, gathered=gathered, **more))
        return plans[-1]

    monkeypatch.setattr(uppers, "plan_adapters", planning)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    engine = tiny.engine_of(tiny_base)
    engine.run(requests_of(tiny_base, tiny_store, [3, 4, 5]))
    engine.close()
    assert any(plan.own_sizes == [3, 4, 5] for plan in plans)
    assert gathers(CPU, torch.bfloat16)
    assert gathers(torch.device("cuda"), torch.float32)
    assert own_product_tokens(torch.device("cuda")) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert gathers(CPU, torch.float32)


def check_neighbours_change_nothing(
    engine: EncodeEngine, base: Base, tenants: int, cls_from: int, shortest: int = 1
) -> None:
    """Assert that texts of `tenants` tenants have the same bits alone and together; those from `cls_from` on read `[CLS]`."""
    rng = np.random.default_rng(0)
    members = tiny.fleet_of(base, tenants, factors=(16, 16, 4, 4))
    members[cls_from:] = [reading_cls(one) for one in members[cls_from:]]
    requests = [
        EngineRequest(members[i % tenants], rng.normal(size=(n, base.config.hidden_size)).astype(np.float16))
        for i, n in enumerate(rng.integers(shortest, 41, 60))
    ]
    alone = [engine.run([request])[0] for request in requests]
    for count in (2, 5, 48):
        chosen = rng.permutation(len(requests))[:count]
        for index, got in zip(chosen, engine.run([requests[i] for i in chosen]), strict=True):
            np.testing.assert_array_equal(got, alone[index])


@pytest.mark.parametrize(
    ("names", "rows"),
    [(("alpha", "beta", "alpha", "beta"), 4), (("alpha", "beta", "alpha", "tagger"), 33)],
    ids=["all-read-cls", "a-tagging-reads-all"],
)
def test_the_last_layer_goes_on_with_what_heads_read_alone(
    tiny_base: Base, tiny_store: Store, names: tuple[str, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    feed = RunLayers._linear_gelu

    def counting(layers: RunLayers, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        fed.append(len(tokens))
        return feed(layers, tokens, weight, bias)

    # Without TorchScript, so that the test sees the input of the feed-forward half.
    monkeypatch.setattr(uppers, "scripted", lambda module: module)
    monkeypatch.setattr(RunLayers, "_linear_gelu", counting)
    lengths = [7, 30, 1, 30]
    hidden = [request.features for request in requests_of(tiny_base, tiny_store, lengths)]
    # The adapters of alpha and beta stand at different places.
    members = [reading_cls(tiny.load_tenant(tiny_store, tiny_base, name)) for name in names]
    requests = [EngineRequest(member, states) for member, states in zip(members, hidden, strict=True)]
    for request, got in zip(requests, tiny.engine_of(tiny_base).run(requests), strict=True):
        np.testing.assert_allclose(got, wanted(tiny_base, request), atol=2e-4, rtol=2e-4)
    size = rounded if can_pack(CPU, torch.float32) else int
    assert fed == [size(sum(lengths)), size(rows)]


def test_bfloat16_stays_near_the_reference(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, tiny_store, [5, 30, 12, 1])
    for request, got in zip(requests, tiny.engine_of(tiny_base, dtype=torch.bfloat16).run(requests), strict=True):
        exact = wanted(tiny_base, request)
        assert np.abs(got - exact).max() < 0.05 * max(1.0, float(np.abs(exact).max()))


def test_one_text_gets_each_tenants_own_answer(tiny_base: Base, tiny_store: Store) -> None:
    hidden = requests_of(tiny_base, tiny_store, [9])[0].features
    members = [tiny.load_tenant(tiny_store, tiny_base, name) for name in ("alpha", "gamma")]
    logits = tiny.engine_of(tiny_base).run([EngineRequest(member, hidden) for member in members])
    assert not np.allclose(logits[0], logits[1])


def test_an_empty_adapter_is_the_identity(tiny_base: Base, tiny_store: Store) -> None:
    member = tiny.load_tenant(tiny_store, tiny_base, "alpha")
    zeros = Adapter(*(np.zeros_like(array) for array in vars(member.adapter).values()))
    plain = Tenant(member.card, pack(zeros), member.head)
    request = requests_of(tiny_base, tiny_store, [11])[0]
    got = tiny.engine_of(tiny_base, 2).run([EngineRequest(plain, request.features)])[0]
    hidden = torch.from_numpy(request.features.astype(np.float32))
    last = reference.upper(tiny_base.load_upper(), hidden, None).mean(0).numpy()
    np.testing.assert_allclose(got[0], plain.head.weight @ last + plain.head.bias, atol=2e-4, rtol=2e-4)


def test_an_adapter_too_large_for_the_slots_fails_and_leaves_no_slot_behind(tiny_base: Base, tiny_store: Store) -> None:
    engine = tiny.engine_of(tiny_base, 3, reduced_size=1)
    (request,) = requests_of(tiny_base, tiny_store, [4])
    large = replace(request.tenant, packed=widen(request.tenant.packed, engine.slots.sizes[-1] + 1))
    requests = [replace(request, tenant=large)]
    for _ in range(3):  # the second time must not find a slot that was never filled
        with pytest.raises(ConfigError, match="lower reduction_factor"):
            engine.run(requests)
    assert engine.slots.find(requests[0].tenant) is None
    assert engine.slots.tables[0].num_unpinned


def test_slots_are_as_large_as_products_want_them_and_the_others_adapters_are_filled_up(
    tiny_base: Base, tiny_store: Store
) -> None:
    requests = requests_of(tiny_base, tiny_store, [4, 9])
    smallest = max(request.tenant.packed.reduced_size for request in requests)
    engine = tiny.engine_of(tiny_base)
    assert (smallest, engine.slots.sizes) == (3, [8, 16])
    assert engine.slots.fitted(requests[0].tenant.packed).reduced_size == 8
    assert engine.slots.fitted(widen(requests[0].tenant.packed, 9)).reduced_size == 16
    for request, got in zip(requests, engine.run(requests), strict=True):
        np.testing.assert_allclose(got, wanted(tiny_base, request), atol=2e-4, rtol=2e-4)
    engine.close()


def test_a_batch_reuses_no_slot_of_its_own_tenants(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, tiny_store, [3] * 4)
    members = [request.tenant for request in requests]
    slots = tiny.engine_of(tiny_base, 4).slots  # three for tenants
    for tenant in members[:3]:
        with slots.assigned([tenant]):
            pass
    loads = slots.loads
    # The fourth tenant comes first and needs a slot. The oldest slot, that of members[0], is needed right after.
    with slots.assigned([members[3], members[0], members[1]]):
        assert slots.loads == loads + 1
    slots.close()


def test_a_tenant_that_is_wanted_many_times_is_one_in_a_head_start(tiny_base: Base, tiny_store: Store) -> None:
    requests = requests_of(tiny_base, tiny_store, [3] * 4)
    members = [request.tenant for request in requests]
    slots = tiny.engine_of(tiny_base, 4).slots
    with slots.assigned(members[:2]):
        pass
    loads = slots.loads
    slots.prefetch([*members[:2] * 4, members[2]])
    assert slots.loads == loads + 1
    slots.close()


def test_means_are_those_of_each_text_alone(tiny_base: Base, tiny_store: Store) -> None:
    engine = tiny.engine_of(tiny_base, 5)
    requests = requests_of(tiny_base, tiny_store, [1, 40, 2, 17, 17, 9])
    together = engine.run(requests)
    for request, found in zip(requests, together, strict=True):
        np.testing.assert_allclose(found, engine.run([request])[0], atol=1e-5, rtol=1e-5)
    engine.close()


def test_an_adapter_stands_where_its_card_says(tiny_base: Base, tiny_store: Store) -> None:
    request = requests_of(tiny_base, tiny_store, [9])[0]
    answers = []
    for place in tiny.PLACES:
        tenant = replace(request.tenant, card=replace(request.tenant.card, adapter_at=place), version=place)
        moved = replace(request, tenant=tenant)
        answers.append(tiny.engine_of(tiny_base, 3).run([moved])[0])
        np.testing.assert_allclose(answers[-1], wanted(tiny_base, moved), atol=2e-4, rtol=2e-4)
    assert np.abs(answers[0] - answers[1]).max() > 0.01


def test_a_head_start_of_wide_adapters_takes_no_slot_from_usual_ones(tiny_base: Base) -> None:
    usual, wide = (tiny.fleet_of(tiny_base, 6, seed, factors=(factor,)) for seed, factor in enumerate((16, 4)))
    wide = [replace(one, version="wide") for one in wide]
    slots = tiny.engine_of(tiny_base, 4).slots
    with slots.assigned(usual[:3]), slots.assigned(wide[:3]):
        # No slot is unpinned, so a prefetch must wait.
        slots.prefetch([usual[3], wide[3]])
        assert slots.loads == 6
    slots.prefetch(wide[2:5])
    # One tenant already had its slot.
    assert slots.loads == 8
    assert all(slots.find(one) is not None for one in (*usual[:3], *wide[2:5]))
    with slots.assigned([usual[0], wide[4], usual[0]]) as assigned:
        assert assigned.slots[0] == assigned.slots[2] == slots.find(usual[0])
        assert assigned.slots[1] == slots.find(wide[4])
        assert len(set(assigned.slots)) == 2
    slots.close()


def test_slots_that_nobody_needs_are_an_identity_and_no_more() -> None:
    shape = tiny.config(hidden_size=64)
    for asked, sizes in ((1, [8]), (4, [8]), (8, [8]), (9, [8, 16]), (64, [8, 64])):
        slots = AdapterSlots(shape, 3, asked, CPU, torch.float32, fine_prefetch=False)
        assert slots.sizes == sizes
        assert not any(part[:, IDENTITY].any() for part in slots.parts)
        assert slots.device_bytes == sum(4 * shape.upper_layers * 3 * packed_width(64, size) for size in sizes)


def test_an_adapter_that_is_kept_in_bfloat16_comes_into_slots_of_it_with_the_same_bits(tiny_base: Base) -> None:
    noise = np.float32(1 + 2**-12)
    members = [
        replace(one, packed=replace(packed := pack(one.adapter), weights=packed.weights * noise))
        for one in tiny.fleet_of(tiny_base, 3)
    ]
    found = []
    for keeps in (False, True):
        slots = AdapterSlots(tiny_base.config, 4, 12, CPU, torch.bfloat16, keep_bfloat16=keeps)
        fitted = [replace(one, packed=slots.fitted(one.packed)) for one in members]
        assert {one.packed.weights.dtype for one in fitted} == {np.dtype(np.uint16 if keeps else np.float32)}
        with slots.assigned(fitted) as assigned:
            assigned.wait(tiny_base.config.upper_layers - 1)
            found.append(torch.cat([part[:, list(assigned.slots)].flatten() for part in slots.parts[:4]]))
        slots.close()
    assert torch.equal(*found)


@pytest.mark.parametrize(("dtype", "keeps"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_adapters_are_kept_no_finer_than_they_are_computed(tiny_base: Base, dtype: torch.dtype, keeps: bool) -> None:
    engine = tiny.engine_of(tiny_base, 4, dtype=dtype)
    (member,) = tiny.fleet_of(tiny_base, 1)
    kept = engine.slots.fitted(pack(member.adapter)).weights.dtype
    assert kept == (np.uint16 if keeps else np.float32)
    engine.close()
