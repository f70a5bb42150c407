"""Conversion: a model is read, training brings the base closer to it, and an interrupted training resumes."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.convert import base as base_builder
from hplm_builder.convert import training as convert
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import PackedText
from hplm_builder.convert.original import base_config, load_original
from hplm_builder.convert.training import Converted, ConvertSettings
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModel, BertModel, MPNetModel

from hplm.engine.lower_layers import LOWER_FORMS, load_lower
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.errors import ConfigError, DataError
from hplm.models import base as bases
from hplm.models.layers import packed_attention
from hplm.store.layout import Store
from tests import tiny


def save_model(path: Path, kind: type[BertModel] | type[MPNetModel]) -> Path:
    """Save a model of random weights in Hugging Face form."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    shape |= {"vocab_size": tiny.tokenizer().get_vocab_size(), "max_position_embeddings": 64}
    kind(kind.config_class(initializer_range=0.2, **shape)).save_pretrained(path)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bert"), BertModel)


@pytest.fixture(scope="module", params=[BertModel, MPNetModel])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("any"), request.param)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def text_of(count: int, seed: int) -> PackedText:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 30, count)
    return PackedText(rng.integers(1, 40, int(lengths.sum())), lengths)


def shape_of(folder: Path, form: str = NgramEncoder.form, **change: int) -> convert.BaseConfig:
    values = {"lower_layers": 2, "window": 3, "window_layers": 2, "max_tokens": 40} | change
    return base_config(folder, name="small", lower_form=form, **values)


def test_our_layers_compute_what_transformers_computes(any_folder: Path) -> None:
    config = shape_of(any_folder, max_tokens=60)
    ids = torch.randint(2, 40, (2, 57))
    theirs = AutoModel.from_pretrained(any_folder).eval()(ids, output_hidden_states=True).hidden_states[1:]
    ours = load_original(any_folder, config)(ids.flatten(), [57, 57])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_a_window_of_a_model_with_relative_positions_sees_them(tmp_path: Path) -> None:
    config = replace(tiny.config(form="windows"), relative_buckets=8)
    lower = load_lower(tiny.make_base(Store(tmp_path), config))
    windows = torch.randint(5, 40, (6, 3))
    assert lower.relative is not None
    attend = packed_attention(config.num_heads, [3] * 6, lower.relative)
    with torch.inference_mode():
        hidden = lower.embedding_norm(lower.word_embeddings(windows) + lower.window_position).flatten(0, 1)
        for layer in lower.layers:
            hidden = layer(hidden, attend)
        hidden = hidden.unflatten(0, (6, 3))
        gate = torch.einsum("wnh,nkh->wnk", hidden, lower.gate_weight) + lower.gate_bias
        torch.testing.assert_close(lower(windows), 2 * torch.sigmoid(gate) * hidden, atol=1e-5, rtol=1e-4)


@tiny.BOTH_FORMS
def test_training_brings_the_base_nearer_to_the_original(any_folder: Path, tmp_path: Path, form: str) -> None:
    config, held = shape_of(any_folder, form), text_of(40, 1)
    original = load_original(any_folder, config)
    torch.manual_seed(0)
    model = Converted(config, original)
    before = convert.distance(model, original, held)
    settings = ConvertSettings(total_tokens=60_000, batch_tokens=1000, learning_rate=2e-3)
    convert.train(model, original, text_of(300, 0), settings, tmp_path / "c.pt", Progress(disable=True))
    after = convert.distance(model, original, held)
    assert after["relative"] < 0.7 * before["relative"]


class Counting(Progress):
    steps = 0

    def update(self, *args: object, **kwargs: object) -> None:
        self.steps += 1


