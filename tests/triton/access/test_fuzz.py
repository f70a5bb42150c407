"""Malformed requests and wrong keys, drawn by hypothesis, end no process, hang nowhere and give away nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hplm.access.proof import REFUSED as PROOF_REFUSED
from hplm.core import wire
from hplm.core.roles import models_of
from hplm.errors import BadManageRequestError, ForbiddenError
from hplm.manage.requests import parse_request
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from tests import tiny
from tests.triton.access.certificates import make_certificate, needs_openssl
from tests.triton.access.fuzzing import (
    AMPLE,
    HEADER,
    Attack,
    Caller,
    Draw,
    Keys,
    ModelInputs,
    Target,
    attacks,
    encoded,
    grpc_message,
    is_header,
    manage_requests,
    to_json,
)
from tests.triton.access.known_crashes import send_known_crashes
from tests.triton.access.making import OWN, serving
from tests.triton.access.nginx import HOST, Proxy, needs_nginx, port_of, proxy
from tests.triton.access.raw_connections import Answer, GrpcConnection, HttpConnection
from tests.triton.access.verdicts import Judge, refusal
from tests.triton.cascade.making import Making, table_of
from tests.triton.repetitions import repetitions

pytestmark = [pytest.mark.triton, pytest.mark.repeated]
VICTIM = "victim"
LABELS = ("yes", "no")  # of every tenant that has a key
STRANGERS = ("stella", "stefan")
SIDE_BY_SIDE = 8  # requests that are under way together
# What a process may grow by between the first tenth of the requests and the end, and what Triton may hold.
GROWTH_BYTES, GROWTH_FILES, MOST_BYTES = 64 << 20, 32, 1 << 30
# Seconds until every process has heard of a new key; each polls the registry five times a second.
KEYS_ARE_KNOWN_S = 1.5
WORDS = b"the key is missing, or is not valid for this "
PLACES = ("header", "KEY", "KEY beside the right header", "two headers", "another scheme")

# A failing example is not made smaller: each try would send requests to a server that an earlier try has changed.
fuzzed = settings(
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with keys, as a target of attacks that change limits, keys and one of its tenants."""
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(folder) as place:
        making = Making.over(folder)
        base = making.bases["middle"]
        for seed, name in enumerate((VICTIM, *STRANGERS), 9):
            tiny.make_tenant(place.store, base, name, seed, "alpha", domain=table_of(base.config))
        revoked = {tenant: place.add_key(tenant) for tenant in OWN.values()}
        for key in revoked.values():
            place.revoke(key)
        keys = Keys(
            {role: place.add_key(None, role) for role in ("read", "manage", "admin")},
            {OWN["small"]: place.add_key(OWN["small"], "manage")},
            revoked,
            {tenant: place.add_key(tenant, expires_s=time.time() - 1) for tenant in OWN.values()},
            {name: place.add_key(name) for name in STRANGERS},
        )
        callers = [Caller(tenant, model, place.add_key(tenant), LABELS) for model, tenant in OWN.items()]
        with closing(Registry.open(place.store)) as registry:
            for name in (*OWN.values(), *STRANGERS):
                registry.set_limits(name, AMPLE)
        ports = place.server.ports
        inputs = {name: ModelInputs.ask(ports.http_url, name) for name in models_of(place.models)}
        time.sleep(KEYS_ARE_KNOWN_S)
        yield Target(ports, place.models, folder / "triton.log", inputs, callers, keys, VICTIM)


class Lane:
    """A connection over HTTP and one over gRPC; each lane is used by one request at a time."""

    def __init__(self, http: int, grpc: int, certificate: Path | None = None) -> None:
        self.http, self.grpc = HttpConnection(HOST, http, certificate), GrpcConnection(HOST, grpc, certificate)

    def send(self, attack: Attack) -> Answer:
        if attack.encoding == "gRPC":
            return self.grpc.send(attack.body, attack.headers)
        return self.http.send(
            attack.method,
            attack.path,
            attack.headers,
            attack.body,
            said_length=attack.said_length,
            hangs_up=attack.hangs_up,
        )

    def close(self) -> None:
        self.http.close()
        self.grpc.close()


class Lanes:
    """Sends requests side by side."""

    def __init__(self, http: int, grpc: int, certificate: Path | None = None) -> None:
        self._lanes = [Lane(http, grpc, certificate) for _ in range(SIDE_BY_SIDE)]
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE)

    def send(self, requests: Sequence[Attack]) -> list[Answer]:
        return list(self._pool.map(lambda lane, attack: lane.send(attack), self._lanes, requests))

    def close(self) -> None:
        self._pool.shutdown()
        for lane in self._lanes:
            lane.close()


