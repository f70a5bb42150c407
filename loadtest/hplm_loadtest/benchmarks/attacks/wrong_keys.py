"""The benchmark `hplm bench wrong-keys`: keys that are nearly right, sent to every model that a client may call."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hplm.access.proof import REFUSED as PROOF_REFUSED
from hplm.core import wire
from hplm.errors import ForbiddenError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.attacks.attack import HEADER
from hplm_loadtest.benchmarks.attacks.connections import Answer, Connections, Headers
from hplm_loadtest.benchmarks.attacks.encodings import grpc_message, http_body
from hplm_loadtest.benchmarks.attacks.keyed_copy import keyed_copy
from hplm_loadtest.benchmarks.attacks.near_misses import near_miss
from hplm_loadtest.benchmarks.attacks.target import Target
from hplm_loadtest.benchmarks.attacks.verdicts import refusal

Place = Literal["header", "input KEY", "input KEY beside the right header", "two headers", "another scheme"]
PLACES: tuple[Place, ...] = (
    "header",
    "input KEY",
    "input KEY beside the right header",
    "two headers",
    "another scheme",
)
# A right key is sent after this many wrong keys, so that a server that refuses every request is noticed.
RIGHT_EVERY = 50
MOST_SHOWN = 20
# The words of every refusal. Those of a model go on with "tenant", those of the manager with "action".
WORDS = b"the key is missing, or is not valid for this "
PROOF_WORDS = PROOF_REFUSED.encode()


@dataclass(frozen=True)
class Attempt:
    """A request with a wrong key. `kind` says what is wrong with the key, `place` where it is."""

    number: int
    model: str
    protocol: Literal["HTTP", "gRPC"]
    kind: str
    place: Place
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)


@dataclass
class WrongKeys:
    """Counts of the attempts, and the attempts whose answer was wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    protocols: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)
    # Refused, and not with the words that every wrong key gets.
    other_words: list[str] = field(default_factory=list)
    right_refused: list[str] = field(default_factory=list)
    right: int = 0
    seconds: float = 0.0


def _send(attempt: Attempt, over: Connections) -> Answer:
    if attempt.protocol == "gRPC":
        return over.grpc.send(attempt.body, attempt.headers)
    return over.http.send("POST", f"/v2/models/{attempt.model}/infer", attempt.headers, attempt.body)


def wrong_keys(models: Path, count: int, connections: int, seed: int = 1) -> Report:
    """Send `count` wrong keys to a copy of `models`, over HTTP and gRPC; see `send_wrong_keys`."""
    with keyed_copy(models) as target:
        sent = send_wrong_keys(target, count, connections, seed)
    return report_of(sent, {"keys": count, "connections": connections, "seed": seed})


def send_wrong_keys(target: Target, count: int, connections: int, seed: int) -> WrongKeys:
    """Send `count` requests with wrong keys, without a proxy, and a right key after each RIGHT_EVERY."""
    ports = target.ports
    sent, mine = WrongKeys(), Connections(ports.host, ports.http, ports.grpc)

    def one(number: int) -> tuple[Attempt, Answer]:
        attempt = attempt_of(target, number, seed)
        return attempt, _send(attempt, mine)

    began_s = time.monotonic()
    with closing(mine), ThreadPoolExecutor(connections) as pool, progress_bars() as progress:
        bar = progress.add_task("keys", total=count)
        for attempt, answer in pool.map(one, range(count)):
            _count(sent, attempt, answer)
            progress.update(bar, advance=1)
    sent.seconds = time.monotonic() - began_s
    return sent


def _count(sent: WrongKeys, attempt: Attempt, answer: Answer) -> None:
    words = f"{attempt}: {answer.status} {answer.content[:200]!r}"
    if attempt.kind == "right":
        sent.right += 1
        if not answer.is_ok:
            sent.right_refused.append(words)
        return
    sent.kinds[attempt.kind] += 1
    sent.places[attempt.place] += 1
    sent.models[attempt.model] += 1
    sent.protocols[attempt.protocol] += 1
    if answer.is_ok or answer.status is None:
        sent.let_in.append(words)
    elif refusal(answer) != ("hplm", ForbiddenError.code) or _words(attempt) not in answer.content:
        sent.other_words.append(words)


def _words(attempt: Attempt) -> bytes:
    """Return the words of the error that a wrong key gets: a header with a forged proof is refused as a proof."""
    is_proof = any(value.startswith("Proof ") for name, value in attempt.headers if name == HEADER)
    return PROOF_WORDS if is_proof and attempt.model != wire.MANAGER else WORDS


