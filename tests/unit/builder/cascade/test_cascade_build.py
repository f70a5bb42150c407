"""Cascades of trained levels: what is set aside, calibrated, computed, selected, proved and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.cascade.cascade_build import (
    STEPS,
    BuiltCascade,
    build_cascade,
    compute_outputs,
    numbered,
    select_again,
    set_aside,
)
from hplm_builder.cascade.levels import Level, LevelInput
from hplm_builder.cascade.outputs import ALPHAS, compute_part, load_outputs, save_outputs
from hplm_builder.cascade.used_texts import checksum, load_used, used_by
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import train_tenant

from hplm.cascade.offline import answer_offline
from hplm.cascade.promise import proved_accuracy
from hplm.cascade.pruning import prune
from hplm.cascade.selection import CascadeTarget
from hplm.core.text import text_key
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import ContractError, CorruptArtifactError, DataError, JobCancelledError
from hplm.models.base import Base
from hplm.store.layout import Store
from hplm.tasks.examples import LabelledText
from tests.tasks import colour_data, count_data, place_data, seen_data


@dataclass(frozen=True)
class Times:
    """Milliseconds a token."""

    token_ms: float

    def latency_ms(self, tokens: int) -> float:
        return self.token_ms * tokens


TIMES = {"small": Times(0.1), "large": Times(1.0)}


@pytest.fixture(scope="module")
def lookup(tiny_store: Store, tiny_base: Base) -> OpenDomain:
    return open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)


def trained_levels(base: Base, lookup: OpenDomain, data: LabelledData) -> list[LevelInput]:
    """Two levels over one base, the second of which has learned for longer."""
    return [
        LevelInput(base, lookup, train_tenant(base, lookup, "some", data, settings), name)
        for name, settings in (
            ("small", TrainSettings(epochs=1, learning_rates=(2e-3,), batch_examples=64, dropout=0.0)),
            ("large", TrainSettings(epochs=3, learning_rates=(1e-2,), batch_examples=32, dropout=0.0)),
        )
    ]


@pytest.fixture(scope="module")
def data() -> LabelledData:
    return colour_data()


@pytest.fixture(scope="module")
def levels(tiny_base: Base, lookup: OpenDomain, data: LabelledData) -> list[LevelInput]:
    return trained_levels(tiny_base, lookup, data)


@pytest.fixture(scope="module")
def built(levels: list[LevelInput], data: LabelledData) -> BuiltCascade:
    return build_cascade(levels, data, data.test, CascadeTarget(), lambda level: TIMES[level.base_name])


@pytest.fixture
def opened(levels: list[LevelInput]) -> Iterator[list[Level]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Level(level)) for level in levels]


def test_a_cascade_promises_what_the_proof_shows(built: BuiltCascade, data: LabelledData) -> None:
    promise = built.plan.promise
    answers = answer_offline(built.plan, [level.base for level in built.outputs.levels], built.outputs.proof)
    assert promise.examples == len(data.test) == len(answers)
    assert promise.right == sum(answer.right for answer in answers)
    assert promise.accuracy == proved_accuracy(promise.right, promise.examples)
    (chosen,) = [row for row in built.about["candidates"] if row["chosen"]]
    assert chosen["levels"] == [level.base for level in built.plan.levels]
    assert chosen["latency_ms"] == promise.latency_ms
    assert json.loads(json.dumps(built.about)) == built.about


def test_levels_are_in_ascending_accuracy_whatever_their_order(levels: list[LevelInput], data: LabelledData) -> None:
    outputs = compute_outputs(levels[::-1], data.dev, data.test[:5])
    assert [level.base for level in outputs.levels] == ["small", "large"]
    small, large = (level.accuracy for level in outputs.select.whole)
    assert small < large


def test_progress_goes_through_all_steps_and_may_end_the_work(levels: list[LevelInput], data: LabelledData) -> None:
    said: list[tuple[str, float]] = []

    def cancel(step: str, progress: float) -> None:
        said.append((step, progress))
        if step == "prove":
            raise JobCancelledError("cancelled")

    with pytest.raises(JobCancelledError):
        build_cascade(levels, data, data.test, CascadeTarget(), lambda level: TIMES[level.base_name], cancel)
    assert list(dict.fromkeys(step for step, _ in said)) == list(STEPS)[:3]
    assert all(0 <= progress <= 1 for _, progress in said)


def test_a_temperature_undoes_what_multiplies_the_logits(levels: list[LevelInput], data: LabelledData) -> None:
    fitted = [temperature_of(levels[1], data.dev, factor) for factor in (12.0, 6.0)]
    assert fitted[1] > 1
    # The prior draws both towards 1.
    assert 0.5 * fitted[0] < fitted[1] < 0.8 * fitted[0]


def temperature_of(level: LevelInput, dev: list[LabelledText], factor: float = 1.0) -> float:
    """Return the temperature of a level whose logits are multiplied by `factor`."""
    head = level.tenant.head
    tenant = replace(level.tenant, head=replace(head, weight=head.weight * factor, bias=head.bias * factor))
    with Level(replace(level, tenant=tenant)) as opened:
        answered = opened.answer([example.text for example in dev])
        return opened.calibrate(answered, dev, opened.judge(answered, dev, 1.0).right)


def test_dev_that_is_all_right_or_too_small_leaves_confidences_alone_and_says_so(
    levels: list[LevelInput], data: LabelledData
) -> None:
    with Level(levels[1]) as level:
        right = level.judge(level.answer([one.text for one in data.dev]), data.dev, 1.0).right
        sure = [one for one, is_right in zip(data.dev, right, strict=True) if is_right]
        assert len(sure) >= 20
        (new,) = level.answer(["zzz"])
        score = level.task.decode(new.outputs, level.labels, new.tokens)[0][0].score
        for dev, why in ((sure, f"all {len(sure)} answers are right"), (data.dev[:9], "9 examples are fewer than 20")):
            temperature = temperature_of(levels[1], dev)
            assert temperature == 1
            assert level.task.confidence(new.outputs, level.labels, new.tokens, None, temperature) == pytest.approx(
                score
            )
            outputs = compute_outputs(levels[1:], dev, data.test)
            (said,) = select_again(outputs, CascadeTarget(), TIMES).about["warnings"]
            assert said.startswith(f"dev cannot calibrate the confidence over large, because {why}: ")


def test_pruned_outputs_are_those_of_the_pruned_texts(opened: list[Level], data: LabelledData) -> None:
    examples = data.dev[:12]
    texts = [example.text for example in examples]
    part = compute_part(opened, [1.0, 1.0], examples, alphas={(0, 1): ALPHAS})
    importance = [one.importance for one in opened[0].answer(texts, wants_importance=True)]
    assert part.alphas(0, [1]) == [0.0, *ALPHAS]
    for alpha in ALPHAS[::4]:
        pruned = [prune(text, words, alpha) for text, words in zip(texts, importance, strict=True)]
        expected = opened[1].judge(opened[1].answer(pruned), examples, 1.0)
        outputs = part.pruned[0, 1, alpha]
        np.testing.assert_allclose(outputs.logits, expected.logits, atol=1e-5)
        assert (outputs.tokens == expected.tokens).all()
    assert (part.pruned[0, 1, ALPHAS[-1]].tokens < part.whole[1].tokens).all()


def test_outputs_that_were_kept_select_the_same_cascade(built: BuiltCascade, tmp_path: Path) -> None:
    save_outputs(tmp_path / "outputs", built.outputs)
    loaded = load_outputs(tmp_path / "outputs")
    again = select_again(loaded, CascadeTarget(), TIMES)
    assert again.plan == built.plan
    assert again.about == built.about


def test_damaged_outputs_are_refused(built: BuiltCascade, tmp_path: Path) -> None:
    save_outputs(tmp_path / "outputs", built.outputs)
    path = tmp_path / "outputs" / "outputs.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptArtifactError, match="checksum"):
        load_outputs(tmp_path / "outputs")


def test_a_plan_gets_the_numbers_of_the_versions(built: BuiltCascade) -> None:
    plan = numbered(built.plan, {"small": 4, "large": 7})
    assert [level.number for level in plan.levels] == [{"small": 4, "large": 7}[level.base] for level in plan.levels]


def test_a_target_that_the_proof_is_too_small_for_is_refused(built: BuiltCascade) -> None:
    with pytest.raises(ContractError, match="the nearest offer is accuracy 0"):
        select_again(built.outputs, CascadeTarget(accuracy=0.99), TIMES)


def test_a_tagging_is_right_if_the_whole_sentence_is_and_is_never_pruned(tiny_base: Base, lookup: OpenDomain) -> None:
    data = place_data()
    levels = trained_levels(tiny_base, lookup, data)
    cascade = build_cascade(levels, data, data.test, CascadeTarget(), lambda level: TIMES[level.base_name])
    part = cascade.outputs.select
    assert part.pruned == {}
    large = part.whole[1]
    for example, answers, right in zip(data.dev, large.answers, large.right, strict=True):
        gold = [(entity.label, entity.start, entity.end) for entity in example.entities]
        assert right == ([(span.label, span.start, span.end) for span in answers] == gold)
    assert {*cascade.about["levels"][1]} >= {"f1", "accuracy", "temperature"}


def test_pairs_are_pruned_while_the_large_level_loses_at_most_two_points(tiny_base: Base, lookup: OpenDomain) -> None:
    data = seen_data()
    levels = trained_levels(tiny_base, lookup, data)
    outputs = compute_outputs(levels, data.dev, data.test)
    part = outputs.select
    tried = part.alphas(0, [1])[1:]
    assert tried == list(ALPHAS[: len(tried)])
    assert outputs.proof.alphas(0, [1])[1:] == tried
    with ExitStack() as stack:
        opened = [stack.enter_context(Level(level)) for level in levels]
        every = compute_part(opened, [level.temperature for level in outputs.levels], data.dev, alphas={(0, 1): ALPHAS})
    least = part.whole[1].accuracy - 0.02
    assert all(every.pruned[0, 1, alpha].accuracy >= least for alpha in tried)
    assert len(tried) == len(ALPHAS) or every.pruned[0, 1, ALPHAS[len(tried)]].accuracy < least
    # [CLS] a [SEP] b [SEP]: a word of each text stays.
    assert (every.pruned[0, 1, ALPHAS[-1]].tokens >= 5).all()


def test_three_levels_make_cascades_of_two_and_three(levels: list[LevelInput], data: LabelledData) -> None:
    small, large = levels
    three = [small, replace(small, base_name="middle"), large]
    outputs = compute_outputs(three, data.dev, data.test[:10])
    times = {**TIMES, "middle": Times(0.3)}
    about = select_again(outputs, CascadeTarget(), times).about
    combinations = {tuple(row["levels"]) for row in about["candidates"]}
    assert {("small",), ("middle",), ("large",), ("small", "large"), ("small", "middle", "large")} <= combinations


def test_with_profiles_nothing_is_computed_that_no_selection_takes(tiny_base: Base, lookup: OpenDomain) -> None:
    data = seen_data()
    levels = trained_levels(tiny_base, lookup, data)
    every = compute_outputs(levels, data.dev, data.test)
    needed = compute_outputs(levels, data.dev, data.test, profiles=TIMES)
    assert needed.proof.pruned.keys() == needed.select.pruned.keys() < every.select.pruned.keys()
    for target in (CascadeTarget(), CascadeTarget(accuracy=0.4), CascadeTarget(deterministic=True)):
        assert select_again(needed, target, TIMES).plan == select_again(every, target, TIMES).plan


def test_without_a_file_a_part_of_dev_proves_and_does_not_select(data: LabelledData) -> None:
    distinct = [LabelledText(f"text {number}", "red") for number in range(200)]
    data = replace(data, dev=distinct)
    kept, proof, warnings = set_aside(data, None, seed=0)
    assert warnings == []
    assert {one.text for one in kept.dev} | {one.text for one in proof} == {one.text for one in distinct}
    assert len(kept.dev) + len(proof) == 200
    assert 50 < len(proof) < 110
    # More examples later leave the earlier ones on their side.
    more, _, _ = set_aside(replace(data, dev=[*distinct, LabelledText("more", "blue")]), None, seed=0)
    assert {one.text for one in kept.dev} <= {one.text for one in more.dev}


def test_proof_examples_that_train_or_select_are_left_out(data: LabelledData) -> None:
    new = LabelledText("the blue bird", "blue")
    kept, proof, warnings = set_aside(data, [data.train[0], data.dev[0], new], seed=0)
    assert kept == data
    assert proof == [new]
    assert warnings == ["2 of 3 proof examples also train or select, so they prove nothing"]
    with pytest.raises(
        DataError, match=r"3 of 3 proof examples also train .*; no examples that prove the accuracy are left"
    ):
        set_aside(data, data.train[:3], seed=0)


def test_proof_examples_that_trained_an_earlier_version_are_left_out(
    built: BuiltCascade, data: LabelledData, tmp_path: Path
) -> None:
    new, earlier = LabelledText("the blue bird", "blue"), LabelledText("an earlier text", "red")
    save_outputs(tmp_path / "outputs", built.outputs, used_by(replace(data, train=[earlier])))
    used = load_used(tmp_path / "outputs")
    assert used == {checksum(text_key(example.text)) for example in (earlier, *data.dev)}
    _, proof, warnings = set_aside(data, [earlier, new], seed=0, used=used)
    assert proof == [new]
    assert warnings == ["1 of 2 proof examples have trained or selected an earlier version, so they prove nothing"]


def test_near_copies_of_texts_that_train_prove_nothing_and_neither_do_those_of_older_stores(
    data: LabelledData,
) -> None:
    copy = LabelledText(f"  {data.train[0].text.upper()}\n", data.train[0].label)
    new = LabelledText("the blue bird", "blue")
    _, proof, warnings = set_aside(data, [copy, new], seed=0)
    assert proof == [new]
    assert warnings == ["1 of 2 proof examples also train or select, so they prove nothing"]
    with pytest.raises(DataError, match="have trained or selected an earlier version"):
        set_aside(data, [LabelledText("An Earlier Text", "red")], seed=0, used={checksum("An Earlier Text")})


def test_a_regression_is_refused(data: LabelledData) -> None:
    with pytest.raises(DataError, match="a regression have no confidence"):
        set_aside(count_data(), None, seed=0)
