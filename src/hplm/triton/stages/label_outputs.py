"""The output tensors of labels, for the stages that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from hplm.core import wire
from hplm.serving.encode_stage import EncodeAnswer
from hplm.serving.multi_text import fill_up, labelled
from hplm.triton.bridge import translate


def label_writer(request: Any) -> Callable[[Sequence[EncodeAnswer]], dict[str, npt.NDArray[Any]]]:
    """Return what makes output tensors of the answers of a Triton request's texts: LOGITS too if the client asked for them."""
    with_logits = translate.wants(request, wire.LOGITS)

    def write(answers: Sequence[EncodeAnswer]) -> dict[str, npt.NDArray[Any]]:
        outputs = labelled([answer.spans for answer in answers])
        if with_logits:
            outputs[wire.LOGITS] = fill_up([answer.logits for answer in answers], wire.LOGITS_FILLER)
        return outputs

    return write
