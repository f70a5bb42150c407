"""The catalogue of architectures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    MPNetConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from hplm.errors import ConfigError
from hplm.models.architectures import ARCHITECTURES, Architecture
from hplm.store.layout import Store
from tests import tiny

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "bert": BertConfig,
    "mpnet": MPNetConfig,
    "roberta": RobertaConfig,
    "xlm-roberta": XLMRobertaConfig,
    "distilbert": DistilBertConfig,
    "electra": ElectraConfig,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_weight_of_the_model_has_a_place_in_the_row_of_its_architecture(architecture: Architecture) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {"add_pooling_layer": False} if architecture.has_pooler else {}
    kind = CONFIGS[architecture.model_type]
    config = kind(vocab_size=20, embedding_size=8, **{architecture.intermediate_size: 8}, **shape)
    model = AutoModel.from_config(config, **options)
    layer = f"{architecture.layers}.0."
    parts = [*architecture.qkv, *architecture.layer_parts.values()]
    known = {f"{layer}{part}.{which}" for part in parts for which in ("weight", "bias")}
    known |= {*architecture.embeddings.values(), architecture.token_types, architecture.relative_bias} - {None}
    assert model.state_dict().keys() == known


def test_a_base_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no architecture 'gpt2'; there are bert, mpnet"):
        tiny.make_base(Store(tmp_path), replace(tiny.config(), architecture="gpt2"))
