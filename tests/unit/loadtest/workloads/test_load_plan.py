"""Load plans have the planned tenants, texts, deadlines and sizes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.scenarios.infer_messages import infer_messages
from hplm_loadtest.workloads.load_plan import RequestMix, Requests
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from hplm.errors import BadInputError, ConfigError
from hplm.workloads.arrivals import (
    Arrivals,
    BurstArrivals,
    GammaArrivals,
    PeriodicArrivals,
    PoissonArrivals,
    RampArrivals,
    TraceArrivals,
)
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import RoundRobinTenants, UniformTenants, ZipfTenants

NAMES = [f"tenant-{i}" for i in range(20)]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.5])
def test_zipf_shares_fall_with_the_rank(exponent: float) -> None:
    drawn = Counter(ZipfTenants(NAMES, exponent).draw(100_000, rng()))
    weights = np.arange(1.0, 21) ** -exponent
    shares = [drawn[name] / 100_000 for name in NAMES]
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.006)


def test_uniform_tenants_are_drawn_equally_often() -> None:
    drawn = Counter(UniformTenants(NAMES).draw(100_000, rng()))
    assert set(drawn) == set(NAMES)
    assert max(drawn.values()) < 1.1 * min(drawn.values())


@given(st.integers(1, 30), st.integers(0, 90))
def test_round_robin_tenants_repeat_in_the_same_order(tenants: int, count: int) -> None:
    drawn = RoundRobinTenants([str(i) for i in range(tenants)]).draw(count, rng())
    assert len(drawn) == count
    for i, name in enumerate(drawn[tenants:]):
        assert name == drawn[i]


def test_periodic_tenants_send_one_request_a_period_each() -> None:
    plan = RequestMix(RoundRobinTenants(NAMES), ["text"]).plan(PeriodicArrivals(20, 2.0), 6.0, rng())
    for name in NAMES:
        own = plan.times_s[[tenant == name for tenant in plan.requests.tenants]]
        np.testing.assert_allclose(np.diff(own), 2.0)
        assert len(own) == 3


def test_tenants_of_pairs_are_sent_two_texts_and_other_tenants_one() -> None:
    texts = [str(i) for i in range(50)]
    drawn = RequestMix(UniformTenants(NAMES), texts, pair_tenants=frozenset(NAMES[:5])).draw(400, rng())
    for name, text, pair in zip(drawn.tenants, drawn.texts, drawn.pairs, strict=True):
        assert (pair is not None) == (name in NAMES[:5])
        assert {text, pair} <= {*texts, None}
    alone = RequestMix(UniformTenants(NAMES), texts).draw(400, rng())
    assert (alone.tenants, alone.texts, alone.pairs) == (drawn.tenants, drawn.texts, ())


def test_no_tenants_or_texts_are_refused() -> None:
    for draw in (UniformTenants, ZipfTenants, RoundRobinTenants):
        with pytest.raises(ConfigError, match="no tenants"):
            draw([])
    with pytest.raises(ConfigError, match="no texts"):
        RequestMix(UniformTenants(NAMES), []).draw(1, rng())


def test_a_plan_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request arrives"):
        RequestMix(UniformTenants(NAMES), ["text"]).plan(PoissonArrivals(0.001), 0.001, rng())


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        (PoissonArrivals(1e12), "1e+15 requests would arrive within 1,000 s of 1,000,000,000,000 requests/s"),
        (GammaArrivals(1e12, 2), "1e+15 requests would arrive"),
        (
            RampArrivals(0, 1e5),
            "50,000,000 requests would arrive within 1,000 s of a ramp from 0 to 100,000 requests/s",
        ),
        (BurstArrivals(10**6, count=10**6), "1,000,000,000,000 requests would arrive"),
        (TraceArrivals(Path("t.csv"), 1e300), "1e+303 requests would arrive within 1,000 s of t.csv at 1e+300"),
    ],
    ids=["poisson", "gamma", "ramp", "burst", "trace"],
)
def test_a_plan_that_does_not_fit_into_memory_is_refused_before_it_is_made(arrivals: Arrivals, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}.*10,000,000 at most: make the duration shorter"):
        RequestMix(UniformTenants(NAMES), ["text"]).plan(arrivals, 1000.0, rng())


def test_deadline_classes_have_their_shares() -> None:
    classes = DeadlineClasses.parse("interactive=0.1:0.7,batch=2:0.3")
    drawn = classes.draw(100_000, rng())
    assert set(drawn) == {0.1, 2.0}
    assert np.mean(drawn == 0.1) == pytest.approx(0.7, abs=0.01)
    assert [classes.name_of(value) for value in (0.1, 2.0)] == ["interactive", "batch"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1", "no deadline class"),
        ("a", "no deadline class"),
        ("a=1:0.5", "add up to 0.5"),
        ("a=0:1", "above 0"),
        ("a=nan:1", "above 0"),
        ("a=100000:1", "86,400 seconds at most, not 100,000"),
        ("a=1:0.5,b=1:0.5", "same deadline"),
        ("a=1:0.5,a=2:0.5", "name of its own"),
        ("=1:1", "name of its own"),
    ],
)
def test_bad_deadline_classes_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DeadlineClasses.parse(text)


def test_a_serialised_message_equals_the_message_of_tritonclient() -> None:
    mix = RequestMix(RoundRobinTenants(["films"]), ["Ein größeres Kätzchen 🐈"], DeadlineClasses({"only": (0.25, 1.0)}))
    message = service_pb2.ModelInferRequest.FromString(infer_messages(mix.draw(1, rng()))[0])
    assert message.model_name == "hbert"
    assert [(one.name, one.datatype, list(one.shape)) for one in message.inputs] == [
        ("TEXT", "BYTES", [1, 1]),
        ("TENANT", "BYTES", [1, 1]),
    ]
    text = "Ein größeres Kätzchen 🐈".encode()
    assert list(message.raw_input_contents) == [len(text).to_bytes(4, "little") + text, b"\x05\0\0\0films"]
    assert [one.name for one in message.outputs] == ["LABEL", "SCORE", "SPAN", "TRUNCATED"]
    assert message.parameters["timeout"].int64_param == 250_000


def test_a_message_without_a_deadline_has_no_parameters() -> None:
    message = infer_messages(RequestMix(RoundRobinTenants(["films"]), ["a"]).draw(1, rng()))[0]
    assert not service_pb2.ModelInferRequest.FromString(message).parameters


def test_a_deadline_that_the_client_refuses_is_refused_before_anything_is_sent() -> None:
    requests = Requests(["films"], ["a"], np.array([1e9]))
    with pytest.raises(BadInputError, match="deadline"):
        infer_messages(requests)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_is_not_positive_and_finite_is_refused(duration_s: float) -> None:
    with pytest.raises(ConfigError, match="duration_s"):
        RequestMix(UniformTenants(["a"]), ["text"]).plan(PoissonArrivals(1), duration_s, np.random.default_rng(0))


def test_shares_of_requests_contain_every_request_once() -> None:
    requests = Requests(["a", "b", "c"], ["x", "y", "z"], np.array([1.0, np.nan, 3.0]), ["p", None, "q"])
    first, second = (requests.share(number, 2) for number in range(2))
    assert (first.tenants, first.texts, first.pairs) == (["a", "c"], ["x", "z"], ["p", "q"])
    assert (second.tenants, second.texts, second.pairs) == (["b"], ["y"], [None])
    np.testing.assert_array_equal(first.deadlines_s, [1.0, 3.0])
    assert Requests(["a"], ["x"], np.array([1.0])).share(0, 1).pairs == ()
