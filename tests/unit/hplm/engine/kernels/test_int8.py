"""Products in int8: equal to their slow twins, near the float products, and independent of a batch's neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hplm.adapters.packed import pack
from hplm.engine import reference
from hplm.engine.encode import EncodeEngine
from hplm.engine.kernels.int8 import (
    APART,
    Int8TokenLinear,
    Ranges,
    channels_apart,
    check_int8,
    quantise_layer,
)
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.kernels.run_layers import RunLayers
from hplm.engine.kernels.scripted import scripted
from hplm.engine.layouts import Batching
from hplm.engine.lower_layers import load_lower
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import has_bfloat16
from hplm.models.layers import TransformerLayer, UpperLayers, layer_weights
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.engine.test_encode import CPU, check_neighbours_change_nothing, requests_of, wanted

needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this processor has no VNNI")


@pytest.fixture(scope="module")
def ranges(tiny_base: Base) -> list[Ranges]:
    return measure_ranges(tiny_base, load_lower(tiny_base), tiny_base.load_upper())


@pytest.fixture
def engine(tiny_base: Base, ranges: list[Ranges]) -> Iterator[EncodeEngine]:
    made = tiny.engine_of(tiny_base, int8=ranges)
    yield made
    made.close()


def layers_of(upper: UpperLayers) -> list[TransformerLayer]:
    return [layer for layer in upper.layers if isinstance(layer, TransformerLayer)]


def inputs_of(layer: TransformerLayer, count: int, scale: float = 1.0) -> torch.Tensor:
    hidden = torch.randn(count, layer.ffn_in.in_features, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return scale * layer.attention_norm(hidden)


def with_large_inner(layer: TransformerLayer, ranges: Ranges) -> Ranges:
    """Make some inner channels far larger than the others, with small weights, as in trained models."""
    with torch.inference_mode():
        layer.ffn_in.weight[:2] *= 60
        layer.ffn_out.weight[:, :2] /= 60
    return some_apart(ranges)


def some_apart(ranges: Ranges) -> Ranges:
    inner = ranges.inner.clone()
    inner[:2] *= 60
    return replace(ranges, inner=inner)


def products_of(layers: list[TransformerLayer], ranges: list[Ranges], dtype: torch.dtype = torch.float32) -> RunLayers:
    return RunLayers(
        [[one.to(dtype) for one in layer_weights(layer)] for layer in layers],
        [torch.zeros(len(layers), 1)] * 4,
        1e-12,
        4,
        None,
        int8=[quantise_layer(layer, found) for layer, found in zip(layers, ranges, strict=True)],
    )


def given_of(run: RunLayers, product: str, layer: int) -> list[torch.Tensor]:
    """Return the tensors of `_int8_by_token` without bias, which would hide a small token's product."""
    factor, bias, *matrix = (run.int8_qkv if product == "qkv" else run.int8_attention_out)[layer]
    return [factor, torch.zeros_like(bias), *matrix]


def slow_of(layer: TransformerLayer, ranges: Ranges, product: str) -> Int8TokenLinear:
    """Return the slow twin's product, without bias."""
    slow: Int8TokenLinear = getattr(quantise_layer(layer, ranges), product)
    return replace(slow, bias=torch.zeros_like(slow.bias))


