"""Domains: further pretrained lower layers, kept as a branch over the parent's table."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import itertools
import json
import resource
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.cli.build import app
from hplm_builder.data.labelled import LabelledFile
from hplm_builder.domains import domain_build
from hplm_builder.domains.domain_build import DomainSettings, build_domain, estimate_domain
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress
from typer.testing import CliRunner

from hplm.engine import lower_layers as lowers
from hplm.engine import reference
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import OpenDomain, compute_ngrams, open_lineage
from hplm.errors import (
    ConfigError,
    CorpusTooSmallError,
    CorruptArtifactError,
    DataError,
    HplmError,
    JobCancelledError,
    MissingArtifactError,
    StoppingError,
    StoreUnavailableError,
    WrongBaseError,
)
from hplm.models import base as bases
from hplm.models.base import LOWER, WORDS, Base
from hplm.models.lower import LowerEncoder
from hplm.plot import table
from hplm.registry.registry import Registry
from hplm.reporting.progress import silent
from hplm.store import artifact
from hplm.store.layout import Store
from tests import tiny
from tests.limits import limited
from tests.unit.builder.domains.test_benefit import write_classes

SETTINGS = DomainSettings(
    total_tokens=30 * 128, warmup_tokens=5 * 128, batch_tokens=128, top_percent=20.0, min_corpus_tokens=1000
)
ROOT = "plots/general"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A base with its root alone."""
    made = Store(tmp_path_factory.mktemp("domains") / "store")
    tiny.make_base(made, tiny.config())
    build_plot(made, "tiny", "general", tiny.sentences(50), 30.0, Progress(disable=True), dtype="float32")
    return made


