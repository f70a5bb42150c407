"""The models that `hplm build base --model` takes, and the refusals of all others before anything long begins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hplm_builder.cli import build as cli
from hplm_builder.convert.base import check_model, origin_of
from hplm_builder.convert.original import base_config, load_original
from safetensors.torch import load
from safetensors.torch import save as serialise
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel
from typer.testing import CliRunner

from hplm.errors import DataError, HplmError
from hplm.models import base as bases
from hplm.store.layout import Store
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
        (
            {"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.safetensors": "x"},
            r"a PEFT adapter \(LORA\)",
        ),
        (
            {"adapter_config.json": '{"config": {}, "model_name": "x"}'},
            "holds an AdapterHub adapter, not a whole model",
        ),
        ({"adapter_config.json": "{"}, "an adapter whose adapter_config.json cannot be read"),
        ({"adapter_config.json": '{"peft_type": "LORA"}', "config.json": BERT}, "a PEFT adapter"),
        (
            {"config.json": '{"model_type": "deberta-v2"}', "model.safetensors": "x"},
            "holds a model of type 'deberta-v2'",
        ),
        ({"config.json": '{"model_type": "nobody-knows"}'}, "holds a model of type 'nobody-knows'"),
        ({"config.json": "{}"}, "has a config.json without model_type"),
        ({"config.json": "[]"}, "config.json that cannot be read: it is no JSON object"),
        ({"config.json": '{"model_type": ["bert"]}'}, r"holds a model of type \['bert'\]"),
        ({"model-q4.gguf": ""}, "no config.json, but the GGUF file model-q4.gguf"),
        ({"config.json": BERT, "model-q4.gguf": ""}, "no model.safetensors, but the GGUF file model-q4.gguf"),
        ({"config.json": BERT, "tf_model.h5": "x"}, "has no weights that can be read: no model.safetensors"),
        ({"config.json": BERT, "model.safetensors": "x"}, "has no tokenizer.json"),
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
        "list-of-types",
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


def run_base(folder: Path, store: Path) -> str | None:
    """Run `hplm build base --whole` on a folder; return the error on the wire, None if the base was made."""
    options = ["--whole", "--model", str(folder), "--name", "mine", "--store", str(store), "--max-tokens", "0"]
    done = CliRunner().invoke(cli.app, ["base", *options])
    if done.exception is None:
        return None
    assert isinstance(done.exception, HplmError), repr(done.exception)
    words = done.exception.wire()
    assert "\n" not in words
    return words


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "pytorch_model.bin")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a folder with a fast tokenizer of BERT's class, by name, with weights in both formats."""
    folder = tmp_path_factory.mktemp("whole")
    model = save(folder, BertModel)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return {name: (folder / name).read_bytes() for name in FILES}


