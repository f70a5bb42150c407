"""Matrices in oneDNN's order: the same products, and sizes that are few."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hplm.nn.base import Base
from hplm.nn.dtype import computing_in
from hplm.nn.onednn import PackedLinear, can_pack, pack_linears, rounded

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_lower_layers_give_what_they_gave(tiny_base: Base, dtype: torch.dtype) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN has no {dtype} on this processor")
    windows = torch.randint(5, tiny_base.config.vocab_size, (7, tiny_base.config.window))
    lower = tiny_base.load_lower()
    with torch.inference_mode(), computing_in(dtype, CPU):
        before = lower(windows)
        pack_linears(lower, dtype)
        packed = {name: id(one) for name, one in lower.named_modules() if isinstance(one, PackedLinear)}
        pack_linears(lower, dtype)  # a second time finds nothing left
        after = lower(windows)
    assert len(packed) == 4 * tiny_base.config.window_layers
    assert packed == {name: id(one) for name, one in lower.named_modules() if isinstance(one, PackedLinear)}
    assert not any(isinstance(one, nn.Linear) for one in lower.modules())
    torch.testing.assert_close(after, before, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-4)


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
