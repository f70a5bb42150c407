"""The command `hplm predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from hplm.errors import BadInputError, ForbiddenError, HplmError, TenantNameError, UnknownTenantError, UnreachableError
from hplm.reporting.terminal_text import say
from hplm_client.cli.predict_input import PredictInput, read_inputs
from hplm_client.cli.predict_stream import stream_predictions
from hplm_client.client import Client
from hplm_client.prediction import Prediction
from hplm_client.transport.access_keys import keys_from_environment
from hplm_client.transport.headers import headers_from_environment
from hplm_client.transport.time_limits import DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S

# Characters of a refused text that are shown.
REFUSED_TEXT_LENGTH = 200


def predict(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Tenant whose model answers.")],
    text: Annotated[str | None, typer.Argument(help="One text. Default: each line of standard input.")] = None,
    pair: Annotated[
        str | None, typer.Option("--pair", "-p", help="The second text, for a tenant that was trained on pairs.")
    ] = None,
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl", help="Read JSON objects from standard input, one a line, with text and, for pairs, text_pair."
        ),
    ] = False,
    url: Annotated[
        str,
        typer.Option(
            envvar="HPLM_URL",
            help="Address of the server: http://HOST:PORT or grpc://HOST:PORT; https or grpcs over TLS.",
        ),
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of a base to call. Default: cascade or hplm, for the tenants of all bases, if one is there, else hbert."
        ),
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline", metavar="S", help="Seconds that each text may take. A text that would take longer is refused."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Ask a tenant's model.

    Each line of standard input gets an answer. If a line is refused, is not a text, or gets no answer, its error is printed
    instead, with --json in the key `error`. The exit status is then 1.

    An error that the next line would meet too, such as an unknown tenant, ends the command. Such an error is printed on
    standard error, and with --json also in `error`. With --json each answer has the number of its line in `line`. Blank lines
    are skipped. An error before the first line has no `line`.

    Examples:

      hplm predict --tenant films "A moving, beautifully acted film."

      hplm predict -t spam --json < messages.txt

      hplm predict -t films --deadline 0.1 "A moving, beautifully acted film."

      hplm predict -t icd10 --url grpc://127.0.0.1:8001 "Fracture of the left femur"

      hplm predict -t alike "A man plays a guitar." --pair "Somebody makes music."

      hplm predict -t alike --jsonl --json < pairs.jsonl
    """
    num_refused = 0
    last_input: PredictInput | None = None

    def show(item: PredictInput, answer: Prediction | HplmError) -> None:
        nonlocal num_refused
        first, second = (None, None) if isinstance(item.texts, HplmError) else item.texts
        if isinstance(answer, Prediction):
            record, lines = answer.as_dict(), list(_prediction_lines(answer))
        else:
            num_refused += 1
            record = {"tenant": tenant, "text": first, "pair": second, "error": answer.wire()}
            lines = [*([] if first is None else [_shorten(first)]), f"  {answer.wire()}"]
        if as_json:
            number = {} if item.line is None else {"line": item.line}
            _print(json.dumps({**number, **record}, ensure_ascii=False))
        else:
            _print("\n".join(lines))

    # The timeout also limits the connecting, which happens before the client counts a deadline.
    timeout_s = DEFAULT_TIMEOUT_S if deadline_s is None else min(LONGEST_TIMEOUT_S, max(0.0, deadline_s) + 5.0)
    try:
        inputs = read_inputs(_standard_input(), text, pair, jsonl=jsonl)
        with Client(
            url, headers=headers_from_environment(), key=keys_from_environment(), timeout_s=timeout_s, model=model
        ) as client:
            for item, answer in stream_predictions(client, tenant, inputs, deadline_s):
                was_sent = not isinstance(item.texts, HplmError)
                if was_sent and isinstance(answer, HplmError) and (text is not None or _fails_all(client, answer)):
                    last_input = item
                    raise answer
                show(item, answer)
    except HplmError as error:
        if as_json:
            show(last_input or PredictInput(error if text is None else (text, pair)), error)
        raise
    if num_refused:
        raise typer.Exit(1)


def _print(line: str) -> None:
    try:
        say(line)
    except BrokenPipeError:
        # The reader of the output has ended, which is not an error of this command.
        raise
    except OSError as error:
        raise BadInputError(f"standard output takes no more: {error.strerror}") from None


def _standard_input() -> Iterator[bytes]:
    """Yield the lines of standard input."""
    if sys.stdin is None:
        raise BadInputError("standard input is closed: give a text, or lines to read")
    # At its end Python would wait for the thread that reads `sys.stdin`, so the thread reads a file object of its own.
    with open(sys.stdin.fileno(), "rb", closefd=False) as lines:
        yield from lines


def _fails_all(client: Client, error: HplmError) -> bool:
    """Return whether the next text would fail too. A single answer may be late, or its connection may break."""
    if not isinstance(error, UnreachableError):
        return isinstance(error, UnknownTenantError | TenantNameError | ForbiddenError)
    try:
        return not client.is_ready()
    except HplmError:
        return True


def _shorten(text: str) -> str:
    return text if len(text) <= REFUSED_TEXT_LENGTH else f"{text[:REFUSED_TEXT_LENGTH]}..."


def _prediction_lines(prediction: Prediction) -> Iterator[str]:
    yield prediction.text
    if prediction.pair is not None:
        yield prediction.pair
    if not prediction.spans:
        yield "  (nothing found)"
    whole_text = prediction.text if prediction.pair is None else f"{prediction.text} {prediction.pair}"
    for span in prediction.spans:
        is_whole = len(prediction.spans) == 1 and span.start == 0 and span.end >= len(whole_text.rstrip())
        words = "" if is_whole else f"  {whole_text[span.start : span.end]!r}"
        yield f"  {span.label}  {span.score:.3f}{words}"
    if (prediction.students or 1) > 1:
        yield f"  (answered by {prediction.students} students)"
    if prediction.confidence is not None:
        late = ", because a larger base could not answer in time" if prediction.late else ""
        yield f"  (answered by {prediction.level}, confidence {prediction.confidence:.3f}{late})"
    if prediction.truncated:
        yield "  (the text was longer than the model reads and was cut)"
