"""Architectures of pretrained models as data: how Hugging Face names their weights, and in what they differ.

All of them are encoders of post-LayerNorm layers as in `hplm.models.layers`. Another encoder of that kind, such as RoBERTa, is
another row of ARCHITECTURES. A model whose layers compute otherwise also needs a module beside `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hplm.errors import ConfigError

_FEED_FORWARD = {"ffn_in": "intermediate.dense", "ffn_out": "output.dense", "ffn_norm": "output.LayerNorm"}


@dataclass(frozen=True)
class Architecture:
    """A kind of pretrained model. Keys of weights are those of its state in Hugging Face's `transformers`.

    `model_type`: its name there. `encoder`: class of the model without a head. `mask_token`: what its tokenizer family writes
    for a masked token.
    `first_position`: row of the position embeddings at which a text starts.
    `token_types`: key of the embeddings of token types; None for a model without them.
    `relative_bias`: key of the scores of `relative_buckets` distances, which every layer adds to its attention; None for a
    model without them.
    `qkv`: in each layer, the keys of queries, keys and values. `layer_parts`: our name of each other part -> its key.
    `layers`: key of the layers. `embeddings`: our name of each weight -> its key.
    """

    model_type: str
    title: str
    encoder: str
    mask_token: str
    qkv: tuple[str, str, str]
    layer_parts: Mapping[str, str]
    first_position: int = 0
    token_types: str | None = None
    relative_bias: str | None = None
    relative_buckets: int = 0
    layers: str = "encoder.layer"
    embeddings: Mapping[str, str] = field(
        default_factory=lambda: {
            "word_embeddings.weight": "embeddings.word_embeddings.weight",
            "position_embeddings.weight": "embeddings.position_embeddings.weight",
            "embedding_norm.weight": "embeddings.LayerNorm.weight",
            "embedding_norm.bias": "embeddings.LayerNorm.bias",
        }
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            "bert",
            "BERT",
            "BertModel",
            mask_token="[MASK]",
            qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
            layer_parts={
                "attention_out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                **_FEED_FORWARD,
            },
            token_types="embeddings.token_type_embeddings.weight",
        ),
        Architecture(
            "mpnet",
            "MPNet",
            "MPNetModel",
            mask_token="<mask>",
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            layer_parts={
                "attention_out": "attention.attn.o",
                "attention_norm": "attention.LayerNorm",
                **_FEED_FORWARD,
            },
            # Positions count from the id of its [PAD] on.
            first_position=2,
            relative_bias="encoder.relative_attention_bias.weight",
            # `transformers` computes 32 whatever the model's config says.
            relative_buckets=32,
        ),
    )
}


def find_architecture(model_type: str) -> Architecture:
    """Return the architecture of that name. Raises ConfigError, which names the architectures there are."""
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"there is no architecture {model_type!r}; there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]
