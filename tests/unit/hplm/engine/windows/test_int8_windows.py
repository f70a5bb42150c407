"""A window encoder with int8 products: equal to its slow twin, near the float encoder, independent of a batch's neighbours."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from hplm.core.settings import LookupSettings, Quantization
from hplm.engine import lower_layers as lowers
from hplm.engine import reference
from hplm.engine.kernels.int8 import APART, Ranges, channels_apart
from hplm.engine.kernels.int8_products import cut_off
from hplm.engine.kernels.int8_ranges import SAMPLE_NGRAMS
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import compute_ngrams, open_lineage
from hplm.engine.windows import encoder
from hplm.engine.windows.encoder import WindowEncoder
from hplm.engine.windows.int8_windows import measure_window_ranges, quantise_window_layer
from hplm.engine.windows.run_windows import RunWindows
from hplm.errors import ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import has_bfloat16
from hplm.models.layers import TransformerLayer
from hplm.models.lower import LowerEncoder
from hplm.plot.table import PlotTable
from hplm.serving.lookup_stage import LookupStage
from hplm.store.layout import Store
from tests import tiny
from tests.rounding import assert_same_windows, skip_without_avx512
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni

FORMATS = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16, marks=pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16")
        ),
    ],
    ids=str,
)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of a tiny base whose lower layers are windows."""
    return tiny.make_repository(tmp_path_factory.mktemp("windows"), shape=tiny.config(form="windows"))


@pytest.fixture(scope="module")
def tiny_store(tiny_models: Path) -> Store:
    return Store(tiny_models.parent / "store")


@pytest.fixture(scope="module")
def tiny_base(tiny_store: Store) -> Base:
    return bases.load(tiny_store.base("tiny"))


def in_int8(base: Base, lower: LowerEncoder, dtype: torch.dtype = torch.float32) -> LowerEncoder:
    lowers.pack(lower, dtype, base)
    return lower


def test_codes_are_what_is_before_the_point() -> None:
    values = torch.arange(0, 256 * 64) / 64
    assert torch.equal(cut_off(values), values.floor().to(torch.uint8))


def enlarge(layer: nn.Module) -> None:
    """Make some inner channels far larger than the others, with small weights, as in trained models."""
    assert isinstance(layer, TransformerLayer)
    with torch.inference_mode():
        layer.ffn_in.weight[:APART] *= 60
        layer.ffn_out.weight[:, :APART] /= 60


def moved(found: npt.NDArray[np.float16], exact: npt.NDArray[np.float16]) -> float:
    """Return how far the vector that moves most has moved, as a share of its variance."""
    off = np.square(found.astype(np.float32) - exact).mean(-1)
    return float((off / exact.astype(np.float32).var(-1)).max())


