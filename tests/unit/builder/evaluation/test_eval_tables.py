"""`hplm eval tables-accuracy`: pruned tables answer as published ones, sizes are those of files, accuracy follows the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_builder.cli.evaluate import app
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.domains.domain_build import DomainSettings, publish
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.studies.table_scorer import MISSES, hit_rates
from hplm_builder.evaluation.studies.tables_accuracy import count_corpus, goals_of, table_rows
from hplm_builder.jobs.local_builds import build_domain, build_tenant
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tables.pruned_tables import OWN_TABLE, TableSize, VersionTree
from hplm_builder.tenants.finetune import TrainSettings
from rich.progress import Progress
from typer.testing import CliRunner

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import Tenant
from hplm.core.text import EncodedText, TextEncoder, TextOrPair
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import open_lineage
from hplm.errors import ConfigError, HplmError, UnknownTenantError
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import Place, report_of

DOMAIN = DomainSettings(total_tokens=1024, warmup_tokens=512, batch_tokens=128, top_percent=100.0, min_corpus_tokens=0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = evaluated.make_place(tmp_path_factory.mktemp("tables"))
    corpus = place.folder / "corpus.txt"
    corpus.write_text("\n".join(tiny.sentences(200, seed=5)))
    build_domain(place.store, "tiny", tiny.PLOT, "medical", corpus, DOMAIN, Progress(disable=True))
    return place


def texts_of(place: Place, seed: int) -> list[np.ndarray]:
    return [one.ids for one in place.base.load_text_encoder().encode(tiny.sentences(20, seed=seed))]


def tree_of(place: Place, domain: str) -> VersionTree:
    served = ServedDomain(place.store, place.base, domain)
    documents = tiny.sentences(50) if domain == tiny.PLOT else tiny.sentences(200, seed=5)
    return VersionTree(place.store, place.base, served.lineage, count_corpus(documents, served))


@pytest.mark.parametrize("miss", ["compute", "backoff"])
@pytest.mark.parametrize("percent", [0.1, 30.0, 100.0])
def test_a_pruned_root_answers_as_the_whole_one(bench: Place, tmp_path: Path, percent: float, miss: str) -> None:
    name = f"whole-{percent:g}-{miss}"
    built = build_plot(bench.store, "tiny", name, tiny.sentences(50), percent, Progress(disable=True))
    tree, texts = tree_of(bench, tiny.PLOT), texts_of(bench, 3)
    assert tree.size(percent).rows == built["root_rows"]
    pruned = tree.open(tmp_path, percent, miss, texts)
    whole = open_lineage(bench.store, bench.base, [bench.store.table(name, "root").parent], miss=miss)
    ids, lengths = np.concatenate(texts), [len(one) for one in texts]
    np.testing.assert_allclose(
        pruned.hidden_states(ids, lengths), whole.hidden_states(ids, lengths), atol=0.05, rtol=0.05
    )
    assert pruned.windows_by_level[OWN_TABLE] == whole.windows_by_level["root"]


@pytest.mark.parametrize("domain", [tiny.PLOT, "medical"])
def test_a_table_without_any_of_the_windows_backs_off(bench: Place, tmp_path: Path, domain: str) -> None:
    tree = tree_of(bench, domain)
    strange = [np.full(9, number) for number in range(20, 24)]
    lookup = tree.open(tmp_path, 1.0, "backoff", strange)
    assert lookup.hidden_states(np.concatenate(strange), [9] * 4).shape == (36, bench.base.config.hidden_size)
    assert lookup.windows_by_level[OWN_TABLE] == 0


def test_a_pruned_branch_of_all_ngrams_answers_as_the_published_one(bench: Place, tmp_path: Path) -> None:
    tree, texts = tree_of(bench, "medical"), texts_of(bench, 5)
    ids, lengths = np.concatenate(texts), [len(one) for one in texts]
    pruned = tree.open(tmp_path, 100.0, "backoff", texts)
    whole = open_lineage(bench.store, bench.base, tree.lineage, miss="backoff")
    np.testing.assert_allclose(
        pruned.hidden_states(ids, lengths), whole.hidden_states(ids, lengths), atol=0.05, rtol=0.05
    )
    assert pruned.windows_by_level[OWN_TABLE] == whole.windows_by_level["medical"] > 0


@pytest.mark.parametrize("name", ["own", "unigram", "computed"])
def test_windows_of_a_parent_domain_of_any_name_are_hits_but_not_own_hits(
    bench: Place, tmp_path: Path, name: str
) -> None:
    grams = np.array([[20, 21, 22]])
    publish(tmp_path / name / "1", bench.base, load_lower(bench.base), grams, {})
    publish(tmp_path / "below" / "1", bench.base, load_lower(bench.base), grams, {})
    lineage = [tmp_path / "below" / "1", tmp_path / name / "1", bench.store.table(tiny.PLOT, "root").parent]
    tree = VersionTree(bench.store, bench.base, lineage, tree_of(bench, "medical").counted)
    lookup = tree.open(tmp_path / "table", 0.0, "backoff", [grams[0]])
    lookup.hidden_states(grams[0], [3])
    hits, own = hit_rates(lookup)
    assert hits >= 1 / 3
    assert own == 0.0


def test_an_empty_branch_answers_as_its_parent(bench: Place, tmp_path: Path) -> None:
    tree, texts = tree_of(bench, "medical"), texts_of(bench, 5)
    ids, lengths = np.concatenate(texts), [len(one) for one in texts]
    alone = tree.open(tmp_path, 0.0, "compute", texts).hidden_states(ids, lengths)
    parent = open_lineage(bench.store, bench.base, tree.lineage[1:]).hidden_states(ids, lengths)
    np.testing.assert_array_equal(alone, parent)
    assert tree.size(0.0).rows == 0


def test_the_reported_size_is_the_size_of_the_files(bench: Place) -> None:
    build_plot(bench.store, "tiny", "sized", tiny.sentences(50), 40.0, Progress(disable=True))
    folder = bench.store.table("sized", "root")
    found = sum((folder / name).stat().st_size for name in ("keys.u64", "values.f16"))
    assert tree_of(bench, tiny.PLOT).size(40.0).megabytes * 1e6 == pytest.approx(found)
    # HMI 5.1: a trigram of BERT-base in float16.
    assert TableSize.of(1.0, 1_000_000, tiny.config(form="windows")).bert_base_gigabytes == pytest.approx(4.616)


def rows_by(report: dict[str, Any]) -> dict[tuple[str, float, str], dict[str, Any]]:
    return {(row["task"], row["top_percent"], row["miss"]): row for row in report["rows"]}


def test_larger_tables_have_more_hits_and_computed_misses_cost_no_accuracy(bench: Place) -> None:
    corpus = ["--text", str(bench.folder / "corpus.txt")]
    rows = rows_by(report_of(bench, "tables-accuracy", *corpus, "--seed", "0", "--seed", "1"))
    percents = (0.1, 1.0, 10.0, 100.0)
    tasks = ("colours", "places", "average")
    assert set(rows) == {(task, p, miss) for task in tasks for p in percents for miss in ("compute", "backoff")}
    for task in tasks:
        hits = [rows[task, percent, "backoff"]["hit_rate"] for percent in percents]
        assert hits == sorted(hits)
        assert hits[0] < hits[-1]
        tests = [rows[task, percent, "compute"]["test"] for percent in percents]
        # Windows computed in another batch round differently, so the answers to one or two texts may change.
        assert max(tests) - min(tests) < 0.1
    for row in rows.values():
        assert row["own_hit_rate"] == row["hit_rate"]
        assert len(row["test_by_seed"]) == 2


def test_a_branch_is_scored_over_its_parent(bench: Place) -> None:
    corpus = ["--domain", "medical", "--text", str(bench.folder / "corpus.txt")]
    report = report_of(bench, "tables-accuracy", *corpus, "--top", "0", "--top", "100")
    rows = rows_by(report)
    for task in ("colours", "places"):
        assert rows[task, 0.0, "compute"]["own_hit_rate"] == 0
        assert rows[task, 0.0, "compute"]["megabytes"] == 0
        assert rows[task, 100.0, "compute"]["own_hit_rate"] > 0
        assert rows[task, 100.0, "compute"]["hit_rate"] >= rows[task, 0.0, "compute"]["hit_rate"]
    assert report["settings"]["distinct"] == tree_of(bench, "medical").size(100.0).rows


@pytest.mark.parametrize("at", tiny.PLACES)
def test_a_published_tenant_scores_as_its_card_says(bench: Place, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hplm_builder.tenants.tenant_build.ADAPTER_AT", at)
    settings = TrainSettings(epochs=4, learning_rates=(1e-2,))
    data = read_folder(bench.root / "colours")
    card = build_tenant(bench.store, "tiny", tiny.PLOT, f"painter-{at}", data, settings, Progress(disable=True))
    done = report_of_tenant(bench, "colours", f"painter-{at}")
    rows = rows_by(done)
    assert rows["colours", 100.0, "compute"]["test"] == pytest.approx(card.about["scores"]["test_accuracy"], abs=0.07)
    assert done["settings"]["tenants"] == [f"painter-{at}"]


def test_a_tenant_of_a_bank_scores_as_its_card_says(bench: Place, tmp_path: Path) -> None:
    place = evaluated.make_place(tmp_path)
    (tmp_path / "corpus.txt").write_text("\n".join(tiny.sentences(200, seed=5)))
    data, settings = read_folder(place.root / "colours"), TrainSettings(epochs=4, learning_rates=(1e-2,))
    card = build_tenant(place.store, "tiny", tiny.PLOT, "painter", data, settings, Progress(disable=True))
    member = tiny.load_tenant(place.store, place.base, "painter")
    tiny.make_bank(place.store, place.base, [replace(member, card=replace(member.card, name="banked"))])
    rows = rows_by(report_of_tenant(place, "colours", "banked"))
    assert rows["colours", 100.0, "compute"]["test"] == pytest.approx(card.about["scores"]["test_accuracy"], abs=0.07)


def test_a_tenant_is_scored_only_over_its_own_version_of_the_domain(
    bench: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, settings = read_folder(bench.root / "colours"), TrainSettings(epochs=1)
    build_tenant(bench.store, "tiny", tiny.PLOT, "stands", data, settings, Progress(disable=True))
    really = tenants.load

    def load(*given: Any, **options: Any) -> Tenant:
        """Load a tenant with a card like those of a server's worker process."""
        made = really(*given, **options)
        return replace(made, card=replace(made.card, about={**made.card.about, "domain": version}))

    monkeypatch.setattr(tenants, "load", load)
    version = f"plots/{tiny.PLOT}"
    assert report_of_tenant(bench, "colours", "stands")["settings"]["tenants"] == ["stands"]
    version = f"plots/{tiny.PLOT}/before"
    with pytest.raises(ConfigError, match="'stands' belongs to an earlier version of domain"):
        report_of_tenant(bench, "colours", "stands")


