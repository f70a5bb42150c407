"""Students are stacked on a teacher (Algorithm 1), trained as prefixes (Algorithm 2), kept, and packed as a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.ensemble import Ensemble, answers_of, pooled_states
from hplm_builder.students.joint_prefixes import head_over_students, train_prefixes
from hplm_builder.students.stacking import Map, Stage, Texts, train_students
from hplm_builder.students.student_bodies import SharedStudent, first_student, run_layers
from hplm_builder.students.student_build import KeptStudents, build_students, check_form
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.students.teacher import Taught, check_task, soft_labels
from hplm_builder.tenants.bodies import AdapterModel
from hplm_builder.tenants.judging import predict
from hplm_builder.tenants.prepared import Prepared, prepare_all
from hplm_builder.tenants.trained_layers import trained_layers

from hplm.adapters import tenant as tenants
from hplm.adapters.packed import from_bfloat16
from hplm.adapters.tenant import Head
from hplm.core.settings import WHOLE
from hplm.engine import reference
from hplm.engine.open_domain import Domain, open_features
from hplm.errors import ConfigError, DataError
from hplm.models.base import Base
from hplm.models.layers import UpperLayers, packed_attention, packed_positions
from hplm.store.layout import Store
from hplm.tasks.task import Scale
from tests import tiny
from tests.tasks import colour_data, count_data, place_data

# A training takes seconds, and each student still learns something of a random teacher.
QUICK = StudentSettings(
    most_students=3, epochs=4, pruning_epochs=2, batch_examples=16, learning_rate=1e-2, reduction_factor=4, dropout=0.0
)


def few(data: LabelledData) -> LabelledData:
    return replace(data, train=data.train[:60], dev=data.dev[:30], test=data.test[:10])


class Place(NamedTuple):
    """A trunk with features of the texts of `data`, and what a random teacher of another width says of them."""

    base: Base
    lookup: Domain
    upper: UpperLayers
    data: LabelledData
    train: list[Prepared]
    dev: list[Prepared]
    taught: Taught

    def stack(self, settings: StudentSettings, **options: object) -> tuple[Ensemble, Map, list[Stage]]:
        texts = (Texts(self.train, self.taught.states["train"]), Texts(self.dev, self.taught.states["dev"]))
        make = first_student(self.upper, settings.form, settings.reduction_factor, "input")
        return train_students(make, self.base.config.hidden_size, self.data, *texts, settings, **options)  # type: ignore[arg-type]


def teacher_of(parts: dict[str, list[Prepared]], data: LabelledData, width: int = 64) -> Taught:
    """Representations that are a fixed function of the words of a text, of another width than the students'."""
    rng = np.random.default_rng(0)
    vectors = {word: rng.normal(size=width) for word in [word.lower() for word in tiny.WORDS]}

    def state(example: Prepared) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        words = " ".join(filter(None, (example.source.text, example.source.pair))).lower().split()
        return np.tanh(np.mean([vectors[word] for word in words], axis=0))

    states = {part: torch.tensor(np.stack([*map(state, those)]), dtype=torch.float32) for part, those in parts.items()}
    outputs = 1 if data.task == "regression" else len(data.labels)
    head = Head(rng.normal(size=(outputs, width)).astype(np.float32), np.zeros(outputs, np.float32))
    soft = {part: soft_labels(those, head, data.task) for part, those in states.items()}
    return Taught(states, soft, head, {"name": "words", "base": "other", "dev_score": 0.9})


def place_of(folder: Path, data: LabelledData, layers: int = 2) -> Place:
    store = Store(folder / "store")
    shape = replace(tiny.config(form=WHOLE, name="trunk"), upper_layers=layers, adapter_layers=0)
    base = tiny.make_base(store, shape, trunk_of="tiny")
    lookup = open_features(store, base, [], miss="compute")
    layers_of = trained_layers(base, lookup)
    train, dev, _ = prepare_all(data, base.load_text_encoder(), layers_of.featurise)
    taught = teacher_of({"train": train, "dev": dev}, data)
    return Place(base, lookup, layers_of.upper, data, train, dev, taught)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place_of(tmp_path_factory.mktemp("students"), few(colour_data()))


@pytest.fixture(scope="module")
def stacked(place: Place) -> tuple[Ensemble, Map, list[Stage]]:
    return place.stack(QUICK)


def soft(place: Place) -> list[Prepared]:
    return [
        replace(one, targets=row[None]) for one, row in zip(place.train, place.taught.outputs["train"], strict=True)
    ]


def residual(place: Place, map_: Map, states: torch.Tensor) -> float:
    """Eq. 2 in plain numbers, as a share of the variance of the teacher's representations."""
    taught = place.taught.states["train"]
    with torch.no_grad():
        left = (taught - map_(states)).square().sum(1).mean()
    return float(left / (taught - taught.mean(0)).square().sum(1).mean())


