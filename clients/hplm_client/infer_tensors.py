"""Tensors of an infer request: from texts to inputs, and from outputs to predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.errors import BadInputError, HplmError, TextEncodingError, about_text
from hplm_client.model_choice import ChosenModel
from hplm_client.prediction import Prediction
from hplm_client.transport.access_keys import AccessKeys

# A request as callers write it: (tenant, text) or (tenant, text, pair). A list that mixes the two has no narrower type.
Request: TypeAlias = "tuple[str | None, ...] | list[str] | list[str | None]"
# A request as the client handles it; the pair is None for a single text.
TenantTextPair: TypeAlias = "tuple[str, str, str | None]"
WITHOUT_KEYS = AccessKeys(None, None)


def parse_requests(requests: Iterable[Any]) -> list[TenantTextPair]:
    """Return the requests of a batch. Raises BadInputError, which names the request that is malformed."""
    batch = list(requests)
    parsed = []
    for index, request in enumerate(batch):
        try:
            parsed.append(parse_request(request))
        except HplmError as error:
            raise about_text(error, index, len(batch)) from None
    return parsed


def parse_request(request: Any) -> TenantTextPair:
    """Return tenant, text and pair of a request. Raises BadInputError if it is malformed."""
    if not isinstance(request, tuple | list) or len(request) not in (2, 3):
        raise BadInputError(f"a request is (tenant, text) or (tenant, text, pair), not {request!r:.100}")
    tenant, text, *pair = request
    return tenant, text, pair[0] if pair else None


def input_tensors(module: Any, requests: Sequence[TenantTextPair], keys: AccessKeys = WITHOUT_KEYS) -> list[Any]:
    """Return TEXT `[n, 1]` (of pairs `[n, 2]`), TENANT `[n, 1]`, and KEY `[n, 1]` unless a header has the key.

    `module` is `tritonclient.http` or `tritonclient.grpc`. Raises BadInputError, TextEncodingError, and ForbiddenError for a
    tenant that `keys` lack.
    """
    if len({pair is None for _, _, pair in requests}) > 1:
        raise BadInputError("a request has texts or pairs, not both")
    texts, tenants = [], []
    for index, (tenant, text, pair) in enumerate(requests):
        try:
            texts.append(_encode(wire.TEXT, [text] if pair is None else [text, pair]))
            tenants.append(_encode(wire.TENANT, [tenant]))
        except HplmError as error:
            raise about_text(error, index, len(requests)) from None
    tensors = [bytes_tensor(module, wire.TEXT, texts), bytes_tensor(module, wire.TENANT, tenants)]
    if (sent := keys.of_tenants([tenant for tenant, _, _ in requests])) is not None:
        tensors.append(bytes_tensor(module, wire.KEY, [[key] for key in sent]))
    return tensors


def bytes_tensor(module: Any, name: str, values: Sequence[Any]) -> Any:
    """Return an input of Triton's type BYTES, with the shape of the nested `values`."""
    array = np.array(values, dtype=np.object_)
    tensor = module.InferInput(name, list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array)
    return tensor


def _encode(name: str, values: list[str]) -> list[bytes]:
    if wrong_types := [type(value).__name__ for value in values if not isinstance(value, str)]:
        raise BadInputError(f"{name} must be a str, not {wrong_types[0]}")
    try:
        return [value.encode() for value in values]
    except UnicodeEncodeError as error:
        raise TextEncodingError(
            f"{name} has a lone surrogate at character {error.start}, so it is not a text"
        ) from None


def infer_options(module: Any, logits: bool, deadline_s: float | None, model: ChosenModel) -> dict[str, Any]:
    """Return the options of tritonclient's infer calls of `model`: the outputs, and the deadline as Triton's `timeout`."""
    names = [wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED, *([wire.LOGITS] if logits else [])]
    names += [wire.LEVEL, wire.CONFIDENCE, wire.LATE] if model.name == wire.CASCADE else []
    names += [wire.STUDENTS] if model.tells_students else []
    timeout = {} if deadline_s is None else {"timeout": deadline_us(deadline_s)}
    return {"outputs": [module.InferRequestedOutput(name) for name in names], **timeout}


def metadata_options(is_grpc: bool, timeout_s: float) -> dict[str, Any]:
    """Return the options with which tritonclient gives a model's metadata as a dictionary."""
    return {"as_json": True, "client_timeout": timeout_s} if is_grpc else {}


def deadline_us(deadline_s: float) -> int:
    """Return a deadline in whole microseconds, at least one, because Triton reads 0 as none. Raises BadInputError."""
    if not (isinstance(deadline_s, Real) and 0 < deadline_s <= wire.LONGEST_DEADLINE_S):
        raise BadInputError(
            f"a deadline is a number of seconds above 0 and at most {wire.LONGEST_DEADLINE_S:.0f}, not {deadline_s!r}"
        )
    return max(1, round(deadline_s * 1e6))


def predictions_from(result: Any, requests: Sequence[TenantTextPair], logits: bool) -> list[Prediction]:
    """Return the prediction for each request. Raises BadInputError if the server left out logits that were too large."""
    labels, scores, spans, truncated = (
        result.as_numpy(name) for name in (wire.LABEL, wire.SCORE, wire.SPAN, wire.TRUNCATED)
    )
    filled_logits = result.as_numpy(wire.LOGITS) if logits else None
    cascade = _cascade_fields(result, len(requests))
    students = result.as_numpy(wire.STUDENTS)
    if filled_logits is not None and not filled_logits.size:
        raise BadInputError("the logits of these texts are too large for one answer: send fewer texts at a time")
    return [
        Prediction(
            tenant,
            text,
            _spans(labels[i], scores[i], spans[i]),
            bool(truncated[i, 0]),
            None if filled_logits is None else _without_filler(filled_logits[i]),
            pair,
            students=None if students is None else int(students[i, 0]),
            **cascade[i],
        )
        for i, (tenant, text, pair) in enumerate(requests)
    ]


def _cascade_fields(result: Any, count: int) -> list[dict[str, Any]]:
    """Return what the model `cascade` says of each of `count` texts; other models say nothing of it."""
    levels = result.as_numpy(wire.LEVEL)
    if levels is None:
        return [{}] * count
    confidences, late = result.as_numpy(wire.CONFIDENCE), result.as_numpy(wire.LATE)
    return [
        {
            "level": _text(level),
            "confidence": None if np.isnan(confidence) else float(confidence),
            "late": bool(is_late),
        }
        for (level,), (confidence,), (is_late,) in zip(levels, confidences, late, strict=True)
    ]


def _text(value: str | bytes) -> str:
    """Return a BYTES element as text. It is a str if a server answers in JSON without Triton's binary data."""
    return value if isinstance(value, str) else value.decode()


def _without_filler(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return one text's logits without the rows and columns that fill them up to the largest text's."""
    is_own = logits != np.float32(wire.LOGITS_FILLER)
    # A copy, because a view would keep the logits of all texts in memory.
    return logits[is_own.any(axis=1)][:, is_own.any(axis=0)].copy()


def _spans(labels: Any, scores: Any, spans: Any) -> tuple[LabelledSpan, ...]:
    """Return one text's spans without the filler, whose spans start below 0."""
    return tuple(
        LabelledSpan(_text(label), float(score), int(start), int(end))
        for label, score, (start, end) in zip(labels, scores, spans, strict=True)
        if start >= 0
    )
