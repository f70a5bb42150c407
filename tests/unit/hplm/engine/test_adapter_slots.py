"""Adapter slots, host cache and encode stage under several threads: every request gets its own tenant's answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hplm.adapters.host_cache import HostCache
from hplm.adapters.packed import PackedAdapter, packed_width, widen
from hplm.adapters.tenant import Tenant
from hplm.core.settings import EncodeSettings
from hplm.engine import reference
from hplm.engine.adapter_slots import SLOTS_SHARE, USUAL_SLOTS, AdapterSlots, Fill, choose_slots, slot_size
from hplm.engine.encode import EngineRequest
from hplm.engine.kernels.scripted import scripted
from hplm.engine.slot_fill import fill_slots, fill_slots_from_pinned, pieces, place_for
from hplm.errors import CorruptArtifactError, DeadlineError, HplmError, QueueFullError, StoppingError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import ServedTenant
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage, looks_ahead
from hplm.serving.request import Request
from hplm.store.layout import Store
from tests import tiny
from tests.submitting import Started, submit

CPU = torch.device("cpu")
MEMBERS = 40
SOON_S = 120.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The tiny store with a fleet in a bank beside its tenants."""
    made = Store(tmp_path_factory.mktemp("fleet") / "store")
    tiny.make_base(made, tiny.config())
    return made


@pytest.fixture(scope="module")
def base(store: Store) -> Base:
    return bases.load(store.base("tiny"))


@pytest.fixture(scope="module")
def fleet(store: Store, base: Base) -> list[Tenant]:
    """Return tenants with a version, as the host cache returns them."""
    tiny.name_root(store, base)
    return [replace(member, version="1") for member in tiny.make_fleet(store, base, MEMBERS)]


@pytest.fixture(scope="module")
def mixed(base: Base) -> list[Tenant]:
    """Tenants of two widths, each with slots of its own."""
    return [replace(member, version="1") for member in tiny.fleet_of(base, MEMBERS, factors=(16, 16, 4, 4))]


@pytest.fixture(scope="module")
def hidden(base: Base) -> list[npt.NDArray[Any]]:
    """Hidden states of four texts."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=(length, base.config.hidden_size)).astype(np.float16) for length in (1, 4, 17, 40)]


@pytest.fixture(scope="module")
def wanted(base: Base, fleet: list[Tenant], hidden: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return references(base, fleet, hidden)


def references(base: Base, fleet: list[Tenant], hidden: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The slow reference: `[tenants, texts, labels]`."""
    upper = base.load_upper()
    states = [torch.from_numpy(one.astype(np.float32)) for one in hidden]
    return np.array([[reference.logits(upper, state, member)[0].numpy() for state in states] for member in fleet])


def run_all(*targets: Callable[[], None]) -> None:
    """Run functions in a thread each; fail if a thread does not end."""
    failures: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SOON_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"


def test_the_references_of_two_tenants_are_far_apart(wanted: npt.NDArray[Any]) -> None:
    apart = np.abs(wanted[:, None] - wanted[None]).max(-1)
    assert apart[~np.eye(MEMBERS, dtype=bool)].min() > 0.05


