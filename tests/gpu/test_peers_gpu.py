"""The peers of hBERT on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_loadtest.peers import whole_model
from hplm_loadtest.peers.engines import ENGINES
from hplm_loadtest.peers.repository import write_models
from hplm_loadtest.peers.settings import PeerSettings, System
from hplm_loadtest.peers.whole_model import PeerRequest, model_files, whole_config
from rich.progress import Progress

from hplm.store.layout import Store
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("system", ["dedicated"])
def test_a_peer_answers_on_the_gpu_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: System, dtype: torch.dtype, tolerance: float
) -> None:
    # A file has several pieces, and the last piece is shorter.
    monkeypatch.setattr(whole_model, "PIECE_BYTES", 7 * whole_model.ALIGNMENT)
    base = tiny.make_base(Store(tmp_path / "store"), tiny.config(hidden_size=64))
    config, folder = whole_config(base.config), tmp_path / "weights"
    write_models(folder, config, tenants=3, disk_bytes=10**9, dtype=dtype, onnx=False, progress=Progress(disable=True))
    pieces = model_files(folder)[0].stat().st_size / whole_model.PIECE_BYTES
    assert pieces > 2
    assert pieces % 1
    mean, cls, tagging = tiny.fleet_of(base, 3)
    cls = replace(cls, card=replace(cls.card, pooling="cls"))
    tagging = replace(tagging, card=replace(tagging.card, task="tagging"))
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, config.vocab_size, size=length) for length in (4, 7, 4)]
    settings = PeerSettings(system=system, store="", base="", weights="", budget_mb=1)
    engines = [ENGINES[settings.system](settings, config, dtype, folder, device) for device in (GPU, CPU)]
    # The last model replaces the one before in its place.
    for tenant in (mean, cls, tagging, mean):
        found, wanted = [], []
        for engine, answers in zip(engines, (found, wanted), strict=True):
            kept = engine.keep(tenant)
            engine.load(0, engine.model_of(kept))
            answers += engine.run(0, [PeerRequest(kept, ids) for ids in texts])
        for got, exact in zip(found, wanted, strict=True):
            assert got.shape == exact.shape
            assert np.abs(got - exact).max() < tolerance * max(1.0, float(np.abs(exact).max()))
