"""The fused stage without Triton: the answers of both stages, from one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hplm import errors
from hplm.core.roles import load_serving_settings
from hplm.core.settings import FusedSettings, fused_values
from hplm.scheduling.downstream_admission import Backlog
from hplm.scheduling.policy import Batch
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.fused_stage import FusedAnswer, FusedInput, FusedStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.request import Request
from tests import tiny
from tests.batches import admitted, compute, find_labels, look_up

pytestmark = tiny.BASES_OF_BOTH_KINDS
REQUESTS = [((text.encode(),), name.encode()) for text in tiny.sentences(8, words=(1, 60)) for name in tiny.TASKS]


@pytest.fixture(scope="module")
def fused(tiny_models: Path) -> Iterator[FusedStage]:
    settings = load_serving_settings(tiny_models)
    values = fused_values(vars(settings.look_up), vars(settings.encode))
    stage = FusedStage(FusedSettings(**values), settings.folder)
    yield stage
    stage.close()


def requests(of: Sequence[tuple[tuple[bytes, ...], bytes]] = REQUESTS) -> list[Request[Any, FusedAnswer]]:
    return [Request(FusedInput(texts), tenant) for texts, tenant in of]


def test_it_answers_as_the_look_up_stage_and_the_encode_stage_do(tiny_models: Path, fused: FusedStage) -> None:
    settings = load_serving_settings(tiny_models)
    first, second = LookupStage(settings.look_up, settings.folder), EncodeStage(settings.encode, settings.folder)
    hidden = [one for one in look_up(first, REQUESTS) if isinstance(one, LookupAnswer)]
    inputs = [EncodeInput(one.features, one.tokens, one.version_id) for one in hidden]
    wanted = find_labels(second, [Request(one, tenant) for one, (_, tenant) in zip(inputs, REQUESTS, strict=True)])
    for stage in (first, second):
        stage.close()
    for answer, looked_up, one in zip(compute(fused, requests()), hidden, wanted, strict=True):
        assert isinstance(answer, FusedAnswer)
        assert isinstance(one, EncodeAnswer)
        assert [(span.label, span.start, span.end) for span in answer.spans] == [
            (span.label, span.start, span.end) for span in one.spans
        ]
        np.testing.assert_allclose(answer.logits, one.logits, atol=1e-3)
        assert answer.truncated == looked_up.truncated
    assert {one.truncated for one in hidden} == {False, True}


def test_a_bad_text_of_a_batch_gets_its_error_and_the_others_their_answers(fused: FusedStage) -> None:
    mixed = [REQUESTS[0], ((b"\x01",), b"alpha"), REQUESTS[1], ((b"hello",), b"nobody")]
    answers = compute(fused, requests(mixed))
    kinds = [FusedAnswer, errors.EmptyTextError, FusedAnswer, errors.UnknownTenantError]
    assert [type(answer) for answer in answers] == kinds


def test_what_was_looked_up_ahead_is_not_looked_up_again(fused: FusedStage, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = compute(fused, requests())
    items = [admitted(fused, request) for request in requests()]
    fused.look_ahead(items[::2])
    looked_up: list[int] = []
    find = fused.lookup.look_up
    monkeypatch.setattr(fused.lookup, "look_up", lambda texts: (looked_up.append(len(texts)), find(texts))[1])
    answers: dict[int, Any] = {}
    for indices, found in fused.run(items, Batch((), students=(1,) * len(items))):
        answers.update(zip(indices, found, strict=True))
    assert looked_up == [len(items) // 2]
    for index, one in enumerate(wanted):
        assert isinstance(one, FusedAnswer)
        np.testing.assert_allclose(answers[index].logits, one.logits, atol=1e-3)


def test_what_waits_in_its_own_queue_refuses_a_request_before_it_is_looked_up(fused: FusedStage) -> None:
    request = Request[Any, FusedAnswer](FusedInput(REQUESTS[0][0]), REQUESTS[0][1], 30.0)
    now_s = request.arrived_s
    fused.publish(Backlog(now_s, now_s, 10, 1.0, now_s, (now_s + 1.0,), (1000,), {"alpha": 1000}))
    try:
        with pytest.raises(errors.DeadlineError):
            admitted(fused, request)
        assert admitted(fused, Request(FusedInput(REQUESTS[0][0]), REQUESTS[0][1], 3000.0))
    finally:
        fused.publish(Backlog(now_s, now_s, 0, 0.0, now_s, (), (), {}))
    assert admitted(fused, request)