def report_of_tenant(place: Place, task: str, name: str) -> dict[str, Any]:
    given = place.options("tables-accuracy")
    at = given.index("--root")
    given[at : at + 2] = ["--data", str(place.root / task)]
    path = place.folder / "tenant.json"
    corpus = ["--text", str(place.folder / "corpus.txt")]
    # The whole test part, which the card's score is about.
    given[given.index("--quick")] = "--budget=cpu"
    arguments = [*given, *corpus, "--tenant", name, "--json", str(path)]
    CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    found: dict[str, Any] = evaluated.json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--top", "0"], ConfigError, "--top 0 uses only the tables of the parents, but 'general' is a root"),
        (["--domain", "medical"], ConfigError, "give the corpus of domain 'medical' with --text"),
        (["--tenant", "painter"], ConfigError, "1 --tenant for 2 tasks"),
        (["--tenant", "nobody", "--tenant", "nobody"], UnknownTenantError, "there is no tenant 'nobody'"),
        (["--tenant", "painter", "--seed", "1"], ConfigError, "--tenant scores tenants that are trained already"),
        (["--tenant", "a", "--tenant", "b", "--pooling", "mean"], ConfigError, "--examples and --pooling"),
        (["--tenant", "a", "--tenant", "b", "--pooling", "cls"], ConfigError, "--examples and --pooling"),
    ],
)
def test_a_wrong_call_is_refused(bench: Place, arguments: list[str], error: type[HplmError], words: str) -> None:
    corpus = [] if "medical" in arguments else ["--text", str(bench.folder / "corpus.txt")]
    done = CliRunner().invoke(app, [*bench.options("tables-accuracy"), *corpus, *arguments])
    assert isinstance(done.exception, error)
    assert words in str(done.exception)


