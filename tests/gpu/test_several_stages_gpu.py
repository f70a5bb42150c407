"""Encode stages of some layers each on a GPU: one after another they compute as a single encode stage."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.core.settings import EncodeSettings
from hplm.engine.served_engine import make_engine
from hplm.models.device import choose_device
from tests import tiny
from tests.unit.hplm.engine.test_layer_ranges import asked_of, base_of, run_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_engines_of_some_layers_compute_as_one_engine_of_all_on_a_gpu(
    tmp_path: Path, dtype: str, tolerance: float
) -> None:
    base = base_of(tmp_path, tiny.config(form="whole"))
    requests, device = asked_of(base), choose_device("cuda")
    given = EncodeSettings(store="", base="tiny", num_slots=8, dtype=dtype)  # type: ignore[arg-type]
    with ExitStack() as opened:
        whole = opened.enter_context(closing(make_engine(base, given, device)))
        # The first of these engines has no layer with adapters.
        parts = [
            opened.enter_context(closing(make_engine(base, given, device, layers=layers)))
            for layers in (range(2), range(2, 3), range(3, 4))
        ]
        for found, logits in zip(run_parts(parts, requests), whole.run(requests), strict=True):
            np.testing.assert_allclose(found, logits, atol=tolerance, rtol=tolerance)
