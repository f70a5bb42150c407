"""Judges answers to attacks: each must be an error with a code, or a right answer, and must give nothing away."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from hplm.core import wire
from hplm.errors import from_wire
from tests.triton.access.fuzzing import Attack, Target, secret_of
from tests.triton.access.raw_connections import Answer, outputs_of

By = Literal["answered", "hplm", "Triton", "proxy", "hung up", "batch mate", "fault"]
TRACEBACK = re.compile(rb"Traceback|File \"|\.py\"?[:,]|line \d+, in ")
# Words of nginx in its own answers. Over gRPC a client sees the HTTP status alone.
_PROXY = re.compile(rb"<center>nginx|Received http2 header with status: [34]\d\d|HTTP status code [34]\d\d")
# The Python backend of Triton 24.10 refuses all requests of a batch if a text in one of them has a wrong length.
BATCH_MATE = re.compile(rb"incomplete string|expecting string of length|expecting 4 bytes")
GZIP_OR_ZLIB = 47
# Statuses that say that the proxy had no answer of Triton, or that Triton failed.
_GONE = (502, 503, 504)


@dataclass(frozen=True)
class Verdict:
    """The part that answered a request (`by`), the code of an error, and the fault of the answer, empty if it has none."""

    by: By
    code: str
    fault: str = ""


class Judge:
    """Judges the answers of one target. Safe to use from several threads."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._secrets, self._names = target.secrets, target.names
        self._labels = {caller.tenant.encode(): caller.labels for caller in target.callers}
        held = target.keys
        # A tenant may be a caller of several bases, each with a key.
        self._infer = [(caller.tenant, secret_of(caller.key)) for caller in target.callers]
        self._manage = [*map(secret_of, held.operators.values()), *map(secret_of, held.managing.values())]
        self._operators = [*map(secret_of, held.operators.values())]

    def verdict(self, attack: Attack, answer: Answer) -> Verdict:
        """Return the verdict of an answer."""
        if answer.status is None:
            is_expected = attack.hangs_up or attack.method == "CONNECT"
            return Verdict("hung up", "") if is_expected else Verdict("fault", "", "no answer")
        raw = attack.raw
        if fault := self._given_away(raw, answer.content):
            return Verdict("fault", "", fault)
        if not answer.is_ok:
            by, code = refusal(answer)
            is_of_server = by == "hplm" and code in ("INTERNAL", "CORRUPT_ARTIFACT", "STAGE_DOWN")
            if is_of_server or (by == "proxy" and answer.status in _GONE):
                return Verdict("fault", code, f"an error of the server: {answer.content[:300]!r}")
            if attack.is_well_formed and BATCH_MATE.search(answer.content):
                return Verdict("batch mate", code)
            if attack.is_well_formed:
                return Verdict("fault", code, f"a good request was refused: {answer.content[:300]!r}")
            return Verdict(by, code)
        if attack.method not in ("POST", "post") or attack.path.endswith("/ready"):
            return Verdict("answered", "")
        fault = self._wrong_answer(attack, raw, answer.content)
        return Verdict("fault", "", fault) if fault else Verdict("answered", "")

    def _given_away(self, raw: bytes, content: bytes) -> str:
        """Return what an answer gives away, if anything."""
        if TRACEBACK.search(content) and not TRACEBACK.search(raw):
            return f"a traceback: {content[:500]!r}"
        if any(secret in content and secret not in raw for secret in self._secrets):
            return "a key"
        is_operator = any(secret in raw for secret in self._operators)
        if not is_operator and (
            named := [name for name in self._names if _has_word(content, name) and name not in raw]
        ):
            return f"the tenant {named[0].decode()}: {content[:300]!r}"
        return ""

    def _wrong_answer(self, attack: Attack, raw: bytes, content: bytes) -> str:
        """Return what is wrong with an answer that is no error, if anything is."""
        outputs = _outputs(attack, content)
        if outputs is None:
            return f"no answer of a model: {content[:300]!r}"
        if wire.RESPONSE in outputs or attack.model.startswith(wire.MANAGER):
            return "" if any(secret in raw for secret in self._manage) else "let in to the manager without a key"
        named = [tenant for tenant, secret in self._infer if secret in raw and tenant.encode() in raw]
        managing = [tenant for tenant, key in self._target.keys.managing.items() if secret_of(key) in raw]
        if not named and not managing:
            return "let in without the tenant's key"
        allowed = {label.encode() for tenant in (*named, *managing) for label in self._labels[tenant.encode()]}
        # The parts B- and I- of labels of words are not in an answer.
        allowed |= {label[2:] for label in allowed if label[1:2] == b"-"}
        wrong = [
            label for label in outputs.get(wire.LABEL, []) if label not in allowed and label not in (b"score", b"")
        ]
        return f"a label that the tenant has not: {wrong[:3]}" if wrong else ""


def refusal(answer: Answer) -> tuple[By, str]:
    """Return who refused a request, and the code: hplm's code, or the status of Triton or the proxy."""
    words = answer.content.decode("utf-8", "replace")
    if _PROXY.search(answer.content):
        number = re.search(r"(?:status|code)[: ]+(\d{3})", words)
        return "proxy", number[1] if number else str(answer.status)
    if (error := from_wire(words)) is not None:
        return "hplm", str(error.code)
    return "Triton", str(answer.status)


def _outputs(attack: Attack, content: bytes) -> dict[str, list[bytes]] | None:
    """Return the BYTES outputs of an answer, None if it is no answer of a model. Binary outputs over HTTP are left out."""
    if attack.encoding == "gRPC":
        with suppress(DecodeError):
            return outputs_of(content)
        return None
    start = content
    # The request may have asked for a compressed answer.
    with suppress(zlib.error):
        start = zlib.decompress(content, wbits=GZIP_OR_ZLIB)
    try:
        # With binary outputs the JSON ends before the content does.
        parsed, _ = json.JSONDecoder().raw_decode(start.decode("latin-1"))
    except ValueError:
        return None
    if not isinstance(parsed, dict) or "model_name" not in parsed:
        return None
    return {
        output["name"]: [str(value).encode("latin-1") for value in _flat(output["data"])]
        for output in parsed.get("outputs", [])
        if output.get("datatype") == "BYTES" and "data" in output
    }


def _flat(data: Any) -> Iterable[Any]:
    for value in data:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _has_word(content: bytes, name: bytes) -> bool:
    """Return whether a name stands in an answer, and not as a part of another word."""
    return name in content and re.search(rb"(?<!\w)" + re.escape(name) + rb"(?!\w)", content) is not None
