"""Matrices in oneDNN's order: the same products, and sizes that are few."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hplm.nn import lower as lowers
from hplm.nn.base import Base
from hplm.nn.dtype import computing_in
from hplm.nn.encoder import WindowEncoder
from hplm.nn.lookup import compute_windows
from hplm.nn.onednn import PackedLinear, can_pack, pack_linears, rounded
from tests import tiny

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def skip_without(dtype: torch.dtype) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN has no {dtype} on this processor")


@FORMATS
def test_packed_lower_layers_give_what_they_gave(tiny_base: Base, dtype: torch.dtype) -> None:
    skip_without(dtype)
    windows = torch.randint(5, tiny_base.config.vocab_size, (7, tiny_base.config.window))
    lower = tiny_base.load_lower()
    torch.nn.init.normal_(lower.gate_weight, std=0.2)
    with torch.inference_mode(), computing_in(dtype, CPU):
        before = lower(windows)
        lowers.pack(lower, dtype)
        packed = {name: id(one) for name, one in lower.named_modules() if isinstance(one, PackedLinear)}
        lowers.pack(lower, dtype)  # a second time finds nothing left
        after = lower(windows)
    assert len(packed) == 4 * tiny_base.config.window_layers
    assert len(lower.packed_gate) == tiny_base.config.window
    assert packed == {name: id(one) for name, one in lower.named_modules() if isinstance(one, PackedLinear)}
    assert not any(isinstance(one, nn.Linear) for one in lower.modules())
    torch.testing.assert_close(after, before, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-4)


@FORMATS
def test_a_window_has_the_same_bits_whatever_others_are_computed_with_it(dtype: torch.dtype) -> None:
    skip_without(dtype)
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("without AVX-512, products in float32 are rounded by their size")
    # Smaller products than any real base has are computed one way or another by their size.
    shape = tiny.config(hidden_size=384)
    torch.manual_seed(0)
    lower = WindowEncoder(shape)
    torch.nn.init.normal_(lower.gate_weight, std=0.05)
    lowers.pack(lower, dtype)
    windows = np.random.default_rng(0).integers(5, shape.vocab_size, (200, shape.window))
    together = compute_windows(lower, windows, dtype)
    for size in (1, 2, 3, 8, 15, 40, 150):
        np.testing.assert_array_equal(compute_windows(lower, windows[:size], dtype), together[:size])


def test_any_number_of_windows_is_computed_in_parts_of_few_sizes(tiny_base: Base) -> None:
    lower = tiny_base.load_lower()
    sizes: Counter[int] = Counter()
    lower.register_forward_pre_hook(lambda _, windows: sizes.update([len(windows[0])]))
    windows = np.full((900, tiny_base.config.window), 7)
    for count in range(1, 900):
        assert len(compute_windows(lower, windows[:count], torch.float32)) == count
    # What oneDNN makes ready for each size takes hundreds of KB a matrix, for as long as the stage lives.
    assert min(sizes) == 2
    assert max(sizes) == 256
    assert len(sizes) == 64


def test_packed_lower_layers_are_not_saved_without_their_matrices(tiny_base: Base, tmp_path: Path) -> None:
    skip_without(torch.float32)
    lower = tiny_base.load_lower()
    lowers.pack(lower, torch.float32)
    with pytest.raises(TypeError, match="before it is packed"):
        lowers.save(tmp_path / "lower", tiny_base, lower, {})
    assert not any(tmp_path.iterdir())


def test_what_is_not_on_a_cpu_stays_as_it_is() -> None:
    linear = nn.Sequential(nn.Linear(4, 4, device="meta"))
    pack_linears(linear, torch.float32)
    assert isinstance(linear[0], nn.Linear)
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float16)


def test_sizes_are_few_and_at_most_a_sixteenth_too_large() -> None:
    sizes = {size: rounded(size) for size in range(1, 4097)}
    assert all(size <= filled <= max(size + 7, size * 17 / 16) for size, filled in sizes.items())
    assert len(set(sizes.values())) == 32 + 4 * 16
    assert all(rounded(filled) == filled for filled in sizes.values())