@tiny.BOTH_FORMS
def test_an_interrupted_conversion_goes_on_as_if_nothing_had_been(folder: Path, tmp_path: Path, form: str) -> None:
    config = shape_of(folder, form)
    original = load_original(folder, config)
    settings = ConvertSettings(total_tokens=8_000, batch_tokens=1000)

    class Interrupted(Counting):
        def update(self, *args: object, **kwargs: object) -> None:
            super().update()
            if self.steps == 5:
                signal.raise_signal(signal.SIGINT)

    def trained(progress: Progress, checkpoint: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Converted(config, original)
        convert.train(model, original, text_of(100, 0), settings, checkpoint, progress)
        return model.state_dict()

    steps, rest = Counting(disable=True), Counting(disable=True)
    whole = trained(steps, tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        trained(Interrupted(disable=True), tmp_path / "cut.pt")
    resumed = trained(rest, tmp_path / "cut.pt")
    # The five steps in the checkpoint are not repeated.
    assert rest.steps == steps.steps - 5
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_checkpoint_of_other_settings_is_refused(folder: Path, tmp_path: Path) -> None:
    config, original = shape_of(folder), load_original(folder, shape_of(folder))
    model = Converted(config, original)
    Checkpoint(tmp_path / "c.pt", {"settings": "others"}).save({"step": 1})
    with pytest.raises(DataError, match="another model, text or settings"):
        convert.train(
            model,
            original,
            text_of(9, 0),
            ConvertSettings(total_tokens=2000),
            tmp_path / "c.pt",
            Progress(disable=True),
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lower_layers": 4}, "must be 1 to 3"),
        ({"lower_layers": 0}, "must be 1 to 3"),
        ({"max_tokens": 65}, "64 positions"),
    ],
)
def test_a_cut_that_the_model_does_not_allow_is_refused(folder: Path, change: dict[str, int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        shape_of(folder, **change)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no config\.json"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json that cannot be read"):
        shape_of(tmp_path)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"model_type": "gpt2"}, "holds a model of type 'gpt2'"),
        ({"model_type": "bert", "hidden_act": "relu"}, "with the activation .relu.: only .gelu. is taken"),
        ({"model_type": "mpnet", "relative_attention_num_buckets": 64}, "with 64 buckets of relative positions"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(tmp_path: Path, written: dict[str, object], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=words):
        shape_of(tmp_path)


def test_a_tokenizer_with_tokens_that_the_model_does_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<ticket>"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(DataError, match=f"token ids up to {tokenizer.get_vocab_size() - 1}"):
        converted(Store(tmp_path / "store"), other, "small")


def converted(
    store: Store,
    folder: Path,
    name: str,
    *,
    form: str = NgramEncoder.form,
    window_layers: int = 3,
    start: bases.Base | None = None,
    learning_rate: float = 1e-3,
    progress: Progress | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Convert the model in `folder` shortly, publish it as `name`, and return the record."""
    corpus = store.root.parent / "corpus.txt"
    corpus.write_text("\n".join(tiny.sentences(3000)))
    report = base_builder.convert_base(
        store,
        folder,
        name=name,
        origin="test",
        lower_layers=2,
        lower_form=form,
        window=2,
        window_layers=window_layers,
        max_tokens=40,
        shares={str(corpus): 1.0},
        settings=ConvertSettings(total_tokens=4096, batch_tokens=1024, learning_rate=learning_rate),
        device=device,
        progress=progress or Progress(disable=True),
        start=start,
    )
    found: dict[str, Any] = report["conversion"]
    return found


@tiny.BOTH_FORMS
def test_a_conversion_goes_on_from_another_base(folder: Path, store: Store, form: str) -> None:
    first = converted(store, folder, "small", form=form)
    small = bases.load(store.base("small"))
    longer = converted(store, folder, "longer", form=form, start=small)
    assert longer["started_from"] == small.fingerprint
    # Within the precision of float16.
    assert longer["before"]["relative"] == pytest.approx(first["after"]["relative"], rel=0.01)
    assert longer["after"]["relative"] < longer["before"]["relative"]
    (other,) = {*LOWER_FORMS} - {form}
    for changed in ({"form": form, "window_layers": 2}, {"form": other}):
        with pytest.raises(ConfigError, match="base small has another shape"):
            converted(store, folder, "other", start=small, **changed)  # type: ignore[arg-type]


def test_a_base_that_domains_stand_on_is_not_replaced_by_other_weights(folder: Path, store: Store) -> None:
    tiny.make_base(store, tiny.config(name="small"))
    converted(store, folder, "small")
    standing = bases.load(store.base("small"))
    tiny.name_root(store, standing)
    untrained = Counting(disable=True)
    with pytest.raises(ConfigError, match=r"base 'small' has domain 'general', .* give another --name"):
        converted(store, folder, "small", progress=untrained)
    assert untrained.steps == 0
    assert bases.load(store.base("small")).fingerprint == standing.fingerprint
    converted(store, folder, "other")


def test_a_base_is_not_replaced_under_domains_that_came_while_it_was_converted(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_base(store, tiny.config(name="small"))
    standing = bases.load(store.base("small"))
    train = base_builder.train

    def train_meanwhile(*given: Any) -> None:
        train(*given)
        tiny.name_root(store, standing)

    monkeypatch.setattr(base_builder, "train", train_meanwhile)
    with pytest.raises(ConfigError, match="base 'small' has domain 'general'"):
        converted(store, folder, "small")
    assert bases.load(store.base("small")).fingerprint == standing.fingerprint


@pytest.mark.parametrize("name", ["Legal_EN", "a/b", "../x"])
def test_names_that_no_request_could_give_are_refused_at_once(folder: Path, store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="--name: a name is 1 to 64 lower-case"):
        converted(store, folder, name)
    with pytest.raises(ConfigError, match="--plot: a name is 1 to 64 lower-case"):
        build_plot(store, "tiny", name, ["a text"], 30.0, Progress(disable=True))


def test_the_shipped_base_is_put_in_place_again_but_never_in_that_of_another(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(tmp_path / "other")
    converted(store, folder, base_builder.DEFAULT_BASE)
    base_builder.ship(store, base_builder.DEFAULT_BASE, tmp_path / "shipped" / base_builder.DEFAULT_BASE)
    monkeypatch.setattr(base_builder, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(base_builder, "minilm_folder", lambda: folder)
    base_builder.install_shipped(store)
    tiny.name_root(store, bases.load(store.base(base_builder.DEFAULT_BASE)))
    (store.base(base_builder.DEFAULT_BASE) / "lower.safetensors").unlink()
    base_builder.install_shipped(store)
    bases.load(store.base(base_builder.DEFAULT_BASE))
    standing = tiny.make_base(other, tiny.config(name=base_builder.DEFAULT_BASE))
    tiny.name_root(other, standing)
    with pytest.raises(ConfigError, match=f"base '{base_builder.DEFAULT_BASE}' has domain 'general'"):
        base_builder.install_shipped(other)
    assert bases.load(other.base(base_builder.DEFAULT_BASE)).fingerprint == standing.fingerprint


def test_a_conversion_that_could_not_be_saved_is_not_trained_again(folder: Path, store: Store, tmp_path: Path) -> None:
    whole, again = Counting(disable=True), Counting(disable=True)
    store.root.mkdir()
    (store.root / "bases").touch()  # stands for a disk without space
    with pytest.raises(OSError, match="bases"):
        converted(store, folder, "small", progress=whole)
    assert any((store.root / "jobs").iterdir())
    (store.root / "bases").unlink()
    converted(store, folder, "small", progress=again)
    assert again.steps <= whole.steps - 4
    assert bases.load(store.base("small")).config.window == 2
    assert not any((store.root / "jobs").iterdir())


def test_a_conversion_that_diverged_leaves_nothing_to_go_on_from(folder: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match="diverged: choose a lower one"):
        converted(store, folder, "small", learning_rate=1e30)
    converted(store, folder, "small")


def test_a_base_converted_from_a_folder_is_published_with_its_distances(
    folder: Path, store: Store, tmp_path: Path
) -> None:
    conversion = converted(store, folder, "small")
    made = bases.load(store.base("small"))
    assert (made.config.window, made.config.window_layers, made.config.upper_layers) == (2, 3, 2)
    assert conversion["after"]["relative"] > 0
    load_lower(made)
    made.load_upper()
    base_builder.ship(store, "small", tmp_path / "shipped")
    shipped = load_file(tmp_path / "shipped" / "converted.safetensors")
    assert not any("word_embeddings" in name for name in shipped)
