"""Fine-tuning learns every kind of task, keeps what it found out, and what is published predicts the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.tokenising import BATCH_CHARACTERS
from hplm_builder.jobs.local_builds import build_tenant
from hplm_builder.tenants import finetune
from hplm_builder.tenants.bodies import ADAPTER_AT, HeadModel, adapter_body, fastest_format
from hplm_builder.tenants.finetune import Trainer, TrainSettings
from hplm_builder.tenants.judging import scores_of
from hplm_builder.tenants.prepared import (
    CHUNK,
    Prepared,
    Room,
    chunks,
    packed_batches,
    prepare,
    prepare_all,
    sample_of,
)
from hplm_builder.tenants.tenant_build import MOST_STEPS, estimate_fine_tune, train_tenant
from hplm_builder.tenants.trained_layers import plot_features
from rich.progress import Progress

from hplm.adapters import bank_file
from hplm.adapters import tenant as tenants
from hplm.adapters.packed import Place
from hplm.adapters.tenant import Tenant
from hplm.core.names import check_name
from hplm.core.settings import REDUCTION_FACTOR, EncodeSettings
from hplm.core.text import TextEncoder
from hplm.engine import reference
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import (
    ConfigError,
    CorruptArtifactError,
    DataError,
    HplmError,
    TenantNameError,
)
from hplm.models.base import Base
from hplm.models.device import computing_in
from hplm.runtime.memory import count_memory
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.request import Request
from hplm.store.layout import Store
from hplm.tasks.examples import Entity, LabelledText
from hplm.tasks.tagging import WORD_WINDOW, Tagging
from hplm.tasks.task import IGNORED
from hplm.tasks.task_loader import TASKS, task_named
from tests import tiny
from tests.batches import find_labels
from tests.doubles import ManualClock
from tests.tasks import colour_data, count_data, place_data, seen_data

FAST = TrainSettings(epochs=30, learning_rates=(1e-2,), batch_examples=64, dropout=0.0, patience=10)
SHORT = replace(FAST, epochs=3)


@pytest.fixture(scope="module")
def lookup(tiny_store: Store, tiny_base: Base) -> OpenDomain:
    return open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("colour", colour_data()),
        ("places", place_data()),
        ("count", count_data()),
        ("differ", count_data(pairs=True)),
        ("seen", seen_data()),
    ],
)
def test_a_tenant_learns_its_task_and_serving_answers_as_the_test_scored(
    tmp_path: Path, name: str, data: LabelledData
) -> None:
    # Random windows keep more of each token than random blocks do, so that each task can be learned.
    models = tiny.make_repository(tmp_path, shape=tiny.config(form="windows"))
    store, base = tiny.opened(tmp_path)
    card = build_tenant(store, "tiny", "general", name, data, FAST, Progress(disable=True))
    assert card.about["curve"]
    metric = task_named(data.task).metric
    assert card.about["scores"][f"test_{metric}"] > 0.6
    assert (card.task, card.labels, card.texts) == (data.task, data.labels, data.texts)
    settings = EncodeSettings(store="../../../store", base="tiny", dtype="float32")
    stage = EncodeStage(settings, models / "hbert_upper" / "1")
    lookup = open_lineage(store, base, ["plots/general"], dtype=torch.float32)
    examples = prepare(data.test, data, TextEncoder(base.tokenizer_path, 40), plot_features(lookup))
    found = find_labels(
        stage, [Request(EncodeInput(one.features.numpy(), one.tokens), name.encode()) for one in examples]
    )
    # What is served keeps nothing of how it was trained.
    assert stage._cache.get(stage._bank.resolve(name.encode())).card.about == {}
    served = scores_of(data, examples, [one.spans for one in found if isinstance(one, EncodeAnswer)])[metric]
    # Training and serving round differently; a sentence or two may tip over.
    assert abs(served - card.about["scores"][f"test_{metric}"]) < 0.08


def test_values_of_a_regression_come_as_they_were_given(tiny_base: Base, lookup: OpenDomain) -> None:
    data = count_data()
    made = train_tenant(tiny_base, lookup, "count", data, FAST)
    # Weights alone, however trained, would have to reach 100 from near 0.
    assert made.head.bias[0] > 50
    assert set(made.card.about["scores"]) == {f"{p}_{m}" for p in ("dev", "test") for m in ("pearson", "spearman")}


def test_the_card_tells_how_training_went_in_json_values(tiny_base: Base, lookup: OpenDomain) -> None:
    data = colour_data()
    made = train_tenant(tiny_base, lookup, "colour", data, replace(SHORT, learning_rates=(1e-2, 1e-3)))
    about = made.card.about
    assert json.loads(json.dumps(about, allow_nan=False)) == about
    assert [(row["learning_rate"], row["epoch"]) for row in about["curve"]] == [
        (rate, epoch) for rate in (1e-2, 1e-3) for epoch in (1, 2, 3)
    ]
    first, second, third = about["curve"][:3]
    assert 0 < third["loss"] < first["loss"] * 1.5
    assert third["rate"] < second["rate"] <= 1e-2
    best = max(row["dev"] for row in about["curve"])
    assert about["scores"]["dev_accuracy"] == pytest.approx(best, abs=1e-4)
    for part, examples in (("dev", data.dev), ("test", data.test)):
        counts = about["confusion"][part]
        assert sum(sum(found.values()) for found in counts.values()) == len(examples)
        for label in data.labels:
            assert sum(counts[label].values()) == sum(example.label == label for example in examples)


def test_the_card_of_a_tagging_has_figures_of_each_type(tiny_base: Base, lookup: OpenDomain) -> None:
    data = place_data()
    about = train_tenant(tiny_base, lookup, "places", data, SHORT).card.about
    assert set(about["types"]["test"]) == {"PLACE"}
    assert about["types"]["test"]["PLACE"]["gold"] == sum(len(example.entities) for example in data.test)
    assert about["types"]["dev"]["PLACE"]["f1"] == pytest.approx(about["scores"]["dev_f1"])


def test_training_ends_when_dev_gets_no_better_and_keeps_the_best_epoch(tiny_base: Base, lookup: OpenDomain) -> None:
    rng = np.random.default_rng(0)
    noise = [LabelledText(text, str(rng.choice(["x", "y"]))) for text in tiny.sentences(80, words=(2, 6))]
    data = check_data(noise[:40], noise[40:], [])
    about = train_tenant(tiny_base, lookup, "noise", data, replace(FAST, epochs=50, patience=2)).card.about
    curve = about["curve"]
    assert len(curve) < 50
    assert len(curve) == about["best_epoch"] + 2
    assert curve[about["best_epoch"] - 1]["dev"] == max(row["dev"] for row in curve)


@pytest.mark.parametrize(
    ("data", "dev_scores", "kept"),
    [
        # Chance is two standard errors of 0.8: 0.11 with 56 entities.
        (place_data(), [0.5, 0.8, 0.71, 0.68], 3),
        (place_data(), [0.8, 0.68, 0.1, 0.6], 1),
        # Of 0.05 it is more than that, but an epoch that finds nothing is not kept for it.
        (place_data(), [0.05, 0.0, 0.01, 0.0], 3),
        (place_data(), [0.0, 0.0, 0.05, 0.0], 3),
        (colour_data(), [0.5, 0.8, 0.7, 0.8], 2),
    ],
)
def test_of_a_tagging_the_last_epoch_is_kept_that_is_below_the_best_by_chance_alone(
    monkeypatch: pytest.MonkeyPatch,
    tiny_base: Base,
    lookup: OpenDomain,
    data: LabelledData,
    dev_scores: list[float],
    kept: int,
) -> None:
    assert data.task != "tagging" or sum(len(one.entities) for one in data.dev) == 56
    told = iter(dev_scores)
    monkeypatch.setattr(finetune._Run, "_score", lambda *given: next(told))
    about = train_tenant(tiny_base, lookup, "some", data, replace(SHORT, epochs=4)).card.about
    assert about["best_epoch"] == kept


@pytest.mark.parametrize(("dev_scores", "kept"), [([0.8, 0.79, 0.8, 0.78], 0), ([0.8, 0.79, 0.85, 0.82], 3)])
def test_an_update_of_a_tagging_keeps_nothing_that_is_no_better_than_the_version_before(
    monkeypatch: pytest.MonkeyPatch, tiny_base: Base, lookup: OpenDomain, dev_scores: list[float], kept: int
) -> None:
    start = train_tenant(tiny_base, lookup, "places", place_data(), SHORT)
    told = iter(dev_scores)
    monkeypatch.setattr(finetune._Run, "_score", lambda *given: next(told))
    assert train_tenant(tiny_base, lookup, "places", place_data(), SHORT, start=start).card.about["best_epoch"] == kept


def test_a_tagging_that_finds_nothing_yet_goes_on(tiny_base: Base, lookup: OpenDomain) -> None:
    whole = LabelledText("Paris Berlin Paris Berlin Paris", None, (Entity("PLACE", 0, 31),))
    train, _, test = place_data().labelled.values()
    settings = replace(FAST, learning_rates=(1e-7,), epochs=6, patience=1)
    about = train_tenant(tiny_base, lookup, "places", check_data(train, [whole], test), settings).card.about
    assert [row["dev"] for row in about["curve"]] == [0.0] * 6
    assert any("nothing was learned: on dev the model is no better" in said for said in about["warnings"])


def test_batches_are_of_so_many_texts_and_of_fewer_long_ones(tiny_base: Base, lookup: OpenDomain) -> None:
    def sizes(texts: Sequence[str]) -> list[int]:
        labelled = [LabelledText(text, "ab"[i % 2]) for i, text in enumerate(texts)]
        data = check_data(labelled, labelled, [])
        examples = prepare(data.train, data, tiny_base.load_text_encoder(), plot_features(lookup))
        return sorted(map(len, packed_batches(examples, 64, np.random.default_rng(0))))

    assert sizes(["the red cat"] * 256) == [64] * 4
    # 40 tokens each, as long as a text may be here: 52 of them go beyond 2,048.
    assert sizes(["cat " * 60] * 104) == [52, 52]
    assert sizes(["the red cat", "a dog"]) == [2]


@pytest.mark.parametrize("is_update", [False, True])
def test_progress_is_told_step_by_step_and_never_goes_back(
    tiny_base: Base, lookup: OpenDomain, is_update: bool
) -> None:
    told: list[tuple[str, float]] = []
    data = colour_data()
    start = train_tenant(tiny_base, lookup, "colour", data, SHORT) if is_update else None
    settings = replace(SHORT, learning_rates=(1e-2, 1e-3))

    def report(step: str, done: float) -> None:
        told.append((step, done))

    train_tenant(tiny_base, lookup, "colour", data, settings, report, start=start)
    for step in ("features", "fine-tune"):
        values = [done for name, done in told if name == step]
        assert values == sorted(values)
        assert 0 < values[0] < 1 or step == "features"
        assert values[-1] == 1.0
    assert len(told) > 20


def test_a_report_that_raises_ends_the_work_at_once(tiny_base: Base, lookup: OpenDomain) -> None:
    class Stop(HplmError):
        code = "STOP"

    told = 0

    def report(step: str, done: float) -> None:
        nonlocal told
        if step == "fine-tune":
            told += 1
            if told == 3:
                raise Stop("enough")

    with pytest.raises(Stop):
        train_tenant(tiny_base, lookup, "colour", colour_data(), SHORT, report)
    assert told == 3


@pytest.mark.parametrize("data", [colour_data(), count_data()], ids=["classification", "regression"])
def test_an_update_goes_on_from_the_version_before_and_keeps_nothing_worse(
    tiny_base: Base, lookup: OpenDomain, data: LabelledData
) -> None:
    first = train_tenant(tiny_base, lookup, "acme", data, FAST)
    useless = replace(SHORT, epochs=1, learning_rates=(1e-9,))
    second = train_tenant(tiny_base, lookup, "acme", data, useless, start=first)
    metric = f"test_{task_named(data.task).metric}"
    assert second.card.about["scores"][metric] == pytest.approx(first.card.about["scores"][metric], abs=0.02)
    np.testing.assert_allclose(second.head.bias, first.head.bias, atol=1e-3)
    np.testing.assert_allclose(second.adapter.down, first.adapter.down, atol=1e-3)


@pytest.mark.parametrize("place", tiny.PLACES)
def test_adapters_train_where_they_are_served(tiny_base: Base, place: Place) -> None:
    tenant = tiny.tenant_of(tiny_base, "alpha", seed=1)
    tenant = replace(tenant, card=replace(tenant.card, adapter_at=place))
    body = adapter_body(tiny_base.load_upper(), REDUCTION_FACTOR, tenant.adapter, at=place)()
    hidden = torch.randn(7, tiny_base.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), computing_in(*fastest_format()):
        trained = body(hidden, [7]).float()
    served = reference.upper(tiny_base.load_upper(), hidden, tenant)
    torch.testing.assert_close(trained, served, atol=0.1, rtol=0.05)


def test_an_update_keeps_the_place_of_the_version_before(tiny_base: Base, lookup: OpenDomain) -> None:
    first = train_tenant(tiny_base, lookup, "acme", colour_data(), SHORT)
    assert first.card.adapter_at == ADAPTER_AT
    old = replace(first, card=replace(first.card, adapter_at="attention"))
    assert train_tenant(tiny_base, lookup, "acme", colour_data(), SHORT, start=old).card.adapter_at == "attention"


def test_training_that_diverges_is_refused_and_publishes_nothing(
    tmp_path: Path, tiny_base: Base, lookup: OpenDomain
) -> None:
    with pytest.raises(ConfigError, match="diverged at learning rates"):
        train_tenant(tiny_base, lookup, "colour", colour_data(), replace(SHORT, learning_rates=(1e30,)))


def test_an_estimate_is_about_what_it_takes(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < estimate_fine_tune(colour_data(), SHORT, tiny_base, lookup) < 60
    # A token takes so many seconds that the time to take features, which is measured, does not count.
    monkeypatch.setattr("hplm_builder.tenants.tenant_build._token_s", lambda *given: 1e6)
    small = estimate_fine_tune(colour_data(), SHORT, tiny_base, lookup)
    large = estimate_fine_tune(colour_data(), replace(SHORT, epochs=300), tiny_base, lookup)
    assert 10 < large / small < 1000


def test_an_estimate_is_no_longer_for_a_pause_while_it_is_measured(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("hplm_builder.tenants.tenant_build.time", SimpleNamespace(perf_counter=clock))

    def estimated_s(took_s: Sequence[float]) -> float:
        left_s = iter(took_s)

        def step(trainer: Trainer, *_: object) -> float:
            clock.now_s += next(left_s)
            return 0.0

        monkeypatch.setattr(Trainer, "step", step)
        return estimate_fine_tune(colour_data(), SHORT, tiny_base, lookup)

    usual_s = estimated_s([1.0, *[0.01] * MOST_STEPS])
    assert usual_s > 0
    assert estimated_s([1.0, 0.3, *[0.01] * (MOST_STEPS - 1)]) == pytest.approx(usual_s)
    # The first is no measurement, and a second one of so long a step would change little.
    assert estimated_s([1.0, 2.0]) == pytest.approx(200 * usual_s)


def test_a_text_without_a_token_is_refused(tiny_base: Base, lookup: OpenDomain) -> None:
    examples = [LabelledText("cat", "x"), LabelledText("\x01\x02", "y")]
    with pytest.raises(DataError, match="nothing but white space and control characters"):
        train_tenant(
            tiny_base, lookup, "odd", LabelledData("classification", ("x", "y"), examples, examples, []), SHORT
        )


def test_a_pair_of_which_one_text_has_no_token_is_refused_with_both(tiny_base: Base, lookup: OpenDomain) -> None:
    examples = [LabelledText("cat", "x", pair="dog"), LabelledText("bird", "y", pair="\x01")]
    data = LabelledData("classification", ("x", "y"), examples, examples, [])
    with pytest.raises(DataError, match=r"control characters: 'bird', '\\x01'"):
        train_tenant(tiny_base, lookup, "odd", data, SHORT)


def test_a_sample_is_evenly_from_all_over_a_part() -> None:
    part = [LabelledText(str(number), "x") for number in range(127)]
    taken = [int(one.text) for one in sample_of(part, 64)]
    assert len(taken) == 64
    assert {b - a for a, b in pairwise(taken)} == {1, 2}
    assert taken[-1] > 123
    assert sample_of(part, 200) == part
    assert sample_of([], 64) == []


def test_data_whose_features_the_memory_cannot_hold_are_refused_before_and_while_they_are_computed(
    tiny_base: Base, lookup: OpenDomain
) -> None:
    data, encoder = colour_data(), TextEncoder(tiny_base.tokenizer_path, 40)
    features = plot_features(lookup)
    taken = sum(one.features.nbytes for part in prepare_all(data, encoder, features) for one in part)
    Room(2 * taken).expect(data, encoder, lookup.token_bytes)
    prepare_all(data, encoder, features, room=Room(taken))
    with pytest.raises(DataError, match="send fewer or shorter texts"):
        Room(taken // 2).expect(data, encoder, lookup.token_bytes)
    with pytest.raises(DataError, match="send fewer or shorter texts"):
        prepare_all(data, encoder, features, room=Room(taken - 1))


def test_a_containers_limit_counts_as_its_memory(tmp_path: Path) -> None:
    machine = count_memory(tmp_path)
    assert machine > 1e9
    for written, wanted in (("max\n", machine), ("500000000\n", 500_000_000), (f"{machine * 2}\n", machine)):
        (tmp_path / "memory.max").write_text(written)
        assert count_memory(tmp_path) == wanted


def test_a_published_tenant_reads_back_bit_by_bit(tiny_base: Base, tiny_store: Store, tmp_path: Path) -> None:
    made = tiny.load_tenant(tiny_store, tiny_base, "tagger")
    tenants.save(tmp_path / "tagger", made)
    again = tenants.load(tmp_path / "tagger", fingerprint=tiny_base.fingerprint)
    assert again.card == made.card
    for name, array in vars(made.adapter).items():
        np.testing.assert_array_equal(array, getattr(again.adapter, name))
    assert set(made.head.arrays) == {"weight", "bias", "transitions"}
    for name, array in made.head.arrays.items():
        np.testing.assert_array_equal(array, getattr(again.head, name))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_head_over_some_words_reads_back_and_older_servers_hear_of_it_where_it_is_more_than_one(
    tiny_base: Base, tmp_path: Path, window: int
) -> None:
    made = with_window(tiny.tenant_of(tiny_base, "tagger", 1), window)
    assert ("word_window" in tenants.card_meta(made.card)) == (window > 1)
    tenants.save(tmp_path / "tagger", made)
    again = tenants.load(tmp_path / "tagger", fingerprint=tiny_base.fingerprint)
    assert again.card == made.card
    np.testing.assert_array_equal(again.head.weight, made.head.weight)
    bank_file.write(tmp_path / "bank", tiny_base.fingerprint, [made])
    banked = bank_file.BankFile(tmp_path / "bank", tiny_base.fingerprint).load("tagger")
    assert banked.card == made.card
    for name, array in made.head.arrays.items():
        np.testing.assert_array_equal(getattr(banked.head, name), array)
    tenants.save(tmp_path / "odd" / "tagger", replace(made, card=replace(made.card, word_window=5)))
    with pytest.raises(CorruptArtifactError, match="do not fit"):
        tenants.load(tmp_path / "odd" / "tagger", fingerprint=tiny_base.fingerprint)


def with_window(tagger: Tenant, window: int) -> Tenant:
    """Return a tenant whose head has random weights and the word window."""
    rng = np.random.default_rng(0)
    outputs, hidden = window * len(tagger.card.labels), tagger.head.weight.shape[1]
    weight, bias = rng.normal(0, 0.5, (outputs, hidden)), rng.normal(0, 0.5, outputs)
    head = replace(tagger.head, weight=weight.astype(np.float32), bias=bias.astype(np.float32))
    return replace(tagger, card=replace(tagger.card, word_window=window), head=head)


def test_transitions_that_do_not_fit_the_labels_or_the_task_are_corrupt(tiny_base: Base, tmp_path: Path) -> None:
    for name, moves in (
        ("tagger", np.zeros((5, 4), np.float32)),
        ("tagger", None),
        ("alpha", np.zeros((3, 2), np.float32)),
    ):
        made = tiny.tenant_of(tiny_base, name, 1)
        folder = tmp_path / str(moves is None) / name
        tenants.save(folder, replace(made, head=replace(made.head, transitions=moves)))
        with pytest.raises(CorruptArtifactError, match="do not fit"):
            tenants.load(folder, fingerprint=tiny_base.fingerprint)


def test_a_tagging_from_before_is_served_and_a_server_from_before_reads_that_it_cannot_serve_a_new_one(
    tiny_base: Base, tmp_path: Path
) -> None:
    made = tiny.tenant_of(tiny_base, "tagger", 1)
    assert tenants.card_meta(made.card)["transitions"] is True
    before = replace(made, card=replace(made.card, transitions=False), head=replace(made.head, transitions=None))
    assert "transitions" not in tenants.card_meta(before.card)
    tenants.save(tmp_path / "tagger", before)
    assert tenants.load(tmp_path / "tagger", fingerprint=tiny_base.fingerprint).head.transitions is None


def test_a_tagging_learns_which_tags_follow_each_other_and_goes_on_from_a_head_that_has_none(
    tiny_base: Base, lookup: OpenDomain
) -> None:
    data = place_data()
    made = train_tenant(tiny_base, lookup, "places", data, SHORT)
    moves = made.head.transitions
    assert moves is not None
    assert moves.shape == (4, 3)
    assert np.abs(moves).max() > 0.01
    # At a rate that moves nothing, an update has what it began with, and none is no preference.
    still = replace(SHORT, epochs=1)
    for start, wanted in (
        (made, moves),
        (replace(made, head=replace(made.head, transitions=None)), np.zeros_like(moves)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finetune, "TRANSITIONS_RATE", 1e-9)
            again = train_tenant(tiny_base, lookup, "places", data, still, start=start)
        assert again.card.transitions
        np.testing.assert_allclose(again.head.transitions, wanted, atol=1e-6)
    assert train_tenant(tiny_base, lookup, "colour", colour_data(), SHORT).head.transitions is None


def test_the_learning_rate_of_a_tagging_goes_up_for_longer(tiny_base: Base, lookup: OpenDomain) -> None:
    settings = replace(SHORT, epochs=10, patience=10)
    highest = {}
    for data in (place_data(), colour_data()):
        curve = train_tenant(tiny_base, lookup, "some", data, settings).card.about["curve"]
        highest[data.task] = max(curve, key=lambda row: row["rate"])["epoch"]
    assert highest == {"tagging": 3, "classification": 1}


def test_tags_are_learned_from_the_words_beside_them() -> None:
    """Only the words beside a word say its tag, and no layer below the head mixes words."""
    rng = np.random.default_rng(0)
    data = LabelledData("tagging", ("O", "B-X"), [], [], [])
    examples = []
    for _ in range(60):
        signs = rng.choice([-1.0, 1.0], 6)
        # Each word has two pieces; the second one tells what the next word is.
        features = np.zeros((14, 4), np.float32)
        features[2:14:2, 0] = signs
        tokens = np.array([(0, 0, -1), *((i, i + 1, i // 2) for i in range(12)), (0, 0, -1)], np.int32)
        targets = torch.full((14,), IGNORED)
        targets[1:13:2] = torch.tensor([0, *(int(sign > 0) for sign in signs[:-1])])
        spans = tuple(Entity("X", 2 * word, 2 * word + 2) for word in range(1, 6) if signs[word - 1] > 0)
        text = LabelledText("x" * 12, None, spans)
        examples.append(Prepared(torch.from_numpy(features).half(), targets, tokens, text))
    settings = replace(FAST, learning_rates=(0.1,))
    parts = examples[:40], examples[40:50], examples[50:]
    scores = {}
    for window in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tagging, "new_word_window", window)
            trained = finetune.fine_tune(HeadModel, 4, data, parts, settings)
        assert len(trained.head.bias) == 2 * window
        scores[window] = trained.scores["test_f1"]
    assert scores[3] == 1.0
    assert scores[1] < 0.8


@pytest.mark.parametrize(
    ("task", "of_slots", "factor"),
    [("tagging", 4, 4), ("tagging", 24, 24), ("classification", 4, 16), ("regression", 24, 24)],
)
def test_a_new_tagging_is_usually_as_wide_as_the_slots_and_others_are_narrow(
    task: str, of_slots: int, factor: int
) -> None:
    assert task_named(task).reduction_factor(of_slots) == factor


def test_a_reduction_factor_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction_factor must be at least 1, got 0"):
        TrainSettings(reduction_factor=0)


def test_an_update_reads_as_many_words_as_the_version_before(tiny_base: Base, lookup: OpenDomain) -> None:
    data = place_data()
    first = train_tenant(tiny_base, lookup, "places", data, SHORT)
    assert first.card.word_window == WORD_WINDOW
    centre = slice(len(data.labels), 2 * len(data.labels))
    old_head = replace(first.head, weight=first.head.weight[centre], bias=first.head.bias[centre])
    old = replace(first, card=replace(first.card, word_window=1), head=old_head)
    for start in (first, old):
        again = train_tenant(tiny_base, lookup, "places", data, SHORT, start=start)
        assert again.card.word_window == start.card.word_window
        assert again.head.weight.shape == start.head.weight.shape


def test_an_entity_that_starts_within_a_word_or_goes_on_after_another_begins_with_its_beginning_tag() -> None:
    tokens = np.array([(0, 0, -1), (0, 3, 0), (4, 7, 1), (8, 11, 2), (12, 15, 3), (0, 0, -1)], dtype=np.int32)
    ids = {tag: number for number, tag in enumerate(("O", "B-X", "I-X", "B-Y", "I-Y"))}

    def tags(*entities: Entity) -> list[int]:
        found = TASKS["tagging"].targets(LabelledText("abc def ghi jkl", None, entities), tokens, ids)
        return [number for number in found.tolist() if number != IGNORED]

    assert tags(Entity("X", 0, 7)) == [1, 2, 0, 0]
    assert tags(Entity("X", 1, 11)) == [0, 1, 2, 0]
    assert tags(Entity("X", 0, 15), Entity("Y", 4, 7)) == [1, 3, 1, 2]


def test_a_card_from_before_has_one_text_and_the_papers_place_and_impossible_cards_are_corrupt(
    tiny_store: Store,
) -> None:
    meta = asdict(tenants.load_card(tiny.folder_of(tiny_store, "alpha")))
    for key in ("texts", "example_pair", "adapter_at", "word_window"):
        del meta[key]
    old = tenants.parse_card(meta, "old")
    assert (old.texts, old.adapter_at, old.word_window) == (1, "attention", 1)
    odd_windows = [{"task": "tagging", "word_window": odd} for odd in (0, 2, 11, -1, 3.0, True, "3", None)]
    odd = [{"texts": 3}, {"adapter_at": "end"}, {"task": "regression"}, {"task": "tagging", "texts": 2}]
    for changed in (*odd, *odd_windows, {"word_window": 3}):
        with pytest.raises(CorruptArtifactError, match="not a tenant's card"):
            tenants.parse_card({**meta, **changed}, "odd")
    with pytest.raises(CorruptArtifactError, match=r"odd: there is no task 'poetry'; .* install the package"):
        tenants.parse_card({**meta, "task": "poetry"}, "odd")
    with pytest.raises(CorruptArtifactError, match="another version of hplm, which knows 'taste'"):
        tenants.parse_card({**meta, "taste": 1}, "odd")


@pytest.mark.parametrize("place", tiny.PLACES)
def test_a_card_reads_back_and_says_no_more_than_older_servers_know_where_they_can_serve_it(
    tiny_base: Base, place: Place
) -> None:
    card = replace(tiny.tenant_of(tiny_base, "alpha", seed=1).card, adapter_at=place)
    meta = json.loads(json.dumps(tenants.card_meta(card)))
    assert tenants.parse_card(meta, "here") == card
    assert ("adapter_at" in meta) == (place == "input")


@pytest.mark.parametrize("name", ["", "a/b", "../a", "A", "a" * 65, "-a", "a b", "ä", "a\n"])
def test_a_name_that_could_be_a_path_or_is_odd_is_refused_without_repeating_it(name: str) -> None:
    with pytest.raises(TenantNameError) as caught:
        check_name(name)
    assert name == "" or len(name) == 1 or name not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], []),
        ([1] * (CHUNK + 1), [CHUNK, 1]),
        ([BATCH_CHARACTERS] * 3, [1, 1, 1]),
        ([1, BATCH_CHARACTERS // 2, BATCH_CHARACTERS // 2, 1], [3, 1]),
    ],
    ids=["none", "short", "long", "between"],
)
def test_few_long_texts_are_tokenised_together(sizes: list[int], wanted: list[int]) -> None:
    examples = [LabelledText("x" * size, "a") for size in sizes]
    found = list(chunks(examples))
    assert [len(chunk) for chunk in found] == wanted
    assert [one for chunk in found for one in chunk] == examples
    pairs = [LabelledText("x", "a", pair="y" * BATCH_CHARACTERS)] * 2
    assert [len(chunk) for chunk in chunks(pairs)] == [1, 1]
