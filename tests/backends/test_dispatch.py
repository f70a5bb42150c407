"""Stages as levels of a cascade, without Triton: what they decide on texts, and the importances that they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hplm import errors
from hplm.cascade.dispatch import DETERMINISTIC, DispatchInput
from hplm.core.roles import load_serving_settings
from hplm.core.settings import WHOLE
from hplm.engine import reference
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.request import Request
from hplm.tasks.task_loader import task_named
from tests import tiny
from tests.batches import find_labels, look_up

# Texts from one word to more than is read, of tenants of every task that has a confidence.
TEXTS = [((text.encode(),), name.encode()) for text in tiny.sentences(6, words=(1, 60)) for name in tiny.TASKS]
PAIRS = [((b"the red cat, Oslo", b"the dog runs fast"), b"follows"), ((b"Anna", b"the b\xc3\xa4r sings"), b"follows")]
ASKED = [*TEXTS, *PAIRS]
# Confidences of texts of random weights are around this one.
CUT_OFF = 0.6
DISPATCH = DispatchInput(temperature=1.5, cut_off=CUT_OFF, slope=4.0, draw=DETERMINISTIC, wants_importance=True)


@pytest.fixture(scope="module", params=[NgramEncoder.form, WHOLE])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of either kind of base, with tenants of pairs and of regression."""
    shape = tiny.config(form=request.param)
    return tiny.make_repository(tmp_path_factory.mktemp("dispatch"), shape=shape, other_tasks=True)


@pytest.fixture(scope="module")
def stages(models: Path) -> Iterator[tuple[LookupStage, EncodeStage]]:
    settings = load_serving_settings(models)
    opened = LookupStage(settings.look_up, settings.folder), EncodeStage(settings.encode, settings.folder)
    yield opened
    for stage in opened:
        stage.close()


def answers_of(
    stages: tuple[LookupStage, EncodeStage], dispatches: Sequence[DispatchInput | None], asked: Any = None
) -> list[Any]:
    """Return the answers of both stages to `asked`, by default to ASKED."""
    asked = asked or ASKED
    found = [one for one in look_up(stages[0], asked) if isinstance(one, LookupAnswer)]
    inputs = [
        EncodeInput(one.features, one.tokens, one.version_id, dispatch)
        for one, dispatch in zip(found, dispatches, strict=True)
    ]
    return find_labels(stages[1], [Request(one, name) for one, (_, name) in zip(inputs, asked, strict=True)])


def test_a_level_decides_and_returns_the_importance_of_words_of_texts_that_it_reroutes(
    stages: tuple[LookupStage, EncodeStage], models: Path
) -> None:
    dispatches = [replace(DISPATCH, wants_importance=number % 3 > 0) for number in range(len(ASKED))]
    store, base = tiny.opened(models.parent)
    upper = base.load_upper()
    seen = set()
    answers = answers_of(stages, dispatches)
    found = look_up(stages[0], ASKED)
    for (_, name), dispatch, looked_up, answer in zip(ASKED, dispatches, found, answers, strict=True):
        assert isinstance(answer, EncodeAnswer)
        assert isinstance(looked_up, LookupAnswer)
        assert answer.dispatch is not None
        tenant = tiny.load_tenant(store, base, name.decode())
        features = torch.from_numpy(looked_up.features)
        outputs = reference.logits(upper, features, tenant).numpy()
        read_from = (tenant.card.labels, looked_up.tokens, tenant.head.transitions)
        confidence = task_named(tenant.card.task).confidence(outputs, *read_from, temperature=1.5)
        assert answer.dispatch.confidence == pytest.approx(confidence, abs=2e-3)
        assert answer.dispatch.is_rerouted == (answer.dispatch.confidence <= CUT_OFF)
        wanted = []
        if answer.dispatch.is_rerouted and dispatch.wants_importance:
            importance = reference.importance(upper, features, tenant)
            wanted = reference.word_importances(importance, looked_up.tokens)
        np.testing.assert_allclose(answer.dispatch.importance, np.array(wanted).reshape(-1, 3), atol=2e-3, rtol=2e-3)
        assert answer.dispatch.importance.dtype == np.float32
        seen.add((answer.dispatch.is_rerouted, dispatch.wants_importance))
    assert len(seen) == 4


def test_a_decision_changes_no_bit_of_an_answer(stages: tuple[LookupStage, EncodeStage]) -> None:
    plain = answers_of(stages, [None] * len(ASKED))
    for answer, decided in zip(plain, answers_of(stages, [DISPATCH] * len(ASKED)), strict=True):
        assert answer.dispatch is None
        assert decided.spans == answer.spans
        np.testing.assert_array_equal(decided.logits, answer.logits)


def test_importances_of_a_pair_have_the_words_of_both_texts_and_no_special_token(
    stages: tuple[LookupStage, EncodeStage],
) -> None:
    always = replace(DISPATCH, draw=0.0)
    for (texts, _), answer in zip(PAIRS, answers_of(stages, [always] * len(ASKED))[-2:], strict=True):
        both = " ".join(text.decode() for text in texts)
        words = [both[int(first) : int(end)] for first, end, _ in answer.dispatch.importance]
        assert words == both.replace(",", " ,").split()


def test_a_regression_has_no_level_and_leaves_its_batch_unharmed(
    stages: tuple[LookupStage, EncodeStage],
) -> None:
    asked = [((b"the red cat",), b"grade"), TEXTS[0]]
    grade, other = answers_of(stages, [DISPATCH] * 2, asked)
    assert isinstance(grade, errors.BadInputError)
    assert "answers of a regression have no confidence" in str(grade)
    assert isinstance(other, EncodeAnswer)
