"""Fine-tuning learns, for both kinds of task, and what is published predicts the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.finetune import TrainSettings
from hplm_builder.labelled import Entity, LabelledData, LabelledText, check_data
from hplm_builder.scores import accuracy, entity_f1
from hplm_builder.tenants import build_tenant
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.config import UpperSettings
from hplm.errors import TenantNameError
from hplm.nn.base import Base
from hplm.nn.lookup import open_lookup
from hplm.serving.upper_stage import UpperAnswer, UpperInput, UpperStage
from hplm.store.layout import Store
from hplm.text import TextEncoder
from tests import tiny

FAST = TrainSettings(epochs=30, learning_rates=(1e-2,), batch_tokens=256, dropout=0.0)


def colour_data() -> LabelledData:
    """Class: the colour that the text names."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        words = list(rng.choice(["the", "cat", "runs", "fast"], 4))
        colour = rng.choice(["red", "blue"])
        words.insert(int(rng.integers(0, 5)), colour)
        examples.append(LabelledText(" ".join(words), str(colour)))
    return check_data(examples[:220], examples[220:260], examples[260:])


def place_data() -> LabelledData:
    """Entities: names of places; names of people are none."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        words, entities, position = [], [], 0
        for word in rng.choice(["the", "cat", "Anna", "Paris", "Berlin", "Bob", "runs"], 6):
            if word in ("Paris", "Berlin"):
                entities.append(Entity("PLACE", position, position + len(word)))
            words.append(str(word))
            position += len(word) + 1
        examples.append(LabelledText(" ".join(words), None, tuple(entities)))
    return check_data(examples[:220], examples[220:260], examples[260:])


@pytest.mark.parametrize(("name", "data"), [("colour", colour_data()), ("places", place_data())])
def test_a_tenant_learns_its_task_and_serving_answers_as_the_test_scored(
    tmp_path: Path, name: str, data: LabelledData
) -> None:
    models = tiny.make_repository(tmp_path)
    store = Store(tmp_path / "store")
    card = build_tenant(store, "tiny", "general", name, data, FAST, Progress(disable=True))
    metric = "f1" if data.task == "tagging" else "accuracy"
    assert card.about["scores"][f"test_{metric}"] > 0.6
    assert card.labels == data.labels
    settings = UpperSettings(store="../../../store", base="tiny", dtype="float32")
    stage = UpperStage(settings, models / "hbert_upper" / "1")
    base = tiny.bases.load(store.base("tiny"))
    lookup = open_lookup(store, base, "general", dtype=torch.float32)
    found = []
    for encoded in TextEncoder(base.tokenizer_path, 40).encode([example.text for example in data.test]):
        hidden = lookup.hidden_states(encoded.ids, [len(encoded.ids)])
        answer = stage.run([UpperInput(hidden, encoded.tokens, name.encode())])[0]
        assert isinstance(answer, UpperAnswer)
        found.append(answer.spans)
    if data.task == "tagging":
        served = entity_f1([example.entities for example in data.test], found)
    else:
        served = accuracy([str(example.label) for example in data.test], [spans[0].label for spans in found])
    # Training and serving round differently; a sentence or two may tip over.
    assert abs(served - card.about["scores"][f"test_{metric}"]) < 0.08


def test_a_published_tenant_reads_back_bit_by_bit(tiny_base: Base, tiny_store: Store, tmp_path: Path) -> None:
    made = tenants.load(tiny_store.tenant("tagger"), fingerprint=tiny_base.fingerprint)
    tenants.save(tmp_path / "tagger", made)
    again = tenants.load(tmp_path / "tagger", fingerprint=tiny_base.fingerprint)
    assert again.card == made.card
    for name, array in vars(made.adapter).items():
        np.testing.assert_array_equal(array, getattr(again.adapter, name))


@pytest.mark.parametrize("name", ["", "a/b", "../a", "A", "a" * 65, "-a", "a b", "ä", "a\n"])
def test_a_name_that_could_be_a_path_or_is_odd_is_refused_without_repeating_it(name: str) -> None:
    with pytest.raises(TenantNameError) as caught:
        tenants.check_name(name)
    assert name == "" or len(name) == 1 or name not in str(caught.value)