@pytest.mark.parametrize("num_slots", [3, 8])
@pytest.mark.parametrize("fine_prefetch", [False, True])
def test_batches_equal_the_reference_while_other_threads_fill_slots(
    base: Base,
    mixed: list[Tenant],
    hidden: list[npt.NDArray[Any]],
    fine_prefetch: bool,
    num_slots: int,
) -> None:
    engine = tiny.engine_of(base, num_slots, fine_prefetch=fine_prefetch)
    wanted, done = references(base, mixed, hidden), threading.Event()

    def compute() -> None:
        rng = np.random.default_rng(num_slots)
        try:
            for _ in range(80):
                # More tenants than slots: the engine cuts the batch.
                chosen = rng.integers(MEMBERS, size=rng.integers(1, 2 * num_slots))
                texts = rng.integers(len(hidden), size=len(chosen))
                pairs = list(zip(chosen, texts, strict=True))
                logits = engine.run([EngineRequest(mixed[member], hidden[text]) for member, text in pairs])
                for (member, text), got in zip(pairs, logits, strict=True):
                    np.testing.assert_allclose(got[0], wanted[member, text], atol=2e-3)
        finally:
            done.set()

    def prefetch(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            engine.slots.prefetch([mixed[i] for i in rng.integers(MEMBERS, size=5)])
            # A loop that takes the lock again at once starves other threads; a stage prefetches a hundred times a second.
            time.sleep(1e-4)

    run_all(compute, lambda: prefetch(100), lambda: prefetch(101))
    assert [table.num_unpinned for table in engine.slots.tables] == [num_slots - 1] * 2
    engine.close()


@pytest.mark.parametrize("fine_prefetch", [False, True])
def test_a_pinned_slot_keeps_its_weights_and_threads_that_want_all_slots_do_not_wait_for_each_other(
    base: Base, mixed: list[Tenant], fine_prefetch: bool
) -> None:
    slots = AdapterSlots(base.config, 4, 12, CPU, torch.float32, fine_prefetch=fine_prefetch)
    rows = [torch.from_numpy(slots.fitted(member.packed).weights) for member in mixed]
    assert {len(row[0]) for row in rows} == {packed_width(base.config.hidden_size, size) for size in (8, 16)}

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            chosen = rng.choice(MEMBERS, size=rng.integers(1, 4), replace=False)
            with slots.assigned([mixed[i] for i in chosen]) as assigned:
                for layer in range(base.config.upper_layers):
                    assigned.wait(layer)
                    for _ in range(2):
                        for member, slot in zip(chosen, assigned.slots, strict=True):
                            pool, place = divmod(slot, 4)
                            parts = slots.parts[4 * pool : 4 * pool + 4]
                            found = torch.cat([part[layer, place].flatten() for part in parts])
                            assert torch.equal(found, rows[member][layer])

    run_all(*(lambda seed=seed: use(seed) for seed in range(4)))
    assert [table.num_unpinned for table in slots.tables] == [3, 3]
    slots.close()


@pytest.mark.parametrize("fine_prefetch", [False, True])
def test_a_filling_that_fails_is_reported_and_forgotten(
    base: Base, fleet: list[Tenant], hidden: list[npt.NDArray[Any]], wanted: npt.NDArray[Any], fine_prefetch: bool
) -> None:
    engine = tiny.engine_of(base, 3, fine_prefetch=fine_prefetch)
    packed = fleet[0].packed
    # One layer is missing: the copy of the first succeeds.
    broken = replace(fleet[0], packed=PackedAdapter(packed.weights[:1], packed.hidden_size, packed.reduced_size))
    for _ in range(3):
        # TorchScript raises a RuntimeError.
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            engine.run([EngineRequest(broken, hidden[1])])
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            engine.slots.prefetch([broken])
        assert engine.slots.find(broken) is None
    got = engine.run([EngineRequest(fleet[0], hidden[1]), EngineRequest(fleet[1], hidden[1])])
    np.testing.assert_allclose(np.concatenate(got), wanted[:2, 1], atol=2e-3)
    assert engine.slots.tables[0].num_unpinned == 2
    engine.close()


def test_a_closed_cache_ends_what_runs_and_fails_what_waits_and_comes_later() -> None:
    entered, opened = threading.Event(), threading.Event()

    def load(key: int) -> int:
        entered.set()
        assert opened.wait(SOON_S)
        return 2 * key

    cache: HostCache[int, int] = HostCache(load, lambda value: 1, capacity=100, num_threads=1)
    futures = [cache.fetch(key) for key in range(5)]
    assert entered.wait(SOON_S)
    closing = threading.Thread(target=cache.close, args=(SOON_S,))
    closing.start()
    late = cache.fetch(9)
    assert isinstance(futures[4].exception(SOON_S), StoppingError)
    opened.set()
    closing.join(SOON_S)
    assert futures[0].result(SOON_S) == 0
    for future in (*futures[1:], late, cache.fetch(10)):
        with pytest.raises(StoppingError):
            future.result(SOON_S)


def stage_of(store: Store, **settings: Any) -> EncodeStage:
    values: dict[str, Any] = {"num_slots": 8, "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    return EncodeStage(EncodeSettings(str(store.root), "tiny", **values), Path("/"))


Found = list["Future[EncodeAnswer | HplmError]"]
EncodeRequest = Request[EncodeInput, EncodeAnswer]


def submit_all(stage: EncodeStage, inputs: list[EncodeRequest]) -> Found:
    """A future for each input; fails if an input is answered twice."""
    futures: Found = [Future() for _ in inputs]
    for given, future in zip(inputs, futures, strict=True):
        submit(stage, given, future.set_result)
    return futures


def inputs_of(hidden: list[npt.NDArray[Any]], pairs: list[tuple[int, int]]) -> list[EncodeRequest]:
    return [
        Request(EncodeInput(hidden[text], np.zeros((len(hidden[text]), 3), np.int32)), f"t{member}".encode())
        for member, text in pairs
    ]


def request_of_zeros(base: Base, tenant: bytes) -> EncodeRequest:
    return Request(EncodeInput(np.zeros((3, base.config.hidden_size), np.float16), np.zeros((3, 3), np.int32)), tenant)


@pytest.mark.parametrize(("coarse", "fine"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("batching", ["packed", "slotted"])
def test_submitted_requests_get_the_reference_s_answers_with_and_without_prefetching(
    store: Store,
    fleet: list[Tenant],
    hidden: list[npt.NDArray[Any]],
    wanted: npt.NDArray[Any],
    coarse: bool,
    fine: bool,
    batching: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = "slotted_das" if batching == "slotted" else "edf"
    # The user of the tests may have no right to change priorities, which would be logged.
    modes = {"batching": batching, "policy": policy, "compute_nice": 0}
    stage = stage_of(store, coarse_prefetch=coarse, fine_prefetch=fine, **modes)
    pairs = [(i % MEMBERS, (i // 7) % len(hidden)) for i in range(300)]
    futures = submit_all(stage, inputs_of(hidden, pairs))
    stage.start()
    for (member, text), future in zip(pairs, futures, strict=True):
        answer = future.result(SOON_S)
        assert isinstance(answer, EncodeAnswer)
        np.testing.assert_allclose(answer.logits[0], wanted[member, text], atol=2e-3)
        assert answer.spans[0].label.startswith(f"t{member}-")
    stage.stop()
    assert stage.counts["ok"] == 300
    assert stage.waiting == 0
    # Threads of earlier tests may log other lines.
    ours = ("hplm.serving", "hplm.adapters", "hplm.nn", "hplm.runtime.rate_limited_log")
    assert not [one for one in caplog.records if one.name.startswith(ours)]


@pytest.mark.parametrize(
    ("wanted", "device", "ahead"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
    ids=["cpu", "cuda", "cpu-told-to", "cuda-told-not-to"],
)
def test_slots_are_filled_ahead_on_a_gpu_and_where_that_was_asked_for(
    wanted: bool | None, device: str, ahead: bool
) -> None:
    settings = EncodeSettings(store="", base="tiny", coarse_prefetch=wanted)
    assert looks_ahead(settings, torch.device(device)) == ahead


@pytest.mark.parametrize("factor", [16, 4])
@pytest.mark.parametrize("instances", [1, 4])
def test_slots_on_a_gpu_take_a_share_of_its_free_memory_together_and_never_less_than_elsewhere(
    base: Base, factor: int, instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced_size = base.config.reduced_size(factor)
    held = AdapterSlots(base.config, 10, reduced_size, CPU, torch.bfloat16, fine_prefetch=False).device_bytes / 10
    free = int(1000 * held / SLOTS_SHARE) + 99

    def chosen(wanted: int | None, device: str, free: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        return choose_slots(wanted, base.config, reduced_size, torch.device(device), torch.bfloat16, instances)

    assert chosen(None, "cuda", free) == 1000 // instances
    assert chosen(None, "cuda", 0) == chosen(None, "cpu", free) == USUAL_SLOTS
    assert chosen(7, "cuda", free) == chosen(7, "cpu", free) == 7


@pytest.mark.parametrize("wanted", [None, True])
def test_a_stage_that_looks_ahead_on_a_processor_was_told_to(store: Store, wanted: bool | None) -> None:
    stage = stage_of(store, coarse_prefetch=wanted)
    before = {thread for thread in threading.enumerate() if thread.name == "upper-prefetch"}
    stage.start()
    started = {thread for thread in threading.enumerate() if thread.name == "upper-prefetch"} - before
    stage.stop()
    assert bool(started) == bool(wanted)


def test_a_stage_that_stops_while_tenants_are_loaded_answers_everybody(
    store: Store, fleet: list[Tenant], hidden: list[npt.NDArray[Any]]
) -> None:
    stage = stage_of(store, host_cache_mb=1)
    stage.start()
    futures = submit_all(stage, inputs_of(hidden, [(i % MEMBERS, 2) for i in range(400)]))
    stage.stop()
    futures += submit_all(stage, inputs_of(hidden, [(0, 0), (39, 0)]))
    answers = [future.result(SOON_S) for future in futures]
    assert all(isinstance(answer, EncodeAnswer | StoppingError) for answer in answers)
    assert isinstance(answers[-1], StoppingError)


def test_a_tenant_with_too_few_layers_fails_alone(
    store: Store, base: Base, fleet: list[Tenant], started: Started
) -> None:
    packed = fleet[0].packed
    card = replace(fleet[0].card, name="short")
    cut = PackedAdapter(packed.weights[:1], packed.hidden_size, packed.reduced_size)
    tiny.publish(store, base, tiny.PLOT, replace(fleet[0], card=card, packed=cut))
    stage = stage_of(store)
    given = request_of_zeros(base, b"t1")
    futures = submit_all(stage, [given, replace(given, tenant=b"short"), given])
    started.add(stage)
    answers = [future.result(SOON_S) for future in futures]
    assert [type(answer) for answer in answers] == [EncodeAnswer, CorruptArtifactError, EncodeAnswer]


def test_tenants_in_memory_are_answered_however_many_wait_for_one_that_loads(
    store: Store, fleet: list[Tenant], hidden: list[npt.NDArray[Any]], monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(stage_of(store, queue_capacity=20))
    warm, cold = inputs_of(hidden, [(0, 0), (1, 0)])
    assert isinstance(submit_all(stage, [warm])[0].result(SOON_S), EncodeAnswer)
    opened, load = threading.Event(), stage._bank.load

    def slow(key: ServedTenant) -> Tenant:
        assert opened.wait(SOON_S)
        return load(key)

    monkeypatch.setattr(stage._bank, "load", slow)
    # One tenant has half of the places at most. Another cold tenant finds room until all places are full.
    waiting = submit_all(stage, [cold] * 10)
    (refused,) = submit_all(stage, [cold])
    assert isinstance(refused.result(SOON_S), QueueFullError)
    others = inputs_of(hidden, [(i, 0) for i in range(2, 12)])
    waiting += submit_all(stage, others[:1])
    assert stage.counts["queue_full"] == 1
    assert isinstance(submit_all(stage, [warm])[0].result(SOON_S), EncodeAnswer)
    opened.set()
    assert all(isinstance(one.result(SOON_S), EncodeAnswer) for one in waiting)


def test_what_is_too_late_already_loads_nothing(
    store: Store, fleet: list[Tenant], hidden: list[npt.NDArray[Any]]
) -> None:
    stage = stage_of(store)
    stage.start()
    (cold,) = inputs_of(hidden, [(5, 0)])
    late = replace(cold, deadline_s=1e-6, arrived_s=time.monotonic() - 0.001)
    (refused,) = submit_all(stage, [late])
    assert isinstance(refused.result(SOON_S), DeadlineError)
    stage.stop()
    assert stage.counts["host_loads"] == 0


def test_who_claims_to_have_come_long_ago_goes_before_nobody_who_waited_as_long_as_most_may(
    store: Store, fleet: list[Tenant], hidden: list[npt.NDArray[Any]], started: Started
) -> None:
    stage = started.add(stage_of(store, default_deadline_s=200.0))
    (given,) = inputs_of(hidden, [(5, 0)])
    now = time.monotonic()
    for claimed_s, timeout_s, counted_s in (
        (3000, 3600, 200),
        (250, 3600, 200),
        (100, 3600, 100),
        (100, None, 100),
        (-50, 3600, 0),
    ):
        arrived_s, deadline_s = stage.times_of(replace(given, deadline_s=timeout_s, arrived_s=now - claimed_s))
        assert now - arrived_s == pytest.approx(counted_s, abs=20)
        # The time to the deadline excludes the time that the request has waited.
        assert deadline_s - now == pytest.approx((timeout_s or 200) - max(0, claimed_s), abs=20)


def test_a_tenant_too_large_for_the_slots_is_the_operators_affair(
    store: Store, base: Base, fleet: list[Tenant], caplog: pytest.LogCaptureFixture, started: Started
) -> None:
    card = replace(fleet[0].card, name="large")
    large = widen(fleet[0].packed, slot_size(1) + 1)
    tiny.publish(store, base, tiny.PLOT, replace(fleet[0], card=card, packed=large))
    stage = started.add(stage_of(store, reduction_factor=base.config.hidden_size))
    (answer,) = submit_all(stage, [request_of_zeros(base, b"large")])
    error = answer.result(SOON_S)
    assert isinstance(error, CorruptArtifactError)
    assert "reduction_factor" not in str(error)
    assert "lower reduction_factor" in caplog.text


def test_coarse_prefetch_alone_holds_no_batch_up(
    base: Base, fleet: list[Tenant], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = tiny.engine_of(base, fine_prefetch=False).slots
    begun, go_on, fill_layers = threading.Event(), threading.Event(), slots._fill_layers

    def slow(fill: Fill) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(SOON_S)
        fill_layers(fill)

    monkeypatch.setattr(slots, "_fill_layers", slow)

    thread = threading.Thread(target=slots.prefetch, args=(fleet[:4],), daemon=True)
    thread.start()
    assert begun.wait(SOON_S)
    # Tenants that are not being copied.
    with slots.assigned(fleet[4:6]):
        pass
    go_on.set()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert slots.loads == 6


def test_what_is_refused_before_the_queue_is_counted(
    store: Store, base: Base, fleet: list[Tenant], started: Started
) -> None:
    stage = started.add(stage_of(store))
    width = base.config.hidden_size
    unknown = request_of_zeros(base, b"nobody")
    wide = Request(replace(unknown.item, features=np.full((3, width + 1), 1, np.float16)), b"nobody")
    odd = [np.full((3, width), value, np.float16) for value in (np.nan, np.inf, -np.inf)]
    bad = [Request(replace(unknown.item, features=hidden), b"t1") for hidden in odd]
    answers = [one.result(SOON_S) for one in submit_all(stage, [unknown, wide, *bad])]
    assert [type(answer).__name__ for answer in answers] == ["UnknownTenantError", *["HiddenStatesError"] * 4]
    assert stage.counts["unknown_tenant"] == 1
    assert stage.counts["bad_hidden_states"] == 4


def filled_at_once(parts: list[torch.Tensor], layer: int, weights: list[torch.Tensor], slots: list[int]) -> None:
    """Fill a layer of slots as on a GPU."""
    staged = place_for(weights, CPU)
    scripted(fill_slots_from_pinned)(parts, layer, layer + 1, weights, torch.tensor(slots), staged)


@pytest.mark.parametrize("slots_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_gpu_s_slots_get_all_layers_in_pieces_and_no_format_loses_anything(
    layers: int, dtypes: tuple[torch.dtype, ...], slots_dtype: torch.dtype
) -> None:
    shapes = ((6, 2), (2,), (2, 6), (6,))
    parts, wanted = ([torch.full((layers, 5, *shape), 7.0, dtype=slots_dtype) for shape in shapes] for _ in range(2))
    weights = [torch.randn(layers, 32).to(dtype) for dtype in dtypes]
    staged, fill, done = place_for(weights, CPU), scripted(fill_slots_from_pinned), []
    for first, last in pieces(layers):
        fill(parts, first, last, weights, torch.tensor([4, 2]), staged)
        done += range(first, last)
    assert done == list(range(layers))
    for layer in range(layers):
        fill_slots(wanted, layer, weights, [4, 2])
    assert all(map(torch.equal, parts, wanted))


@pytest.mark.parametrize(
    "fill", [fill_slots, scripted(fill_slots), filled_at_once], ids=["plain", "scripted", "of-a-gpu"]
)
@pytest.mark.parametrize("slots_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_copied_into_its_slots_and_no_other(
    fill: Callable[..., None], slots_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    shapes, layers = ((6, 2), (2,), (2, 6), (6,)), 3
    parts = [torch.full((layers, 5, *shape), 7.0, dtype=slots_dtype) for shape in shapes]
    weights = [torch.randn(layers, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2)]
    fill(parts, 1, weights, [4, 2])
    for slot, row in ((4, weights[0][1]), (2, weights[1][1])):
        found = torch.cat([part[1, slot].flatten() for part in parts])
        assert torch.equal(found, row.to(slots_dtype))
    for part in parts:
        assert (part[[0, 2]] == 7).all()
        assert (part[1, [0, 1, 3]] == 7).all()


@pytest.mark.parametrize("fine_prefetch", [False, True])
def test_a_head_start_that_fails_costs_no_batch_its_answer(
    base: Base, mixed: list[Tenant], fine_prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = AdapterSlots(base.config, 4, 12, CPU, torch.float32, fine_prefetch=fine_prefetch)
    fill, members = slots._fill_slots, [mixed[0], mixed[2]]
    assert {one.packed.reduced_size for one in members} == {3, 12}

    def failing(parts: list[torch.Tensor], layer: int, *rest: Any) -> None:
        # A wide slot, after the narrow slots are filled.
        if parts[0].shape[-1] == 16:
            raise MemoryError
        fill(parts, layer, *rest)

    monkeypatch.setattr(slots, "_fill_slots", failing)
    with pytest.raises(MemoryError):
        slots.prefetch(members)
    monkeypatch.setattr(slots, "_fill_slots", fill)
    assert [slots.find(one) for one in members] == [None, None]
    with slots.assigned(members) as assigned:
        assigned.wait(base.config.upper_layers - 1)
    slots.close()


def test_a_layer_of_all_widths_is_there_before_the_next_one_of_any(
    base: Base, mixed: list[Tenant], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = AdapterSlots(base.config, 4, 12, CPU, torch.float32)
    fill, opened, filled = slots._fill_slots, threading.Event(), []

    def held(parts: list[torch.Tensor], layer: int, *rest: Any) -> None:
        assert layer == 0 or opened.wait(SOON_S)
        fill(parts, layer, *rest)
        filled.append((parts[0].shape[-1], layer))

    monkeypatch.setattr(slots, "_fill_slots", held)
    with slots.assigned([mixed[0], mixed[2]]) as assigned:
        assigned.wait(0)
        assert sorted(filled) == [(8, 0), (16, 0)]
        assert not assigned.filled
        opened.set()
        assigned.wait(base.config.upper_layers - 1)
    slots.close()
