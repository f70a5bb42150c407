"""Architectures of pretrained models as data: how Hugging Face names their weights, and in what they differ.

All of them are encoders of post-LayerNorm layers as in `hplm.models.layers`. Another encoder of that kind is another row of
ARCHITECTURES. A model whose layers compute otherwise also needs a module beside `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hplm.errors import ConfigError

_FEED_FORWARD = {"ffn_in": "intermediate.dense", "ffn_out": "output.dense", "ffn_norm": "output.LayerNorm"}
# Names of weights that BERT, RoBERTa and ELECTRA share.
_BERT_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_BERT_PARTS = {
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    **_FEED_FORWARD,
}
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"


@dataclass(frozen=True)
class Architecture:
    """A kind of pretrained model. Keys of weights are those of its state in Hugging Face's `transformers`.

    `model_type`: its name there. `encoder`: class of the model without a head. `mask_token`: what its tokenizer family writes
    for a masked token.
    `first_position`: row of the position embeddings at which a text starts. With `counts_from_pad` a text starts at the row
    behind the id of the padding token.
    `token_types`: key of the embeddings of token types; None for a model without them.
    `relative_bias`: key of the scores of `relative_buckets` distances, which every layer adds to its attention; None for a
    model without them.
    `qkv`: in each layer, the keys of queries, keys and values. `layer_parts`: our name of each other part -> its key.
    `layers`: key of the layers. `embeddings`: our name of each weight -> its key.
    `has_pooler`: whether its class can leave the pooler out.
    `intermediate_size`, `activation`: keys of its config.json. `layer_norm_eps`: the number that all models of the kind compute
    with; None if config.json has it.
    """

    model_type: str
    title: str
    encoder: str
    mask_token: str
    qkv: tuple[str, str, str]
    layer_parts: Mapping[str, str]
    first_position: int = 0
    counts_from_pad: bool = False
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
    has_pooler: bool = True
    intermediate_size: str = "intermediate_size"
    activation: str = "hidden_act"
    layer_norm_eps: float | None = None

    def first_row(self, pad_id: int) -> int:
        """Return the row of the position embeddings at which a text starts in a model with that padding token."""
        return pad_id + 1 if self.counts_from_pad else self.first_position


def _roberta(model_type: str, title: str, encoder: str) -> Architecture:
    return Architecture(
        model_type,
        title,
        encoder,
        mask_token="<mask>",
        qkv=_BERT_QKV,
        layer_parts=_BERT_PARTS,
        counts_from_pad=True,
        token_types=_TOKEN_TYPES,
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            "bert",
            "BERT",
            "BertModel",
            mask_token="[MASK]",
            qkv=_BERT_QKV,
            layer_parts=_BERT_PARTS,
            token_types=_TOKEN_TYPES,
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
            # `transformers` computes with the padding token 1 whatever the model's config says.
            first_position=2,
            relative_bias="encoder.relative_attention_bias.weight",
            # `transformers` computes 32 whatever the model's config says.
            relative_buckets=32,
        ),
        _roberta("roberta", "RoBERTa", "RobertaModel"),
        _roberta("xlm-roberta", "XLM-RoBERTa", "XLMRobertaModel"),
        Architecture(
            "distilbert",
            "DistilBERT",
            "DistilBertModel",
            mask_token="[MASK]",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            layer_parts={
                "attention_out": "attention.out_lin",
                "attention_norm": "sa_layer_norm",
                "ffn_in": "ffn.lin1",
                "ffn_out": "ffn.lin2",
                "ffn_norm": "output_layer_norm",
            },
            layers="transformer.layer",
            has_pooler=False,
            intermediate_size="hidden_dim",
            activation="activation",
            layer_norm_eps=1e-12,
        ),
        Architecture(
            "electra",
            "ELECTRA",
            "ElectraModel",
            mask_token="[MASK]",
            qkv=_BERT_QKV,
            layer_parts=_BERT_PARTS,
            token_types=_TOKEN_TYPES,
            has_pooler=False,
        ),
    )
}


def find_architecture(model_type: str) -> Architecture:
    """Return the architecture of that name. Raises ConfigError, which names the architectures there are."""
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"there is no architecture {model_type!r}; there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]
