"""Warnings about odd data, and about a tenant that learned nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hplm_builder.data.data_warnings import data_warnings, has_learned
from hplm_builder.data.labelled import LabelledData, LabelledText

from hplm.core.text import TextEncoder
from hplm.errors import DataError
from hplm.models.base import Base
from hplm.tasks.examples import Entity

TEXT = "anna runs to paris"
WHOLE = LabelledText(TEXT, None, (Entity("PER", 0, 4), Entity("CITY", 13, 18)))
APART = LabelledText("paris", None, (Entity("CITY", 0, 5),))
BEGINS_WITHIN = LabelledText(TEXT, None, (Entity("PER", 2, 4),))
ENDS_WITHIN = LabelledText(TEXT, None, (Entity("CITY", 13, 16),))
BEYOND = LabelledText("the " * 60 + "paris", None, (Entity("CITY", 240, 245),))


@pytest.fixture(scope="module")
def encoder(tiny_base: Base) -> TextEncoder:
    return tiny_base.load_text_encoder()


def classes(train: dict[str, str], dev: dict[str, str], test: dict[str, str] | None = None) -> LabelledData:
    parts = [[LabelledText(text, label) for text, label in part.items()] for part in (train, dev, test or {})]
    return LabelledData("classification", tuple(sorted(set(train.values()))), *parts)


def tagging(train: list[LabelledText], dev: list[LabelledText] | None = None) -> LabelledData:
    return LabelledData("tagging", ("O", "B-CITY", "I-CITY", "B-PER", "I-PER"), train, dev or [APART], [])


def test_entities_that_can_be_found_give_no_warning(encoder: TextEncoder) -> None:
    spaced = replace(WHOLE, text=f"{TEXT} !", entities=(Entity("PER", 0, 5),))
    assert data_warnings(tagging([WHOLE, spaced]), encoder) == []


def test_entities_that_can_never_be_found_are_counted(encoder: TextEncoder) -> None:
    said, *_ = data_warnings(tagging([WHOLE, BEGINS_WITHIN, ENDS_WITHIN, BEYOND]), encoder)
    assert said.startswith("3 of 5 entities of the train data can never be found: they begin or end inside a word")
    assert f"beyond the first {encoder.max_tokens} tokens" in said


@pytest.mark.parametrize("one", [BEGINS_WITHIN, ENDS_WITHIN, BEYOND], ids=["begins", "ends", "beyond"])
def test_a_part_without_any_findable_entity_is_refused(encoder: TextEncoder, one: LabelledText) -> None:
    with pytest.raises(DataError, match="none of the 2 entities of the train data can be learned"):
        data_warnings(tagging([one, one]), encoder)
    with pytest.raises(DataError, match="none of the 1 entities of the dev data"):
        data_warnings(tagging([WHOLE], [one]), encoder)
    said, *_ = data_warnings(replace(tagging([WHOLE]), test=[one]), encoder)
    assert said.startswith("1 of 1 entities of the test data can never be found")


def test_sound_data_gives_no_warning(encoder: TextEncoder) -> None:
    train = {"the cat": "x", "a cat": "x", "the dog": "y", "a dog": "y"}
    assert data_warnings(classes(train, {"cat": "x", "dog": "y"}, {"red cat": "x"}), encoder) == []


def test_classes_with_too_few_examples_are_named(encoder: TextEncoder) -> None:
    train = {"the cat": "x", "a cat": "x", "the dog": "y", "the bird": "z"}
    assert data_warnings(classes(train, {"cat": "x"}), encoder) == [
        "2 of 3 classes have one train example: 'y', 'z'",
        "2 of 3 classes have no dev example, so their quality is not measured: 'y', 'z'",
    ]


def test_labels_that_may_mean_the_same_are_named(encoder: TextEncoder) -> None:
    train = {"the cat": "1", "a cat": "1", "the dog": "1.0", "a dog": "1.0", "a bird": "x", "the bird": "x"}
    assert data_warnings(classes(train, {"cat": "1", "dog": "1.0", "bird": "x"}), encoder) == [
        "labels differ only in capitals, width, spaces or how a number is written: '1', '1.0'; do they mean the same label?"
    ]
    train = {"the cat": "1_0", "a cat": "1_0", "the dog": "10", "a dog": "10"}
    assert data_warnings(classes(train, {"cat": "1_0", "dog": "10"}), encoder) == []
    tags = ("O", "B-CITY", "I-CITY", "B-City", "I-City", "B-PER", "I-PER")
    assert data_warnings(replace(tagging([WHOLE]), labels=tags), encoder) == [
        "labels differ only in capitals, width, spaces or how a number is written: 'CITY', 'City'; do they mean the same label?"
    ]


def test_an_uninformative_test_part_gives_a_warning(encoder: TextEncoder) -> None:
    bare = replace(tagging([WHOLE]), test=[LabelledText("the cat runs")])
    assert data_warnings(bare, encoder) == [
        "the test data holds no entity: a model that finds nothing scores best there"
    ]
    ratings = [
        [LabelledText(f"{word} {part}", f"{number}.5") for number, word in enumerate(("one", "two"))] for part in "abc"
    ]
    rated = LabelledData("regression", ("score",), *ratings)
    assert data_warnings(rated, encoder) == []
    (said,) = data_warnings(replace(rated, test=rated.test[:1]), encoder)
    assert said.startswith("the test data holds one value only")


def test_repeated_texts_are_counted(encoder: TextEncoder) -> None:
    train = {"the cat": "x", "a cat": "x", "the dog": "y", "a dog": "y"}
    data = classes(train, {"cat": "x", "dog": "y"}, {"the cat": "x", "red dog": "y"})
    twice = replace(
        data, train=[*data.train, LabelledText("a dog", "y"), LabelledText("a cat", "y", where="train.csv, line 6")]
    )
    assert data_warnings(twice, encoder) == [
        "4 of 6 train examples share their text with another example",
        "1 of 4 train texts have more than one label, for example at train.csv, line 6",
        "1 of 2 test texts are in the train data too: test scores are too good",
    ]


def test_the_share_of_truncated_texts_is_estimated(encoder: TextEncoder) -> None:
    train = {"the cat": "x", "a cat " * 60: "x", "the dog": "y", "a dog": "y"}
    (said,) = data_warnings(classes(train, {"cat": "x", "dog": "y"}), encoder)
    assert said.startswith("about 25% of the train texts are longer than the")


@pytest.mark.parametrize(
    ("data", "scores", "learned"),
    [
        (classes({}, {"cat": "x", "dog": "x", "hen": "y"}), {"dev_accuracy": 2 / 3}, False),
        (classes({}, {"cat": "x", "dog": "x", "hen": "y"}), {"dev_accuracy": 1.0}, True),
        (classes({}, {"cat": "x", "dog": "x"}), {"dev_accuracy": 1.0}, True),
        (tagging([WHOLE]), {"dev_f1": 0.0}, False),
        (tagging([WHOLE]), {"dev_f1": 0.01}, True),
        (LabelledData("regression", ("score",), [], [], []), {"dev_pearson": -0.1}, False),
        (LabelledData("regression", ("score",), [], [], []), {"dev_pearson": 0.1}, True),
    ],
    ids=["majority", "all-right", "one-class", "no-entity", "some-entity", "contrary", "alike"],
)
def test_a_tenant_no_better_than_a_constant_answer_has_learned_nothing(
    data: LabelledData, scores: dict[str, float], learned: bool
) -> None:
    assert has_learned(data, scores) == learned
