"""What a processor rounds by how many tokens go together, and what not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hplm.plot.table import Values


def skip_without_avx512(dtype: torch.dtype) -> None:
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("without AVX-512, products in float32 are rounded by their size")


def assert_same_windows(found: Values, wanted: Values, dtype: torch.dtype) -> None:
    """To the bit; with AMX almost, for in bfloat16 oneDNN cuts sums of more than 512 channels there by the tokens' number."""
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        np.testing.assert_allclose(found, wanted, rtol=0.03, atol=0.03)
        assert np.count_nonzero(found != wanted) < 0.05 * found.size
    else:
        np.testing.assert_array_equal(found, wanted)