def test_the_residual_on_train_falls_with_each_student(
    place: Place, stacked: tuple[Ensemble, Map, list[Stage]]
) -> None:
    ensemble, map_, stages = stacked
    assert len(stages) >= 2
    states = torch.stack([pooled_states(body, place.data, place.train, "mean") for body in ensemble.students])
    with torch.no_grad():
        found = [residual(place, map_, prefix) for prefix in ensemble.prefixes(states)]
    assert found == pytest.approx([stage.train_residual for stage in stages], abs=1e-3)
    assert found == sorted(found, reverse=True)
    assert len({*found}) == len(found)
    assert ensemble.alphas[0].item() == 1


def test_students_with_own_layers_lower_the_residual_too_and_leave_the_trunk_as_it_was(place: Place) -> None:
    before = {name: value.clone() for name, value in place.upper.state_dict().items()}
    _, _, stages = place.stack(replace(QUICK, form="own", learning_rate=3e-3, most_students=2, stacking_weight=0.1))
    assert len(stages) == 2
    assert stages[1].train_residual < stages[0].train_residual
    assert all(torch.equal(before[name], value) for name, value in place.upper.state_dict().items())


def test_a_multiplier_is_the_best_one(place: Place, stacked: tuple[Ensemble, Map, list[Stage]]) -> None:
    ensemble, map_, stages = stacked
    first, second = (pooled_states(body, place.data, place.train, "mean") for body in [*ensemble.students][:2])
    around = [residual(place, map_, first + (stages[1].alpha + step) * second) for step in (-0.02, 0.0, 0.02)]
    assert around[1] == min(around)


