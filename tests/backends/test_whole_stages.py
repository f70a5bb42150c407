"""The stages over a whole base, without Triton: ids and types of tokens go from the look-up stage to the encode stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm import errors
from hplm.core import wire
from hplm.core.text import TextOrPair
from hplm.engine import reference
from hplm.engine.open_domain import open_features
from hplm.models.base import Base
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.request import Request
from hplm.store.layout import Store
from tests import tiny
from tests.backends.test_stages import labels_input, plot_stage_of, upper_stage_of
from tests.batches import find_labels, look_up
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni

TEXTS = tiny.sentences(6, seed=2, words=(1, 60))
PAIRS = [*zip(tiny.sentences(3, 7), tiny.sentences(3, 8), strict=True)]
# Each text or pair with a tenant that takes it.
ASKED: list[tuple[TextOrPair, str]] = [
    *((text, name) for text in TEXTS for name in (*tiny.TASKS, "grade")),
    *((pair, name) for pair in PAIRS for name in ("alike", "follows")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_repository(tmp_path_factory.mktemp("whole"), shape=tiny.config(form="whole"), other_tasks=True)


@pytest.fixture(scope="module")
def look_up_stage(models: Path) -> Iterator[LookupStage]:
    stage = plot_stage_of(models)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def encode_stage(models: Path) -> Iterator[EncodeStage]:
    stage = upper_stage_of(models)
    yield stage
    stage.close()


def expected(store: Store, base: Base, text: TextOrPair, tenant: str) -> np.ndarray:
    """Return the slow reference's logits."""
    encoded = base.load_text_encoder().encode([text])
    features = open_features(store, base, []).features(encoded)[0]
    made = tiny.load_tenant(store, base, tenant)
    return reference.answered(base.load_upper(), torch.from_numpy(features), made, encoded[0].tokens)


def asked_of(stage: LookupStage) -> list[LookupAnswer]:
    requests = []
    for text, tenant in ASKED:
        parts = text if isinstance(text, tuple) else (text,)
        requests.append(([part.encode() for part in parts], tenant.encode()))
    answers = look_up(stage, requests)
    assert all(isinstance(answer, LookupAnswer) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, LookupAnswer)]


def labels_of(stage: EncodeStage, looked_up: list[LookupAnswer]) -> list[np.ndarray]:
    requests = [labels_input(one, tenant.encode()) for one, (_, tenant) in zip(looked_up, ASKED, strict=True)]
    answers = find_labels(stage, requests)
    assert all(isinstance(answer, EncodeAnswer) for answer in answers), answers
    return [answer.logits for answer in answers if isinstance(answer, EncodeAnswer)]


def test_texts_and_pairs_get_the_references_logits(
    models: Path, look_up_stage: LookupStage, encode_stage: EncodeStage
) -> None:
    store, base = tiny.opened(models.parent)
    looked_up = asked_of(look_up_stage)
    assert {answer.truncated for answer in looked_up} == {False, True}
    for (text, tenant), logits in zip(ASKED, labels_of(encode_stage, looked_up), strict=True):
        np.testing.assert_allclose(logits, expected(store, base, text, tenant), atol=5e-4, rtol=5e-4)


def test_the_look_up_stage_only_tokenises(look_up_stage: LookupStage) -> None:
    assert look_up_stage.output == wire.IDS
    for answer in asked_of(look_up_stage):
        assert answer.features.dtype == np.int32
        assert answer.features.shape == (len(answer.tokens), 2)
    assert not look_up_stage.domains.windows_by_level


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (np.zeros((4, 3), np.int32), "ids and types of tokens are 3 wide, this base's are 2"),
        (np.full((4, 2), -1, np.int32), "ids of tokens must be 0 to"),
        (np.full((4, 2), 10**6, np.int32), "ids of tokens must be 0 to"),
        (np.array([(5, 2)] * 4, np.int32), "their types 0 to 1"),
        (np.zeros((41, 2), np.int32), "41 tokens came, 1 to 40 are accepted"),
    ],
)
def test_tokens_without_an_embedding_are_refused(encode_stage: EncodeStage, features: np.ndarray, words: str) -> None:
    request = Request[EncodeInput, EncodeAnswer](
        EncodeInput(features, np.zeros((len(features), 3), np.int32)), b"alpha"
    )
    (answer,) = find_labels(encode_stage, [request])
    assert isinstance(answer, errors.HiddenStatesError)
    assert words in str(answer)


@needs_vnni
def test_products_in_int8_move_the_logits_little(models: Path, look_up_stage: LookupStage) -> None:
    store, base = tiny.opened(models.parent)
    stage = upper_stage_of(models, quantization="int8")
    logits = labels_of(stage, asked_of(look_up_stage))
    stage.close()
    wanted = [expected(store, base, text, tenant) for text, tenant in ASKED]
    moved = sum(float(np.square(found - one).sum()) for found, one in zip(logits, wanted, strict=True))
    assert 0 < moved / sum(float(np.square(one).sum()) for one in wanted) < 0.02
