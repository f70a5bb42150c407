"""Baselines on dev: one answer to everything, a head over frozen layers, and what the tenant's warning says."""

from __future__ import annotations

import itertools

import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.tenants.baselines import baseline_scores, baseline_warnings, constant_baseline, head_baseline
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.prepared import prepare_all
from hplm_builder.tenants.tenant_build import train_tenant
from hplm_builder.tenants.trained_layers import plot_features

from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.models.base import Base
from hplm.reporting.progress import silent
from hplm.store.layout import Store
from hplm.tasks.examples import Entity, LabelledText
from tests.tasks import colour_data, count_data, place_data, seen_data

SETTINGS = TrainSettings(epochs=2, learning_rates=(1e-2,), batch_examples=64, dropout=0.0)


@pytest.fixture(scope="module")
def lookup(tiny_store: Store, tiny_base: Base) -> OpenDomain:
    return open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)


def judged(labels: str) -> LabelledData:
    """A classification whose dev examples have these labels, a character each."""
    dev = [LabelledText(f"dev {i}", label) for i, label in enumerate(labels)]
    return LabelledData("classification", tuple(sorted(set(labels))), dev, dev, [])


def accuracy(answers: str, labels: str) -> DevScore:
    """The dev score of a model with these answers."""
    return DevScore.of(lambda numbers: sum(answers[i] == labels[i] for i in numbers) / len(numbers), len(labels))


@pytest.mark.parametrize(
    ("labels", "answers", "says"),
    [
        ("xxxxxxyyyy", "xxxxxxxxxx", True),
        ("xxxxxxyyyy", "yyyyyyyyyy", True),
        ("xxxxxxyyyy", "xxxxxxxxxy", True),
        ("xxxxxxyyyy", "xxxxxxxxyy", False),
        ("xxxxxxyyyy", "xxxxxxyyyy", False),
        ("xxxxxxxxxx", "xxxxxxxxxx", False),
    ],
    ids=["constant", "worse", "one-more", "two-more", "all-right", "one-class"],
)
def test_a_tenant_no_better_than_the_most_frequent_class_beyond_chance_has_learned_nothing(
    labels: str, answers: str, says: bool
) -> None:
    data = judged(labels)
    said = baseline_warnings(data, accuracy(answers, labels), constant_baseline(data), None, 2e-3)
    assert len(said) == says
    for one in said:
        assert one.startswith("nothing was learned: on dev the model is no better than one answer to everything")
        assert "and 0.600" in one
        assert "try other learning rates than 0.002, a lower one first, or more examples" in one


def test_the_baseline_of_a_regression_and_of_a_tagging_is_a_score_of_zero() -> None:
    for data in (count_data(), place_data()):
        found = constant_baseline(data)
        assert found is not None
        assert found.value == 0.0
        assert set(found.without) == {0.0}


def test_a_head_that_is_better_alone_is_told() -> None:
    labels = "xy" * 20
    constant, model, head = (
        accuracy(answers, labels) for answers in ("x" * 40, "xy" * 10 + "x" * 20, "xy" * 16 + "x" * 8)
    )
    (said,) = baseline_warnings(judged(labels), model, constant, head, 2e-3)
    assert said.startswith("the adapter learned less than a head alone")
    assert "(accuracy 0.750 and 0.900, standard error 0.05" in said
    assert baseline_warnings(judged(labels), head, constant, model, 2e-3) == []


@pytest.mark.parametrize("data", [colour_data(), count_data(), seen_data()], ids=["classes", "values", "pairs"])
def test_a_head_alone_over_frozen_layers_learns_words(tiny_base: Base, lookup: OpenDomain, data: LabelledData) -> None:
    parts = prepare_all(data, tiny_base.load_text_encoder(), plot_features(lookup))
    told: list[tuple[str, float]] = []
    head = head_baseline(tiny_base.load_upper(), data, parts, SETTINGS, lambda step, done: told.append((step, done)))
    constant = constant_baseline(data)
    assert head is not None
    assert constant is not None
    assert head.is_clearly_above(constant)
    assert {step for step, _ in told} == {"baseline"}
    assert told[-1] == ("baseline", 1.0)
    assert head_baseline(tiny_base.load_upper(), data, parts, SETTINGS, silent) == head


def test_the_card_has_the_baselines_of_its_task(tiny_base: Base, lookup: OpenDomain) -> None:
    classes = train_tenant(tiny_base, lookup, "colour", colour_data(), SETTINGS).card.about
    assert set(classes["baseline_scores"]) == {"constant", "head"}
    assert 0.5 <= classes["baseline_scores"]["constant"] < classes["baseline_scores"]["head"] <= 1.0
    tags = train_tenant(tiny_base, lookup, "places", place_data(), SETTINGS).card.about
    assert tags["baseline_scores"] == {"constant": 0.0}


def test_dev_examples_of_one_class_have_no_constant_baseline() -> None:
    assert constant_baseline(judged("xxx")) is None
    assert baseline_scores(constant=None, head=accuracy("xx", "xy")) == {"head": 0.5}


def test_a_training_that_learns_nothing_says_so(tiny_base: Base, lookup: OpenDomain) -> None:
    # No model can tell these dev examples apart, or finds an entity of five words in one epoch.
    # Words that no piece makes are all [UNK].
    alike = [LabelledText(f"the cat {chr(0x4E00 + place)}", colour) for place, colour in enumerate(("red", "blue") * 5)]
    places = [" ".join(words) for words in itertools.islice(itertools.product(("Paris", "Berlin"), repeat=5), 10)]
    whole = [LabelledText(text, None, (Entity("PLACE", 0, len(text)),)) for text in places]
    for data, dev in ((colour_data(), alike), (place_data(), whole)):
        data = check_data(data.train, dev, data.test)
        about = train_tenant(tiny_base, lookup, "some", data, SETTINGS).card.about
        assert any(said.startswith("nothing was learned: on dev the model") for said in about["warnings"])