def test_students_after_the_first_learn_from_the_hardest_texts_and_others_at_random(place: Place) -> None:
    learned: list[set[int]] = []
    numbers = {id(one.features): number for number, one in enumerate(place.train)}

    class Noting(SharedStudent):
        def middle_and_last(self, features: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            if torch.is_grad_enabled():
                learned[-1].update(
                    number
                    for part in features.split([*lengths])
                    for number in numbers.values()
                    if torch.equal(part, place.train[number].features)
                )
            return super().middle_and_last(features, lengths)

        def next_student(self) -> Noting:
            return Noting(super().next_student().adapters)

    def make() -> Noting:
        return Noting(AdapterModel(place.upper.float(), 4))

    texts = (Texts(place.train, place.taught.states["train"]), Texts(place.dev, place.taught.states["dev"]))
    settings = replace(QUICK, most_students=2, epochs=1, hard_share=0.2, random_share=0.1)
    _, map_, stages = train_students(
        make, place.base.config.hidden_size, place.data, *texts, settings, begin=lambda number: learned.append(set())
    )
    same = [{one.source.text for i, one in enumerate(place.train) if i in of_student} for of_student in learned]
    assert same[0] == {one.source.text for one in place.train}
    states = pooled_states(stages[0].body, place.data, place.train, "mean")
    with torch.no_grad():
        left = (place.taught.states["train"] - map_(states)).square().sum(1)
    hardest = {place.train[int(i)].source.text for i in left.argsort(descending=True)[:12]}
    assert hardest <= same[1]
    assert len(same[1]) <= 18


def test_the_middle_of_a_single_layer_is_its_attention_sub_layer(tmp_path: Path) -> None:
    place = place_of(tmp_path, few(colour_data()), layers=1)
    upper, text = place.upper.float(), place.train[0]
    lengths = [len(text.tokens)]
    hidden = upper.embed(text.features, packed_positions(lengths, hidden_device := text.features.device))
    assert hidden_device.type == "cpu"
    attend = packed_attention(upper.config.num_heads, lengths, upper.relative)
    middle, last = run_layers(upper.layers, hidden, attend)
    torch.testing.assert_close(upper.layers[0].feed_forward(middle), last)
    torch.testing.assert_close(upper(text.features, lengths), last)
    _, _, stages = place.stack(replace(QUICK, most_students=2, epochs=1))
    assert stages[0].train_residual < 1.5


def test_the_first_prefix_is_the_plain_student_and_its_tenant_is_ordinary(place: Place, tmp_path: Path) -> None:
    settings = replace(QUICK, most_students=1)
    made = build_students(place.base, place.lookup, "acme", place.data, place.taught, settings)
    assert (made.card.students, made.students) == (1, None)
    tenants.save(tmp_path / "acme", made)
    loaded = tenants.load(tmp_path / "acme", fingerprint=place.base.fingerprint)
    upper = place.base.load_upper()
    body = AdapterModel(upper, 4, loaded.adapter, loaded.card.adapter_at)
    found = predict(body, loaded.head, place.data, place.dev, "mean")
    right = [spans[0].label == one.source.label for spans, one in zip(found, place.dev, strict=True)]
    assert sum(right) / len(right) == pytest.approx(made.card.about["scores"]["dev_accuracy"], abs=0.05)
    one = place.dev[0]
    logits = reference.answered(upper, one.features, loaded, one.tokens)
    states = pooled_states(body, place.data, [one], "mean")
    outputs = states @ torch.from_numpy(loaded.head.weight).T + torch.from_numpy(loaded.head.bias)
    np.testing.assert_allclose(outputs.numpy(), logits, atol=0.2)


@pytest.mark.parametrize("form", ["shared", "own"])
def test_the_best_prefix_is_packed_with_its_scores_and_weights(place: Place, tmp_path: Path, form: str) -> None:
    settings = replace(QUICK, form=form, most_students=2, learning_rate=3e-3, joint_prefixes=False)
    made = build_students(place.base, place.lookup, "acme", place.data, place.taught, settings, example="the red cat")
    about = made.card.about["students"]
    count = about["count"]
    assert (made.card.students, made.card.student_form, made.card.example) == (count, form, "the red cat")
    assert [row["students"] for row in about["prefixes"]] == [*range(1, len(about["stages"]) + 1)]
    tenants.save(tmp_path / "acme", made)
    loaded = tenants.load(tmp_path / "acme", fingerprint=place.base.fingerprint)
    assert loaded.students is not None
    assert loaded.students.scores == tuple(row["dev_accuracy"] for row in about["prefixes"])
    assert loaded.students.alphas[0] == 1
    upper = place.base.load_upper()
    for k, row in enumerate(about["prefixes"], 1):
        answers = [reference.students(upper, one.features, loaded, k).argmax().item() for one in place.dev]
        right = [place.data.labels[answer] == one.source.label for answer, one in zip(answers, place.dev, strict=True)]
        # The training computes in bfloat16 where the machine is fast in it.
        assert sum(right) / len(right) == pytest.approx(row["dev_accuracy"], abs=0.07)
    if form == "own":
        assert loaded.students.own is not None
        first = from_bfloat16(loaded.students.own.tensors[0])
        assert first.shape == (count, 2, 3 * 48, 48)
        assert not np.array_equal(first[0], first[1])


def test_all_prefixes_learn_from_one_classifier_and_the_shortest_of_the_best_is_chosen(
    place: Place, stacked: tuple[Ensemble, Map, list[Stage]]
) -> None:
    ensemble, map_, _ = stacked
    start = head_over_students(place.taught.head, map_)
    settings = replace(QUICK, pruning_rate=1e-3)
    pruned = train_prefixes(ensemble, start, place.data, soft(place), place.dev, [], settings, Scale())
    values = [score.value for score in pruned.dev]
    assert pruned.best == 1 + values.index(max(values))
    states = torch.stack([pooled_states(body, place.data, place.dev, "mean") for body in pruned.ensemble.students])
    for prefix, row in zip(pruned.ensemble.prefixes(states).detach(), pruned.scores, strict=True):
        found = answers_of(prefix, pruned.head, place.data, place.dev)
        right = [spans[0].label == one.source.label for spans, one in zip(found, place.dev, strict=True)]
        assert sum(right) / len(right) == pytest.approx(row["dev_accuracy"])


def test_values_are_learned_from_a_teacher_of_values(tmp_path: Path) -> None:
    place = place_of(tmp_path, few(count_data(pairs=True)))
    settings = replace(QUICK, most_students=2)
    made = build_students(place.base, place.lookup, "acme", place.data, place.taught, settings)
    assert made.card.texts == 2
    assert np.isfinite(made.card.about["scores"]["dev_pearson"])


def test_averaged_students_are_as_many_as_were_asked_for(place: Place) -> None:
    ensemble, map_, stages = place.stack(replace(QUICK, boosting=False, most_students=3, epochs=1))
    assert [stage.alpha for stage in stages] == [1, 1, 1]
    states = torch.randn(3, 5, 4)
    torch.testing.assert_close(ensemble.prefixes(states)[2], states.mean(0))
    assert map_.linear is not None


def test_a_training_goes_on_after_its_last_kept_student(place: Place, tmp_path: Path) -> None:
    settings = replace(QUICK, most_students=2, epochs=1)
    ensemble, _, _ = place.stack(settings)
    kept, trained = KeptStudents(tmp_path, {"of": "this"}), [0]

    class Killed(Exception):
        pass

    def begin(number: int) -> None:
        if number == 1:
            raise Killed

    keep = {"keep": lambda number, state: kept.keep(str(number), state), "load": lambda number: kept.load(str(number))}
    with pytest.raises(Killed):
        place.stack(settings, begin=begin, **keep)
    assert KeptStudents(tmp_path, {"of": "another"}).load("0") is None

    def load(number: int) -> dict[str, object] | None:
        found = kept.load(str(number))
        trained[0] += found is None
        return found

    again, _, _ = place.stack(settings, **{**keep, "load": load})
    assert trained == [1]
    for ours, theirs in zip(again.state_dict().values(), ensemble.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_taggings_are_refused_with_the_way_out() -> None:
    with pytest.raises(DataError, match="not for a tagging: create the tenant without students"):
        check_task(place_data().task)


def test_layers_of_their_own_that_are_too_large_are_refused(tmp_path: Path) -> None:
    shape = tiny.config(form=WHOLE, name="large", hidden_size=1024)
    with pytest.raises(ConfigError, match="choose the form shared, or a smaller trunk"):
        check_form(Base(tmp_path, shape, ""), replace(QUICK, form="own"))


@pytest.mark.parametrize(
    "wrong", [{"hard_share": 1.5}, {"hard_share": 0.0, "random_share": 0.0}, {"form": "ours"}, {"learning_rate": 0.0}]
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(QUICK, **wrong)  # type: ignore[arg-type]
