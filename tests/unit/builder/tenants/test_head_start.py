"""A new classification of many labels begins with a head that is fitted to the untrained body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants import head_start
from hplm_builder.tenants.finetune import TaskHead, TrainSettings, fine_tune
from hplm_builder.tenants.head_start import examples_to_fit, fit_head, may_be_fitted
from hplm_builder.tenants.prepared import Prepared
from torch import Tensor, nn

from hplm.tasks.classification import LEAST_FITTED_LABELS
from hplm.tasks.examples import LabelledText

HIDDEN = 16


class Frozen(nn.Module):
    """A body that trains nothing, and says of each token what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor, lengths: list[int]) -> Tensor:
        return features.float() + 0.0 * self.unused


def prepared(labels: int, of_each: int) -> list[Prepared]:
    """Texts of one token around their class's own direction."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(labels, HIDDEN))
    made = []
    for i in range(labels * of_each):
        features = torch.tensor(centres[i % labels] + 0.3 * rng.normal(size=HIDDEN), dtype=torch.float16)[None]
        source = LabelledText(f"text {i}", label=f"l{i % labels:03}")
        made.append(Prepared(features, torch.tensor([i % labels]), np.array([[0, 4, 1]], np.int32), source))
    return made


def data_of(labels: int, examples: list[Prepared]) -> LabelledData:
    texts = [one.source for one in examples]
    return LabelledData("classification", tuple(f"l{i:03}" for i in range(labels)), texts, texts, texts)


def test_a_fitted_head_tells_classes_apart_and_has_the_least_loss_there_is() -> None:
    examples = prepared(20, 6)
    data = data_of(20, examples)
    body, head = Frozen(), TaskHead(HIDDEN, data)
    fit_head(head, body, data, examples, "mean")
    states, targets = (
        torch.cat([one.features for one in examples]).float(),
        torch.cat([one.targets for one in examples]),
    )
    assert (head(states).argmax(1) == targets).float().mean() > 0.9

    @torch.no_grad()
    def loss(weight: Tensor) -> float:
        found = nn.functional.cross_entropy(states @ weight.T + head.bias, targets)
        return float(found + head_start.DECAY * weight.square().sum())

    least = loss(head.weight)
    for seed in range(5):
        away = 0.05 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        assert loss(head.weight + away) > least


@pytest.mark.parametrize("labels", [LEAST_FITTED_LABELS - 1, LEAST_FITTED_LABELS])
def test_only_many_labels_are_fitted_first(labels: int) -> None:
    examples = prepared(labels, 4)
    data = data_of(labels, examples)
    parts = (examples, examples, examples)
    # Training at so small a rate changes nothing, so that the score is that of the first head.
    settings = TrainSettings(epochs=1, learning_rates=(1e-12,))
    told: list[float] = []
    trained = fine_tune(Frozen, HIDDEN, data, parts, settings, lambda step, share: told.append(share))
    assert may_be_fitted(data) is (labels == LEAST_FITTED_LABELS)
    assert (trained.scores["dev_accuracy"] > 0.9) is may_be_fitted(data)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_head_that_does_badly_on_dev_is_left_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = prepared(20, 4)
    data = data_of(20, examples)
    others = [replace(one, source=replace(one.source, label="l000")) for one in examples]
    settings = TrainSettings(epochs=1, learning_rates=(1e-12,))
    torch.manual_seed(settings.seed)
    body, made = Frozen(), TaskHead(HIDDEN, data)
    assert body.unused.item() == 0.0
    trained = fine_tune(Frozen, HIDDEN, data, (examples, others, others), settings)
    np.testing.assert_allclose(trained.head.weight, made.weight.detach().numpy(), atol=1e-6)
    monkeypatch.setattr("hplm_builder.tenants.finetune.LEAST_SCORE", 0.0)
    fitted = fine_tune(Frozen, HIDDEN, data, (examples, others, others), settings)
    assert np.abs(fitted.head.weight - made.weight.detach().numpy()).max() > 0.1


def test_a_rival_begins_with_the_head_that_was_fitted_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = prepared(20, 4)
    data, parts = data_of(20, examples), (examples, examples, examples)
    settings = TrainSettings(epochs=1, learning_rates=(1e-12,))
    first = fine_tune(Frozen, HIDDEN, data, parts, settings)
    monkeypatch.delattr("hplm_builder.tenants.finetune.fit_head")  # a second fit would fail
    second = fine_tune(Frozen, HIDDEN, data, parts, settings, rival=first)
    np.testing.assert_allclose(second.head.weight, first.head.weight, atol=1e-6)
    assert second.scores == first.scores
    # The only epoch is the last one, so that nothing is left to save.
    assert not second.is_beaten


def test_a_tenant_that_is_updated_goes_on_from_its_own_head() -> None:
    examples = prepared(20, 4)
    data = data_of(20, examples)
    settings = TrainSettings(epochs=1, learning_rates=(1e-12,))
    parts = (examples, examples, examples)
    before = fine_tune(Frozen, HIDDEN, data, parts, settings)
    after = fine_tune(Frozen, HIDDEN, data, parts, settings, start=before.head)
    np.testing.assert_allclose(after.head.weight, before.head.weight, atol=1e-6)


def test_of_very_many_examples_some_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = prepared(10, 10)
    assert examples_to_fit(examples, 0) is examples
    monkeypatch.setattr(head_start, "MOST_EXAMPLES", 30)
    few = examples_to_fit(examples, 0)
    assert len(few) == 30
    assert [id(one) for one in few] == [id(one) for one in examples_to_fit(examples, 0)]
    assert [id(one) for one in few] != [id(one) for one in examples_to_fit(examples, 1)]
