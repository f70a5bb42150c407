"""Matrices in oneDNN's order: the same products, in few sizes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.engine import lower_layers as lowers
from hplm.engine.kernels.onednn import can_pack, rounded
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import SHARED_NGRAMS, Helpers, compute_ngrams
from hplm.engine.windows.encoder import WindowEncoder
from hplm.engine.windows.int8_windows import Int8WindowLayer, measure_window_ranges, quantise_window_layer
from hplm.engine.windows.run_windows import RunWindows
from hplm.models.base import Base
from hplm.models.device import computing_in
from hplm.models.lower import LowerEncoder
from hplm.store.layout import Store
from tests import tiny
from tests.rounding import assert_same_windows, skip_without_avx512

CPU = torch.device("cpu")
SOON_S = 30.0
FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def skip_without(dtype: torch.dtype) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN has no {dtype} on this processor")


@FORMATS
@pytest.mark.parametrize("buckets", [0, 32], ids=["absolute", "relative"])
def test_packed_lower_layers_give_what_they_gave(dtype: torch.dtype, buckets: int) -> None:
    skip_without(dtype)
    torch.manual_seed(0)
    lower = WindowEncoder(replace(tiny.config(form="windows"), relative_buckets=buckets))
    windows = torch.from_numpy(tiny.some_ngrams(lower, 60))
    windows[:20, 0] = windows[20:30, 2] = lower.config.pad_id
    torch.nn.init.normal_(lower.gate_weight, std=0.2)
    with torch.inference_mode():
        exact = lower(windows)
    with torch.inference_mode(), computing_in(dtype, CPU):
        before = lower(windows)
        lowers.pack(lower, dtype)
        packed = lower.packed
        assert packed is not None
        lowers.pack(lower, dtype)
        assert lower.packed is packed
        after = lower(windows)
    # No matrix is in memory twice.
    assert not lower.layers
    if dtype == torch.float32:
        torch.testing.assert_close(after, exact, atol=1e-5, rtol=1e-4)
    # A GELU within its product rounds once less than a separate one.
    assert (after - exact).square().mean() <= 1.1 * (before - exact).square().mean() + 1e-12


def packed_lower(dtype: torch.dtype) -> LowerEncoder:
    # Products smaller than a real base's are computed differently by their size.
    torch.manual_seed(0)
    lower = WindowEncoder(tiny.config(form="windows", hidden_size=384))
    torch.nn.init.normal_(lower.gate_weight, std=0.05)
    lowers.pack(lower, dtype)
    return lower


@FORMATS
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("buckets", [0, 32], ids=["absolute", "relative"])
def test_as_one_function_packed_lower_layers_give_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, quantization: str, buckets: int
) -> None:
    skip_without(dtype)
    if quantization == "int8" and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor has no VNNI")
    base = tiny.make_base(
        Store(tmp_path), replace(tiny.config(form="windows", hidden_size=128), relative_buckets=buckets)
    )
    lower = load_lower(base)
    torch.nn.init.normal_(lower.gate_weight, std=0.05)
    with torch.inference_mode():
        # A channel that is computed in floats, apart from the int8 channels.
        lower.layers[0].ffn_in.weight[0] *= 60  # type: ignore[union-attr, index, operator]
    int8: list[Int8WindowLayer] = []
    if quantization == "int8":
        pairs = zip(lower.layers, measure_window_ranges(base, lower), strict=True)
        int8 = [quantise_window_layer(layer, ranges) for layer, ranges in pairs]
        assert [len(one.half.apart) for one in int8] == [3, 0]
    readable = RunWindows(lower, dtype, int8)
    lowers.pack(lower, dtype, base if quantization == "int8" else None)
    windows = torch.from_numpy(tiny.some_ngrams(lower, 60))
    windows[:20, 0] = windows[20:30, 2] = base.config.pad_id
    with torch.inference_mode(), computing_in(dtype, CPU):
        # Three runs, because TorchScript optimises a function after its first runs.
        found = [lower(windows) for _ in range(3)]
        with torch.autocast("cpu", enabled=False):
            expected = readable(windows)
    # Only processors with AVX-512 are known to round alike.
    off = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-6
    for one in found:
        torch.testing.assert_close(one, expected, atol=off, rtol=off)


@FORMATS
def test_a_window_has_the_same_bits_whatever_others_are_computed_with_it(dtype: torch.dtype) -> None:
    skip_without(dtype)
    skip_without_avx512(dtype)
    lower = packed_lower(dtype)
    windows = tiny.some_ngrams(lower, 200)
    together = compute_ngrams(lower, windows, dtype)
    for size in (1, 2, 3, 8, 15, 40, 150):
        assert_same_windows(compute_ngrams(lower, windows[:size], dtype), together[:size], dtype)


def test_any_number_of_windows_is_computed_in_parts_of_few_sizes(tiny_base: Base) -> None:
    lower = load_lower(tiny_base)
    sizes: Counter[int] = Counter()
    lower.register_forward_pre_hook(lambda _, windows: sizes.update([len(windows[0])]))
    windows = np.full((900, tiny_base.config.window), 7)
    for count in range(1, 900):
        assert len(compute_ngrams(lower, windows[:count], torch.float32)) == count
    # oneDNN keeps hundreds of KB a matrix for each size, as long as the stage lives.
    assert min(sizes) == 2
    assert max(sizes) == 256
    assert len(sizes) == 64


@FORMATS
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 600])
def test_shared_out_among_threads_windows_have_the_same_bits(count: int, dtype: torch.dtype) -> None:
    skip_without(dtype)
    lower = packed_lower(dtype)
    by: Counter[str] = Counter()
    begun = threading.Barrier(2)

    def see(*_: object) -> None:
        name = threading.current_thread().name
        if not by[name] and count > SHARED_NGRAMS:
            # The first thread waits for the second, so that both take part.
            begun.wait(SOON_S)
        by[name] += 1

    windows = tiny.some_ngrams(lower, count)
    alone = compute_ngrams(lower, windows, dtype)
    lower.register_forward_pre_hook(see)
    with ThreadPoolExecutor(1, "helper") as pool:
        shared = compute_ngrams(lower, windows, dtype, Helpers(pool, 1))
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        np.testing.assert_allclose(shared, alone, atol=1e-3)
    else:
        np.testing.assert_array_equal(shared, alone)
    assert shared.shape == (count, lower.config.window, lower.config.hidden_size)
    assert sum(by.values()) == -(-count // SHARED_NGRAMS)
    assert len(by) == min(2, sum(by.values()))


def test_nobody_waits_for_a_helper_that_has_not_begun(tiny_base: Base) -> None:
    lower = load_lower(tiny_base)
    windows = np.full((600, tiny_base.config.window), 7)
    may_go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(may_go_on.wait, SOON_S)
        found = compute_ngrams(lower, windows, torch.float32, Helpers(pool, 1))
        assert not busy.done()
        may_go_on.set()
    np.testing.assert_array_equal(found, compute_ngrams(lower, windows, torch.float32))


def test_what_a_helper_fails_at_is_raised(tiny_base: Base) -> None:
    lower = load_lower(tiny_base)
    begun = threading.Barrier(2)

    def fail(*_: object) -> None:
        begun.wait(SOON_S)
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")

    lower.register_forward_pre_hook(fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(MemoryError, match="no room"):
        compute_ngrams(lower, np.full((2 * SHARED_NGRAMS, 3), 7), torch.float32, Helpers(pool, 1))


def test_where_the_one_that_asks_fails_no_helper_goes_on(tiny_base: Base) -> None:
    lower = load_lower(tiny_base)
    begun, failed = threading.Barrier(2), threading.Event()
    computed: list[str] = []

    def see(*_: object) -> None:
        begun.wait(SOON_S)
        if threading.current_thread() is threading.main_thread():
            failed.set()
            raise MemoryError("no room")
        assert failed.wait(SOON_S)
        # The other thread has failed by now, or fails soon.
        time.sleep(0.2)
        computed.append(threading.current_thread().name)

    lower.register_forward_pre_hook(see)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(MemoryError, match="no room"):
            compute_ngrams(lower, np.full((9 * SHARED_NGRAMS, 3), 7), torch.float32, Helpers(pool, 1))
        # Chunks that had started before the failure are computed, and no other chunk.
        assert len(computed) == 1
    assert len(computed) == 1


def test_packed_lower_layers_are_not_saved_without_their_matrices(tiny_base: Base, tmp_path: Path) -> None:
    skip_without(torch.float32)
    lower = load_lower(tiny_base)
    lowers.pack(lower, torch.float32)
    with pytest.raises(TypeError, match="before it is packed"):
        lowers.save(tmp_path / "lower", tiny_base, lower, {})
    assert not any(tmp_path.iterdir())


def test_what_has_no_order_of_its_own_stays_as_it_is() -> None:
    lower = WindowEncoder(tiny.config(form="windows"))
    lowers.pack(lower, torch.float16)
    assert lower.packed is None
    assert len(lower.layers) == lower.config.window_layers
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float16)


def test_sizes_are_few_and_at_most_a_sixteenth_too_large() -> None:
    sizes = {size: rounded(size) for size in range(1, 4097)}
    assert all(size <= filled <= max(size + 7, size * 17 / 16) for size, filled in sizes.items())
    assert len(set(sizes.values())) == 32 + 4 * 16
    assert all(rounded(filled) == filled for filled in sizes.values())
