"""Each architecture computes in our layers what it computes in transformers, for single texts and for pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hplm_builder.convert.original import base_config, load_original
from safetensors.torch import load_file, save_file
from transformers import (
    BertModel,
    DistilBertModel,
    ElectraModel,
    MPNetModel,
    PreTrainedModel,
    RobertaModel,
    XLMRobertaModel,
)

from hplm.core.settings import BaseConfig
from hplm.core.text import TextEncoder, TextOrPair
from hplm.errors import DataError
from hplm.models.architectures import ARCHITECTURES
from tests.unit.tokenizer_kinds import KINDS

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
POSITIONS = 66
# Each model with the kind of its tokenizer and in what it differs from SHAPE.
MODELS: dict[str, tuple[type[PreTrainedModel], str, dict[str, Any]]] = {
    "bert": (BertModel, "bert", {}),
    "mpnet": (MPNetModel, "bert", {}),
    "roberta": (RobertaModel, "roberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": (XLMRobertaModel, "xlm-roberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": (DistilBertModel, "bert", {"hidden_dim": 48}),
    "electra": (ElectraModel, "bert", {"embedding_size": 32}),
}
TEXTS: list[TextOrPair] = [
    "the red cat",
    ("the cat runs over the river", "a dog"),
    "12 rivers, " * 40,
    ("cat " * 100, "dog " * 100),
]


def save(folder: Path, name: str, **change: Any) -> PreTrainedModel:
    """Save a model of random weights, all of them other than 0 and 1, with its tokenizer."""
    kind, tokenizer, options = MODELS[name]
    made = KINDS[tokenizer]()
    made.save(str(folder / "tokenizer.json"))
    # The tokenizer's file says all: the classes of each architecture would add special tokens of their own.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    shape = {**SHAPE, "vocab_size": made.get_vocab_size(), "max_position_embeddings": POSITIONS}
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**shape, **options, **change})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model


def shape_of(folder: Path, max_tokens: int | None = None) -> BaseConfig:
    return base_config(
        folder, name="x", lower_layers=1, lower_form="windows", window=3, window_layers=1, max_tokens=max_tokens
    )


def test_every_architecture_is_tested_here() -> None:
    assert MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_texts_and_pairs_get_the_hidden_states_of_transformers(tmp_path: Path, name: str) -> None:
    model = save(tmp_path, name)
    config = shape_of(tmp_path)
    encoded = TextEncoder(tmp_path / "tokenizer.json", config.max_tokens).encode(TEXTS)
    lengths = [len(text.ids) for text in encoded]
    assert max(lengths) == config.max_tokens  # every position is used
    ids, types = (torch.cat([torch.from_numpy(getattr(text, part)) for text in encoded]) for part in ("ids", "types"))
    with torch.no_grad():
        ours = load_original(tmp_path, config)(ids, lengths, types)
        for place, text in enumerate(encoded):
            given = {"input_ids": torch.from_numpy(text.ids)[None]}
            if getattr(model.config, "type_vocab_size", 0) > 1:
                given["token_type_ids"] = torch.from_numpy(text.types)[None]
            theirs = model(**given, output_hidden_states=True).hidden_states[1:]
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a.split(lengths)[place], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path, name: str) -> None:
    save(tmp_path, name)
    config = shape_of(tmp_path)
    (pair,) = TextEncoder(tmp_path / "tokenizer.json", config.max_tokens).encode([("the cat", "a dog")])
    assert pair.types.tolist() == [0, 0, 0, 0, 1, 1, 1]
    model, ids = load_original(tmp_path, config), torch.from_numpy(pair.ids)
    typed, untyped = model(ids, [7], torch.from_numpy(pair.types))[-1], model(ids, [7])[-1]
    assert not torch.allclose(typed, untyped, atol=1e-2)


@pytest.mark.parametrize("name", ["mpnet", "roberta", "xlm-roberta", "distilbert"])
def test_a_model_without_token_types_adds_the_same_to_both_texts(tmp_path: Path, name: str) -> None:
    save(tmp_path, name)
    types = load_original(tmp_path, shape_of(tmp_path)).token_types
    assert torch.equal(types[0], types[1])


@pytest.mark.parametrize(("name", "positions"), [("bert", 66), ("roberta", 64), ("mpnet", 64), ("distilbert", 66)])
def test_a_base_reads_as_many_tokens_as_the_model_has_positions(tmp_path: Path, name: str, positions: int) -> None:
    save(tmp_path, name)
    assert shape_of(tmp_path).max_tokens == positions
    with pytest.raises(DataError, match=f"has {positions} positions, --max-tokens asks for {positions + 1}"):
        shape_of(tmp_path, positions + 1)


def test_positions_of_roberta_begin_behind_its_padding_token(tmp_path: Path) -> None:
    model = save(tmp_path, "roberta", pad_token_id=3)
    config = shape_of(tmp_path)
    assert config.max_tokens == POSITIONS - 4
    ids = torch.randint(4, 60, (20,))
    theirs = model(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(load_original(tmp_path, config)(ids, [20])[-1], theirs, atol=1e-4, rtol=1e-4)


def test_the_number_in_layer_norms_is_the_models(tmp_path: Path) -> None:
    save(tmp_path, "roberta", layer_norm_eps=0.01)
    assert shape_of(tmp_path).layer_norm_eps == 0.01
    save(tmp_path, "distilbert")
    assert shape_of(tmp_path).layer_norm_eps == 1e-12


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("roberta", {"hidden_act": "gelu_new"}, "with the activation 'gelu_new': only 'gelu' is taken"),
        ("distilbert", {"activation": "relu"}, "of type 'distilbert' with the activation 'relu': only 'gelu'"),
        ("electra", {"embedding_size": 16}, "whose embeddings have 16 numbers and whose layers have 32"),
        ("bert", {"is_decoder": True}, "that is a decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "with position_embedding_type 'relative_key'"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "with 16 buckets of relative positions: .* MPNet with 32"),
        ("bert", {"pad_token_id": None}, "without pad_token_id"),
    ],
)
def test_a_model_that_our_layers_would_compute_otherwise_is_refused_with_the_reason(
    tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    save(tmp_path, name)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), **change}))
    with pytest.raises(DataError, match=words):
        shape_of(tmp_path)


def test_weights_that_are_missing_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    save(tmp_path, "electra")
    config, path = shape_of(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, path, {"format": "pt"})
    words = r"lack 1 parts of the model, such as encoder\.layer\.1\.output\.dense\.weight"
    with pytest.raises(DataError, match=words):
        load_original(tmp_path, config)
