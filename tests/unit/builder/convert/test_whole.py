"""Whole bases: a model as it is, whose answers with adapters at their identity are those of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.cli import build as cli
from hplm_builder.convert.whole import AdaptedLayers, make_whole_base
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.export import register
from hplm_builder.jobs.local_builds import build_domain
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.trained_layers import trained_layers
from rich.progress import Progress
from transformers import AutoModel, BertModel
from typer.testing import CliRunner

from hplm.adapters.packed import PackedAdapter, packed_width
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.settings import BaseConfig
from hplm.core.text import TextOrPair
from hplm.engine import reference
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.open_domain import open_features, open_lineage
from hplm.engine.token_domain import TokenDomain
from hplm.errors import ConfigError, CorruptArtifactError, DataError
from hplm.housekeeping import garbage_collection
from hplm.models.base import LOWER, Base
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.unit.builder.convert.test_architectures import MODELS, save
from tests.unit.builder.convert.test_convert import save_model

TEXTS: list[TextOrPair] = [*tiny.sentences(12, seed=3), *zip(tiny.sentences(6, 4), tiny.sentences(6, 5), strict=True)]
# Weights are rounded to float16 in the base and in the model that it is compared with, so only the order of sums differs.
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(scope="module", params=sorted(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save(made, request.param, num_hidden_layers=4)
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bert"), BertModel)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def whole(store: Store, folder: Path, name: str = "whole", adapters: AdaptedLayers = "upper") -> Base:
    return make_whole_base(store, folder, name=name, origin="a test", adapters=adapters, max_tokens=48)


def states_of_transformers(folder: Path, base: Base, texts: Sequence[TextOrPair]) -> list[torch.Tensor]:
    """Compute the last hidden states `[T, H]` with `transformers`, from weights that are rounded as the base's are."""
    model = AutoModel.from_pretrained(folder).half().float().eval()
    states = []
    for text in base.load_text_encoder().encode(texts):
        types = {"token_type_ids": [text.types]} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
        inputs = {"input_ids": [text.ids], "attention_mask": [np.ones_like(text.ids)], **types}
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(np.stack(value)) for name, value in inputs.items()}
            states.append(model(**tensors).last_hidden_state[0])
    return states


def identity_tenant(base: Base, pooling: str = "mean") -> Tenant:
    """A tenant whose adapter changes nothing, and whose head gives the pooled hidden state itself."""
    config = base.config
    weights = np.zeros((config.adapted_layers, packed_width(config.hidden_size, 8)), np.float32)
    head = Head(np.eye(config.hidden_size, dtype=np.float32), np.zeros(config.hidden_size, np.float32))
    labels = tuple(f"state-{i}" for i in range(config.hidden_size))
    card = TenantCard(f"same-{pooling}", "classification", labels, base.fingerprint, pooling, adapter_at="input")
    return Tenant(card, PackedAdapter(weights, config.hidden_size, 8), head)


def engine_of(base: Base) -> EncodeEngine:
    return EncodeEngine(
        base.config, base.load_upper(), num_slots=4, reduced_size=8, device=torch.device("cpu"), dtype=torch.float32
    )


@pytest.mark.parametrize("adapters", ["upper", "all"])
def test_a_packed_batch_of_texts_and_pairs_has_the_states_of_transformers(
    folder: Path, store: Store, adapters: AdaptedLayers
) -> None:
    base = whole(store, folder, adapters=adapters)
    assert base.config.adapted_layers == {"upper": 2, "all": 4}[adapters]
    features = open_features(store, base, []).features(base.load_text_encoder().encode(TEXTS))
    tenants = [identity_tenant(base, pooling) for pooling in ("mean", "cls")]
    requests = [EngineRequest(tenants[i % 2], each) for i, each in enumerate(features)]
    with closing(engine_of(base)) as engine:
        answers = engine.run(requests)
    for i, (answer, wanted) in enumerate(zip(answers, states_of_transformers(folder, base, TEXTS), strict=True)):
        pooled = wanted[:1] if i % 2 else wanted.mean(0, keepdim=True)
        np.testing.assert_allclose(answer, pooled.numpy(), **TOLERANCE)


