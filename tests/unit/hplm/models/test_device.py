"""The number format that a machine computes in."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import threadpoolctl  # type: ignore[import-untyped]
import torch

from hplm.models import device as dtypes
from hplm.models.device import bfloat16_is_fast, choose_dtype, use_threads

CPU = torch.device("cpu")


@pytest.fixture
def untried() -> Iterator[None]:
    """Forget what was timed, before and after a test, as in a new process."""
    bfloat16_is_fast.cache_clear()
    yield
    bfloat16_is_fast.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("slow", [torch.bfloat16, torch.float32], ids=str)
def test_auto_is_the_format_whose_products_are_faster(slow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        end_s = time.thread_time() + (0.05 if x.dtype == slow else 0.0)
        while time.thread_time() < end_s:
            pass
        return x

    monkeypatch.setattr(dtypes, "has_bfloat16", lambda: True)
    monkeypatch.setattr(dtypes.F, "linear", slowed)
    assert choose_dtype("auto", CPU) == (torch.float32 if slow == torch.bfloat16 else torch.bfloat16)
    # With int8 no format is timed.
    assert choose_dtype("auto", CPU, "int8") == torch.float32
    assert choose_dtype("bfloat16", CPU, "int8") == torch.bfloat16


@pytest.mark.usefixtures("untried")
def test_auto_is_float32_where_there_is_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_bfloat16", lambda: False)
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "wanted"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_is_float32_on_a_gpu_that_only_emulates_bfloat16(
    capability: tuple[int, int], wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch reports support for GPUs that emulate bf16.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", torch.device("cuda:1")) == wanted
    assert choose_dtype("bfloat16", torch.device("cuda:1")) == torch.bfloat16


def test_torch_alone_computes_with_several_threads(restored_threads: None) -> None:
    with threadpoolctl.threadpool_limits(4, user_api="blas"):
        use_threads(2)
        assert {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"} == {1}
        assert torch.get_num_threads() == 2
