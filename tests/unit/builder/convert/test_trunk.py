"""Trunks: one or two layers distilled from a base, over the same frozen embeddings, published as an ordinary base."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hplm_builder.cli import build as cli
from hplm_builder.convert.trunk import Trunk, TrunkSettings, distil_trunk, starting_layers
from rich.progress import Progress
from safetensors.torch import load_file
from typer.testing import CliRunner

from hplm.core.settings import WHOLE
from hplm.engine import reference
from hplm.engine.encode import EngineRequest
from hplm.engine.lower_layers import load_lower
from hplm.engine.token_domain import Features, TokenDomain
from hplm.errors import ConfigError, CorruptArtifactError, DataError
from hplm.models import base as bases
from hplm.models import base_folder
from hplm.models.base import LOWER, Base
from hplm.models.lower import merged_texts
from hplm.store import artifact
from hplm.store.layout import Store
from tests import tiny

SETTINGS = TrunkSettings(total_tokens=30_000, batch_tokens=1000, learning_rate=2e-3)
SHORT = TrunkSettings(total_tokens=8_000, batch_tokens=1000)
ROOT = Path(__file__).parents[4]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(tiny.sentences(3000)))
    return path


def make_parent(store: Store, kind: str) -> Base:
    return tiny.make_base(store, tiny.config(name="parent", form=kind, upper_layers=3 if kind != WHOLE else 2))


def make_trunk(
    store: Store,
    parent: Base,
    corpus: Path,
    *,
    name: str = "trunk",
    layers: int = 2,
    settings: TrunkSettings = SETTINGS,
    progress: Progress | None = None,
) -> Base:
    return distil_trunk(
        store,
        parent,
        name=name,
        layers=layers,
        shares={str(corpus): 1.0},
        settings=settings,
        device="cpu",
        progress=progress or Progress(disable=True),
    )


class Trained(NamedTuple):
    """A trunk of two layers, and the base that it was distilled from."""

    parent: Base
    trunk: Base


@pytest.fixture(scope="module", params=tiny.KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trained:
    store = Store(tmp_path_factory.mktemp("store"))
    parent = make_parent(store, request.param)
    return Trained(parent, make_trunk(store, parent, corpus))


class Counting(Progress):
    steps = 0

    def update(self, *args: object, **kwargs: object) -> None:
        self.steps += 1


class Interrupted(Counting):
    def update(self, *args: object, **kwargs: object) -> None:
        super().update()
        if self.steps == 5:
            signal.raise_signal(signal.SIGINT)


def test_a_trunk_is_a_base_with_the_embeddings_and_lower_encoder_of_its_parent(trained: Trained) -> None:
    parent, made = trained
    assert (made.config.upper_layers, made.config.adapted_layers, made.kind) == (2, 2, parent.kind)
    assert (made.is_trunk, made.trunk_of, parent.is_trunk) == (True, "parent", False)
    for file in (LOWER, "tokenizer.json"):
        assert (made.folder / file).read_bytes() == (parent.folder / file).read_bytes()
    ours, theirs = (load_file(each.folder / "upper.safetensors") for each in (made, parent))
    changed = {name.split(".")[0] for name, value in ours.items() if not torch.equal(value, theirs[name])}
    assert changed == {"layers"}


def test_training_brings_a_trunk_nearer_to_its_parent_and_the_manifest_says_how_near(trained: Trained) -> None:
    parent, made = trained
    meta = artifact.read(made.folder, base_folder.KIND).meta
    before, after = (meta["distillation"][key] for key in ("before", "after"))
    for measure in ("mse", "relative", "relative_pooled"):
        assert after[measure] < 0.8 * before[measure]
    assert meta["trunk"] == {
        "of": "parent",
        "fingerprint": parent.fingerprint,
        "layers": 2,
        "error": after["relative"],
    }


def test_a_trunk_starts_from_the_last_layers_and_over_a_whole_base_from_the_first_and_last() -> None:
    hierarchical, whole = tiny.config(upper_layers=6), tiny.config(form=WHOLE, upper_layers=4)
    assert [starting_layers(hierarchical, layers) for layers in (1, 2)] == [[5], [4, 5]]
    assert [starting_layers(whole, layers) for layers in (1, 2)] == [[5], [0, 5]]


def test_a_trunk_and_its_parent_read_one_input(trained: Trained) -> None:
    parent = trained.parent
    copy = Trunk(parent, parent.config, [*range(parent.config.upper_layers)])
    encoded = parent.load_text_encoder().encode(tiny.sentences(5))
    ids, lengths = np.concatenate([text.ids for text in encoded]), [len(text.ids) for text in encoded]
    states, wanted = copy.states(ids, lengths)
    torch.testing.assert_close(states, wanted)
    served = torch.from_numpy(np.concatenate(features_of(parent, tiny.sentences(5))))
    torch.testing.assert_close(parent.load_upper()(served, lengths), wanted, atol=5e-3, rtol=5e-3)


def test_tenants_over_a_trunk_are_served_as_over_any_base(trained: Trained) -> None:
    made = trained.trunk
    requests = [
        EngineRequest(tiny.tenant_of(made, ("alpha", "beta")[i % 2], i % 2), each)
        for i, each in enumerate(features_of(made, tiny.sentences(8)))
    ]
    with closing(tiny.engine_of(made)) as engine:
        answers = engine.run(requests)
    for request, answer in zip(requests, answers, strict=True):
        wanted = reference.logits(made.load_upper(), torch.from_numpy(request.features), request.tenant)
        np.testing.assert_allclose(answer, wanted.numpy(), atol=2e-3, rtol=2e-3)


def features_of(base: Base, texts: list[str]) -> list[Features]:
    """Compute what the layers read, without tables."""
    encoded = base.load_text_encoder().encode(texts)
    if base.config.is_whole:
        return [*TokenDomain(base.config).features(encoded)]
    with torch.no_grad():
        states = [merged_texts(load_lower(base), text.ids, [len(text.ids)]) for text in encoded]
    return [state.numpy().astype(np.float16) for state in states]


def test_a_checkpoint_of_another_parent_is_refused(store: Store, corpus: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trunk(store, make_parent(store, WHOLE), corpus, settings=SHORT, progress=Interrupted(disable=True))
    other = tiny.make_base(store, make_parent(store, WHOLE).config, seed=1)
    with pytest.raises(DataError, match="another model, text or settings"):
        make_trunk(store, other, corpus, settings=SHORT)


@pytest.mark.parametrize(
    ("layers", "name", "words"),
    [
        (3, "trunk", "a trunk has 1 to 2 layers, got 3"),
        (0, "trunk", "a trunk has 1 to 2 layers, got 0"),
        (2, "trunk", "has 2 upper layers, and a trunk of it must have fewer, got 2"),
        (1, "parent", "the name parent is that of the parent or of a shipped base"),
        (1, "minilm-ngrams", "the name minilm-ngrams is that of the parent or of a shipped base"),
    ],
)
def test_a_wrong_number_of_layers_or_name_is_refused_before_anything_is_read(
    store: Store, layers: int, name: str, words: str
) -> None:
    parent = tiny.make_base(store, tiny.config(name="parent", upper_layers=2))
    with pytest.raises(ConfigError, match=words):
        make_trunk(store, parent, Path("no such file"), name=name, layers=layers)


def test_a_trunk_of_a_trunk_is_refused(trained: Trained, store: Store) -> None:
    with pytest.raises(ConfigError, match="'trunk' is a trunk already: distil a trunk from 'parent'"):
        make_trunk(store, trained.trunk, Path("no such file"), name="second", layers=1)


def test_a_damaged_record_of_the_parent_is_refused_by_name(store: Store) -> None:
    parent = make_parent(store, WHOLE)
    manifest = parent.folder / artifact.MANIFEST
    content = json.loads(manifest.read_text())
    content["meta"]["trunk"] = {"of": 3}
    manifest.write_text(json.dumps(content))
    with pytest.raises(CorruptArtifactError, match=r"manifest\.json: trunk must be an object whose `of` names a base"):
        bases.load(parent.folder)


def test_the_command_distils_a_trunk_and_refuses_options_that_do_not_belong_to_it(store: Store, corpus: Path) -> None:
    make_parent(store, WHOLE)
    shape = ["--store", str(store.root), "--text", str(corpus), "--tokens", "3000", "--batch-tokens", "1000"]
    run = CliRunner().invoke(cli.app, ["base", "--trunk", "1", "--from", "parent", *shape])
    assert run.exit_code == 0, run.output
    assert "Distance to the base that the trunk was distilled from" in " ".join(run.output.split())
    assert bases.load(store.base("parent-trunk-1")).trunk_of == "parent"
    for options, words in (
        (["--trunk", "1"], "--trunk needs --from"),
        (["--from", "parent"], "--from is for --trunk"),
        (["--trunk", "1", "--from", "parent", "--lower", "2"], "leave out --trunk or --lower"),
        (["--trunk", "1", "--from", "parent", "--whole"], "leave out --trunk or --whole"),
        (["--trunk", "1", "--from", "unknown"], "unknown"),
    ):
        refused = CliRunner().invoke(cli.app, ["base", *options, "--store", str(store.root)])
        assert words in str(refused.exception)