def test_the_second_text_of_a_pair_has_its_own_token_type(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    single, pair = open_features(store, base, []).features(
        base.load_text_encoder().encode(["the cat", ("the cat", "a dog")])
    )
    assert single[:, 1].tolist() == [0] * 4
    assert pair[:, 1].tolist() == [0] * 4 + [1] * 3


def test_a_pair_that_is_cut_keeps_the_types_of_its_texts(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    long = " ".join(["cat"] * 2000)
    for pair in ((long, "a dog"), ("a dog", long), (long, long)):
        (text,) = base.load_text_encoder().encode([pair])
        assert text.types is not None
        second = int(np.argmax(text.types))
        assert text.truncated
        assert len(text.types) == len(text.ids) == 48
        # The first text ends with a separator, behind which the second begins.
        assert base.load_text_encoder()._tokenizer.id_to_token(int(text.ids[second - 1])) == "[SEP]"
        assert (np.diff(text.types) >= 0).all()


def test_only_the_layers_that_have_an_adapter_are_changed(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    upper = base.load_upper()
    made = tiny.tenant_of(base, "alpha", 1)
    features = torch.from_numpy(
        open_features(store, base, []).features(base.load_text_encoder().encode(["the red cat"]))[0]
    )
    seen: list[int] = []

    def adapt(place: str, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        first = base.config.upper_layers - base.config.adapted_layers
        if place != made.card.adapter_at or layer < first:
            return tokens
        seen.append(layer)
        return reference.adapt(made, layer - first, tokens)

    wanted = upper(features, [len(features)], adapt)
    assert seen == [2, 3]
    torch.testing.assert_close(reference.upper(upper, features, made), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("adapters", ["upper", "all"])
def test_a_tenant_is_trained_in_layers_that_give_what_is_served(
    bert: Path, store: Store, adapters: AdaptedLayers
) -> None:
    base = whole(store, bert, adapters=adapters)
    texts = base.load_text_encoder().encode(TEXTS)
    upper, featurise, token_bytes = trained_layers(base, TokenDomain(base.config))
    lengths = [len(text.ids) for text in texts]
    features = featurise(texts)
    assert sum(part.nbytes for part in features) == token_bytes * sum(lengths)
    assert len(upper.layers) == base.config.adapted_layers
    states = upper(torch.cat(features), lengths)
    ids = torch.from_numpy(np.concatenate(TokenDomain(base.config).features(texts)))
    # The states between the layers are rounded to float16, and computed in the fastest format of the machine.
    torch.testing.assert_close(states, base.load_upper()(ids, lengths), atol=0.06, rtol=0.06)


def test_word_embeddings_are_mapped_from_the_disk(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    words = base.load_upper().get_buffer("words")
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(*(int(end, 16) for end in line[0].split("-")), line[-1]) for line in lines]
    (file,) = [path for first, last, path in ranges if first <= words.data_ptr() < last]
    assert file == str(base.folder / LOWER)


def test_embeddings_of_another_shape_are_refused(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    other = Base(base.folder, replace(base.config, vocab_size=7), base.fingerprint)
    with pytest.raises(CorruptArtifactError, match="word embeddings of another shape"):
        other.load_upper()


def test_its_root_is_registered_and_adopted_without_tables(bert: Path, store: Store) -> None:
    base = whole(store, bert)
    with closing(Registry.open_read_only(store)) as registry:
        root = registry.current_domain("whole", register.ROOT_OF_WHOLE)
        assert (root.path, root.parent_id) == ("bases/whole", None)
    tiny.publish(store, base, register.ROOT_OF_WHOLE, tiny.tenant_of(base, "alpha", 1))
    (store.root / "registry.sqlite").unlink()
    with closing(Registry.open(store, create=True)) as registry:
        plan = garbage_collection.adopt(store, registry, 1.0)
        assert [domain.path for domain in plan.domains] == ["bases/whole"]
        assert registry.tenant("alpha").domain == register.ROOT_OF_WHOLE
        assert not garbage_collection.verify(store, registry, 1.0).problems


def test_the_same_model_may_be_built_again_and_another_may_not(bert: Path, store: Store, tmp_path: Path) -> None:
    first = whole(store, bert)
    assert whole(store, bert).fingerprint == first.fingerprint
    with pytest.raises(ConfigError, match="give another --name"):
        whole(store, bert, adapters="all")
    assert whole(store, bert, name="all", adapters="all").fingerprint != first.fingerprint


def test_what_needs_lower_layers_is_refused_with_one_error(bert: Path, store: Store, tmp_path: Path) -> None:
    base = whole(store, bert)
    corpus = tmp_path / "law.txt"
    corpus.write_text("the cat sleeps\n" * 100)
    progress = Progress(disable=True)
    words = r"base 'whole' is whole: all its layers are computed, so it has no lower layers"
    with pytest.raises(ConfigError, match=words):
        build_plot(store, "whole", "law", ["the cat"], 50.0, progress)
    with pytest.raises(ConfigError, match=words):
        open_lineage(store, base, ["bases/whole"])
    with pytest.raises(ConfigError, match=words):
        build_domain(store, "whole", None, "law", corpus, DomainSettings(min_corpus_tokens=1), progress)


def test_a_tokenizer_of_another_model_is_refused(bert: Path, store: Store, tmp_path: Path) -> None:
    copy = save_model(tmp_path / "small", BertModel)
    shape = copy / "config.json"
    shape.write_text(
        shape.read_text().replace(f'"vocab_size": {tiny.tokenizer().get_vocab_size()}', '"vocab_size": 12')
    )
    with pytest.raises(DataError, match="the model has embeddings below 12 only"):
        whole(store, copy)


def test_the_command_builds_a_base_in_one_step_and_refuses_options_of_training(bert: Path, tmp_path: Path) -> None:
    model = tmp_path / "my-bert"
    model.symlink_to(bert)
    common = ["base", "--whole", "--model", str(model), "--store", str(tmp_path / "store"), "--max-tokens", "48"]
    run = CliRunner().invoke(cli.app, common)
    assert run.exit_code == 0, run.output
    assert "base my-bert-whole: 4 layers, the last 2 with adapters" in " ".join(run.output.split())
    for option, words in (("--lower=2", "leave out --whole or --lower"), ("--text=x", "leave out --whole or --text")):
        assert words in str(CliRunner().invoke(cli.app, [*common, option]).exception)
    other = CliRunner().invoke(cli.app, ["base", "--adapters", "all", "--store", str(tmp_path / "store")])
    assert "--adapters is for --whole" in str(other.exception)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 3}, "window of a whole base must be 1, got 3"),
        ({"window_layers": 2}, "window_layers of a whole base must be 0"),
        ({"adapter_layers": 9}, "adapter_layers must be at most upper_layers, 4, got 9"),
        ({"lower_form": "windows", "window": 3, "window_layers": 2}, "token_types must be 0 unless the base is whole"),
    ],
)
def test_a_shape_that_no_base_has_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BaseConfig(**{**vars(tiny.config(form="whole")), **change})