@pytest.mark.parametrize("percent", ["-5", "0", "300", "nan"])
def test_an_invalid_percentage_is_refused_before_n_grams_are_counted(percent: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tables", "--store", str(tmp_path), "--top", "1", "--top", percent])
    assert isinstance(done.exception, ConfigError)
    assert "--top is a share in percent" in str(done.exception)


def test_averages_are_over_the_seeds_that_diverged_on_no_task(bench: Place) -> None:
    def judged(test: float) -> list[dict[str, Any]]:
        return [{"percent": 100.0, "miss": miss, "hit_rate": 1.0, "own_hit_rate": 1.0, "test": test} for miss in MISSES]

    models = {"one": [judged(0.8), judged(0.6)], "two": [None, judged(0.4)], "three": [None, None]}
    tree = tree_of(bench, tiny.PLOT)
    rows = rows_by({"rows": table_rows({task: models[task] for task in ("one", "two")}, tree, [100.0])})
    assert rows["one", 100.0, "compute"]["test_by_seed"] == [0.8, 0.6]
    assert rows["two", 100.0, "compute"]["test_by_seed"] == [0.4]
    assert rows["average", 100.0, "compute"]["test_by_seed"] == [0.5]
    assert {row["task"] for row in table_rows(models, tree, [100.0])} == {"one", "two"}


def test_a_test_part_is_tokenised_a_few_texts_at_a_time(bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hplm_builder.tenants.prepared.CHUNK", 8)
    tested = {one.text_or_pair for one in read_folder(bench.root / "colours").test}
    together: list[int] = []
    encode = TextEncoder.encode

    def counted(encoder: TextEncoder, texts: Sequence[TextOrPair]) -> list[EncodedText]:
        together.append(sum(text in tested for text in texts))
        return encode(encoder, texts)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    corpus = ["--text", str(bench.folder / "corpus.txt"), "--top", "100", "--epochs", "1"]
    report_of(bench, "tables-accuracy", *corpus)
    assert 0 < max(together) <= 8


def test_the_goal_is_for_the_largest_table_below_one_and_a_half_gigabytes() -> None:
    tests = {0.0: 0.5, 1.0: 0.79, 10.0: 0.795, 50.0: 0.70, 100.0: 0.80}
    sizes = {0.0: 0.0, 1.0: 0.1, 10.0: 1.4, 50.0: 1.6, 100.0: 3.0}
    rows = [
        {
            "task": "average",
            "top_percent": percent,
            "miss": "compute",
            "bert_base_gigabytes": sizes[percent],
            "test": test,
            "spread": 0.006,
        }
        for percent, test in tests.items()
    ]
    (goal,) = goals_of(rows)
    assert (goal.id, goal.met) == ("small-table-compute", True)
    assert goal.value == pytest.approx(0.5)
    assert goal.goal == pytest.approx(0.6)
    assert goals_of([{key: value for key, value in row.items() if key != "spread"} for row in rows]) == []
    tasks = [{**row, "task": task} for task in ("one", "two") for row in rows]
    assert goals_of([*tasks, *rows]) == [goal]
    # If each seed diverged on a task, the average is missing, and another task's row does not stand in for it.
    assert goals_of(tasks) == []