@st.composite
def keyed_requests(draw: Draw, target: Target) -> Attack:
    """Draw a well-formed request with a wrong key in some place, at times with the right key, which is let in."""
    model = draw(st.sampled_from(target.called_models))
    place, is_right = draw(st.sampled_from(PLACES)), draw(st.integers(0, 20)) == 0
    right = target.right_key(model)
    wrong = right if is_right else draw(target.wrong_keys(model))
    place = draw(st.sampled_from(PLACES[:2])) if is_right else place
    if not place.startswith("KEY") and not is_header(wrong):
        place = "KEY"
    values, headers = target.values(model), [(HEADER, f"Bearer {wrong}")]
    if place.startswith("KEY"):
        values[wire.KEY] = wrong.encode()
        headers = [(HEADER, f"Bearer {right}")] if place != "KEY" else []
    elif place == "two headers":
        headers *= 2
    elif place == "another scheme":
        scheme = draw(st.sampled_from(("Basic", "Proof", "Bearer Bearer", "Token", "Bearer,", "bearer:", "Key")))
        headers = [(HEADER, f"{scheme} {draw(st.sampled_from((wrong, right)))}".strip())]
    request = target.inputs[model].well_formed(values)
    encoding = draw(st.sampled_from(("HTTP JSON", "HTTP binary", "gRPC")))
    if encoding != "gRPC":
        # Triton writes no FP16 output of a look-up stage in JSON.
        request["outputs"] = [{**one, "parameters": {"binary_data": True}} for one in request["outputs"]]
    made = draw(encoded(encoding, model, headers, request, is_changed=False))
    return dataclasses.replace(made, is_well_formed=is_right)


def test_keys_that_are_nearly_right_are_refused_by_every_model_in_the_same_words(target: Target) -> None:
    counts = {True: 0, False: 0}
    with closing(Lanes(target.ports.http, target.ports.grpc)) as lanes:

        @settings(fuzzed, max_examples=repetitions(60, 1200))
        @given(st.lists(keyed_requests(target), min_size=SIDE_BY_SIDE, max_size=SIDE_BY_SIDE))
        def check(requests: list[Attack]) -> None:
            for attack, answer in zip(requests, lanes.send(requests), strict=True):
                counts[attack.is_well_formed] += 1
                if attack.is_well_formed:
                    assert answer.is_ok, (answer, attack)
                    continue
                assert refusal(answer) == ("hplm", ForbiddenError.code), (answer, attack)
                is_proof = any(value.startswith("Proof ") for _, value in attack.headers)
                words = PROOF_REFUSED.encode() if is_proof and attack.model != wire.MANAGER else WORDS
                assert words in answer.content, (answer, attack)

        check()
    assert counts[True] > 5
    assert counts[False] > 300


@pytest.fixture
def behind(target: Target, tmp_path: Path) -> Iterator[Proxy]:
    """The example's nginx before the server."""
    with proxy(target.ports, make_certificate(tmp_path / "tls"), tmp_path / "nginx") as made:
        yield made


def ask_every_model(target: Target) -> None:
    """Check that each model that clients may call answers a good request, without the proxy."""
    lane = Lane(target.ports.http, target.ports.grpc)
    for model in target.called_models:
        request = target.inputs[model].well_formed(target.values(model))
        del request["outputs"]
        message = grpc_message(request, wrong_lengths=False)
        answer = lane.grpc.send(message, [(HEADER, f"Bearer {target.right_key(model)}")])
        assert answer.is_ok, (model, answer)
    lane.close()


def footprints(target: Target) -> dict[str, tuple[int, int]]:
    """Return the bytes in memory and the number of open files of each process."""
    found = {}
    for name, pid in target.processes().items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[name] = pages * 4096, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return found


@needs_nginx
@needs_openssl
def test_malformed_requests_through_the_example_proxy_end_block_and_give_away_nothing(
    target: Target, behind: Proxy
) -> None:
    judge, before, seen = Judge(target), target.processes(), 0
    verdicts: dict[str, int] = {}
    warm: dict[str, tuple[int, int]] = {}
    ask_every_model(target)
    examples = repetitions(120, 6000)
    ports = port_of(behind.https_url), port_of(behind.grpcs_url)
    with closing(Lanes(*ports, behind.certificate)) as lanes:

        @settings(fuzzed, max_examples=examples)
        @given(st.lists(attacks(target), min_size=SIDE_BY_SIDE, max_size=SIDE_BY_SIDE))
        def check(requests: list[Attack]) -> None:
            nonlocal seen, warm
            for attack, answer in zip(requests, lanes.send(requests), strict=True):
                verdict = judge.verdict(attack, answer)
                assert not verdict.fault, (verdict, attack)
                verdicts[verdict.by] = verdicts.get(verdict.by, 0) + 1
            seen += 1
            if seen % 30 == 0:
                ask_every_model(target)
            if seen == examples // 10:
                warm = footprints(target)

        check()
    end = footprints(target)
    assert target.processes() == before
    for name, (size, files) in end.items():
        assert size < 1.05 * warm[name][0] + GROWTH_BYTES, name
        assert files <= warm[name][1] + GROWTH_FILES, name
    assert end["Triton"][0] < MOST_BYTES
    # Each part refuses some of the requests, and good requests are answered.
    assert min(verdicts[by] for by in ("answered", "hplm", "Triton", "proxy")) > 10, verdicts
    for outcome in send_known_crashes(target, behind):
        assert outcome.is_kept_out, outcome
    ask_every_model(target)
    assert target.processes() == before
    log = target.log.read_bytes()
    assert b"Traceback (most recent" not in log
    assert not any(secret in log for secret in target.secrets)


def test_most_manage_requests_are_well_formed_before_they_are_changed() -> None:
    parsed: set[str] = set()

    @settings(fuzzed, max_examples=600)
    @given(manage_requests(VICTIM, ["tiny"]))
    def check(request: dict[str, Any]) -> None:
        try:
            parsed.add(parse_request(to_json(request), ManageService.REQUESTS)[0])
        except BadManageRequestError:
            return  # some fields exclude each other

    check()
    assert len(parsed) > 0.8 * len(ManageService.REQUESTS)