def plain_of(layer: TransformerLayer, product: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the float product."""
    linear = layer.qkv if product == "qkv" else layer.attention_out
    with torch.inference_mode():
        return linear(tokens) - linear.bias


AROUND = pytest.mark.parametrize("product", ["qkv", "attention_out"])


@needs_vnni
@pytest.mark.parametrize("is_scripted", [True, False], ids=["scripted", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["within", "clipped"])
def test_the_fast_half_equals_its_slow_twin(
    tiny_base: Base, ranges: list[Ranges], scale: float, dtype: torch.dtype, is_scripted: bool
) -> None:
    layers = layers_of(tiny_base.load_upper())
    # One of the layers has inner channels apart.
    ranges = [with_large_inner(layers[0], ranges[0]), *ranges[1:]]
    run = products_of(layers, ranges, dtype)
    assert run.are_apart == [True] + [False] * (len(layers) - 1)
    if is_scripted:
        run = scripted(run)
    rounding = 1e-4 if dtype == torch.float32 else 2**-8
    for index, layer in enumerate(layers):
        hidden = inputs_of(layer, 50, scale).to(dtype)
        with torch.inference_mode():
            found = run._int8_feed_forward(index, hidden)
            expected = reference.int8_feed_forward(layer, ranges[index], hidden)
        assert found.dtype == dtype
        off, most = (found.float() - expected).abs(), expected.abs().max()
        # A value between two codes may be rounded to either. Few codes differ, and by one at most.
        assert off.max() < 0.02 * most
        assert (off > rounding * most).float().mean() < 0.02


def check_huge_neighbours(
    base: Base, ranges: list[Ranges], product: Callable[[RunLayers, torch.Tensor], torch.Tensor]
) -> None:
    """Assert that a product has the same bits beside far larger tokens."""
    layers = layers_of(base.load_upper())
    run = products_of(layers, ranges)
    own, huge = inputs_of(layers[0], 9), inputs_of(layers[0], 70, 1000.0)
    with torch.inference_mode():
        alone, together = (product(run, tokens) for tokens in (own, torch.cat([huge[:30], own, huge[30:]])))
    assert torch.equal(together[30:39], alone)


@needs_vnni
def test_no_neighbour_changes_a_bit_of_an_answer(tiny_base: Base, ranges: list[Ranges]) -> None:
    check_huge_neighbours(tiny_base, ranges, lambda run, tokens: run._int8_feed_forward(0, tokens))


@needs_vnni
@AROUND
@pytest.mark.parametrize("is_scripted", [True, False], ids=["scripted", "plain"])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_a_product_by_token_equals_its_slow_twin_whatever_the_tokens_size(
    tiny_base: Base, ranges: list[Ranges], product: str, scale: float, is_scripted: bool
) -> None:
    layers = layers_of(tiny_base.load_upper())
    run = products_of(layers, ranges)
    if is_scripted:
        run = scripted(run)
    for index, layer in enumerate(layers):
        tokens = inputs_of(layer, 50) * scale * torch.logspace(-2, 2, 50)[:, None]
        with torch.inference_mode():
            found = run._int8_by_token(given_of(run, product, index), tokens)
        expected = reference.int8_by_token(slow_of(layer, ranges[index], product), tokens)
        assert bool(found.any()) == (scale > 0)
        off, most = (found - expected).abs(), expected.abs().amax(1, keepdim=True)
        assert (off <= 0.02 * most).all()
        assert (off > 1e-4 * most).float().mean() < 0.02


@needs_vnni
@AROUND
def test_no_neighbour_changes_a_bit_of_a_product_by_token(tiny_base: Base, ranges: list[Ranges], product: str) -> None:
    check_huge_neighbours(tiny_base, ranges, lambda run, tokens: run._int8_by_token(given_of(run, product, 0), tokens))


@AROUND
def test_a_product_by_token_stays_near_what_it_stands_for(tiny_base: Base, ranges: list[Ranges], product: str) -> None:
    layer = layers_of(tiny_base.load_upper())[0]
    tokens = inputs_of(layer, 200) * torch.logspace(-3, 3, 200)[:, None]
    # Measured for each token, so that a large token does not hide a small one.
    assert moved(layer, product, tokens, ranges[0]) < 0.01


def moved(layer: TransformerLayer, product: str, tokens: torch.Tensor, ranges: Ranges) -> float:
    """Return how far int8 moves the output that it moves most, as a share of its variance."""
    exact = plain_of(layer, product, tokens)
    found = reference.int8_by_token(slow_of(layer, ranges, product), tokens)
    return float(((found - exact).square().mean(1) / exact.var(1)).max())


@AROUND
def test_around_attention_too_large_channels_take_nothing_from_the_others(tiny_base: Base, product: str) -> None:
    layer = layers_of(tiny_base.load_upper())[0]
    linear = layer.qkv if product == "qkv" else layer.attention_out
    tokens = inputs_of(layer, 200).clone()
    tokens[:, 3] *= 40
    with torch.inference_mode():
        # As in a trained model, large channels have small weights.
        linear.weight[:, 3] /= 40
    most, even = tokens.abs().amax(0), torch.ones(tokens.shape[1])
    # Each product uses its own range.
    own, other = (most, even) if product == "qkv" else (even, most)
    right, swapped = (
        moved(layer, product, tokens, Ranges(*pair, most, torch.ones(1))) for pair in ((own, other), (other, own))
    )
    assert right < 0.01
    assert right < 0.5 * swapped


@AROUND
def test_a_channel_that_was_narrow_when_measured_may_be_widened_by_an_adapter(tiny_base: Base, product: str) -> None:
    layer = layers_of(tiny_base.load_upper())[0]
    tokens = inputs_of(layer, 200)
    most = tokens.abs().amax(0)
    most[3] = 0
    assert moved(layer, product, tokens, Ranges(most, most, most, torch.ones(1))) < 0.02


def test_ranges_are_of_what_goes_into_each_product(tiny_base: Base) -> None:
    upper = tiny_base.load_upper()
    seen: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(layers_of(upper)):
        for name in ("qkv", "attention_out", "ffn_in", "ffn_out"):

            def see(_: object, given: tuple[torch.Tensor], key: tuple[int, str] = (index, name)) -> None:
                seen[key] = given[0].float()

            getattr(layer, name).register_forward_pre_hook(see)
    for index, found in enumerate(measure_ranges(tiny_base, load_lower(tiny_base), upper)):
        for values, name in ((found.attention, "qkv"), (found.context, "attention_out"), (found.channels, "ffn_in")):
            assert torch.equal(values, seen[index, name].abs().amax(0))
        assert torch.equal(found.inner, seen[index, "ffn_out"].amax(0))


@pytest.mark.parametrize("index", [0, 1])
def test_it_stays_near_the_layer_it_stands_for(tiny_base: Base, ranges: list[Ranges], index: int) -> None:
    layer = layers_of(tiny_base.load_upper())[index]
    hidden = inputs_of(layer, 200)
    with torch.inference_mode():
        exact = layer.ffn_out(F.gelu(layer.ffn_in(hidden)))
        found = reference.int8_feed_forward(layer, ranges[index], hidden)
    assert float((found - exact).square().mean() / exact.var()) < 0.01


def test_channels_that_are_far_larger_than_the_others_take_nothing_from_them(tiny_base: Base) -> None:
    layer = layers_of(tiny_base.load_upper())[0]
    with torch.inference_mode():
        layer.attention_norm.weight[3] = 40.0
        # As in a trained model, large channels have small weights.
        layer.ffn_in.weight[:, 3] /= 40.0
        hidden = inputs_of(layer, 200)
        inner = F.gelu(layer.ffn_in(hidden))
        most = hidden.abs().amax(0)
        found = Ranges(most, most, most, inner.amax(0))
        exact = layer.ffn_out(inner)
        moved = (reference.int8_feed_forward(layer, found, hidden) - exact).square().mean() / exact.var()
    assert float(moved) < 0.01


def test_inner_channels_far_larger_than_the_others_take_nothing_from_them(tiny_base: Base) -> None:
    layer = layers_of(tiny_base.load_upper())[0]
    with torch.inference_mode():
        layer.ffn_in.weight[:APART] *= 60
        layer.ffn_out.weight[:, :APART] /= 60
        hidden = inputs_of(layer, 200)
        inner = F.gelu(layer.ffn_in(hidden))
        exact = layer.ffn_out(inner)
        most = hidden.abs().amax(0)
        ranges = Ranges(most, most, most, inner.amax(0))
        assert sorted(channels_apart(ranges)) == list(range(APART))
        moved = (reference.int8_feed_forward(layer, ranges, hidden) - exact).square().mean() / exact.var()
    assert float(moved) < 0.01


@pytest.mark.parametrize(
    ("largest", "count"), [([], 0), ([1.9], 0), ([2.1], APART), ([9.0] * APART, APART), ([9.0] * (APART + 1), 0)]
)
def test_inner_channels_are_apart_where_a_few_are_far_larger(
    tiny_base: Base, ranges: list[Ranges], largest: list[float], count: int
) -> None:
    inner = torch.ones(40)
    inner[10 : 10 + len(largest)] = torch.tensor(largest)
    found = channels_apart(replace(ranges[0], inner=inner))
    assert len(found) == count
    assert set(range(10, 10 + len(largest))) <= set(found) or not count
    # A layer this narrow has no channels apart.
    assert channels_apart(replace(ranges[0], inner=inner[10 : 10 + APART])) == []


@needs_vnni
def test_the_engine_stays_near_the_reference_and_says_something_else_than_without(
    engine: EncodeEngine, tiny_base: Base, tiny_store: Store
) -> None:
    requests = requests_of(tiny_base, tiny_store, [5, 30, 12, 1])
    found = engine.run(requests)
    plain = tiny.engine_of(tiny_base)
    for request, got, unquantised in zip(requests, found, plain.run(requests), strict=True):
        exact = wanted(tiny_base, request)
        assert np.abs(got - exact).max() < 0.2 * max(1.0, float(np.abs(exact).max()))
        assert not np.array_equal(got, unquantised)
    plain.close()


@needs_vnni
def test_a_tenant_whose_adapter_is_far_stronger_than_any_trained_one_stays_near_too(
    engine: EncodeEngine, tiny_base: Base, tiny_store: Store
) -> None:
    request = requests_of(tiny_base, tiny_store, [20])[0]
    adapter = request.tenant.adapter
    strong = replace(adapter, up=30 * adapter.up, up_bias=30 * adapter.up_bias)
    request = replace(request, tenant=replace(request.tenant, packed=pack(strong)))
    exact = wanted(tiny_base, request)
    (found,) = engine.run([request])
    assert np.abs(found - wanted(tiny_base, requests_of(tiny_base, tiny_store, [20])[0])).max() > 0.1
    assert np.abs(found - exact).max() < 0.2 * max(1.0, float(np.abs(exact).max()))


@needs_vnni
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16"),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shortest", [1, 2], ids=["a-token-and-more", "two-tokens-and-more"])
@pytest.mark.parametrize("cls_from", [0, 1, 1000], ids=["all-read-cls", "all-but-one-read-cls", "all-read-the-mean"])
def test_no_neighbour_changes_a_bit_of_what_an_engine_answers(
    tiny_base: Base,
    ranges: list[Ranges],
    dtype: torch.dtype,
    threads: int,
    cls_from: int,
    shortest: int,
    restored_threads: None,
) -> None:
    # Before the engine starts, because it reads the number of threads.
    torch.set_num_threads(threads)
    engine = tiny.engine_of(tiny_base, 64, int8=[some_apart(ranges[0]), *ranges[1:]], dtype=dtype)
    check_neighbours_change_nothing(engine, tiny_base, 3, cls_from, shortest)
    engine.close()


@needs_vnni
@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat", "slotted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_batching_mode_gives_what_a_text_gets_alone(
    tiny_base: Base, tiny_store: Store, ranges: list[Ranges], batching: Batching, dtype: torch.dtype
) -> None:
    engine = tiny.engine_of(tiny_base, 3, int8=ranges, batching=batching, row_tokens=48, dtype=dtype)
    requests = requests_of(tiny_base, tiny_store, [40, 1, 3, 17, 9, 26])
    together = engine.run(requests, slot_tokens=20)
    alone = [engine.run([request], slot_tokens=20)[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        # Attention rounds otherwise in rows of other lengths, which may move a code by one.
        np.testing.assert_allclose(one, other, atol=0.02, rtol=0.02)
    engine.close()


@needs_vnni
def test_a_base_that_knows_distances_has_it_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("relative"))
    base = tiny.make_base(store, replace(tiny.config(), relative_buckets=16))
    tiny.name_root(store, base)
    for seed, name in enumerate(tiny.TASKS, 1):
        tiny.make_tenant(store, base, name, seed)
    engine = tiny.engine_of(base, int8=measure_ranges(base, load_lower(base), base.load_upper()))
    for request, got in zip(requests := requests_of(base, store, [7, 31]), engine.run(requests), strict=True):
        exact = wanted(base, request)
        assert np.abs(got - exact).max() < 0.2 * max(1.0, float(np.abs(exact).max()))
    engine.close()


def test_measuring_leaves_no_hook_behind_and_finds_the_same_twice(tiny_base: Base) -> None:
    upper = tiny_base.load_upper()
    first, again = (measure_ranges(tiny_base, load_lower(tiny_base), upper) for _ in range(2))
    assert len(first) == tiny_base.config.upper_layers
    for one, other in zip(first, again, strict=True):
        for name in ("attention", "context", "channels", "inner"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert all(not part._forward_pre_hooks for part in upper.modules())


def test_a_processor_without_it_and_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="for CPUs; leave it out on a GPU"):
        check_int8(torch.device("cuda"))
    with pytest.raises(ConfigError, match="wants a CPU with AVX-512 VNNI"):
        check_int8(CPU, has_vnni=False)


def test_an_engine_on_a_gpu_is_refused_before_it_starts_anything(tiny_base: Base, ranges: list[Ranges]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="for CPUs"):
        tiny.engine_of(tiny_base, device=torch.device("cuda"), int8=ranges)
    assert not set(threading.enumerate()) - before
