"""Reading a BERT-family model folder in Hugging Face format."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from hplm.config import BaseConfig
from hplm.errors import DataError
from hplm.nn.encoder import OriginalEncoder


def base_config(
    folder: Path, *, name: str, lower_layers: int, window: int, window_layers: int, max_tokens: int
) -> BaseConfig:
    """The shape of the base that converting `folder` gives. Raises DataError where the model is not a BERT."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    activation = getattr(config, "hidden_act", "no")
    if config.model_type != "bert" or activation != "gelu":
        raise DataError(
            f"{folder}: a BERT with gelu is wanted, this is {config.model_type} with {activation} activation"
        )
    layers = config.num_hidden_layers
    if not 1 <= lower_layers < layers or not 1 <= window_layers < layers:
        raise DataError(f"{folder} has {layers} layers: --lower and --window-layers must be 1 to {layers - 1}")
    if max_tokens > config.max_position_embeddings:
        raise DataError(f"{folder} has {config.max_position_embeddings} positions, --max-tokens asks for {max_tokens}")
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
    )


def load_original(folder: Path, config: BaseConfig) -> OriginalEncoder:
    """The model of `folder` in our layer form, which runs packed batches."""
    # Its report of a pooler that we do not load, and its bar, would stand between ours.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False, dtype=torch.float32)
    state = source.state_dict()
    num_layers = 1 + max(int(match.group(1)) for key in state if (match := re.match(r"encoder\.layer\.(\d+)\.", key)))
    encoder = OriginalEncoder(config, num_layers)
    ours: dict[str, torch.Tensor] = {
        "word_embeddings.weight": state["embeddings.word_embeddings.weight"],
        "position_embeddings.weight": state["embeddings.position_embeddings.weight"][: config.max_tokens],
        "token_type": state["embeddings.token_type_embeddings.weight"][0],
        "embedding_norm.weight": state["embeddings.LayerNorm.weight"],
        "embedding_norm.bias": state["embeddings.LayerNorm.bias"],
    }
    parts = {
        "attention_out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "ffn_in": "intermediate.dense",
        "ffn_out": "output.dense",
        "ffn_norm": "output.LayerNorm",
    }
    for index in range(num_layers):
        theirs = f"encoder.layer.{index}."
        for kind in ("weight", "bias"):
            heads = [state[f"{theirs}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            ours[f"layers.{index}.qkv.{kind}"] = torch.cat(heads)
            for our_part, their_part in parts.items():
                ours[f"layers.{index}.{our_part}.{kind}"] = state[f"{theirs}{their_part}.{kind}"]
    encoder.load_state_dict(ours)
    return encoder.eval()
