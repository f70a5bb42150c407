"""The upper stage on a GPU."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hplm.engine import reference
from hplm.engine.adapter_slots import Fill
from hplm.engine.encode import EngineRequest
from hplm.engine.kernels.attention import attend_at_once, ends_of
from hplm.engine.kernels.scripted import scripted
from hplm.engine.layouts import Batching
from hplm.models.base import Base
from hplm.models.device import choose_device
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.engine.test_encode import requests_of, wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


GPU = torch.device("cuda")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("head_size", [32, 64])
@pytest.mark.parametrize("lengths", [[1], [256], [1, 1, 2, 3, 3, 17, 40, 128]], ids=str)
def test_rows_of_all_lengths_attend_in_one_call_as_each_alone(
    lengths: list[int], head_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    heads = 4
    qkv = torch.randn(sum(lengths), 3 * heads * head_size, device=GPU).to(dtype)
    got = scripted(attend_at_once)(qkv, ends_of([1] * len(lengths), lengths, GPU), max(lengths), heads)
    for row, found in zip(qkv.split(lengths), got.split(lengths), strict=True):
        query, key, value = row.double().view(len(row), 3, heads, head_size).permute(1, 2, 0, 3)
        exact = F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)
        assert (found - exact).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("batching", ["packed", "naive", "turbo", "concat", "slotted"])
@pytest.mark.parametrize("relative_buckets", [0, 8])
def test_heads_that_attend_in_one_call_and_all_batching_modes_answer_as_the_reference(
    tmp_path: Path, batching: Batching, relative_buckets: int, dtype: torch.dtype, tolerance: float
) -> None:
    shape = replace(tiny.config(hidden_size=64), relative_buckets=relative_buckets)
    base = tiny.make_base(Store(tmp_path), shape)
    members = [tiny.tenant_of(base, name, seed) for seed, name in enumerate(tiny.TASKS)]
    engine = tiny.engine_of(base, reduced_size=4, device=GPU, dtype=dtype, batching=batching, row_tokens=40)
    rng = np.random.default_rng(0)
    requests = [
        EngineRequest(members[n % len(members)], rng.normal(size=(n, shape.hidden_size)).astype(np.float16))
        for n in range(1, 41)
    ]
    assert engine._layers.attends_at_once == (not relative_buckets)
    without_taggings = [request for request in requests if request.tenant.card.task != "tagging"]
    # Without them some heads read `[CLS]` alone, and the last layer goes on with what is read.
    for sent in (requests, without_taggings):
        for request, got in zip(sent, engine.run(sent), strict=True):
            exact = wanted(base, request)
            assert np.abs(got - exact).max() < tolerance * max(1.0, float(np.abs(exact).max()))
    engine.close()


@pytest.mark.parametrize("fine_prefetch", [False, True])
def test_batches_equal_the_reference_while_a_thread_fills_slots_ahead(tmp_path: Path, fine_prefetch: bool) -> None:
    count, num_slots = 40, 8
    base = tiny.make_base(Store(tmp_path), tiny.config(hidden_size=64, upper_layers=3))
    engine = tiny.engine_of(base, num_slots, reduced_size=16, device=GPU, fine_prefetch=fine_prefetch)
    fleet = [
        replace(member, version="1", packed=engine.slots.staged(engine.slots.fitted(member.packed)))
        for member in tiny.fleet_of(base, count, factors=(16, 16, 4, 4))
    ]
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(n, base.config.hidden_size)).astype(np.float16) for n in (1, 4, 17, 40)]
    upper = base.load_upper()
    states = [torch.from_numpy(text.astype(np.float32)) for text in texts]
    exact = np.array([[reference.logits(upper, state, one)[0].numpy() for state in states] for one in fleet])
    done = threading.Event()

    def look_ahead() -> None:
        own = np.random.default_rng(1)
        while not done.is_set():
            engine.slots.prefetch([fleet[i] for i in own.integers(count, size=5)])
            time.sleep(1e-4)

    thread = threading.Thread(target=look_ahead)
    thread.start()
    try:
        for _ in range(200):
            # More tenants than slots: the engine cuts the batch.
            pairs = [(rng.integers(count), rng.integers(len(texts))) for _ in range(rng.integers(1, 2 * num_slots))]
            logits = engine.run([EngineRequest(fleet[member], texts[text]) for member, text in pairs])
            for (member, text), got in zip(pairs, logits, strict=True):
                np.testing.assert_allclose(got[0], exact[member, text], atol=5e-3)
    finally:
        done.set()
        thread.join()
    engine.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_logits_on_the_gpu_equal_the_reference(
    tiny_base: Base, tiny_store: Store, dtype: torch.dtype, tolerance: float
) -> None:
    engine = tiny.engine_of(tiny_base, 3, reduced_size=5, device=GPU, dtype=dtype)
    requests = requests_of(tiny_base, tiny_store, list(range(1, 41)))
    # As the stage loads them: half from pinned memory, half as they come.
    for index, request in enumerate(requests[::2]):
        staged = engine.slots.staged(request.tenant.packed)
        assert torch.from_numpy(staged.weights).is_pinned()
        requests[2 * index] = replace(request, tenant=replace(request.tenant, packed=staged))
    for request, got in zip(requests, engine.run(requests), strict=True):
        exact = wanted(tiny_base, request)
        assert np.abs(got - exact).max() < tolerance * max(1.0, float(np.abs(exact).max()))


def test_attention_of_sizes_that_never_came_before_waits_for_no_plan_of_cudnn() -> None:
    assert choose_device("auto").type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_who_waits_for_a_whole_fill_waits_itself_and_leaves_its_stream_to_who_computes() -> None:
    stream = torch.cuda.Stream()
    fill = Fill([], num_layers=1, device=GPU)
    with torch.cuda.stream(stream):
        # Some tenths of a second: without waiting it would not be over below.
        torch.cuda._sleep(500_000_000)
        event = torch.cuda.Event()
        event.record(stream)
    fill.layer_done(event)
    fill.wait_all()
    assert event.query()
