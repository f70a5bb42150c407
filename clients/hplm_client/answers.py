"""Typed answers, and the tensors they travel as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.errors import BadInputError, HplmError, TextEncodingError, about_text

# Of several: (tenant, text) or (tenant, text, pair). A list that mixes the two has no narrower type than this.
Request: TypeAlias = "tuple[str | None, ...] | list[str] | list[str | None]"
# Tenant, text and pair.
Parts: TypeAlias = "tuple[str, str, str | None]"
LONGEST_DEADLINE_S = 86_400.0


@dataclass(frozen=True)
class Prediction:
    """A tenant's answer: one span for a classification or regression, one per entity for a tagging.

    Spans of a pair count on over its second text: they are characters of `text + " " + pair`.
    """

    tenant: str
    text: str
    spans: tuple[LabelledSpan, ...]
    truncated: bool
    # An array is neither equal to another nor hashable as a whole; texts and labels say which answer it is.
    logits: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    pair: str | None = None

    @property
    def label(self) -> str | None:
        """Label of the first span; None where a tagging found no entity."""
        return self.spans[0].label if self.spans else None

    @property
    def score(self) -> float | None:
        """Probability of `label`; the value of a regression."""
        return self.spans[0].score if self.spans else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without logits."""
        return {
            "tenant": self.tenant,
            "text": self.text,
            "pair": self.pair,
            "label": self.label,
            "score": self.score,
            "spans": [vars(span) for span in self.spans],
            "truncated": self.truncated,
        }


def tensors_of(module: Any, asked: Sequence[Parts]) -> list[Any]:
    """Inputs of one request for `tritonclient.http` or `tritonclient.grpc`, whichever `module` is, all texts or all pairs.

    Raises BadInputError, TextEncodingError.
    """
    if len({pair is None for _, _, pair in asked}) > 1:
        raise BadInputError("a request has texts or pairs, not both")
    texts, tenants = [], []
    for index, (tenant, text, pair) in enumerate(asked):
        try:
            texts.append(_encoded(wire.TEXT, [text] if pair is None else [text, pair]))
            tenants.append(_encoded(wire.TENANT, [tenant]))
        except HplmError as error:
            raise about_text(error, index, len(asked)) from None
    inputs = []
    for name, values in ((wire.TEXT, texts), (wire.TENANT, tenants)):
        tensor = module.InferInput(name, [len(values), len(values[0])], "BYTES")
        tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
        inputs.append(tensor)
    return inputs


def _encoded(name: str, values: list[str]) -> list[bytes]:
    if odd := [type(value).__name__ for value in values if not isinstance(value, str)]:
        raise BadInputError(f"{name} must be a str, not {odd[0]}")
    try:
        return [value.encode() for value in values]
    except UnicodeEncodeError as error:
        raise TextEncodingError(f"{name} has a lone surrogate at character {error.start}: it is no text") from None


def parts_of_all(requests: Iterable[Any]) -> list[Parts]:
    """Of each of several that go together. Raises BadInputError, which says which is something else."""
    given = list(requests)
    found = []
    for index, request in enumerate(given):
        try:
            found.append(parts_of(request))
        except HplmError as error:
            raise about_text(error, index, len(given)) from None
    return found


def parts_of(request: Any) -> Parts:
    """Tenant, text and pair of one of many. Raises BadInputError where it is something else."""
    if not isinstance(request, tuple | list) or len(request) not in (2, 3):
        raise BadInputError(f"a request is (tenant, text) or (tenant, text, pair), not {request!r:.100}")
    tenant, text, *pair = request
    return tenant, text, pair[0] if pair else None


def outputs_of(module: Any, logits: bool) -> list[Any]:
    """The outputs to ask for."""
    names = [wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, *([wire.LOGITS] if logits else [])]
    return [module.InferRequestedOutput(name) for name in names]


def deadline_us(deadline_s: float) -> int:
    """As Triton's `timeout` of a request: whole microseconds, at least one, since 0 means none. Raises BadInputError."""
    if not (isinstance(deadline_s, Real) and 0 < deadline_s <= LONGEST_DEADLINE_S):
        raise BadInputError(
            f"a deadline is a number of seconds above 0 and at most {LONGEST_DEADLINE_S:.0f}, not {deadline_s!r}"
        )
    return max(1, round(deadline_s * 1e6))


def options_of(deadline_s: float | None) -> dict[str, int]:
    """Options of `tritonclient`'s infer calls, the same in all four of its clients."""
    return {} if deadline_s is None else {"timeout": deadline_us(deadline_s)}


def predictions_of(result: Any, asked: Sequence[Parts], logits: bool) -> list[Prediction]:
    """A `tritonclient` result as a Prediction of each text. Raises BadInputError where their logits were too large together."""
    found = [result.as_numpy(name) for name in (wire.LABEL, wire.SCORE, wire.SPAN)]
    truncated = result.as_numpy(wire.TRUNCATED)
    raw = result.as_numpy(wire.LOGITS) if logits else None
    if raw is not None and not raw.size:
        raise BadInputError(
            "the logits of these texts differ too much in size to come together: ask for fewer at a time"
        )
    return [
        Prediction(
            tenant,
            text,
            _spans_of(*(of_all[i] for of_all in found)),
            bool(truncated[i, 0]),
            None if raw is None else _logits_of(raw[i]),
            pair,
        )
        for i, (tenant, text, pair) in enumerate(asked)
    ]


def _logits_of(filled: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return one text's logits without the rows and columns that fill them up to another text's."""
    is_own = filled != np.float32(wire.LOGITS_FILLER)
    # Not a view: one that is kept would keep the logits of all texts.
    return filled[is_own.any(axis=1)][:, is_own.any(axis=0)].copy()


def _spans_of(labels: Any, scores: Any, spans: Any) -> tuple[LabelledSpan, ...]:
    """Those of one text, without what fills them up to as many as another text has."""
    return tuple(
        # Who answers in JSON alone, without Triton's binary data, sends strings.
        LabelledSpan(label if isinstance(label, str) else label.decode(), float(score), int(start), int(end))
        for label, score, (start, end) in zip(labels, scores, spans, strict=True)
        if start >= 0
    )
