"""The upper stage on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hplm.nn.adapters import Fill
from hplm.nn.base import Base
from hplm.nn.dtype import choose_device
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


def test_attention_of_sizes_that_never_came_before_waits_for_no_plan_of_cudnn() -> None:
    assert choose_device("auto").type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_who_waits_for_a_whole_fill_waits_itself_and_leaves_its_stream_to_who_computes() -> None:
    stream = torch.cuda.Stream()
    fill = Fill([1], [], num_layers=1, device=torch.device("cuda"))
    with torch.cuda.stream(stream):
        # Some tenths of a second: without waiting it would not be over below.
        torch.cuda._sleep(500_000_000)
        event = torch.cuda.Event()
        event.record(stream)
    fill.layer_done(event)
    fill.wait_all()
    assert event.query()
