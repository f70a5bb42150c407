"""Tensors of a call to a base's model: from texts of several requests to inputs, and from outputs to each text's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hplm.access.gate import proof_rows
from hplm.cascade.dispatch import DispatchInput
from hplm.core import wire
from hplm.serving.multi_text import fill_up

Tensors = Mapping[str, npt.NDArray[Any]]


class RouteInput(NamedTuple):
    """A text or pair as bytes, whether logits are wanted, and how a level of a cascade decides on the text."""

    texts: tuple[bytes, ...]
    with_logits: bool
    dispatch: DispatchInput | None = None

    @property
    def form(self) -> tuple[int, bool, bool]:
        """Texts with the same form fit in one call."""
        return len(self.texts), self.with_logits, self.dispatch is not None


class Dispatched(NamedTuple):
    """The decision of a level of a cascade on a text: whether the text goes to the next level, and the calibrated confidence.

    `importance` `[words, 3]` is as in `hplm.cascade.pruning.prune`; it has no words unless the text is re-routed and
    importances were wanted.
    """

    is_rerouted: bool
    confidence: float
    importance: npt.NDArray[np.float32]


class RouteAnswer(NamedTuple):
    """The answer to one text: labels `[k]`, scores `[k]`, spans `[k, 2]`, truncated and students `[1]`.

    `logits` `[1 or tokens, labels]`.
    """

    labels: npt.NDArray[Any]
    scores: npt.NDArray[Any]
    spans: npt.NDArray[Any]
    truncated: npt.NDArray[Any]
    students: npt.NDArray[Any]
    logits: npt.NDArray[Any] | None
    dispatched: Dispatched | None = None


def output_names(item: RouteInput) -> list[str]:
    """Return the outputs that a call with texts of this form asks for."""
    logits = [wire.LOGITS] if item.with_logits else []
    dispatched = [] if item.dispatch is None else [wire.ROUTE, wire.CONFIDENCE, wire.IMPORTANCE]
    return [wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, wire.STUDENTS, *logits, *dispatched]


def call_inputs(
    texts: Sequence[tuple[RouteInput, bytes]], proofs: Sequence[bytes] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return TEXT `[n, 1]` (of pairs `[n, 2]`) and TENANT `[n, 1]` of texts of one form with their tenants.

    For a level of a cascade there is also DISPATCH, and with `proofs` PROOF `[n, PROOF_BYTES]`.
    """
    text = np.empty((len(texts), len(texts[0][0].texts)), dtype=np.object_)
    tenant = np.empty((len(texts), 1), dtype=np.object_)
    for index, (item, name) in enumerate(texts):
        text[index, :] = item.texts
        tenant[index, 0] = name
    inputs: dict[str, npt.NDArray[Any]] = {wire.TEXT: text, wire.TENANT: tenant}
    if texts[0][0].dispatch is not None:
        inputs[wire.DISPATCH] = np.stack([item.dispatch.to_array() for item, _ in texts if item.dispatch is not None])
    if proofs is not None:
        inputs[wire.PROOF] = proof_rows(proofs)
    return inputs


def call_answers(outputs: Tensors) -> list[RouteAnswer] | None:
    """Return each text's answer without the filler that makes all answers of a call equally large.

    Return None if the model has left out the logits of several texts, because their filler would be too large.
    """
    labels, scores, spans, truncated, students = (
        outputs[name] for name in (wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, wire.STUDENTS)
    )
    logits = outputs.get(wire.LOGITS)
    dispatched = _dispatched(outputs) if wire.ROUTE in outputs else [None] * len(spans)
    if len(spans) == 1:
        own_logits = None if logits is None else logits[0]
        return [RouteAnswer(labels[0], scores[0], spans[0], truncated[0], students[0], own_logits, dispatched[0])]
    if logits is not None and not logits.size:
        return None
    counts = (spans[:, :, 0] >= 0).sum(axis=1).tolist()
    return [
        RouteAnswer(
            labels[i, :count],
            scores[i, :count],
            spans[i, :count],
            truncated[i],
            students[i],
            None if logits is None else _without_filler(logits[i]),
            dispatched[i],
        )
        for i, count in enumerate(counts)
    ]


def response_outputs(answers: Sequence[RouteAnswer]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a request's texts, as a base's model gives them for the same texts."""
    labels, scores, spans, truncated, students, logits, _ = zip(*answers, strict=True)
    outputs = {
        wire.LABEL: fill_up(labels, b""),
        wire.SCORE: fill_up(scores, 0),
        wire.SPAN: fill_up(spans, -1),
        wire.TRUNCATED: np.stack(truncated),
        wire.STUDENTS: np.stack(students),
    }
    if logits[0] is not None:
        outputs[wire.LOGITS] = fill_up(logits, wire.LOGITS_FILLER)
    return outputs


def _dispatched(outputs: Tensors) -> list[Dispatched | None]:
    importance = outputs[wire.IMPORTANCE]
    return [
        # The filler of importances has negative characters. A copy, because a view would keep the words of all texts.
        Dispatched(bool(route), float(confidence), words[words[:, 0] >= 0].copy())
        for (route,), (confidence,), words in zip(
            outputs[wire.ROUTE], outputs[wire.CONFIDENCE], importance, strict=True
        )
    ]


def _without_filler(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    is_own = logits != np.float32(wire.LOGITS_FILLER)
    return logits[is_own.any(axis=1)][:, is_own.any(axis=0)]
