"""Encode stages of some layers each, without Triton: one after another they answer as a single encode stage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hplm import errors
from hplm.core import wire
from hplm.core.settings import EncodeSettings, load_settings
from hplm.scheduling.downstream_admission import Backlog
from hplm.serving.backlog_file import READ_EVERY_S, BacklogFile
from hplm.serving.encode_stage import (
    EncodeAnswer,
    EncodeInput,
    EncodeStage,
    FeaturesStage,
    LayersStage,
    StatesAnswer,
)
from hplm.serving.lookup_stage import LookupAnswer
from hplm.serving.request import Request
from tests import tiny
from tests.backends.test_stages import plot_stage_of
from tests.backends.test_whole_stages import ASKED, asked_of, expected
from tests.batches import compute
from tests.submitting import submit

CUT = (1, 1, 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole, so that the first two layers have no adapters."""
    shape = tiny.config(form="whole")
    return tiny.make_repository(tmp_path_factory.mktemp("cut"), shape=shape, other_tasks=True, stage_layers=CUT)


def stage_of(models: Path, number: int, **changed: Any) -> FeaturesStage[Any]:
    folder = models / f"hbert_upper_{number}" / "1"
    settings = replace(load_settings(EncodeSettings, folder / "settings.json"), **changed)
    return (EncodeStage if number == len(CUT) else LayersStage)(settings, folder)


@pytest.fixture(scope="module")
def stages(models: Path) -> Iterator[list[FeaturesStage[Any]]]:
    with ExitStack() as opened:
        made = [stage_of(models, number) for number in (1, 2, 3)]
        for stage in made:
            opened.callback(stage.close)
        yield made


@pytest.fixture(scope="module")
def looked_up(models: Path) -> list[LookupAnswer]:
    stage = plot_stage_of(models)
    try:
        return asked_of(stage)
    finally:
        stage.close()


def test_texts_and_pairs_of_every_task_get_the_references_logits(
    models: Path, stages: list[FeaturesStage[Any]], looked_up: list[LookupAnswer]
) -> None:
    store, base = tiny.opened(models.parent)
    assert [stage.input for stage in stages] == [wire.IDS, wire.STATES, wire.STATES]
    features: list[Any] = [one.features for one in looked_up]
    for stage in stages:
        requests = [
            Request[EncodeInput, Any](EncodeInput(given, one.tokens, one.version_id), tenant.encode())
            for given, one, (_, tenant) in zip(features, looked_up, ASKED, strict=True)
        ]
        answers: list[Any] = compute(stage, requests)
        features = [answer.states for answer in answers if isinstance(answer, StatesAnswer)]
    for (text, tenant), answer in zip(ASKED, answers, strict=True):
        assert isinstance(answer, EncodeAnswer), answer
        np.testing.assert_allclose(answer.logits, expected(store, base, text, tenant), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (np.zeros((4, 47), np.float32), "hidden states are 47 wide, this base's are 48"),
        (np.full((4, 48), np.nan, np.float32), "hidden states hold NaN, or numbers beyond 65504"),
        (np.full((4, 48), np.inf, np.float32), "hidden states hold NaN, or numbers beyond 65504"),
        # With `concat` such numbers would spoil the other texts of a batch.
        (np.full((4, 48), -1e20, np.float32), "hidden states hold NaN, or numbers beyond 65504"),
    ],
)
def test_wrong_states_are_refused(stages: list[FeaturesStage[Any]], states: np.ndarray, words: str) -> None:
    request = Request[EncodeInput, Any](EncodeInput(states, np.zeros((4, 3), np.int32)), b"alpha")
    (answer,) = compute(stages[1], [request])
    assert isinstance(answer, errors.HiddenStatesError)
    assert words in str(answer)


def backlog(now_s: float, alone_s: float) -> Backlog:
    """Return the backlog of an idle stage whose batches of one text take `alone_s`."""
    return Backlog(now_s, now_s, 1024, 1.0, 0.0, (), (), {}, (alone_s, 0.0, 0.0))


def test_a_stage_leaves_the_later_stages_the_time_that_they_need(models: Path) -> None:
    stage = stage_of(models, 1)
    store, _ = tiny.opened(models.parent)
    files = [BacklogFile(store.root.resolve(), "tiny", stage=number) for number in (2, 3)]
    request = Request[EncodeInput, Any](EncodeInput(stage.no_features, np.zeros((1, 3), np.int32)), b"alpha", 2.0)
    refused: list[Any] = []
    try:
        without = stage.times_of(request).deadline_s
        for file, alone_s in zip(files, (0.5, 0.25), strict=True):
            file.publish(backlog(time.monotonic(), alone_s))
        time.sleep(2 * READ_EVERY_S)
        assert stage.times_of(request).deadline_s == pytest.approx(without - 0.75)
        # What the later stages cannot do in time is refused at once, before anything is computed.
        files[1].publish(backlog(time.monotonic(), 1.6))
        time.sleep(2 * READ_EVERY_S)
        submit(stage, request, refused.append)
        assert isinstance(refused[0], errors.DeadlineError)
    finally:
        for file in files:
            file.remove()
        stage.close()


@pytest.fixture
def restored_cores() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_a_stage_computes_on_its_cores_alone(
    models: Path, restored_cores: None, restored_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = max(os.sched_getaffinity(0))
    stage = stage_of(models, 2, stage_cores=((core,),) * 3)
    assert os.sched_getaffinity(0) == {core}
    assert f"layers 2 to 2 of 4 on cpu in float32 with 1 thread on cores {core}; costs measured" in stage.about
    stage.close()


def test_a_core_that_is_not_there_is_refused(models: Path, restored_cores: None) -> None:
    with pytest.raises(errors.ConfigError, match="core 9999 is not one of this process: its cores are"):
        stage_of(models, 2, stage_cores=((9999,),) * 3)


def test_a_tenant_with_students_is_refused_before_it_is_in_a_batch(models: Path) -> None:
    store, base = tiny.opened(models.parent)
    tiny.publish(store, base, tiny.PLOT, tiny.students_of(base, "many", 1, 3))
    stage = stage_of(models, 2)
    request = Request[EncodeInput, Any](EncodeInput(stage.no_features, np.zeros((1, 3), np.int32)), b"many")
    (answer,) = compute(stage, [request])
    assert isinstance(answer, errors.CorruptArtifactError)
    stage.close()
