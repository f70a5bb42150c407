"""The upper stage on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hplm.nn.base import Base
from hplm.nn.upper import UpperEngine
from hplm.store.layout import Store
from tests.unit.test_upper import requests_of, wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_logits_on_the_gpu_equal_the_reference(
    tiny_base: Base, tiny_store: Store, dtype: torch.dtype, tolerance: float
) -> None:
    engine = UpperEngine(
        tiny_base.config, tiny_base.load_upper(), num_slots=3, reduced_size=5, device=torch.device("cuda"), dtype=dtype
    )
    requests = requests_of(tiny_base, tiny_store, list(range(1, 41)))
    # As the stage loads them: half from pinned memory, half as they come.
    for index, request in enumerate(requests[::2]):
        staged = engine.slots.staged(request.tenant.packed)
        assert torch.from_numpy(staged.weights).is_pinned()
        requests[2 * index] = replace(request, tenant=replace(request.tenant, packed=staged))
    for request, got in zip(requests, engine.run(requests), strict=True):
        exact = wanted(tiny_base, request)
        assert np.abs(got - exact).max() < tolerance * max(1.0, float(np.abs(exact).max()))
