"""Texts without labels: read, labelled by a model that was trained on the labelled ones, and learned from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.labelled_files import read_data, with_unlabelled
from hplm_builder.tenants import pseudo_labels
from hplm_builder.tenants import tenant_build as builder
from hplm_builder.tenants.finetune import Trained, TrainSettings
from hplm_builder.tenants.judging import predict
from hplm_builder.tenants.prepared import Prepared, prepare, prepare_all
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE, pseudo_labelled
from hplm_builder.tenants.tenant_build import estimate_fine_tune, train_tenant
from hplm_builder.tenants.trained_layers import plot_features

from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import ConfigError, DataError
from hplm.models.base import Base
from hplm.store.layout import Store
from hplm.tasks.examples import LabelledText
from tests.tasks import colour_data, count_data, place_data

SETTINGS = TrainSettings(epochs=3, learning_rates=(1e-2, 3e-3), batch_examples=64, dropout=0.0)
ROWS = "text,label\n" + "".join(f"text {i},{'xy'[i % 2]}\n" for i in range(30))


@pytest.fixture(scope="module")
def lookup(tiny_store: Store, tiny_base: Base) -> OpenDomain:
    return open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)


def partly(data: LabelledData, labelled: int = 60) -> LabelledData:
    """The data with the labels of its first train examples alone."""
    few = check_data(data.train[:labelled], data.dev, data.test, task=data.task)
    return with_unlabelled(few, [LabelledText(one.text, pair=one.pair) for one in data.train])


def test_what_is_labelled_already_is_not_among_the_unlabelled() -> None:
    train = [LabelledText(f"text {i}", "xy"[i % 2]) for i in range(20)]
    data = check_data(train[:12], train[12:16], train[16:])
    more = [LabelledText(text) for text in ("text 3", "text 13", "text 17", "new", "newer", "new")]
    assert [one.text for one in with_unlabelled(data, more).unlabelled] == ["new", "newer"]
    with pytest.raises(DataError, match="no text that is not in the labelled data"):
        with_unlabelled(data, more[:3])
    with pytest.raises(DataError, match="1 of 2 unlabelled texts are not single texts"):
        with_unlabelled(data, [LabelledText("a"), LabelledText("a", pair="b")])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("more.csv", "text\nnew\nnewer\n"),
        ("more.csv", "text,label\nnew,of no class\nnewer,x\n"),
        ("more.jsonl", '{"text": "new"}\n{"sentence": "newer", "entities": "not looked at"}\n'),
        ("more.conll", "new O\n\nnewer B-x\n"),
    ],
)
def test_a_file_of_texts_needs_no_labels_and_none_is_read(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "train.csv").write_text(ROWS)
    (tmp_path / name).write_text(content)
    data = read_data(tmp_path / "train.csv", unlabelled=tmp_path / name)
    assert data.unlabelled == [LabelledText("new"), LabelledText("newer")]


def test_a_file_that_holds_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(ROWS)
    (tmp_path / "more.csv").write_text("label\nx\n")
    with pytest.raises(DataError, match=r"more\.csv, line 1: no column `text`"):
        read_data(tmp_path / "train.csv", unlabelled=tmp_path / "more.csv")


@pytest.fixture
def teachers(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Collect the teachers that are trained in the test."""
    found: list[Trained] = []
    really = pseudo_labels.fine_tune

    def fine_tune(*given: Any, **options: Any) -> Trained:
        found.append(really(*given, **options))
        return found[-1]

    monkeypatch.setattr(pseudo_labels, "fine_tune", fine_tune)
    return found


