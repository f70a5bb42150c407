"""The output tensors of labels, for the stages that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core import wire
from hplm.serving.encode_stage import EncodeAnswer
from hplm.serving.multi_text import fill_up, labelled
from hplm.triton.bridge import translate


def label_writer(request: Any) -> Callable[[Sequence[EncodeAnswer]], dict[str, npt.NDArray[Any]]]:
    """Return what makes output tensors of the answers of a Triton request's texts: LOGITS too if the client asked for them.

    If the client sent DISPATCH, the outputs of it are among them.
    """
    with_logits = translate.wants(request, wire.LOGITS)

    def write(answers: Sequence[EncodeAnswer]) -> dict[str, npt.NDArray[Any]]:
        outputs = labelled([answer.spans for answer in answers])
        outputs[wire.STUDENTS] = np.array([[answer.students] for answer in answers], np.int32)
        if with_logits:
            outputs[wire.LOGITS] = fill_up([answer.logits for answer in answers], wire.LOGITS_FILLER)
        decided = [answer.dispatch for answer in answers if answer.dispatch is not None]
        if decided:
            outputs[wire.ROUTE] = np.array([[one.is_rerouted] for one in decided], np.int32)
            outputs[wire.CONFIDENCE] = np.array([[one.confidence] for one in decided], np.float32)
            outputs[wire.IMPORTANCE] = fill_up([one.importance for one in decided], -1)
        return outputs

    return write