def put(folder: Path, files: Mapping[str, bytes], name: str, content: bytes) -> None:
    """Write the files that a folder has, with other content of one; weights in one format only."""
    other = "pytorch_model.bin" if name != "pytorch_model.bin" else "model.safetensors"
    for each, data in files.items():
        if each != other:
            (folder / each).write_bytes(content if each == name else data)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_empty_or_of_other_content_is_refused_by_its_name_and_never_with_a_traceback(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    size = len(whole[name])
    contents = [whole[name][:length] for length in (1, 7, 8, min(64, size // 3), size // 2, size - 2)]
    others = [
        bytes(size),
        b"[]",
        b"null",
        b"3",
        b'{"model_type": "bert", "hidden_size": "x", "tokenizer_class": 3}',
        b"\xff\xfe{}",
        b"[" * 9999,
    ]
    # With the right length in its header, and no JSON behind.
    others.append((8).to_bytes(8, "little") + b"nonsense")
    for content in [*contents, *others]:
        put(folder, whole, name, content)
        error = run_base(folder, tmp_path / "store")
        assert error is not None, (name, content[:40])
        assert error.startswith("BAD_DATA: "), error
        assert str(folder) in error
    for content, words in (
        (b"", f"has an empty {name}"),
        (LFS, f"has a Git-LFS pointer in place of {name}: run `git lfs pull`"),
    ):
        put(folder, whole, name, content)
        assert words in str(run_base(folder, tmp_path / "store"))
    assert not (tmp_path / "store" / "bases").exists()
    put(folder, whole, name, whole[name])
    assert run_base(folder, tmp_path / "store") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 31}, "31"),
        ({"hidden_size": -32}, ""),
        ({"num_attention_heads": 5}, ""),
        ({"num_hidden_layers": 3}, "lack 16 parts of the model"),
        ({"num_hidden_layers": 10**9}, "1 to 1000 are taken"),
        ({"vocab_size": 7}, ""),
        ({"max_position_embeddings": 4096}, ""),
        ({"intermediate_size": None}, ""),
        ({"layer_norm_eps": "a lot"}, ""),
        ({"pad_token_id": -5}, "no token of its vocabulary"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantization_config"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_the_weights_contradict_is_refused(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], change: dict[str, object], words: str
) -> None:
    config = json.dumps({**json.loads(whole["config.json"]), **change}).encode()
    put(folder, whole, "config.json", config)
    error = run_base(folder, tmp_path / "store")
    assert error is not None
    assert words in error


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "encoder.layer.1.output.dense.bias",
            lambda t: t.index_fill(0, torch.tensor([3]), math.nan),
            "NaN or infinite",
        ),
        ("embeddings.word_embeddings.weight", lambda t: t / 0, "NaN or infinite"),
        ("encoder.layer.0.output.dense.weight", lambda t: t.to(torch.int8), "weights of type I8"),
        ("encoder.layer.0.output.dense.weight", lambda t: t.to(torch.float8_e4m3fn), "weights of type F8_E4M3"),
        ("encoder.layer.0.output.dense.weight", lambda t: t[:-1].contiguous(), "encoder.layer.0.output.dense.weight"),
        ("encoder.layer.0.output.dense.weight", lambda t: t.reshape(-1), "encoder.layer.0.output.dense.weight"),
    ],
    ids=["nan", "infinite", "int8", "float8", "fewer-rows", "flat"],
)
def test_weights_that_are_not_numbers_or_of_another_type_or_shape_are_refused_by_their_tensor(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], name: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    state = load(whole["model.safetensors"])
    put(folder, whole, "model.safetensors", serialise({**state, name: change(state[name])}))
    error = run_base(folder, tmp_path / "store")
    assert error is not None
    assert words in error
    assert name in error


def test_a_checkpoint_that_runs_code_when_it_is_unpickled_is_refused(
    folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (tmp_path / "was-run",)

    put(folder, whole, "pytorch_model.bin", b"x")
    torch.save({"encoder.layer.0.output.dense.weight": Evil()}, folder / "pytorch_model.bin")
    error = run_base(folder, tmp_path / "store")
    assert error is not None
    assert "pytorch_model.bin cannot be read" in error
    assert not (tmp_path / "was-run").exists()


TEXTS = [
    "The CAT sat on 12 Rivers!",
    "it's $10 (or more)",
    "d\u00c9j\u00e0 vu, na\u00efve",
    "\u4e2d\u6587 dog \U0001f600",
]


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": False},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "tokenize_chinese_chars": False},
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
        None,
    ],
    ids=["cased", "accents", "chinese", "tokenizer-json-alone", "no-config"],
)
def test_a_base_reads_text_as_transformers_reads_it_with_all_files_of_the_folder(
    folder: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object] | None,
) -> None:
    put(folder, whole, "tokenizer_config.json", json.dumps(config).encode())
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    assert run_base(folder, tmp_path / "store") is None
    said = [each for each in caplog.records if each.name == "hplm_builder.convert.original"]
    base = bases.load(Store(tmp_path / "store").base("mine"))
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = [theirs(text)["input_ids"] for text in TEXTS]
    differs = [tiny.tokenizer().encode(text).ids for text in TEXTS] != wanted
    made = Tokenizer.from_file(str(base.tokenizer_path))
    assert [made.encode(text).ids for text in TEXTS] == wanted
    # Characters that no piece has are set apart by hplm alone, see `hplm.core.text`; these texts have none.
    assert [encoded.ids.tolist() for encoded in base.load_text_encoder().encode(TEXTS[:2])] == wanted[:2]
    assert bool(said) == differs
    # A folder whose files agree keeps its file, and so do fingerprints.
    assert (base.tokenizer_path.read_bytes() == whole["tokenizer.json"]) == (not differs)


def test_a_tokenizer_without_a_fast_form_is_refused(folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    put(folder, whole, "tokenizer_config.json", b'{"tokenizer_class": "CanineTokenizer"}')
    error = run_base(folder, tmp_path / "store")
    assert error is not None
    assert error.startswith("BAD_DATA: ")


def test_code_in_a_folder_is_never_run(folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    put(folder, whole, "config.json", json.dumps({**json.loads(whole["config.json"]), "auto_map": auto}).encode())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    run_base(folder, tmp_path / "store")
    assert not (tmp_path / "was-run").exists()


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
