"""Fine-tuning on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import HeadModel, UpperModel, adapter_body
from hplm_builder.tenants.finetune import TrainSettings, fine_tune
from hplm_builder.tenants.prepared import prepare_all
from hplm_builder.tenants.trained_layers import plot_features
from torch import nn

from hplm.core.settings import REDUCTION_FACTOR
from hplm.engine.open_domain import open_lookup
from hplm.models.base import Base
from hplm.store.layout import Store
from tests import tiny
from tests.tasks import colour_data, place_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
BODIES: dict[str, Callable[[Base, torch.device], Callable[[], nn.Module]]] = {
    "adapters": lambda base, device: adapter_body(base.load_upper(), REDUCTION_FACTOR, device=device),
    "upper": lambda base, device: lambda: UpperModel(base.load_upper()),
    "head": lambda base, device: HeadModel,
}


@pytest.mark.parametrize(
    ("data", "score"), [(colour_data(), "accuracy"), (place_data(), "f1")], ids=["class", "entities"]
)
@pytest.mark.parametrize("name", BODIES)
def test_a_task_is_learnt_on_the_gpu_as_on_the_cpu(
    tiny_base: Base, tiny_store: Store, name: str, data: LabelledData, score: str
) -> None:
    features = plot_features(open_lookup(tiny_store, tiny_base, tiny.PLOT))
    parts = prepare_all(data, tiny_base.load_text_encoder(), features)
    settings = TrainSettings(epochs=20, learning_rates=(1e-2,), batch_examples=64, dropout=0.0, patience=20)
    hidden = tiny_base.config.hidden_size
    scores = {
        kind: fine_tune(BODIES[name](tiny_base, device), hidden, data, parts, settings, device=device).scores[
            f"test_{score}"
        ]
        for kind, device in (("cuda", torch.device("cuda")), ("cpu", torch.device("cpu")))
    }
    assert scores["cuda"] > 0.7
    assert abs(scores["cuda"] - scores["cpu"]) < 0.2
