"""The real server: answers equal the reference, bad input gets one clear error, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hplm_client import AsyncClient, Client
from hplm_client.prediction import Prediction
from hplm_loadtest.scenarios.server_metrics import metric_value
from tritonclient.utils import InferenceServerException

from hplm import errors
from hplm.core import wire
from hplm.core.roles import dispatch_name
from hplm.core.text import TextOrPair
from hplm.engine import reference
from hplm.engine.lower_layers import load_lower
from hplm.models.base import Base
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.backends.test_stages import BAD_REQUESTS
from tests.waiting import until

pytestmark = pytest.mark.triton
MEMBERS = tuple(tiny.TASKS)
HPLM = Path(sys.executable).parent / "hplm"


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Client]:
    url = server.ports.http_url if request.param == "http" else server.ports.grpc_url
    with Client(url) as opened:
        yield opened


def test_what_it_keeps_beside_itself_is_held_and_nobody_elses_to_read(server: TritonServer) -> None:
    folder = os.open(server._folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    regions = [*Path("/dev/shm").glob(f"{server._folder.name}.*")]
    assert regions
    assert {region.stat().st_mode & 0o077 for region in regions} == {0}


@pytest.mark.parametrize(
    ("protocol", "port", "said"),
    [("http", "grpc", "grpc://HOST:8001"), ("grpc", "http", "http://HOST:8000"), ("http", "metrics", "metrics")],
)
def test_who_calls_another_port_is_told_so(server: TritonServer, protocol: str, port: str, said: str) -> None:
    url = f"{protocol}://127.0.0.1:{getattr(server.ports, port)}"

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.predict("alpha", "the red cat")

    with Client(url) as client, pytest.raises(errors.UnreachableError, match=said):
        client.predict("alpha", "the red cat")
    with pytest.raises(errors.UnreachableError, match=said):
        asyncio.run(ask())


def expected_logits(store: Store, base: Base, pairs: Sequence[tuple[str, TextOrPair]]) -> list[np.ndarray]:
    """The slow reference: a loop over requests, every window computed, nothing packed."""
    lower, upper = load_lower(base), base.load_upper()
    encoder = base.load_text_encoder()
    answers = []
    for tenant, text in pairs:
        encoded = encoder.encode([text])[0]
        merged = reference.merged(encoded.ids.tolist(), base.config, [], lower)
        answers.append(reference.answered(upper, merged, tiny.load_tenant(store, base, tenant), encoded.tokens))
    return answers


def mixed_pairs() -> list[tuple[str, str]]:
    """Every tenant, lengths from one word to far beyond the maximum, shuffled."""
    texts = [
        " ".join(tiny.WORDS[i % len(tiny.WORDS)] for i in range(start, start + n))
        for start, n in enumerate(range(1, 50, 3))
    ]
    pairs = [(tenant, text) for text in texts for tenant in MEMBERS]
    return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]


def test_served_logits_equal_the_reference_for_mixed_tenants_and_lengths(
    client: Client, tiny_store: Store, tiny_base: Base
) -> None:
    pairs = mixed_pairs()
    answers = list(client.predict_many(pairs, logits=True))
    for answer, wanted in zip(answers, expected_logits(tiny_store, tiny_base, pairs), strict=True):
        assert answer.logits is not None
        np.testing.assert_allclose(answer.logits, wanted, atol=0.05, rtol=0.02)


def test_shuffling_the_requests_does_not_change_an_answer(client: Client) -> None:
    pairs = mixed_pairs()
    first = {pair: answer for pair, answer in zip(pairs, client.predict_many(pairs), strict=True)}
    shuffled = [pairs[i] for i in np.random.default_rng(1).permutation(len(pairs))]
    for pair, answer in zip(shuffled, client.predict_many(shuffled), strict=True):
        assert [s.label for s in answer.spans] == [s.label for s in first[pair].spans]
        assert answer.text == pair[1]


def test_the_same_request_twice_gets_the_same_answer_and_two_tenants_their_own(client: Client) -> None:
    first, again = (client.predict("alpha", "the red cat", logits=True) for _ in range(2))
    other = client.predict("gamma", "the red cat", logits=True)
    assert first.logits is not None
    assert again.logits is not None
    assert other.logits is not None
    np.testing.assert_allclose(first.logits, again.logits, atol=1e-3)
    assert first.label in ("yes", "no")
    assert other.label in ("low", "high")


def test_a_long_text_is_cut_and_the_answer_says_so(client: Client) -> None:
    assert client.predict("alpha", "cat " * 100).truncated
    assert not client.predict("alpha", "cat").truncated


def test_spans_of_a_tagging_are_characters_of_the_text(client: Client) -> None:
    text = "Änna sings in Paris and Bob runs"
    for span in client.predict("tagger", text).spans:
        assert 0 <= span.start < span.end <= len(text)
        assert " " not in text[span.start : span.end].strip()[:1]
        assert text[span.start : span.end] == text[span.start : span.end].strip()


RAW_BAD = [bad for bad in BAD_REQUESTS if bad[2] is not errors.TextTooLargeError]


def raw_infer(module: Any, triton: Any, model: str, tensors: dict[str, np.ndarray], **options: Any) -> Any:
    types = {
        np.dtype(np.object_): "BYTES",
        np.dtype(np.float16): "FP16",
        np.dtype(np.int32): "INT32",
        np.dtype(np.int64): "INT64",
        np.dtype(np.float32): "FP32",
    }
    inputs = []
    for name, value in tensors.items():
        tensor = module.InferInput(name, list(value.shape), types[value.dtype])
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return triton.infer(model, inputs, **options)


def as_bytes(*values: bytes) -> np.ndarray:
    """One for each text of a request."""
    return np.array([[value] for value in values], dtype=np.object_)


def in_one_request(pairs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    return {
        "TEXT": as_bytes(*[text.encode() for _, text in pairs]),
        "TENANT": as_bytes(*[tenant.encode() for tenant, _ in pairs]),
    }


@pytest.fixture(params=["http", "grpc"])
def raw(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[tuple[Any, Any]]:
    """tritonclient itself, as an application developer uses it."""
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    port = server.ports.http if request.param == "http" else server.ports.grpc
    opened = module.InferenceServerClient(f"127.0.0.1:{port}")
    yield module, opened
    opened.close()


@pytest.mark.parametrize(
    ("text", "tenant", "error"), BAD_REQUESTS, ids=[f"{e.code}-{i}" for i, (_, _, e) in enumerate(BAD_REQUESTS)]
)
def test_a_bad_request_gets_its_code_and_no_traceback(
    raw: tuple[Any, Any], text: bytes, tenant: bytes, error: type[errors.HplmError]
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, "hbert", {"TEXT": as_bytes(text), "TENANT": as_bytes(tenant)})
    message = str(caught.value.message())
    assert type(errors.from_wire(message)) is error
    assert "Traceback" not in message
    assert "site-packages" not in message
    for name in MEMBERS:
        assert name.encode() in tenant or name not in message


@pytest.mark.parametrize(
    "tensors",
    [
        {"TXT": as_bytes(b"a"), "TENANT": as_bytes(b"alpha")},
        {"TEXT": as_bytes(b"a")},
        {"TEXT": np.array([[1]], dtype=np.int32), "TENANT": as_bytes(b"alpha")},
        {"TEXT": np.array([[b"a", b"b"]], dtype=np.object_), "TENANT": as_bytes(b"alpha")},
        {"TEXT": np.array([b"a"], dtype=np.object_), "TENANT": as_bytes(b"alpha")},
        {"TEXT": as_bytes(b"a", b"b"), "TENANT": as_bytes(b"alpha")},
        {"TEXT": as_bytes(*[b"a"] * 65), "TENANT": as_bytes(*[b"alpha"] * 65)},
        {"TEXT": np.zeros((0, 1), dtype=np.object_), "TENANT": np.zeros((0, 1), dtype=np.object_)},
    ],
    ids=[
        "wrong-name",
        "missing-input",
        "wrong-dtype",
        "two-columns",
        "no-batch-dimension",
        "one-tenant-for-two-texts",
        "too-many-texts",
        "no-text",
    ],
)
def test_a_wrong_tensor_is_refused_and_the_server_goes_on(raw: tuple[Any, Any], tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, "hbert", tensors)
    assert "Traceback" not in str(caught.value.message())
    raw_infer(*raw, "hbert", {"TEXT": as_bytes(b"the red cat"), "TENANT": as_bytes(b"alpha")})


def test_texts_of_all_tenants_and_lengths_in_one_request_are_answered_as_each_alone(
    client: Client,
) -> None:
    pairs = mixed_pairs()[:64]
    alone = list(client.predict_many(pairs))
    together = client.predict_batch(pairs, logits=True)

    async def ask() -> list[Prediction]:
        async with AsyncClient(client.url) as asynchronous:
            with pytest.raises(errors.UnknownTenantError, match="text 2 of 2"):
                await asynchronous.predict_batch([("alpha", "a cat"), ("nobody", "a cat")])
            return await asynchronous.predict_batch(pairs)

    for answers in (together, asyncio.run(ask())):
        for one, other in zip(answers, alone, strict=True):
            assert [(span.label, span.start, span.end) for span in one.spans] == [
                (span.label, span.start, span.end) for span in other.spans
            ]
            assert [span.score for span in one.spans] == pytest.approx([span.score for span in other.spans], abs=0.02)
            assert (one.tenant, one.text, one.truncated) == (other.tenant, other.text, other.truncated)
    assert client.predict_batch([]) == []
    with pytest.raises(errors.BadInputError, match="not both"):
        client.predict_batch([("alpha", "a cat"), ("alpha", "a cat", "a dog")])
    with pytest.raises(errors.TextEncodingError, match="text 2 of 2: TEXT has a lone surrogate"):
        client.predict_batch([("alpha", "a cat"), ("alpha", "\ud800")])
    with pytest.raises(errors.BadInputError, match="64"):
        client.predict_batch([("alpha", "a cat")] * 65)


def test_what_several_answers_lack_is_filled_up(raw: tuple[Any, Any], client: Client) -> None:
    pairs = mixed_pairs()[:64]
    result = raw_infer(*raw, "hbert", in_one_request(pairs))
    found = {name: result.as_numpy(name) for name in ("LABEL", "SCORE", "SPAN", "TRUNCATED", "LOGITS")}
    assert {name: len(value) for name, value in found.items()} == dict.fromkeys(found, 64)
    for i, alone in enumerate(client.predict_many(pairs, logits=True)):
        k = len(alone.spans)
        assert [label.decode() for label in found["LABEL"][i]] == [
            *[span.label for span in alone.spans],
            *[""] * (found["LABEL"].shape[1] - k),
        ]
        np.testing.assert_allclose(found["SCORE"][i, :k], [span.score for span in alone.spans], atol=0.02)
        assert found["SPAN"][i, :k].tolist() == [[span.start, span.end] for span in alone.spans]
        assert found["TRUNCATED"][i, 0] == alone.truncated
        assert (found["SPAN"][i, k:] == -1).all()
        assert alone.logits is not None
        rows, columns = alone.logits.shape
        np.testing.assert_allclose(found["LOGITS"][i, :rows, :columns], alone.logits, atol=0.05, rtol=0.02)
        assert (found["LOGITS"][i, rows:] == np.float32(wire.LOGITS_FILLER)).all()
        assert (found["LOGITS"][i, :, columns:] == np.float32(wire.LOGITS_FILLER)).all()


def test_each_of_several_texts_has_its_own_logits_without_what_fills_them(client: Client) -> None:
    pairs = mixed_pairs()[:64]

    async def ask() -> list[Prediction]:
        async with AsyncClient(client.url) as asynchronous:
            return await asynchronous.predict_batch(pairs, logits=True)

    alone = list(client.predict_many(pairs, logits=True))
    assert len({one.logits.shape for one in alone if one.logits is not None}) > 3, "or there is nothing to fill up"
    for answers in (client.predict_batch(pairs, logits=True), asyncio.run(ask())):
        for one, other in zip(answers, alone, strict=True):
            assert one.logits is not None
            assert other.logits is not None
            assert one.logits.shape == other.logits.shape
            np.testing.assert_allclose(one.logits, other.logits, atol=0.05, rtol=0.02)


def test_several_texts_sent_as_a_pair_are_told_the_shape_that_several_have(raw: tuple[Any, Any]) -> None:
    two = np.array([[b"a cat", b"a dog"]], dtype=np.object_)
    with pytest.raises(
        InferenceServerException, match=r"TEXT_COUNT: .* two texts came .* n texts have the shape \[n, 1\]"
    ):
        raw_infer(*raw, "hbert", {"TEXT": two, "TENANT": as_bytes(b"alpha")})
    # Triton says these two in its own words before any stage is asked.
    with pytest.raises(InferenceServerException, match=r"'TENANT' .*Expected \[-1,1\], got \[1,2\]"):
        raw_infer(*raw, "hbert", {"TEXT": two, "TENANT": np.array([[b"alpha"] * 2], dtype=np.object_)})
    with pytest.raises(InferenceServerException, match=r"batch size does not match"):
        raw_infer(*raw, "hbert", {"TEXT": as_bytes(b"a cat", b"a dog"), "TENANT": as_bytes(b"alpha")})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js 18 or later")
def test_the_page_s_javascript_gets_an_answer_to_each_of_its_texts(server: TritonServer) -> None:
    page = (Path(__file__).parents[3] / "docs" / "calling.md").read_text()
    (code,) = re.findall(r"```js\n(.*?)```", page, flags=re.DOTALL)
    texts = json.loads(re.search(r"const texts = (\[.*?\]);", code, flags=re.DOTALL)[1])  # type: ignore[index]
    assert len(texts) == 3
    code = code.replace("http://127.0.0.1:8000", server.ports.http_url).replace('"films"', '"alpha"')
    command = ["node", "--input-type=module", "-e", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == texts
    assert {line.split(" ", 1)[0] for line in lines} <= {"yes", "no"}


def test_many_requests_of_several_texts_are_all_answered(server: TritonServer) -> None:
    pairs = [pair for pair in mixed_pairs() if pair[0] != "tagger"]
    with Client(server.ports.grpc_url) as client:
        wanted = {pair: answer.label for pair, answer in zip(pairs, client.predict_many(pairs), strict=True)}
    draw = np.random.default_rng(3)
    requests = [[pairs[i] for i in draw.integers(0, len(pairs), draw.integers(1, 65))] for _ in range(60)]

    def ask(chosen: list[tuple[str, str]]) -> list[str]:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as triton:
            result = raw_infer(tritonclient.grpc, triton, "hbert", in_one_request(chosen))
        return [label.decode() for (label,) in result.as_numpy("LABEL")]

    with ThreadPoolExecutor(16) as threads:
        for chosen, labels in zip(requests, threads.map(ask, requests), strict=True):
            assert labels == [wanted[pair] for pair in chosen]


def test_a_stream_of_large_requests_to_an_idle_server_is_not_taken_for_a_flood(server: TritonServer) -> None:
    given = in_one_request([("alpha", "the red cat")] * 64)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as triton:
        for _ in range(150):
            # Each call of Triton's is as full as it can be, and none is followed by another at once.
            raw_infer(tritonclient.grpc, triton, "hbert", given, timeout=1_000_000)
            time.sleep(0.002)


def test_after_a_bad_text_the_others_of_its_request_are_not_computed(server: TritonServer) -> None:
    def cancelled() -> float:
        # The stage that reads texts.
        return sum(
            metric_value(server, f'hplm_{stage}_events_total{{event="cancelled"}}') for stage in ("plot", "upper")
        )

    before = cancelled()
    given = in_one_request([*[("alpha", "the red cat")] * 63, ("nobody", "the red cat")])
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as triton:
        for _ in range(20):
            with pytest.raises(InferenceServerException, match="UNKNOWN_TENANT: text 64 of 64"):
                raw_infer(tritonclient.grpc, triton, "hbert", given)
    # One that is being computed when the error comes is.
    until(lambda: cancelled() > before)


@pytest.mark.parametrize(("text", "tenant", "error"), [bad for bad in BAD_REQUESTS if len(bad[0]) < 1000])
def test_one_bad_text_of_several_is_the_error_of_the_request_and_the_server_goes_on(
    raw: tuple[Any, Any], text: bytes, tenant: bytes, error: type[errors.HplmError]
) -> None:
    texts, tenants = as_bytes(b"the red cat", text, b"one two"), as_bytes(b"alpha", tenant, b"gamma")
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, "hbert", {"TEXT": texts, "TENANT": tenants})
    found = errors.from_wire(str(caught.value.message()))
    assert type(found) is error
    assert str(found).startswith("text 2 of 3: ")
    assert "gamma" not in str(found)
    raw_infer(*raw, "hbert", in_one_request([("alpha", "the red cat"), ("gamma", "one two")]))


def test_a_level_of_a_cascade_decides_on_each_text_as_its_logits_say(
    raw: tuple[Any, Any], server: TritonServer
) -> None:
    level = dispatch_name("hbert") if dispatch_name("hbert") in server.models else "hbert"
    pairs = [("beta", text) for text in tiny.sentences(12)] + [("tagger", "Anna runs over Oslo")]
    plain = raw_infer(*raw, "hbert", in_one_request(pairs))
    sent = np.tile(np.array([[2.0, 0.5, 4.0, 1.0, 1.0]], np.float32), (len(pairs), 1))
    sent[::2, 4] = 0
    found = raw_infer(*raw, level, {**in_one_request(pairs), wire.DISPATCH: sent})
    for name in (wire.LABEL, wire.SCORE, wire.SPAN, wire.LOGITS):
        np.testing.assert_array_equal(found.as_numpy(name), plain.as_numpy(name))
    scaled = np.exp(found.as_numpy(wire.LOGITS)[:-1, 0, :3] / 2)
    wanted = scaled.max(1) / scaled.sum(1)
    np.testing.assert_allclose(found.as_numpy(wire.CONFIDENCE)[:-1, 0], wanted, rtol=1e-5)
    route = found.as_numpy(wire.ROUTE)[:, 0]
    np.testing.assert_array_equal(route, found.as_numpy(wire.CONFIDENCE)[:, 0] <= 0.5)
    assert set(route.tolist()) == {0, 1}
    for (_, text), is_rerouted, wants, words in zip(
        pairs, route, sent[:, 4], found.as_numpy(wire.IMPORTANCE), strict=True
    ):
        read = [text[int(first) : int(end)] for first, end, _ in words if first >= 0]
        # The base reads 40 tokens of a text.
        assert read == (text.split()[: len(read)] if is_rerouted and wants else [])
        assert bool(read) == bool(is_rerouted and wants)


def test_a_bad_dispatch_gets_one_clear_error(raw: tuple[Any, Any], server: TritonServer) -> None:
    level = dispatch_name("hbert") if dispatch_name("hbert") in server.models else "hbert"
    sent = np.array([[0.0, 0.5, 4.0, 1.0, 1.0]], np.float32)
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, level, {**in_one_request([("beta", "the red cat")]), wire.DISPATCH: sent})
    found = errors.from_wire(str(caught.value.message()))
    assert type(found) is errors.BadInputError
    assert "a temperature above 0" in str(found)


def test_a_direct_call_of_the_upper_stage_may_have_several_texts(raw: tuple[Any, Any]) -> None:
    hidden, tokens = np.zeros((2, 3, 48), dtype=np.float16), np.zeros((2, 3, 3), dtype=np.int32)
    of_two: dict[str, np.ndarray] = {"HIDDEN": hidden, "TOKENS": tokens, "TENANT": as_bytes(b"alpha", b"gamma")}
    assert raw_infer(*raw, "hbert_upper", of_two).as_numpy("LABEL").shape == (2, 1)
    about = np.array([[2, -1, -1], [4, -1, -1]])
    assert raw_infer(*raw, "hbert_upper", {**of_two, "REQUEST_META": about}).as_numpy("LABEL").shape == (2, 1)
    for lengths in ((3, 4), (0, 3), (-1, 4)):
        about[:, 0] = lengths
        with pytest.raises(InferenceServerException, match="BAD_HIDDEN_STATES"):
            raw_infer(*raw, "hbert_upper", {**of_two, "REQUEST_META": about})


def test_nan_in_a_direct_call_of_the_upper_stage_is_refused(raw: tuple[Any, Any]) -> None:
    hidden = np.full((1, 3, 48), np.nan, dtype=np.float16)
    tokens = np.zeros((1, 3, 3), dtype=np.int32)
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, "hbert_upper", {"HIDDEN": hidden, "TOKENS": tokens, "TENANT": as_bytes(b"alpha")})
    assert type(errors.from_wire(str(caught.value.message()))) is errors.HiddenStatesError


def test_bad_requests_among_good_ones_leave_the_good_ones_unharmed(client: Client) -> None:
    wanted = client.predict("alpha", "the red cat").label

    def good(_: int) -> str | None:
        with Client(client.url) as own:
            return own.predict("alpha", "the red cat").label

    def bad(index: int) -> type[Exception]:
        text, tenant, _ = RAW_BAD[index % 3]
        with Client(client.url) as own:
            try:
                own.predict(tenant.decode(), text.decode())
            except errors.HplmError as error:
                return type(error)
        return AssertionError

    with ThreadPoolExecutor(8) as pool:
        goods, bads = pool.map(good, range(24)), pool.map(bad, range(24))
        assert set(goods) == {wanted}
        assert set(bads) == {errors.EmptyTextError}


def test_the_typed_client_raises_typed_errors(client: Client) -> None:
    with pytest.raises(errors.UnknownTenantError, match="there is no tenant 'nobody'"):
        client.predict("nobody", "hello")
    with pytest.raises(errors.TextTooLargeError):
        list(client.predict_many([("alpha", "x" * 100_000)]))


def test_of_many_the_refused_stand_in_their_place_where_that_is_asked_for(client: Client) -> None:
    each: dict[Any, type[Prediction | errors.HplmError]] = {
        ("alpha", "the red cat"): Prediction,
        ("nobody", "hello"): errors.UnknownTenantError,
        ("beta", " "): errors.EmptyTextError,
        ("alpha", "\ud800"): errors.TextEncodingError,
        ("alpha", None): errors.BadInputError,
        ("alpha", b"bytes"): errors.BadInputError,
        "alpha": errors.BadInputError,
        ("beta", "a dog"): Prediction,
    }
    asked = [*each] * 8
    answers = list(client.predict_many(asked, on_error="yield"))
    assert [type(one) for one in answers] == [*each.values()] * 8
    for request, answer in zip(asked, answers, strict=True):
        assert not isinstance(answer, Prediction) or (answer.tenant, answer.text) == request


def test_lines_that_are_refused_say_so_and_the_others_are_answered(server: TritonServer) -> None:
    def predict(lines: list[str | None], *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(HPLM), "predict", "--url", server.ports.grpc_url, *arguments]
        typed = b"\n".join(b"\xff" if line is None else line.encode() for line in lines)
        return subprocess.run(command, input=typed, capture_output=True, check=False)

    # What is no text is not sent, wherever it stands.
    lines = [None, "the red cat", "x" * 100_000, None, None, "", "a dog", None]
    done = predict(lines, "-t", "alpha", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["text"] for one in found] == [line for line in lines if line != ""]
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5, 7, 8]
    codes = [one["error"].partition(":")[0] if "error" in one else "" for one in found]
    assert codes == ["TEXT_NOT_UTF8", "", "TEXT_TOO_LARGE", "TEXT_NOT_UTF8", "TEXT_NOT_UTF8", "", "TEXT_NOT_UTF8"]
    assert done.returncode == 1
    # What every line would meet ends it at the first.
    done = predict(["the red cat", "a dog"], "-t", "nobody")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"there is no tenant 'nobody'" in done.stderr


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_async_client_answers_many_at_once(server: TritonServer, protocol: str) -> None:
    url = server.ports.http_url if protocol == "http" else server.ports.grpc_url
    pairs = mixed_pairs()[:40]

    async def run() -> list[str | None]:
        async with AsyncClient(url) as client:
            assert await client.is_ready()
            answers = await asyncio.gather(*(client.predict(tenant, text) for tenant, text in pairs))
            with pytest.raises(errors.UnknownTenantError):
                await client.predict("nobody", "hello")
            return [answer.label for answer in answers]

    with Client(url) as sync:
        assert asyncio.run(run()) == [answer.label for answer in sync.predict_many(pairs)]


def test_plain_curl_gets_a_label(server: TritonServer) -> None:
    body = {
        "inputs": [
            {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["the red cat"]},
            {"name": "TENANT", "shape": [1, 1], "datatype": "BYTES", "data": ["alpha"]},
        ],
        "outputs": [{"name": "LABEL"}, {"name": "SCORE"}],
    }
    url = f"{server.ports.http_url}/v2/models/hbert/infer"
    done = subprocess.run(["curl", "-s", url, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    outputs = {one["name"]: one["data"] for one in json.loads(done.stdout)["outputs"]}
    assert outputs["LABEL"][0] in ("yes", "no")
    assert 0.5 <= outputs["SCORE"][0] <= 1.0


@pytest.mark.parametrize(("tenant", "status"), [("nobody", 404), ("a/b", 400)])
def test_an_error_has_its_http_status(server: TritonServer, tenant: str, status: int) -> None:
    pair = (("TEXT", "x"), ("TENANT", tenant))
    inputs = [{"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]} for name, value in pair]
    request = urllib.request.Request(
        f"{server.ports.http_url}/v2/models/hbert/infer", json.dumps({"inputs": inputs}).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == status


def test_windows_by_level_are_on_the_metrics_page(server: TritonServer) -> None:
    with Client(server.ports.http_url) as client:
        client.predict("alpha", "the red cat")
    until(lambda: metric_value(server, 'hplm_plot_windows_total{level="root"}') > 0)


def test_a_request_that_cannot_be_read_is_counted_too(server: TritonServer, raw: tuple[Any, Any]) -> None:
    def refused() -> float:
        return metric_value(server, 'hplm_upper_events_total{event="bad_hidden_states"}')

    before = refused()
    hidden, tokens = np.zeros((1, 3, 48), dtype=np.float16), np.zeros((1, 3, 3), dtype=np.int32)
    about = np.array([[4, -1, -1]])
    given: dict[str, np.ndarray] = {
        "HIDDEN": hidden,
        "TOKENS": tokens,
        "TENANT": as_bytes(b"alpha"),
        "REQUEST_META": about,
    }
    with pytest.raises(InferenceServerException, match="texts of 4 tokens cannot be in 3 rows"):
        raw_infer(*raw, "hbert_upper", given)
    until(lambda: refused() > before)


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Store, Base]]:
    """A real Triton that also answers for tenants of pairs and of regression."""
    models = tiny.make_repository(tmp_path_factory.mktemp("other"), other_tasks=True)
    with TritonServer(models, free_ports(), log=models.parent / "triton.log") as running:
        running.wait_ready()
        yield running, *tiny.opened(models.parent)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_pairs_and_regressions_are_answered_as_the_reference_does_among_single_texts(
    other_server: tuple[TritonServer, Store, Base], protocol: str
) -> None:
    server, store, base = other_server
    texts = tiny.sentences(16)
    requests: list[tuple[str, str, str | None]] = []
    for first, second in zip(texts, texts[::-1], strict=True):
        requests += [
            ("alike", first, second),
            ("follows", second, first),
            ("grade", first, None),
            ("alpha", first, None),
        ]
    requests.append(("alike", "cat " * 60, "the red dog"))
    url = server.ports.http_url if protocol == "http" else server.ports.grpc_url
    with Client(url) as client:
        answers = list(client.predict_many(requests, logits=True))
        for text, pair, tenant in (("a cat", "a dog", "grade"), ("a cat", None, "alike")):
            with pytest.raises(errors.TextCountError):
                client.predict(tenant, text, pair)
    asked = [(tenant, text if pair is None else (text, pair)) for tenant, text, pair in requests]
    for (tenant, text, pair), answer, wanted in zip(
        requests, answers, expected_logits(store, base, asked), strict=True
    ):
        assert answer.logits is not None
        np.testing.assert_allclose(answer.logits, wanted, atol=0.05, rtol=0.02)
        assert (answer.text, answer.pair) == (text, pair)
        if tenant in ("alike", "grade"):
            assert answer.label == "score"
            assert answer.score == pytest.approx(float(answer.logits[0, 0]))
    assert answers[-1].truncated
    assert answers[0].spans[0].end == len(f"{texts[0]} {texts[-1]}")

    async def one() -> float | None:
        async with AsyncClient(url) as client:
            return (await client.predict("alike", texts[0], texts[-1])).score

    assert asyncio.run(one()) == pytest.approx(answers[0].score, abs=1e-3)


def test_curl_and_the_command_line_ask_for_a_pair(
    other_server: tuple[TritonServer, Store, Base], tmp_path: Path
) -> None:
    ports = other_server[0].ports
    texts, scores = ["the red cat", "the dog runs"], []
    # Once by itself, once beside another pair.
    for count in (2, 1):
        data = [texts[::-1], texts][-count:]
        pairs = (("TEXT", [count, 2], data), ("TENANT", [count, 1], [["alike"]] * count))
        inputs = [{"name": name, "shape": shape, "datatype": "BYTES", "data": data} for name, shape, data in pairs]
        body = json.dumps({"inputs": inputs, "outputs": [{"name": "LABEL"}, {"name": "SCORE"}]})
        url = f"{ports.http_url}/v2/models/hbert/infer"
        done = subprocess.run(["curl", "-s", url, "-d", body], capture_output=True, text=True, check=True)
        outputs = {one["name"]: one["data"] for one in json.loads(done.stdout)["outputs"]}
        assert outputs["LABEL"] == ["score"] * count
        scores.append(outputs["SCORE"][-1])
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    command = [str(Path(sys.executable).parent / "hplm"), "predict", "-t", "alike", "--json", "--url", ports.grpc_url]
    line = json.dumps({"text": texts[0], "text_pair": texts[1]})
    for arguments, typed in (([texts[0], "--pair", texts[1]], ""), (["--jsonl"], f"{line}\n\n{line}\n")):
        done = subprocess.run([*command, *arguments], input=typed, capture_output=True, text=True, check=True)
        for answer in map(json.loads, done.stdout.splitlines()):
            assert answer["pair"] == texts[1]
            assert answer["score"] == pytest.approx(scores[0], abs=1e-3)


@pytest.mark.parametrize("count", [0, 3])
def test_no_text_or_three_get_one_clear_error(raw: tuple[Any, Any], count: int) -> None:
    texts = np.array([[b"a"] * count], dtype=np.object_).reshape(1, count)
    with pytest.raises(InferenceServerException) as caught:
        raw_infer(*raw, "hbert", {"TEXT": texts, "TENANT": as_bytes(b"alpha")})
    assert type(errors.from_wire(str(caught.value.message()))) is errors.TextCountError
    raw_infer(*raw, "hbert", {"TEXT": as_bytes(b"the red cat"), "TENANT": as_bytes(b"alpha")})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_triton_itself_has_no_room_for_before_a_stage_is_queue_full(tmp_path: Path, protocol: str) -> None:
    models = tiny.make_repository(tmp_path)
    pbtxt = models / "hbert_plot" / "config.pbtxt"
    # As it is, but for the number.
    pbtxt.write_text(pbtxt.read_text().replace("max_queue_size: 1024", "max_queue_size: 1"))
    with TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        url = server.ports.http_url if protocol == "http" else server.ports.grpc_url
        found: list[Prediction | errors.HplmError] = []
        with Client(url, concurrency=32) as client:
            wanted = client.predict("alpha", "the red cat").label
            while len(found) < 100_000 and not any(isinstance(one, errors.HplmError) for one in found):
                found += client.predict_many([("alpha", "the red cat")] * 64, on_error="yield")
    refused = [one for one in found if isinstance(one, errors.HplmError)]
    assert {type(one) for one in refused} == {errors.QueueFullError}
    assert {one.label for one in found if not isinstance(one, errors.HplmError)} == {wanted}


def test_nobody_listening_is_one_clear_error() -> None:
    for url in (free_ports().http_url, free_ports().grpc_url):
        with Client(url, timeout_s=2) as client, pytest.raises(errors.UnreachableError):
            client.predict("alpha", "hello")
