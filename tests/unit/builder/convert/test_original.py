"""What `hplm build base --model` takes, and what it says of everything else before anything long begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hplm_builder.cli import build as cli
from hplm_builder.convert.base import check_model, origin_of
from hplm_builder.convert.original import base_config, load_original
from transformers import BertConfig, BertForSequenceClassification, BertModel
from typer.testing import CliRunner

from hplm.errors import DataError
from tests import tiny

BERT = json.dumps({"model_type": "bert"})
TAKEN = (
    r"--model takes minilm, mpnet, or the folder of a whole BERT, MPNet, RoBERTa, XLM-RoBERTa, DistilBERT or ELECTRA in "
    r"Hugging Face's layout: config\.json"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "given").mkdir()
    return tmp_path / "given"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.safetensors": ""}, r"a PEFT adapter \(LORA\)"),
        (
            {"adapter_config.json": '{"config": {}, "model_name": "x"}'},
            "holds an AdapterHub adapter, not a whole model",
        ),
        ({"adapter_config.json": "{"}, "an adapter whose adapter_config.json cannot be read"),
        ({"adapter_config.json": '{"peft_type": "LORA"}', "config.json": BERT}, "a PEFT adapter"),
        (
            {"config.json": '{"model_type": "deberta-v2"}', "model.safetensors": ""},
            "holds a model of type 'deberta-v2'",
        ),
        ({"config.json": '{"model_type": "nobody-knows"}'}, "holds a model of type 'nobody-knows'"),
        ({"config.json": "{}"}, "has a config.json without model_type"),
        ({"config.json": "[]"}, "config.json that cannot be read: it is no JSON object"),
        ({"model-q4.gguf": ""}, "no config.json, but the GGUF file model-q4.gguf"),
        ({"config.json": BERT, "model-q4.gguf": ""}, "no model.safetensors, but the GGUF file model-q4.gguf"),
        ({"config.json": BERT, "tf_model.h5": ""}, "has no weights that can be read: no model.safetensors"),
        ({"config.json": BERT, "model.safetensors": ""}, "has no tokenizer.json"),
    ],
    ids=[
        "peft",
        "adapterhub",
        "broken-adapter",
        "peft-beside-a-model",
        "deberta",
        "unknown-type",
        "no-type",
        "no-object",
        "gguf",
        "gguf-and-config",
        "no-weights",
        "no-tokenizer",
    ],
)
def test_a_folder_that_cannot_be_converted_is_refused_with_what_it_is_and_what_is_taken(
    folder: Path, files: dict[str, str], words: str
) -> None:
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(DataError, match=f"{words}.*{TAKEN}"):
        check_model(folder)


def test_a_hub_name_is_refused_with_the_command_that_downloads_it() -> None:
    words = r"hub are not downloaded by name: run `hf download some-user/some-model --local-dir DIR`.*"
    with pytest.raises(DataError, match=words + TAKEN):
        check_model(Path("some-user/some-model"))


def test_a_file_and_a_path_that_is_not_there_are_refused(folder: Path) -> None:
    (folder / "model.gguf").touch()
    for given, words in ((folder / "model.gguf", "is a GGUF file"), (folder / "missing", "is no folder")):
        with pytest.raises(DataError, match=f"{words}.*{TAKEN}"):
            check_model(given)


def save(folder: Path, kind: type[BertModel] | type[BertForSequenceClassification]) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vocabulary = tiny.tokenizer().get_vocab_size()
    model = kind(BertConfig(initializer_range=0.2, vocab_size=vocabulary, max_position_embeddings=64, **shape))
    model.save_pretrained(folder)
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    return model


def first_key(folder: Path) -> torch.Tensor:
    """Rows of the first layer's query weights as a conversion reads them."""
    config = base_config(
        folder, name="x", lower_layers=1, lower_form="windows", window=3, window_layers=1, max_tokens=40
    )
    return load_original(folder, config).state_dict()["layers.0.qkv.weight"][:32]


def test_a_fine_tuned_checkpoint_gives_its_encoder_and_its_head_is_named(folder: Path) -> None:
    model = save(folder, BertForSequenceClassification)
    assert check_model(folder) == "BertForSequenceClassification"
    wanted = model.state_dict()["bert.encoder.layer.0.attention.self.query.weight"]
    assert torch.equal(first_key(folder), wanted)


def test_weights_in_pytorchs_own_format_are_taken(folder: Path) -> None:
    model = save(folder, BertModel)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert check_model(folder) is None
    assert torch.equal(first_key(folder), model.state_dict()["encoder.layer.0.attention.self.query.weight"])


def test_the_command_says_that_a_head_is_left_out(folder: Path, tmp_path: Path) -> None:
    save(folder, BertForSequenceClassification)
    options = ["--model", str(folder), "--name", "mine", "--lower", "5", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(cli.app, ["base", *options])
    assert "is a BertForSequenceClassification: its encoder is converted, its head is left out" in done.stdout
    # The cut is refused, so that nothing is trained.
    assert isinstance(done.exception, DataError)


def test_the_command_refuses_an_adapter_before_it_asks_for_a_name(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    done = CliRunner().invoke(cli.app, ["base", "--model", str(folder)])
    assert isinstance(done.exception, DataError)
    assert "Adapters that were trained elsewhere cannot be imported yet" in str(done.exception)


def test_a_folder_with_the_name_of_a_known_model_counts_if_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mpnet").mkdir()
    assert origin_of(Path("mpnet")) != "mpnet"
    (tmp_path / "mpnet" / "config.json").write_text("{}")
    assert origin_of(Path("mpnet")) == "mpnet"
