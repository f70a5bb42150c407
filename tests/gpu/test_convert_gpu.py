"""Converting a model on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertModel

from hplm.store.layout import Store
from tests.unit.builder.convert.test_convert import converted, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def test_a_conversion_comes_closer_to_the_original_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path / "cache"))
    found = converted(Store(tmp_path / "store"), save_model(tmp_path / "model", BertModel), "small", device="cuda")
    assert found["after"]["relative"] < found["before"]["relative"]
