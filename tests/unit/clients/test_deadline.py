"""A request's deadline travels as Triton's own `timeout`, in microseconds."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from hplm_client import Client
from hplm_client.infer_tensors import deadline_us, infer_options
from hplm_client.model_choice import UNSURE
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import BadInputError


@given(st.floats(1e-9, 86_400))
def test_a_deadline_is_at_least_one_whole_microsecond(deadline_s: float) -> None:
    timeout_us = deadline_us(deadline_s)
    assert timeout_us >= 1
    assert timeout_us == pytest.approx(deadline_s * 1e6, abs=1)


@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf"), 1e9])
def test_a_deadline_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(BadInputError, match="a deadline is a number of seconds"):
        deadline_us(bad)


def test_no_deadline_sends_no_option() -> None:
    assert "timeout" not in infer_options(tritonclient.http, False, None, UNSURE)
    assert infer_options(tritonclient.http, False, 0.25, UNSURE)["timeout"] == 250_000


@pytest.mark.parametrize(
    "call",
    [
        tritonclient.http.InferenceServerClient.infer,
        tritonclient.http.InferenceServerClient.async_infer,
        tritonclient.grpc.InferenceServerClient.infer,
        tritonclient.grpc.InferenceServerClient.async_infer,
        tritonclient.http.aio.InferenceServerClient.infer,
        tritonclient.grpc.aio.InferenceServerClient.infer,
    ],
    ids=["http", "http-async", "grpc", "grpc-async", "http-aio", "grpc-aio"],
)
def test_every_infer_call_of_tritonclient_takes_a_timeout(call: Any) -> None:
    assert "timeout" in inspect.signature(call).parameters


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_bad_deadline_is_refused_before_anything_is_sent(scheme: str) -> None:
    with Client(f"{scheme}://127.0.0.1:1") as client, pytest.raises(BadInputError):
        client.predict("films", "a", deadline_s=float("nan"))
    with Client(f"{scheme}://127.0.0.1:1") as client, pytest.raises(BadInputError):
        list(client.predict_many([("films", "a")], deadline_s=0))