@needs_vnni
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["within", "clipped"])
def test_a_layer_equals_its_slow_twin(tiny_base: Base, scale: float) -> None:
    lower = load_lower(tiny_base)
    # One of the layers has inner channels apart.
    enlarge(lower.layers[0])
    found_ranges = measure_window_ranges(tiny_base, lower)
    assert [bool(channels_apart(ranges)) for ranges in found_ranges] == [True] + [False] * (len(found_ranges) - 1)
    quantised = [quantise_window_layer(*pair) for pair in zip(lower.layers, found_ranges, strict=True)]
    run = RunWindows(lower, torch.float32, quantised)
    unseen = torch.zeros(40, 1, 3, 1)
    for place, (layer, ranges) in enumerate(zip(lower.layers, found_ranges, strict=True)):
        assert isinstance(layer, TransformerLayer)
        hidden = torch.randn(40, 3, tiny_base.config.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            hidden = scale * layer.ffn_norm(hidden)
            found = run._int8_layer(place, hidden, unseen)
            expected = reference.int8_window_layer(
                layer, ranges, hidden, lambda *qkv: run._attend(torch.cat(qkv, -1), unseen)
            )
        off, most = (found - expected).abs(), expected.abs().max()
        # A value between two codes may be rounded to either, which moves later results a little.
        assert off.max() < 0.05 * most
        assert (off > 1e-4 * most).float().mean() < 0.2


@needs_vnni
@FORMATS
def test_windows_stay_near_and_are_not_the_same(tiny_base: Base, dtype: torch.dtype) -> None:
    windows = tiny.some_ngrams(tiny_base, 300)
    windows[:20, 0] = windows[20:40, 2] = tiny_base.config.pad_id
    plain = load_lower(tiny_base)
    lowers.pack(plain, dtype)
    exact = compute_ngrams(plain, windows, dtype)
    found = compute_ngrams(in_int8(tiny_base, load_lower(tiny_base), dtype), windows, dtype)
    seen = windows != tiny_base.config.pad_id
    assert 0 < moved(found[seen], exact[seen]) < 0.05


@needs_vnni
@FORMATS
@pytest.mark.parametrize("hidden", [384, 768])
def test_a_window_has_the_same_bits_whatever_others_are_computed_with_it(
    tmp_path: Path, dtype: torch.dtype, hidden: int
) -> None:
    skip_without_avx512(dtype)
    # Products smaller than a real base's are computed differently by their size.
    base = tiny.make_base(Store(tmp_path), tiny.config(form="windows", hidden_size=hidden))
    lower = load_lower(base)
    enlarge(lower.layers[0])
    in_int8(base, lower, dtype)
    # The first layer has channels apart.
    assert [len(one) for one in lower.packed.int8_apart] == [3, 0]  # type: ignore[union-attr, arg-type]
    windows = tiny.some_ngrams(base, 600)
    together = compute_ngrams(lower, windows, dtype)
    for size in (1, 2, 3, 8, 15, 40, 150, 257):
        assert_same_windows(compute_ngrams(lower, windows[:size], dtype), together[:size], dtype)


@needs_vnni
def test_inner_channels_far_larger_than_the_others_take_nothing_from_them(tiny_base: Base) -> None:
    exact, quantised = load_lower(tiny_base), load_lower(tiny_base)
    for lower in (exact, quantised):
        for layer in lower.layers:
            enlarge(layer)
    ranges = measure_window_ranges(tiny_base, quantised)
    assert [sorted(channels_apart(one)) for one in ranges] == [list(range(APART))] * len(ranges)
    windows = tiny.some_ngrams(tiny_base, 200)
    found = compute_ngrams(in_int8(tiny_base, quantised), windows, torch.float32)
    assert moved(found, compute_ngrams(exact, windows, torch.float32)) < 0.05


def test_ranges_are_those_of_the_layers_that_are_given(tiny_base: Base) -> None:
    ours, domains = load_lower(tiny_base), load_lower(tiny_base)
    with torch.no_grad():
        for layer in domains.layers:
            assert isinstance(layer, TransformerLayer)
            layer.ffn_norm.weight *= 3
    own = measure_window_ranges(tiny_base, ours)
    wider = measure_window_ranges(tiny_base, domains)
    # The first layer has the same inputs. The second layer's inputs stand behind the first layer's norm.
    assert torch.equal(wider[0].attention, own[0].attention)
    assert bool((wider[1].attention > 2 * own[1].attention).all())
    assert not any(part._forward_pre_hooks for part in ours.modules())


@needs_vnni
def test_layers_that_two_open_at_once_are_put_in_integers_once(
    tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = load_lower(tiny_base)
    measured: list[WindowEncoder] = []
    first_is_in, other_begins, go_on = (threading.Event() for _ in range(3))

    def measure(base: Base, given: WindowEncoder) -> list[Ranges]:
        measured.append(given)
        first_is_in.set()
        assert go_on.wait(10)
        return measure_window_ranges(base, given)

    def pack_too() -> LowerEncoder:
        other_begins.set()
        return in_int8(tiny_base, lower)

    monkeypatch.setattr(encoder, "measure_window_ranges", measure)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(in_int8, tiny_base, lower)
        assert first_is_in.wait(10)
        other = pool.submit(pack_too)
        assert other_begins.wait(10)
        # Long enough for the second thread to measure too if there were no lock.
        assert not wait([other], timeout=0.1).done
        go_on.set()
        assert one.result() is other.result() is lower
    assert len(measured) == 1
    assert lower.packed is not None
    assert lower.is_int8


@needs_vnni
def test_beside_a_format_that_cannot_be_put_in_order_integers_are_refused_not_left_out(tiny_base: Base) -> None:
    lower = load_lower(tiny_base)
    with pytest.raises(ConfigError, match="cannot be had beside"):
        in_int8(tiny_base, lower, torch.float16)
    assert lower.packed is None


@needs_vnni
def test_layers_in_one_format_are_not_silently_served_in_another(tiny_base: Base) -> None:
    in_floats, in_integers = load_lower(tiny_base), in_int8(tiny_base, load_lower(tiny_base))
    lowers.pack(in_floats, torch.float32)
    for lower, int8_of in ((in_floats, tiny_base), (in_integers, None)):
        with pytest.raises(ConfigError, match="open already with another quantization"):
            lowers.pack(lower, torch.float32, int8_of)


@needs_vnni
def test_layers_in_integers_are_not_saved(tiny_base: Base, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="before it is packed"):
        lowers.save(tmp_path / "lower", tiny_base, in_int8(tiny_base, load_lower(tiny_base)), {})
    assert not any(tmp_path.iterdir())


@needs_vnni
def test_a_base_that_knows_distances_has_it_too(tmp_path: Path) -> None:
    base = tiny.make_base(Store(tmp_path), replace(tiny.config(form="windows"), relative_buckets=16))
    windows = tiny.some_ngrams(base, 100)
    found = compute_ngrams(in_int8(base, load_lower(base)), windows, torch.float32)
    assert moved(found, compute_ngrams(load_lower(base), windows, torch.float32)) < 0.05


@needs_vnni
def test_a_lookup_computes_in_integers_what_no_table_has_and_that_alone(tiny_store: Store, tiny_base: Base) -> None:
    root = tiny_store.table(tiny.PLOT, "root").parent
    names: tuple[Quantization, ...] = ("none", "int8")
    plain, quantised = (
        open_lineage(tiny_store, tiny_base, [root], dtype=torch.float32, quantization=name) for name in names
    )
    assert isinstance(plain._chain[0], PlotTable)
    known = np.array(list(reference.level(plain._chain[0]))[:4])
    np.testing.assert_array_equal(plain.vectors(known), quantised.vectors(known))
    ids = tiny.some_ngrams(tiny_base, 8, seed=5).ravel()
    exact, found = (lookup.hidden_states(ids, [ids.size]) for lookup in (plain, quantised))
    assert not np.array_equal(found, exact)
    assert moved(found, exact) < 0.05
    # The overlay remembers vectors as they were computed.
    np.testing.assert_array_equal(quantised.hidden_states(ids, [ids.size]), found)


def test_a_stage_on_a_processor_without_it_does_not_start(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    settings = LookupSettings(store="../../../store", base="tiny", table="general", quantization="int8")
    with pytest.raises(ConfigError, match="wants a CPU with AVX-512 VNNI"):
        LookupStage(settings, tiny_models / "hbert_plot" / "1")


def test_a_batch_of_windows_is_measured(tiny_base: Base) -> None:
    counted: list[int] = []
    lower = load_lower(tiny_base)
    lower.register_forward_pre_hook(lambda _, given: counted.append(len(given[0])))
    measure_window_ranges(tiny_base, lower)
    assert counted == [SAMPLE_NGRAMS]
