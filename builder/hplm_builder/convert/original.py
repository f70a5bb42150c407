"""Reading a model folder in Hugging Face format: BERT, and MPNet, which is a BERT with relative positions."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from hplm.core.settings import BaseConfig
from hplm.errors import DataError
from hplm.models.layers import OriginalEncoder

MPNET_BUCKETS = 32
# Row of the position embeddings where a text starts.
FIRST_POSITION = {"bert": 0, "mpnet": 2}
_FFN = {"ffn_in": "intermediate.dense", "ffn_out": "output.dense", "ffn_norm": "output.LayerNorm"}
# Of a layer: query, key and value, then our names -> theirs.
PARTS = {
    "bert": (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        {"attention_out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm", **_FFN},
    ),
    "mpnet": (
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        {"attention_out": "attention.attn.o", "attention_norm": "attention.LayerNorm", **_FFN},
    ),
}


def base_config(
    folder: Path, *, name: str, lower_layers: int, window: int, window_layers: int, max_tokens: int
) -> BaseConfig:
    """The shape of the base that converting `folder` gives. Raises DataError where the model is no BERT and no MPNet."""
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} is no folder of a model in Hugging Face format: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'config.json'} cannot be read: {error}") from None
    activation = getattr(config, "hidden_act", "no")
    if config.model_type not in FIRST_POSITION or activation != "gelu":
        raise DataError(
            f"{folder}: a BERT or MPNet with gelu is wanted, this is {config.model_type} with {activation} activation"
        )
    buckets = getattr(config, "relative_attention_num_buckets", 0)
    if config.model_type == "mpnet" and buckets != MPNET_BUCKETS:
        raise DataError(
            f"{folder}: transformers computes an MPNet with {MPNET_BUCKETS} buckets, this one has {buckets}"
        )
    layers = config.num_hidden_layers
    if not 1 <= lower_layers < layers or not 1 <= window_layers < layers:
        raise DataError(f"{folder} has {layers} layers: --lower and --window-layers must be 1 to {layers - 1}")
    positions = config.max_position_embeddings - FIRST_POSITION[config.model_type]
    if max_tokens > positions:
        raise DataError(f"{folder} has {positions} positions, --max-tokens asks for {max_tokens}")
    return BaseConfig(
        name=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        window_layers=window_layers,
        upper_layers=layers - lower_layers,
        max_tokens=max_tokens,
        window=window,
        layer_norm_eps=config.layer_norm_eps,
        pad_id=config.pad_token_id,
        relative_buckets=buckets,
    )


def load_original(folder: Path, config: BaseConfig) -> OriginalEncoder:
    """The model of `folder` in our layer form, which runs packed batches."""
    # Its report of a pooler that we do not load, and its bar, would stand between ours.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False, dtype=torch.float32)
    state = source.state_dict()
    kind = source.config.model_type
    num_layers = 1 + max(int(match.group(1)) for key in state if (match := re.match(r"encoder\.layer\.(\d+)\.", key)))
    encoder = OriginalEncoder(config, num_layers)
    first = FIRST_POSITION[kind]
    ours: dict[str, torch.Tensor] = {
        "word_embeddings.weight": state["embeddings.word_embeddings.weight"],
        "position_embeddings.weight": state["embeddings.position_embeddings.weight"][first : first + config.max_tokens],
        "embedding_norm.weight": state["embeddings.LayerNorm.weight"],
        "embedding_norm.bias": state["embeddings.LayerNorm.bias"],
    }
    if kind == "bert":
        ours["token_type"] = state["embeddings.token_type_embeddings.weight"][0]
    else:
        ours["token_type"] = torch.zeros(config.hidden_size)
        ours["relative.scores.weight"] = state["encoder.relative_attention_bias.weight"]
    heads, parts = PARTS[kind]
    for index in range(num_layers):
        theirs = f"encoder.layer.{index}."
        for which in ("weight", "bias"):
            ours[f"layers.{index}.qkv.{which}"] = torch.cat([state[f"{theirs}{part}.{which}"] for part in heads])
            for our_part, their_part in parts.items():
                ours[f"layers.{index}.{our_part}.{which}"] = state[f"{theirs}{their_part}.{which}"]
    encoder.load_state_dict(ours)
    return encoder.eval()
