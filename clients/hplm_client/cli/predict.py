"""`hplm predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from hplm.errors import BadInputError, HplmError, TenantNameError, UnknownTenantError, UnreachableError
from hplm.reporting.terminal_text import say
from hplm_client.answers import Prediction
from hplm_client.cli.predict_input import Asked, texts_asked
from hplm_client.cli.predict_stream import answers_ahead
from hplm_client.client import Client
from hplm_client.transport.connection import LONGEST_TIMEOUT_S, USUAL_TIMEOUT_S, headers_of_environment

# Characters of a text that was refused.
SHOWN = 200


def predict(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Whose model answers.")],
    text: Annotated[str | None, typer.Argument(help="One text; without it, each line of standard input.")] = None,
    pair: Annotated[
        str | None, typer.Option("--pair", "-p", help="The second text, for a tenant that was trained on pairs.")
    ] = None,
    jsonl: Annotated[
        bool,
        typer.Option("--jsonl", help="Lines of standard input are objects with text and, of a pair, text_pair."),
    ] = False,
    url: Annotated[
        str, typer.Option(envvar="HPLM_URL", help="http://HOST:PORT or grpc://HOST:PORT; https or grpcs over TLS.")
    ] = "http://127.0.0.1:8000",
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", metavar="S", help="Seconds each text may take; refused otherwise.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Ask a tenant's model.

    Of many lines those that are refused, are no text, or get no answer from a server that is there, say so in their place,
    with --json in `error`, and the exit status is 1. What the next line would meet too, as an unknown tenant, ends it, with a
    line on standard error, and with --json in `error` too. With --json each has the number of its `line`, but not what ends it
    before the first. Blank lines are left out.
    Examples:

      hplm predict --tenant films "A moving, beautifully acted film."

      hplm predict -t spam --json < messages.txt

      hplm predict -t films --deadline 0.1 "A moving, beautifully acted film."

      hplm predict -t icd10 --url grpc://127.0.0.1:8001 "Fracture of the left femur"

      hplm predict -t alike "A man plays a guitar." --pair "Somebody makes music."

      hplm predict -t alike --jsonl --json < pairs.jsonl
    """
    refused = 0
    ending: Asked | None = None

    def show(one: Asked, answer: Prediction | HplmError) -> None:
        nonlocal refused
        first, second = (None, None) if isinstance(one.texts, HplmError) else one.texts
        if isinstance(answer, Prediction):
            shown, lines = answer.as_dict(), list(_lines(answer))
        else:
            refused += 1
            shown = {"tenant": tenant, "text": first, "pair": second, "error": answer.wire()}
            lines = [*([] if first is None else [_cut(first)]), f"  {answer.wire()}"]
        if as_json:
            line = {} if one.line is None else {"line": one.line}
            _print(json.dumps({**line, **shown}, ensure_ascii=False))
        else:
            _print("\n".join(lines))

    # Also bounds the connecting, which comes before the client counts a deadline.
    timeout_s = USUAL_TIMEOUT_S if deadline_s is None else min(LONGEST_TIMEOUT_S, max(0.0, deadline_s) + 5.0)
    try:
        asked = texts_asked(_typed(), text, pair, jsonl=jsonl)
        with Client(url, headers=headers_of_environment(), timeout_s=timeout_s) as client:
            for one, answer in answers_ahead(client, tenant, asked, deadline_s):
                is_sent = not isinstance(one.texts, HplmError)
                if is_sent and isinstance(answer, HplmError) and (text is not None or _meets_all(client, answer)):
                    ending = one
                    raise answer
                show(one, answer)
    except HplmError as error:
        if as_json:
            show(ending or Asked(error if text is None else (text, pair)), error)
        raise
    if refused:
        raise typer.Exit(1)


def _print(line: str) -> None:
    try:
        say(line)
    except BrokenPipeError:
        # Who reads has seen enough: no error of its own.
        raise
    except OSError as error:
        raise BadInputError(f"standard output takes no more: {error.strerror}") from None


def _typed() -> Iterator[bytes]:
    """Lines of standard input."""
    if sys.stdin is None:
        raise BadInputError("standard input is closed: give a text, or lines to read")
    # Not Python's own: at its end it would wait for the thread that reads it.
    with open(sys.stdin.fileno(), "rb", closefd=False) as typed:
        yield from typed


def _meets_all(client: Client, error: HplmError) -> bool:
    """Whether the next text would meet it as well: a single answer may be late, or a connection break."""
    if not isinstance(error, UnreachableError):
        return isinstance(error, UnknownTenantError | TenantNameError)
    try:
        return not client.is_ready()
    except HplmError:
        return True


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _lines(prediction: Prediction) -> Iterator[str]:
    yield prediction.text
    if prediction.pair is not None:
        yield prediction.pair
    if not prediction.spans:
        yield "  (nothing found)"
    read = prediction.text if prediction.pair is None else f"{prediction.text} {prediction.pair}"
    for span in prediction.spans:
        whole = len(prediction.spans) == 1 and span.start == 0 and span.end >= len(read.rstrip())
        words = "" if whole else f"  {read[span.start : span.end]!r}"
        yield f"  {span.label}  {span.score:.3f}{words}"
    if prediction.truncated:
        yield "  (the text was longer than the model reads and was cut)"