@pytest.fixture(scope="module")
def base(store: Store) -> Base:
    return domain_build.bases.load(store.base("tiny"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(tiny.sentences(200, seed=5)))
    return path


@pytest.fixture(scope="module")
def medical(store: Store, corpus: Path) -> str:
    """A domain version below the root."""
    build_domain(store, "tiny", [ROOT], store.domain("tiny", "medical", 1), corpus, SETTINGS, silent)
    return "domains/tiny/medical/1"


def contents(folder: Path) -> dict[str, str]:
    """Return the digests of the files below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def perturbed(base: Base, seed: int) -> LowerEncoder:
    """Return a lower encoder unlike the base's, without training."""
    lower = load_lower(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lower.named_parameters():
            if name != WORDS:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return lower


def grow(store: Store, base: Base, depth: int, per_level: int = 40, without_table: int = 0) -> list[str]:
    """Publish a lineage of `depth` versions, youngest first, over random n-grams of few tokens, so that levels overlap.

    The version `d<without_table>` has no table.
    """
    lineage = [ROOT]
    for level in range(1, depth):
        rng = np.random.default_rng(level)
        grams = np.unique(rng.integers(5, 10, (per_level, base.config.window)), axis=0)
        grams = grams[:0] if level == without_table else grams
        folder = store.domain("tiny", f"d{level}", 1)
        domain_build.publish(folder, base, perturbed(base, level), grams, {})
        lineage.insert(0, store.relative(folder))
    return lineage


def texts_for(base: Base, seed: int) -> list[np.ndarray]:
    """Return token ids, half of them from the branches' tokens, half random."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, high, rng.integers(1, 30)) for high in (10, base.config.vocab_size, 10, 12)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("miss", ["backoff", "compute"])
def test_a_lookup_over_any_depth_equals_the_dictionary_reference(tmp_path: Path, n: int, depth: int, miss: str) -> None:
    store = Store(tmp_path)
    base = tiny.make_base(store, tiny.config(window=n))
    build_plot(store, "tiny", "general", tiny.sentences(40), 40.0, Progress(disable=True), dtype="float32")
    lineage = grow(store, base, depth)
    lookup = open_lineage(store, base, lineage, miss=miss, overlay_windows=16, dtype=torch.float32)
    levels, lower = reference.lineage(store, base, lineage, miss)
    for seed in range(3):  # repeated, because tables, overlay and freshly computed n-grams must agree
        for ids in texts_for(base, seed):
            wanted = reference.merged(ids.tolist(), base.config, levels, lower).numpy()
            np.testing.assert_allclose(lookup.hidden_states(ids, [len(ids)]), wanted, atol=4e-3, rtol=4e-3)
    names = {f"d{level}" for level in range(1, depth)} | {"root", "unigram" if miss == "backoff" else "computed"}
    assert names <= set(lookup.windows_by_level)


@tiny.BOTH_FORMS
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(("without", "depth"), [(1, 2), (2, 3), (1, 3), (2, 4)])
def test_a_version_without_a_table_ends_the_search_and_computes_with_the_youngest_encoder(
    tmp_path: Path, form: str, n: int, without: int, depth: int
) -> None:
    store = Store(tmp_path)
    base = tiny.make_base(store, tiny.config(window=n, form=form))
    build_plot(store, "tiny", "general", tiny.sentences(40), 40.0, Progress(disable=True), dtype="float32")
    lineage = grow(store, base, depth, without_table=without)
    lookup = open_lineage(store, base, lineage, overlay_windows=16, dtype=torch.float32)
    levels, lower = reference.lineage(store, base, lineage, "compute")
    assert len(levels) == depth - 1 - without
    for seed in range(3):
        for ids in texts_for(base, seed):
            wanted = reference.merged(ids.tolist(), base.config, levels, lower).numpy()
            np.testing.assert_allclose(lookup.hidden_states(ids, [len(ids)]), wanted, atol=4e-3, rtol=4e-3)
    younger = {f"d{level}" for level in range(without + 1, depth)}
    assert set(lookup.windows_by_level) == younger | {"overlay", "computed"}


def test_a_text_over_a_version_without_a_table_has_the_same_bits_computed_and_remembered(
    store: Store, base: Base
) -> None:
    lookup = open_lineage(store, base, grow(store, base, 2, without_table=1))
    ids = np.arange(20, 60)
    first = lookup.hidden_states(ids, [40])
    lookup.windows_by_level.clear()
    np.testing.assert_array_equal(lookup.hidden_states(ids, [40]), first)
    assert set(lookup.windows_by_level) == {"overlay"}


def test_a_version_without_a_table_is_no_more_than_its_encoder(store: Store, base: Base) -> None:
    lineage = grow(store, base, 2, without_table=1)
    assert sorted(path.name for path in store.path(lineage[0]).iterdir()) == ["lower"]
    # The root's tables are not even opened.
    with_lost_root = [lineage[0], "plots/nowhere"]
    ids = np.arange(20, 60)
    np.testing.assert_array_equal(
        open_lineage(store, base, with_lost_root).hidden_states(ids, [40]),
        open_lineage(store, base, lineage).hidden_states(ids, [40]),
    )


@pytest.mark.parametrize(("depth", "name"), [(2, "d1"), (3, "d1")])
def test_back_off_from_a_version_without_a_table_is_refused_by_name(
    store: Store, base: Base, depth: int, name: str
) -> None:
    lineage = grow(store, base, depth, without_table=1)
    with pytest.raises(ConfigError, match=rf"version 1 of domain '{name}' has no table.* set miss to compute"):
        open_lineage(store, base, lineage, miss="backoff")


def test_a_table_that_was_lost_is_missing_and_not_taken_for_a_version_without_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    base = tiny.make_base(store, tiny.config())
    build_plot(store, "tiny", "general", tiny.sentences(40), 40.0, Progress(disable=True), dtype="float32")
    lineage = grow(store, base, 2)
    shutil.rmtree(store.path(lineage[0]) / "branch")
    with pytest.raises(MissingArtifactError):
        open_lineage(store, base, lineage)


def test_a_domain_of_no_percent_has_no_table_and_an_update_may_take_the_table_away_or_add_one(
    store: Store, base: Base, corpus: Path, medical: str, tmp_path: Path
) -> None:
    none = replace(SETTINGS, top_percent=0.0)
    plan = estimate_domain(store, "tiny", [medical, ROOT], corpus, none, silent, before=medical)
    bare, again = tmp_path / "bare" / "2", tmp_path / "again" / "3"
    about = build_domain(store, "tiny", [medical, ROOT], bare, corpus, none, silent, before=medical)
    assert (about["rows"], about["branch_bytes"], about["corpus_hit_rate"]) == (plan["rows"], 0, 0.0) == (0, 0, 0.0)
    assert about["lower_bytes"] == pytest.approx(plan["bytes"], abs=6000)
    assert about["moved"] > 0
    assert [path.name for path in bare.iterdir()] == ["lower"]
    later = build_domain(store, "tiny", [bare, ROOT], again, corpus, SETTINGS, silent, before=str(bare))
    assert later["rows"] == len(table.load(again / "branch", fingerprint=base.fingerprint).keys) > 0


def test_a_window_is_answered_by_the_branch_then_its_parent_then_the_root_then_the_backoff(
    store: Store, base: Base
) -> None:
    lineage = grow(store, base, 3)
    opened = [table.load(store.root / path / "branch", fingerprint=base.fingerprint) for path in lineage[:2]]
    branch, parent = (reference.level(one) for one in opened)
    root = reference.level(table.load(store.table("general", "root"), fingerprint=base.fingerprint))
    in_both = next(gram for gram in branch if gram in parent)
    in_parent = next(gram for gram in parent if gram not in branch)
    in_root = next(gram for gram in root if gram not in branch and gram not in parent and 0 not in gram)
    nowhere = (60, 61, 62)
    lookup = open_lineage(store, base, lineage, miss="backoff")
    computing = open_lineage(store, base, lineage, dtype=torch.float32)
    for gram, level in ((in_both, "d2"), (in_parent, "d1"), (in_root, "root"), (nowhere, "unigram")):
        lookup.windows_by_level.clear()
        lookup.hidden_states(np.array(gram), [3])
        # The n-gram of the middle token is the tested one; both edge tokens have other n-grams.
        assert lookup.windows_by_level[level] >= 1
    np.testing.assert_array_equal(lookup.vectors(np.array([in_both, in_parent]))[0], branch[in_both])
    np.testing.assert_array_equal(lookup.vectors(np.array([in_both, in_parent]))[1], parent[in_parent])
    np.testing.assert_array_equal(lookup.vectors(np.array([in_root]))[0], root[in_root])
    computing.hidden_states(np.array(nowhere), [3])
    youngest = lowers.load(store.root / lineage[0] / "lower", base)
    wanted = compute_ngrams(youngest, np.array([nowhere]), torch.float32)
    np.testing.assert_allclose(computing.vectors(np.array([nowhere])), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["root", "bigram", "unigram", "overlay", "computed"])
def test_windows_of_a_domain_that_is_called_like_a_level_are_counted_apart(
    store: Store, base: Base, tmp_path: Path, name: str
) -> None:
    known, unknown = np.array([20, 21, 22]), np.array([60, 61, 62])
    branch = tmp_path / name / "1"
    domain_build.publish(branch, base, perturbed(base, 1), known[None], {})
    for miss in ("compute", "backoff"):
        lookup = open_lineage(store, base, [branch, ROOT], miss=miss)
        # The last one is repeated, because the overlay remembers it if it was computed.
        for text in (known, unknown, unknown):
            lookup.hidden_states(text, [3])
        assert lookup.windows_by_level[f"domain:{name}"] == 1
        assert sum(lookup.windows_by_level.values()) == 9


def test_what_one_domain_computed_on_a_miss_is_never_given_to_another(store: Store, base: Base) -> None:
    lineages = [grow(store, base, 3)[keep:] for keep in range(3)]
    lookups = [open_lineage(store, base, lineage, dtype=torch.float32) for lineage in lineages]
    ids = np.arange(50, 70)
    found = []
    for _ in range(2):  # computed at first, then remembered
        found = [lookup.hidden_states(ids, [len(ids)]) for lookup in lookups]
        for lineage, hidden in zip(lineages, found, strict=True):
            levels, lower = reference.lineage(store, base, lineage, "compute")
            wanted = reference.merged(ids.tolist(), base.config, levels, lower).numpy()
            np.testing.assert_allclose(hidden, wanted, atol=4e-3, rtol=4e-3)
    assert all(lookup.windows_by_level["overlay"] for lookup in lookups)
    for one, other in itertools.combinations(found, 2):
        assert np.abs(one - other).max() > 0.1


def test_domains_may_share_one_copy_of_the_word_embeddings(store: Store, base: Base, medical: str) -> None:
    lower = load_lower(base)
    found = [lowers.of_lineage(store, base, lineage, base_lower=lower) for lineage in ([ROOT], [medical, ROOT])]
    assert all(one.word_embeddings is lower.word_embeddings for one in found)
    ids = np.arange(40, 60)
    shared, own = (open_lineage(store, base, [medical, ROOT], base_lower=given) for given in (lower, None))
    np.testing.assert_array_equal(shared.hidden_states(ids, [20]), own.hidden_states(ids, [20]))
    for lookup in (shared, own, open_lineage(store, base, [ROOT], base_lower=lower)):
        assert lookup._lower is not None
        assert lookup._lower.packed is not None
    assert shared._lower is not None
    assert shared._lower.word_embeddings is lower.word_embeddings


def test_a_branch_holds_the_top_of_its_corpus_and_nothing_else(
    store: Store, base: Base, corpus: Path, medical: str
) -> None:
    found = prepare_corpus(corpus.read_text().splitlines(), base, 0, SETTINGS.seed, silent)
    branch = table.load(store.root / medical / "branch", fingerprint=base.fingerprint)
    stored = set(reference.level(branch))
    assert len(stored) == round(0.2 * len(found.grams.grams))
    assert stored == {tuple(gram) for gram in found.grams.grams[: len(stored)].tolist()}
    rarest = found.grams.counts[len(stored) - 1]
    assert all(tuple(gram) in stored for gram in found.grams.grams[found.grams.counts > rarest].tolist())


def _packed(lower: LowerEncoder, dtype: torch.dtype) -> LowerEncoder:
    """As for serving: unpacked products in bfloat16 round otherwise."""
    lowers.pack(lower, dtype)
    return lower


def test_a_branch_holds_what_its_lower_layers_compute(store: Store, base: Base, medical: str) -> None:
    branch = table.load(store.root / medical / "branch", fingerprint=base.fingerprint)
    grams = np.array(list(reference.level(branch)))
    dtype = domain_build.choose_dtype("auto", torch.device("cpu"))
    lower = _packed(lowers.load(store.root / medical / "lower", base), dtype)
    np.testing.assert_allclose(branch.values, compute_ngrams(lower, grams, dtype), atol=2e-2, rtol=2e-2)
    before = compute_ngrams(_packed(load_lower(base), dtype), grams, dtype)
    assert np.abs(branch.values - before).max() > 0.02


def test_an_update_keeps_the_n_grams_of_the_version_before_computed_anew(
    store: Store, base: Base, medical: str, tmp_path: Path
) -> None:
    more = tmp_path / "more.txt"
    more.write_text("\n".join(tiny.sentences(200, seed=6)))
    told: list[tuple[str, float]] = []
    folder = tmp_path / "medical" / "2"
    given = store, "tiny", [medical, ROOT]
    planned: list[float] = []
    plan = estimate_domain(*given, more, SETTINGS, lambda _, done: planned.append(done), before=medical)
    assert planned == sorted(planned)
    assert planned[-1] == 1.0
    about = build_domain(*given, folder, more, SETTINGS, lambda *one: told.append(one), before=medical)
    old, new, alone = (
        table.load(place / "branch", fingerprint=base.fingerprint)
        for place in (store.path(medical), folder, _built(store, [medical, ROOT], tmp_path / "alone" / "2", more))
    )
    kept = {tuple(gram) for gram in old.ngrams().tolist()}
    assert kept | {tuple(gram) for gram in alone.ngrams().tolist()} == {tuple(gram) for gram in new.ngrams().tolist()}
    assert len(kept) < len(new.keys) == about["rows"] == plan["rows"]
    dtype = domain_build.choose_dtype("auto", torch.device("cpu"))
    lower = _packed(lowers.load(folder / "lower", base), dtype)
    np.testing.assert_allclose(new.values, compute_ngrams(lower, new.ngrams(), dtype), atol=2e-2, rtol=2e-2)
    assert max(progress for _, progress in told) == pytest.approx(1)


def _built(store: Store, lineage: list[str], folder: Path, corpus: Path) -> Path:
    build_domain(store, "tiny", list(lineage), folder, corpus, SETTINGS, silent)
    return folder


def test_what_a_domain_says_of_itself(store: Store, corpus: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    folder = tmp_path / "said" / "1"
    about = build_domain(
        store, "tiny", [ROOT], folder, corpus, SETTINGS, lambda step, progress: told.append((step, progress))
    )
    assert about["corpus"]["documents"] == len(set(corpus.read_text().splitlines()))
    assert about["corpus"]["tokens"] > 1000
    assert about["settings"] == dataclasses.asdict(SETTINGS)
    assert set(about["masked_lm"]) == {"before", "after"}
    assert about["rows"] == round(0.2 * about["corpus"]["distinct_ngrams"])
    assert 0 < about["corpus_hit_rate"] < 1
    assert about["moved"] > 0
    benefit = about["benefit"]
    assert benefit["verdict"] in benefit["why"]
    assert benefit["compared_with"] == "general"
    assert benefit["held_out_text"]["before"] == about["masked_lm"]["before"]["loss"]
    assert benefit["held_out_text"]["after"] == about["masked_lm"]["after"]["loss"]
    assert benefit["dev"] == []
    kept = json.loads((folder / "lower" / "manifest.json").read_text())["meta"]["domain"]
    assert kept == {key: about[key] for key in kept}
    assert kept["benefit"] == benefit
    for part in ("branch", "lower"):
        assert about[f"{part}_bytes"] == sum(path.stat().st_size for path in (folder / part).iterdir())
    assert list(dict.fromkeys(step for step, _ in told)) == [
        "read the corpus",
        "warm up the head",
        "measure before",
        "further pretrain",
        "measure after",
        "compute the branch",
    ]
    progress = [one for _, one in told]
    assert progress == sorted(progress)
    assert progress[0] == 0
    assert progress[-1] == pytest.approx(1)


def test_a_domain_is_compared_with_its_start_on_labelled_examples(store: Store, corpus: Path, tmp_path: Path) -> None:
    examples = write_classes(tmp_path / "colours.csv")
    folder, told = tmp_path / "law" / "1", list[tuple[str, float]]()
    settings = replace(SETTINGS, top_percent=0.0)
    given = store, "tiny", [ROOT], folder, corpus, settings
    about = build_domain(*given, lambda *one: told.append(one), dev=[examples])
    (result,) = about["benefit"]["dev"]
    assert (result["file"], result["metric"], result["examples"]) == ("colours.csv", "accuracy", 60)
    assert "colours.csv, 60 examples: accuracy" in about["benefit"]["why"]
    # `hplm store adopt` reads the verdict from the manifest.
    manifest = json.loads((folder / "lower" / "manifest.json").read_text())
    assert manifest["meta"]["domain"]["benefit"] == about["benefit"]
    assert [path.name for path in folder.iterdir()] == ["lower"]
    steps = list(dict.fromkeys(step for step, _ in told))
    assert steps == [
        "read the corpus",
        "answer labelled examples before",
        "warm up the head",
        "measure before",
        "further pretrain",
        "measure after",
        "answer labelled examples after",
    ]
    progress = [one for _, one in told]
    assert progress == sorted(progress)
    assert progress[-1] == pytest.approx(1)
    plans = [estimate_domain(store, "tiny", [ROOT], corpus, settings, silent, dev=files) for files in ([], [examples])]
    assert plans[0]["bytes"] == plans[1]["bytes"]


def test_examples_that_no_tenant_could_have_are_refused_before_the_training(
    store: Store, corpus: Path, tmp_path: Path
) -> None:
    poor = tmp_path / "poor.csv"
    poor.write_text("text,label\n" + "a cat,red\n" * 30)
    folder, seen = tmp_path / "law" / "1", Seen()
    for run in (build_domain, estimate_domain):
        places = [folder] if run is build_domain else []
        with pytest.raises(DataError, match="one class"):
            run(store, "tiny", [ROOT], *places, corpus, SETTINGS, seen, dev=[LabelledFile(poor, poor.name)])
    assert not seen.trained
    assert not folder.exists()


def test_a_child_starts_from_its_parents_lower_layers(
    store: Store, base: Base, corpus: Path, medical: str, tmp_path: Path
) -> None:
    still = dataclasses.replace(SETTINGS, learning_rate=1e-9)
    build_domain(store, "tiny", [medical, ROOT], tmp_path / "child" / "1", corpus, still, silent)
    child, parent = (
        lowers.load(folder / "lower", base).state_dict() for folder in (tmp_path / "child/1", store.root / medical)
    )
    for name, value in child.items():
        torch.testing.assert_close(value, parent[name], atol=1e-3, rtol=1e-3)
    assert not torch.equal(child["blocks.0.ffn_in.weight"], load_lower(base).state_dict()["blocks.0.ffn_in.weight"])


def test_one_seed_gives_the_same_bytes(store: Store, corpus: Path, medical: str, tmp_path: Path) -> None:
    build_domain(store, "tiny", [ROOT], tmp_path / "medical" / "1", corpus, SETTINGS, silent)
    assert contents(tmp_path / "medical" / "1") == contents(store.root / medical)


class Ending:
    """A progress callback that raises at the first call of a step."""

    def __init__(self, step: str, error: HplmError) -> None:
        self._step, self._error = step, error

    def __call__(self, step: str, progress: float) -> None:
        if step == self._step:
            raise self._error


@pytest.mark.parametrize(
    "step", ["read the corpus", "warm up the head", "further pretrain", "measure after", "compute the branch"]
)
def test_a_cancelled_job_leaves_nothing_behind(store: Store, corpus: Path, tmp_path: Path, step: str) -> None:
    with pytest.raises(JobCancelledError):
        build_domain(
            *(store, "tiny", [ROOT], tmp_path / "out" / "1", corpus, SETTINGS),
            Ending(step, JobCancelledError("no more")),
            work=tmp_path / "work",
        )
    assert not contents(tmp_path)
    assert not list(tmp_path.glob("out/*"))


class Seen:
    """A progress callback that remembers whether training was reported."""

    def __init__(self) -> None:
        self.trained = False

    def __call__(self, step: str, progress: float) -> None:
        self.trained |= step == "further pretrain"


@pytest.mark.parametrize("step", ["further pretrain", "compute the branch"])
def test_an_interrupted_job_goes_on_to_the_same_bytes(
    store: Store, corpus: Path, medical: str, tmp_path: Path, step: str
) -> None:
    folder, work = tmp_path / "medical" / "1", tmp_path / "work"
    with pytest.raises(StoppingError):
        build_domain(
            *(store, "tiny", [ROOT], folder, corpus, SETTINGS), Ending(step, StoppingError("later")), work=work
        )
    assert not folder.exists()
    resumed, again = Seen(), Seen()
    build_domain(*(store, "tiny", [ROOT], folder, corpus, SETTINGS), resumed, work=work)
    assert resumed.trained == (step == "further pretrain")
    assert contents(folder) == contents(store.root / medical)
    # Killed before publishing: the training is not repeated.
    build_domain(*(store, "tiny", [ROOT], folder, corpus, SETTINGS), again, work=work)
    assert not again.trained
    assert contents(folder) == contents(store.root / medical)


def test_a_job_goes_on_where_only_what_training_does_not_depend_on_is_asked_otherwise(
    store: Store, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "medical" / "1", tmp_path / "work"

    def trained(settings: DomainSettings) -> bool:
        seen = Seen()
        build_domain(*(store, "tiny", [ROOT], folder, corpus, settings), seen, work=work)
        return seen.trained

    assert trained(SETTINGS)
    assert not trained(replace(SETTINGS, top_percent=50.0, min_corpus_tokens=500))
    assert all(message.startswith("continues after step ") for message in caplog.messages)
    assert trained(replace(SETTINGS, seed=1))
    assert "is of another model, text or settings: the training begins again" in caplog.text


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("a.txt", b"caf\xe9", DataError, "line 1 is not UTF-8"),
        ("a.txt", b"x" * 1_000_001, DataError, "line 1: more than 1,000,000 bytes without an end"),
        ("a.txt", b"", DataError, "holds no text"),
        ("a.txt.gz", gzip.compress(b"cat\n" * 1_000_000), DataError, "more than the 100,000 bytes"),
        ("a.jsonl", b'{"label": "x"}', DataError, 'expected an object with a string "text"'),
        ("a.csv", b"text\ncat\n", DataError, "must end in .txt, .jsonl"),
        ("a.txt", b"the cat sleeps\na dog runs\n", CorpusTooSmallError, "has 6 tokens, a domain needs 1,000: 994 more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_corpus_is_refused_with_a_reason_and_leaves_nothing_behind(
    store: Store, tmp_path: Path, name: str, data: bytes, error: type[HplmError], words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    for build in (
        lambda: build_domain(
            *(store, "tiny", [ROOT], tmp_path / "out" / "1", path, SETTINGS, silent),
            work=tmp_path / "work",
            most_corpus_bytes=2_000_000 if "without an end" in words else 100_000,
        ),
        lambda: estimate_domain(
            *(store, "tiny", [ROOT], path, SETTINGS, silent),
            most_corpus_bytes=2_000_000 if "without an end" in words else 100_000,
        ),
    ):
        with pytest.raises(error) as found:
            build()
        assert words in str(found.value)
    assert set(contents(tmp_path)) == {name}
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_an_estimate_says_what_it_would_cost_and_writes_nothing(
    store: Store, base: Base, corpus: Path, medical: str
) -> None:
    before = contents(store.root)
    # The first measurement takes long. The second one does too, as if the machine had other work.
    steps_s = [0.0, 90, 90, 0, 0.3, 0.3, 0, 0.1, 0.1, 0, 0.1, 0.1]
    ticks = itertools.accumulate(steps_s)
    plan = estimate_domain(store, "tiny", [ROOT], corpus, SETTINGS, silent, clock=lambda: next(ticks))
    assert contents(store.root) == before
    real = store.root / medical
    assert plan["rows"] == len(table.load(real / "branch", fingerprint=base.fingerprint).keys)
    written = sum((real / path).stat().st_size for path in ("branch/keys.u64", "branch/values.f16"))
    header = 4096  # bytes of a safetensors file's header
    assert 0 <= written + (real / "lower" / LOWER).stat().st_size - plan["bytes"] < header
    # By that clock 128 tokens take a tenth of a second. So do the n-grams of the sample, which is the whole branch.
    assert plan["estimated_s"] == pytest.approx(0.1 * (30 * 128 + 5 * 128 / 3) / 128, rel=0.5)


def test_lower_layers_of_another_base_or_damaged_or_missing_ones_are_refused(
    store: Store, base: Base, medical: str, tmp_path: Path
) -> None:
    other = dataclasses.replace(base, fingerprint="other")
    with pytest.raises(WrongBaseError, match="this base is other"):
        lowers.load(store.root / medical / "lower", other)
    with pytest.raises(MissingArtifactError):
        open_lineage(store, base, [tmp_path, ROOT])
    lowers.save(tmp_path / "lower", base, load_lower(base), {})
    tiny.flip_last_byte(tmp_path / "lower" / LOWER)
    with pytest.raises(CorruptArtifactError, match="checksum"):
        lowers.load(tmp_path / "lower", base)


def test_files_that_cannot_be_opened_for_a_moment_are_not_called_damaged(
    store: Store, base: Base, medical: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(artifact.Artifact, "read_bytes", exhausted)
    monkeypatch.setattr(bases, "load_file", exhausted)
    with pytest.raises(StoreUnavailableError, match="try again"):
        lowers.load(store.root / medical / "lower", base, words=torch.nn.Embedding(1, 1))
    with pytest.raises(StoreUnavailableError, match="try again"):
        base.load_upper()


def test_a_full_disk_is_an_os_error_and_leaves_nothing_behind(store: Store, base: Base, tmp_path: Path) -> None:
    grams = np.array(list(itertools.product(range(10, 30), repeat=3)))
    for most_bytes in (
        1_000,
        110_000,
    ):  # bytes too few for the lower layers, and bytes too few for the table after them
        refused = pytest.raises(OSError, match=r"File too large|requested and \d+ written")
        with limited(resource.RLIMIT_FSIZE, most_bytes), refused:
            domain_build.publish(tmp_path / "d" / "1", base, load_lower(base), grams, {})
        assert not contents(tmp_path)


def test_training_that_diverges_is_an_error_and_publishes_nothing(corpus: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    shape, base = tiny.config(), tiny.make_base(store, tiny.config())
    broken = load_lower(base).state_dict()
    broken["bias"].fill_(float("nan"))
    tokenizer = base.tokenizer_path.read_bytes()
    domain_build.bases.save(store.base("tiny"), shape, broken, base.load_upper().state_dict(), tokenizer, {})
    with pytest.raises(ConfigError, match=r"learning_rate 5e-05 diverged"):
        build_domain(store, "tiny", [ROOT], tmp_path / "out" / "1", corpus, SETTINGS, silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"top_percent": -1.0}, {"top_percent": 101.0}, {"min_corpus_tokens": -1}])
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        DomainSettings(**change)  # type: ignore[arg-type]


def test_the_command_publishes_version_after_version_and_children(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPLM_CACHE", str(tmp_path / "cache"))
    store = Store(tmp_path / "store")
    tiny.make_base(store, tiny.config())
    build_plot(store, "tiny", "general", tiny.sentences(50), 30.0, Progress(disable=True))

    def run(*more: str) -> str:
        arguments = ["domain", *more, "--corpus", str(corpus), "--store", str(store.root), "--base", "tiny"]
        small = ["--tokens", "4096", "--warmup-tokens", "2048", "--least", "1000"]
        found = CliRunner().invoke(app, [*arguments, *small], catch_exceptions=False)
        assert found.exit_code == 0
        return found.stderr

    run("medical", "--dry-run")
    # The estimate is for the device that would build the domain.
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda, got 'tpu'"):
        run("medical", "--dry-run", "--device", "tpu")
    assert not (store.root / "domains").exists()
    assert "medical " in (said := run("medical"))
    assert "compared with general. Loss of masked words on held-out text:" in said
    assert "compared with version 1." in run("medical")
    run("cardiology", "--parent", "medical")
    # Without --top an update of a domain without a table makes none.
    for more in (["--top", "0"], []):
        run("bare", *more)
    # Without --parent an update keeps the domain's parent.
    run("cardiology", "--dry-run")
    run("cardiology")
    # Refused before an hour of training.
    for more in ([], ["--dry-run"]):
        with pytest.raises(DataError, match="'general' is the root of a tree"):
            run("general", *more)
    with pytest.raises(DataError, match="'cardiology' is below 'medical'"):
        run("cardiology", "--parent", "general", "--dry-run")
    with closing(Registry.open_read_only(store)) as registry:
        first, second = registry.domain_versions("tiny", "medical")
        child, later = registry.domain_versions("tiny", "cardiology")
        bare = registry.domain_versions("tiny", "bare")
        lineage = [version.path for version in registry.lineage(child.id)]
    assert [version.about["rows"] for version in bare] == [0, 0]
    assert second.about["masked_lm"]["after"]["loss"] > 0
    assert lineage == ["domains/tiny/cardiology/1", "domains/tiny/medical/2", ROOT]
    assert first.parent_id == second.parent_id
    assert child.parent_id == later.parent_id == second.id
    assert later.about["rows"] >= child.about["rows"]
    made = domain_build.bases.load(store.base("tiny"))
    lookup = open_lineage(store, made, lineage)
    assert isinstance(lookup, OpenDomain)
    lookup.hidden_states(np.arange(5, 30), [25])