def attempt_of(target: Target, number: int, seed: int) -> Attempt:
    """Return attempt `number`, the same each time."""
    rng = random.Random(f"{seed}-{number}")
    models = [name for name in target.inputs if not name.endswith("_upper")]
    model = rng.choice(models)
    protocol: Literal["HTTP", "gRPC"] = rng.choice(("HTTP", "gRPC"))
    caller = rng.choice(target.callers_of(model))
    right = target.keys.operators["admin"] if model == wire.MANAGER else caller.key
    values = target.values(model, caller, "A moving film.")
    place = rng.choice(PLACES)
    kind, wrong = "right", right
    if number % RIGHT_EVERY:
        kind, wrong = _wrong(target, model, caller.tenant, right, rng)
    else:
        place = rng.choice(PLACES[:2])
    # A header can hold these characters alone.
    if (
        place != "input KEY"
        and place != "input KEY beside the right header"
        and not (wrong.isascii() and wrong.isprintable())
    ):
        place = "input KEY"
    headers: list[tuple[str, str]] = []
    if place == "header":
        headers = [(HEADER, f"Bearer {wrong}")]
    elif place == "two headers":
        other = _wrong(target, model, caller.tenant, right, rng)[1]
        shown = other if other.isascii() and other.isprintable() else "x"
        headers = [(HEADER, f"Bearer {wrong}"), (HEADER, f"Bearer {shown}")]
    elif place == "another scheme":
        scheme = rng.choice(("Basic", "Proof", "Bearer Bearer", "Token", "Bearer,", "bearer:", "Key", ""))
        # A right key in a header of another form is no key either.
        headers = [(HEADER, f"{scheme} {right if rng.random() < 0.5 and scheme else wrong}".strip())]
        headers = headers if headers[0][1] else [(HEADER, "x")]
    else:
        values[wire.KEY] = wrong.encode()
        headers = [(HEADER, f"Bearer {right}")] if place == "input KEY beside the right header" else []
    request = target.inputs[model].well_formed(values, rng)
    # Triton writes no FP16 output of a look-up stage in JSON.
    if protocol == "HTTP":
        outputs = target.inputs[model].outputs[:1]
        request["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    if protocol == "gRPC":
        body = grpc_message(request, rng, is_changed=False)
    else:
        extra, body = http_body(request, rng, binary=rng.random() < 0.5, is_changed=False)
        headers += extra.items()
    return Attempt(number, model, protocol, kind, place, tuple(headers), body)


def _wrong(target: Target, model: str, tenant: str, right: str, rng: random.Random) -> tuple[str, str]:
    """Return what is wrong with a key, and the key: nearly the right key, or a right key of someone else."""
    keys = target.keys
    others: dict[str, str] = {
        "of another tenant": rng.choice(
            [*keys.of_strangers.values(), *(one.key for one in target.callers if one.tenant != tenant)]
        ),
        "revoked": keys.revoked[tenant],
        "expired": keys.expired[tenant],
    }
    if model == wire.MANAGER:
        others["of a tenant"] = rng.choice([one.key for one in target.callers])
    else:
        others["of an operator"] = rng.choice(list(keys.operators.values()))
    if rng.random() < 0.3:
        kind = rng.choice(list(others))
        return kind, others[kind]
    return near_miss(right, rng)


def report_of(sent: WrongKeys, settings: dict[str, Any]) -> Report:
    """Return the benchmark result of the attempts."""
    count = sum(sent.kinds.values())
    rows: list[dict[str, Any]] = [{"wrong": kind, "keys": number} for kind, number in sent.kinds.most_common()]
    rows += [{"place": place, "keys": number} for place, number in sent.places.most_common()]
    rows += [{"model": model, "keys": number} for model, number in sent.models.most_common()]
    rows += [{"over": protocol, "keys": number} for protocol, number in sent.protocols.most_common()]
    rows += _shown({"let in": sent.let_in, "other words": sent.other_words, "right key refused": sent.right_refused})
    goals = [
        Goal("58-wrong-keys", "wrong keys that were let in", 0, len(sent.let_in), "keys", "lower"),
        Goal("58-wrong-keys-words", "wrong keys refused with other words", 0, len(sent.other_words), "keys", "lower"),
        Goal("58-right-keys", "right keys that were refused", 0, len(sent.right_refused), "keys", "lower"),
    ]
    further = {"wrong_keys": count, "right_keys": sent.right, "seconds": sent.seconds}
    return Report(
        "wrong-keys", {**settings, **further, "requests_per_s": (count + sent.right) / sent.seconds}, rows, goals
    )


def _shown(faults: dict[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [{"fault": kind, "request": words} for kind, all_words in faults.items() for words in all_words[:MOST_SHOWN]]
