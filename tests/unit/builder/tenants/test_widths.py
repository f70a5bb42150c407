"""The width of an adapter: which widths are trained, what dev chooses, and what the card says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.finetune import Trained, TrainSettings
from hplm_builder.tenants.tenant_build import estimate_fine_tune, train_tenant
from hplm_builder.tenants.widths import choose, factors_to_train, train_widths
from torch import nn

from hplm.adapters.tenant import Head
from hplm.core.settings import AdapterWidth
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.reporting.progress import Report, silent
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from tests.tasks import colour_data

SHORT = TrainSettings(epochs=3, learning_rates=(1e-2,), batch_examples=64, dropout=0.0)


@pytest.fixture(scope="module")
def lookup(tiny_store: Store, tiny_base: Base) -> OpenDomain:
    return open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)


def score(right: int, of: int = 100) -> DevScore:
    """The accuracy of a model that is right on the first of the dev examples."""
    return DevScore.of(lambda numbers: float(np.mean([i < right for i in numbers])), of)


def trained(dev: DevScore) -> Trained:
    head = Head(np.zeros((2, 4), np.float32), np.zeros(2, np.float32))
    return Trained(nn.Identity(), head, {}, 1e-3, 1, [], {}, dev, {})


@pytest.mark.parametrize(
    ("task", "width", "of_slots", "factors"),
    [
        ("classification", "auto", 4, (16, 4)),
        ("regression", "auto", 4, (16, 4)),
        ("tagging", "auto", 4, (4, 16)),
        ("classification", "narrow", 4, (16,)),
        ("classification", "wide", 8, (8,)),
        ("tagging", "narrow", 4, (16,)),
        ("tagging", "wide", 4, (4,)),
        ("classification", "auto", 16, (16,)),
        ("tagging", "auto", 24, (24,)),
        ("tagging", "narrow", 24, (24,)),
    ],
)
def test_both_widths_are_trained_if_the_slots_hold_both_the_tasks_usual_width_first(
    task: str, width: AdapterWidth, of_slots: int, factors: tuple[int, ...]
) -> None:
    assert factors_to_train(task_named(task), width, of_slots) == factors


@pytest.mark.parametrize(
    ("usual", "other", "kept"),
    [(80, 80, 0), (80, 70, 0), (80, 81, 0), (80, 82, 1), (80, 95, 1)],
    ids=["equal", "worse", "by-chance", "clear", "far"],
)
def test_the_usual_width_stays_unless_the_other_is_better_beyond_chance(usual: int, other: int, kept: int) -> None:
    assert choose([score(usual), score(other)]) == kept


@pytest.mark.parametrize(("other", "width", "why"), [(81, "narrow", "so narrow stays"), (90, "wide", "clearly better")])
def test_the_card_names_the_width_the_scores_of_both_and_the_reason(other: int, width: str, why: str) -> None:
    made = {16: trained(score(80)), 4: trained(score(other))}
    told: list[float] = []

    def train(factor: int, report: Report, rival: Trained | None) -> Trained:
        report("fine-tune", 0.5)
        report("fine-tune", 1.0)
        return made[factor]

    chosen, about = train_widths(train, (16, 4), lambda step, done: told.append(done))
    assert chosen is made[16 if width == "narrow" else 4]
    assert about["adapter_width"] == width
    assert about["width_scores"] == {"narrow": 0.8, "wide": other / 100}
    assert f"wide has {other / 100 - 0.8:+.3f} (standard error 0.0" in about["width_why"]
    assert why in about["width_why"]
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_a_width_that_diverges_leaves_the_other() -> None:
    def train(factor: int, report: Report, rival: Trained | None) -> Trained:
        if factor in diverging:
            raise ConfigError(f"{factor} diverged")
        return trained(score(80))

    diverging = {4}
    _, about = train_widths(train, (16, 4), silent)
    assert about["adapter_width"] == "narrow"
    assert about["width_scores"] == {"narrow": 0.8}
    assert "the training of the other width diverged" in about["width_why"]
    diverging = {16, 4}
    with pytest.raises(ConfigError, match="diverged"):
        train_widths(train, (16, 4), silent)


@pytest.mark.parametrize(("right", "trained_factors"), [(100, [16]), (99, [16]), (98, [16, 4])])
def test_the_other_width_is_not_trained_if_no_score_could_be_clearly_better(
    right: int, trained_factors: list[int]
) -> None:
    asked: list[int] = []

    def train(factor: int, report: Report, rival: Trained | None) -> Trained:
        asked.append(factor)
        return trained(score(right))

    _, about = train_widths(train, (16, 4), silent)
    assert asked == trained_factors
    assert ("leaves no room for a clearly better width, so narrow stays" in about["width_why"]) == (right > 98)
    # Skipping changes no choice.
    assert (choose([score(right), score(100)]) == 0) == (right > 98)


def test_the_other_width_ends_early_if_it_is_not_ahead_of_the_usual_width(tiny_base: Base, lookup: OpenDomain) -> None:
    # 12 channels learn the colours in some epochs; one channel is behind from the start.
    settings = replace(SHORT, epochs=5)
    made = train_tenant(tiny_base, lookup, "colour", colour_data(), settings, factors=(4, 48))
    about = made.card.about
    alone = train_tenant(tiny_base, lookup, "colour", colour_data(), settings, factors=(4,)).card.about
    assert about["width_scores"] == {"wide": about["scores"]["dev_accuracy"]}
    assert about["scores"] == alone["scores"]
    assert "on dev narrow was not ahead after epoch 2 (" in about["width_why"]
    assert about["width_why"].endswith("so wide stays")


@pytest.mark.parametrize(
    ("settings", "factors", "width"),
    [
        # In three epochs one channel learns few of the colours, and 48 channels learn all.
        (SHORT, (48, 1), "wide"),
        # In thirty epochs three channels learn them too.
        (replace(SHORT, epochs=30), (16, 4), "narrow"),
    ],
    ids=["wide", "narrow"],
)
def test_a_training_picks_the_width_that_its_dev_examples_need(
    tiny_base: Base, lookup: OpenDomain, settings: TrainSettings, factors: tuple[int, int], width: str
) -> None:
    made = train_tenant(tiny_base, lookup, "colour", colour_data(), settings, factors=factors)
    about = made.card.about
    assert about["adapter_width"] == width
    assert about["width_scores"][width] == about["scores"]["dev_accuracy"]
    factor = factors[1] if width == "wide" else factors[0]
    assert about["bottleneck"] == made.packed.reduced_size == tiny_base.config.hidden_size // factor
    # The chosen tenant is the one that a training of this width alone makes.
    alone = train_tenant(tiny_base, lookup, "colour", colour_data(), settings, factors=(factor,))
    assert alone.card.about["scores"] == about["scores"]
    assert "width_why" not in alone.card.about


def test_the_time_of_both_widths_is_estimated(
    tiny_base: Base, lookup: OpenDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hplm_builder.tenants.tenant_build._token_s", lambda *given: 1e6)
    one, two = (
        estimate_fine_tune(colour_data(), SHORT, tiny_base, lookup, factors=given) for given in ((16,), (16, 4))
    )
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert one == pytest.approx(estimate_fine_tune(colour_data(), replace(SHORT, seed=1), tiny_base, lookup), rel=1e-3)