@pytest.mark.parametrize("data", [colour_data(), place_data(), count_data(), count_data(pairs=True)])
def test_a_teacher_labels_every_text_as_it_answers_it(
    tiny_base: Base, lookup: OpenDomain, data: LabelledData, teachers: list[Trained]
) -> None:
    data = partly(data)
    encoder, featurise = tiny_base.load_text_encoder(), plot_features(lookup)
    parts = prepare_all(data, encoder, featurise)
    unlabelled = prepare(data.unlabelled, data, encoder, featurise)
    taught = pseudo_labelled(tiny_base, data, parts, unlabelled, SETTINGS)
    (teacher,) = teachers
    assert (taught.scores, taught.best_epoch) == (teacher.scores, teacher.best_epoch)
    assert teacher.learning_rate == TEACHER_RATE
    assert not any(name.startswith("test") for name in teacher.scores)
    before, after = tiny_base.load_upper().state_dict(), teacher.body.state_dict()
    assert all(
        (after[f"upper.{name}"] != value).any() for name, value in before.items() if name.endswith("ffn_in.weight")
    )
    answers = predict(teacher.body, teacher.head, data, unlabelled, "mean")
    assert any(answers)
    assert [one.source.text_or_pair for one in taught.examples] == [one.text_or_pair for one in data.unlabelled]
    for one, answer in zip(taught.examples, answers, strict=True):
        if data.task == "tagging":
            found = [(entity.label, entity.start, entity.end) for entity in one.source.entities]
            assert found == [(span.label, span.start, span.end) for span in answer]
        elif data.task == "regression":
            assert one.source.value == pytest.approx(answer[0].score)
        else:
            assert one.source.label == answer[0].label
    # Targets are the same as if the data had these labels.
    again = prepare([one.source for one in taught.examples], data, encoder, featurise)
    assert all(torch.equal(one.targets, two.targets) for one, two in zip(taught.examples, again, strict=True))


def test_what_a_teacher_says_is_mostly_right(tiny_base: Base, lookup: OpenDomain) -> None:
    data = partly(colour_data(), 120)
    encoder, featurise = tiny_base.load_text_encoder(), plot_features(lookup)
    parts = prepare_all(data, encoder, featurise)
    unlabelled = prepare(data.unlabelled, data, encoder, featurise)
    taught = pseudo_labelled(tiny_base, data, parts, unlabelled, replace(SETTINGS, epochs=40, patience=20))
    right = [("red" if "red" in one.source.text else "blue") == one.source.label for one in taught.examples]
    assert np.mean(right) > 0.7


def test_a_teacher_that_learned_nothing_labels_nothing(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pseudo_labels, "TEACHER_RATE", 1e-12)
    # Where it began it says the same of nearly every text.
    with pytest.raises(
        ConfigError, match=r"the teacher that labels unlabelled texts learned nothing .* train without them"
    ):
        train_tenant(tiny_base, lookup, "colour", partly(colour_data()), SETTINGS)


def test_a_teacher_that_does_not_train_is_named(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pseudo_labels, "TEACHER_RATE", 1e38)
    with pytest.raises(ConfigError, match=r"the teacher that labels unlabelled texts diverged .* train without them"):
        train_tenant(tiny_base, lookup, "colour", partly(colour_data()), SETTINGS)


def test_a_tenant_learns_from_both_and_its_card_tells(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = partly(place_data())
    seen: list[list[Prepared]] = []
    really = builder.fine_tune

    def fine_tune(*given: Any, **options: Any) -> Any:
        seen.append(given[3][0])
        return really(*given, **options)

    monkeypatch.setattr(builder, "fine_tune", fine_tune)
    told: list[tuple[str, float]] = []
    made = train_tenant(tiny_base, lookup, "places", data, SETTINGS, lambda step, done: told.append((step, done)))
    (train,) = seen
    assert [one.source.text for one in train] == [one.text for one in [*data.train, *data.unlabelled]]
    assert [one.source for one in train[: len(data.train)]] == data.train
    about = made.card.about
    assert about["examples"] == {"train": 60, "dev": 40, "test": 40, "unlabelled": len(data.unlabelled)}
    assert set(about["teacher"]) == {"scores", "best_epoch"}
    steps = ["features", "unlabelled", "teacher", "label", "fine-tune"]
    assert list(dict.fromkeys(step for step, _ in told)) == steps
    for step in steps:
        shares = [done for found, done in told if found == step]
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1.0)


def test_the_time_is_estimated_with_the_teachers(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token takes so many seconds that the time to take features, which is measured, does not count.
    monkeypatch.setattr(builder, "_token_s", lambda *given: 1e6)
    data = partly(colour_data())
    tokens = 7  # five words, [CLS] and [SEP]
    unlabelled, epochs = len(data.unlabelled), SETTINGS.epochs
    teacher = epochs * (3 * 60 + 40) + 40 + unlabelled
    student = 2 * epochs * (3 * (60 + unlabelled) + 40) + 40 + 40
    found = estimate_fine_tune(data, SETTINGS, tiny_base, lookup) / 1e6 / tokens
    assert found == pytest.approx(teacher + student, rel=1e-3)
    found = estimate_fine_tune(replace(data, unlabelled=[]), SETTINGS, tiny_base, lookup) / 1e6 / tokens
    assert found == pytest.approx(2 * epochs * (3 * 60 + 40) + 80, rel=1e-3)
