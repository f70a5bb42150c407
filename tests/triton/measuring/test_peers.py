"""The peers of hBERT: real models on a real server, whose answers equal a slow computation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hplm_builder.export import register
from hplm_builder.export.model_folders import export
from hplm_builder.fleet.benchmark_repository import BANK, PLOT, make_fleet, make_pool_plot
from hplm_client import Client
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.serving import memory, throughput_by_tenants
from hplm_loadtest.peers import systems, whole_fleet
from hplm_loadtest.peers.engines import DedicatedEngine
from hplm_loadtest.peers.model_swapping import Resident, SwapWorker, model_to_evict
from hplm_loadtest.peers.repository import serve_peer, write_models, write_repository
from hplm_loadtest.peers.settings import PeerSettings, System
from hplm_loadtest.peers.systems import Limits, SystemName, Systems, open_fleet
from hplm_loadtest.peers.whole_fleet import write_whole_fleet
from hplm_loadtest.peers.whole_model import (
    PACKED_FROM_BATCH,
    PeerRequest,
    PreallocatedModel,
    make_seeded_model,
    model_file_of,
    model_files,
    stored_as,
    whole_config,
)
from hplm_loadtest.scenarios.outcomes import ANSWERED, NO_ANSWER, Run
from rich.progress import Progress

from hplm import errors
from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import Tenant
from hplm.core.settings import EncodeSettings, LookupSettings
from hplm.core.text import TextEncoder
from hplm.engine import reference
from hplm.engine.encode import head_logits, pool
from hplm.engine.kernels.onednn import can_pack
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm.triton.launcher.instances import instances_in
from hplm.triton.launcher.server import TritonServer
from tests import tiny

QUIET = Progress(disable=True)
SYSTEMS: tuple[System, ...] = ("dedicated", "onnxruntime")
MODELS, PLACES = 5, 2


@dataclass(frozen=True)
class Served:
    """A server of a peer with the tiny store's tenants and a fleet, and with fewer places than models."""

    system: System
    server: TritonServer
    store: Store
    base: Base
    weights: Path

    def tenant(self, name: str) -> Tenant:
        bank = BankFile(self.store.bank(BANK), self.base.fingerprint)
        if name in bank:
            return bank.load(name)
        return tiny.load_tenant(self.store, self.base, name)

    def expected(self, name: str, text: str) -> np.ndarray:
        """Compute the logits of one text without packing and swapping, layer by layer."""
        config = whole_config(self.base.config)
        tenant = self.tenant(name)
        is_own = self.system in ("dedicated", "onnxruntime")
        files = model_files(self.weights)
        number = files.index(model_file_of(name, files)) if is_own else 0
        model = make_seeded_model(config, number)
        encoded = TextEncoder(self.base.tokenizer_path, config.max_tokens).encode([text])[0]
        with torch.inference_mode():
            embedded = model.word_embeddings(torch.from_numpy(encoded.ids))
            last = reference.upper(model.body, embedded, None)
            seen = pool(task_named(tenant.card.task), tenant.card.pooling, last).numpy()
        found = seen @ tenant.head.weight.T + tenant.head.bias
        return reference.word_logits(found, len(tenant.card.labels), encoded.tokens)


@pytest.fixture(scope="module", params=SYSTEMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    store = Store(folder / "store")
    base = tiny.make_base(store, tiny.config())
    tiny.name_root(store, base, PLOT)
    for seed, name in enumerate(tiny.TASKS, 1):
        tiny.make_tenant(store, base, name, seed, domain=PLOT)
    make_fleet(store, base, BANK, 12, 0, QUIET)
    register.publish_bank(store, base, PLOT, BANK)
    config = whole_config(base.config)
    onnx = request.param == "onnxruntime"
    written = write_models(
        folder / "weights",
        config,
        tenants=MODELS,
        disk_bytes=10**9,
        dtype=torch.float32,
        onnx=onnx,
        progress=QUIET,
    )
    assert written == MODELS
    settings = PeerSettings(
        system=request.param,
        store=str(store.root),
        base="tiny",
        weights=str(folder / "weights"),
        budget_mb=1,
        dtype="float32",
    )
    models = write_repository(folder / "models", settings)
    with serve_peer(models, log=folder / "log") as server:
        server.wait_ready()
        yield Served(request.param, server, store, base, folder / "weights")


@pytest.mark.triton
def test_logits_equal_a_slow_computation_while_models_are_swapped(served: Served) -> None:
    names = [*tiny.TASKS, *(f"tenant-{i:05d}" for i in range(12))]
    pairs = [(name, text) for text in tiny.sentences(4) for name in names]
    pairs = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]
    with Client(served.server.ports.grpc_url) as client:
        for answer in client.predict_many(pairs, logits=True):
            assert answer.logits is not None
            wanted = served.expected(answer.tenant, answer.text)
            np.testing.assert_allclose(answer.logits, wanted, atol=2e-3, rtol=1e-3)
            card = served.tenant(answer.tenant).card
            if card.task == "classification":
                assert answer.label == card.labels[int(wanted.argmax())]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("tenant", "text", "error"),
    [
        ("nobody", "hello", errors.UnknownTenantError),
        ("alpha", " ", errors.EmptyTextError),
        ("a/b", "hello", errors.TenantNameError),
    ],
)
def test_a_bad_request_gets_hberts_error(served: Served, tenant: str, text: str, error: type[errors.HplmError]) -> None:
    with Client(served.server.ports.grpc_url) as client:
        with pytest.raises(error):
            client.predict(tenant, text)
        assert client.predict("alpha", "the red cat").label in ("yes", "no")


def test_a_model_without_waiting_requests_is_evicted_first() -> None:
    residents = [Resident("a", 3, False), Resident("b", None, True), Resident("c", None, False)]
    assert model_to_evict(residents, wanted=9) == "c"


def test_the_model_whose_requests_came_last_is_evicted_but_never_for_later_requests() -> None:
    residents = [Resident("a", 3, False), Resident("b", 7, False), Resident("c", 9, True)]
    assert model_to_evict(residents, wanted=5) == "b"
    assert model_to_evict(residents, wanted=8) is None


@pytest.mark.parametrize("places", [1, 2, 5])
def test_every_request_runs_once_with_its_own_model(places: int) -> None:
    loaded: dict[int, str] = {}
    answers: list[tuple[str, str]] = []
    loads = 0

    def load(place: int, key: str) -> None:
        nonlocal loads
        loaded[place] = key
        loads += 1

    worker: SwapWorker[str] = SwapWorker(
        places,
        load,
        lambda place, items: answers.extend((loaded[place], item) for item in items),
        lambda items, error: pytest.fail(str(error)),
        batch_requests=4,
    )
    rng = np.random.default_rng(0)
    sent = [f"m{rng.zipf(1.5) % 20}" for _ in range(500)]
    for start in range(0, 500, 10):
        worker.add([(key, f"{key} {start + i}") for i, key in enumerate(sent[start : start + 10])])
    while len(answers) < 500:
        time.sleep(0.001)
    worker.stop()
    assert sorted(item for _, item in answers) == sorted(f"{key} {i}" for i, key in enumerate(sent))
    assert all(item.split()[0] == model for model, item in answers)
    assert loads <= 500


def test_a_model_that_cannot_be_loaded_fails_its_own_requests_only() -> None:
    failed: list[str] = []
    ran: list[str] = []

    def load(place: int, key: str) -> None:
        if key == "bad":
            raise OSError("no such file")

    worker: SwapWorker[str] = SwapWorker(
        1, load, lambda _, items: ran.extend(items), lambda items, _: failed.extend(items), batch_requests=2
    )
    worker.add([("bad", "1"), ("good", "2"), ("bad", "3"), ("good", "4")])
    while len(failed) + len(ran) < 4:
        time.sleep(0.001)
    worker.stop()
    assert (failed, ran) == (["1", "3"], ["2", "4"])


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = whole_config(tiny.config())
    other = replace(config, upper_layers=1)
    write_models(tmp_path, other, tenants=1, disk_bytes=10**9, dtype=torch.float32, onnx=False, progress=QUIET)
    with pytest.raises(errors.CorruptArtifactError, match="bytes"):
        PreallocatedModel(config, torch.float32).fill(model_files(tmp_path)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_gives_the_same_logits_before_and_after_packing_and_after_a_swap(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    base = tiny.make_base(Store(tmp_path / "store"), tiny.config())
    config, folder = whole_config(base.config), tmp_path / "weights"
    write_models(folder, config, tenants=2, disk_bytes=10**9, dtype=dtype, onnx=False, progress=QUIET)
    rng = np.random.default_rng(0)
    tenant = tiny.fleet_of(base, 1)[0]
    requests = [PeerRequest(tenant, rng.integers(5, config.vocab_size, size=length)) for length in (4, 7, 4)]
    flat = PreallocatedModel(config, dtype)
    for number in (0, 1, 0):
        flat.fill(model_files(folder)[number])
        model = stored_as(make_seeded_model(config, number), dtype).float()
        for batch in range(1, PACKED_FROM_BATCH + 2):
            for request, found in zip(requests, flat.run(requests), strict=True):
                with torch.inference_mode():
                    last = model(torch.from_numpy(request.ids), [len(request.ids)])
                    wanted = head_logits([tenant], [len(request.ids)], last)[0]
                assert np.allclose(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.05)
            assert flat.is_packed == (batch >= PACKED_FROM_BATCH and can_pack(torch.device("cpu"), dtype))


def test_the_first_whole_model_in_a_place_is_packed_before_it_computes(tmp_path: Path) -> None:
    config = whole_config(tiny.config())
    write_models(tmp_path, config, tenants=2, disk_bytes=10**9, dtype=torch.float32, onnx=False, progress=QUIET)
    settings = PeerSettings(system="dedicated", store="", base="", weights="", budget_mb=1, dtype="float32")
    body = DedicatedEngine(settings, config, torch.float32, tmp_path, torch.device("cpu"))
    seen = []
    for model in ("acme", "globex"):
        body.load(0, model)
        seen.append(body._models[0].is_packed)
    assert seen == [can_pack(torch.device("cpu"), torch.float32), False]


def throughput(system: str, count: int, rate: float) -> dict[str, object]:
    return {
        "measure": "throughput",
        "system": system,
        "popularity": "uniform",
        "tenants": count,
        "requests_per_s": rate,
        "errors": {},
    }


def test_goals_exist_only_for_measured_rows() -> None:
    rows = [throughput("hbert", 1, 100.0), throughput("hbert", 10_000, 90.0), throughput("dedicated", 10_000, 3.0)]
    found = {goal.id: goal.value for goal in throughput_by_tenants.goals(rows)}
    assert found == {"tenants-errors": 0.0, "tenants-flat": 0.9, "tenants-dedicated-1000": 30.0}
    responses = [
        {"measure": "response", "system": system, "p50_ms": p50_ms, "kept_up": kept_up}
        for system, p50_ms, kept_up in (("hbert", 2.0, 1.0), ("dedicated", 500.0, 0.9))
    ]
    response, kept_up = throughput_by_tenants.goals([*rows, *responses])[-2:]
    assert (response.value, kept_up.value, kept_up.met) == (250.0, 0.9, False)


def make_run(planned: list[float], done: list[float], duration_s: float) -> Run:
    sent, nothing = np.array(planned), np.full(len(planned), np.nan)
    codes = [NO_ANSWER if np.isnan(at) else ANSWERED for at in done]
    return Run(duration_s, sent, sent, np.array(done), codes, nothing)


def test_a_request_without_an_answer_at_the_end_counts_as_waiting_until_the_end() -> None:
    waited_s, answered = throughput_by_tenants.waits(make_run([0.0, 1.0, 2.0, 9.0], [0.5, np.nan, 11.0, 9.5], 10.0))
    np.testing.assert_allclose(waited_s, [0.5, 9.0, 8.0, 0.5])
    assert answered == 0.5


def test_memory_goals_are_read_from_the_largest_row() -> None:
    row = {"tenants": 10_000, "answered": 10_000, "pss_mb": 12 * 2**30 / 1e6}
    assert [goal.met for goal in memory.goals(0.0, row)] == [True, True, True]
    assert [goal.met for goal in memory.goals(1.0, {**row, "answered": 1})] == [False, True, False]


def test_the_memory_of_a_server_counts_its_own_process() -> None:
    found = memory.server_memory(os.getpid())
    assert list(found) == ["tritonserver"]
    assert sum(part["pss"] for part in found.values()) > 10**7
    assert all(part["pss"] <= part["rss"] for part in found.values())


@pytest.fixture(scope="module")
def tiny_fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder like `hplm build fleet --reduction-factor 4`, over the tiny base."""
    folder = tmp_path_factory.mktemp("fleet")
    store = Store(folder / "store")
    base = tiny.make_base(store, tiny.config())
    texts = tiny.sentences(20)
    make_pool_plot(store, base, texts, QUIET)
    register.name_root(store, base, PLOT)
    make_fleet(store, base, BANK, 12, 0, QUIET, reduction_factor=4)
    register.publish_bank(store, base, PLOT, BANK)
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    upper = EncodeSettings(store="", base="tiny", num_slots=4, reduction_factor=4)
    export(store, folder / "models", LookupSettings(store="", base="tiny", table="pool"), upper)
    return folder


@pytest.mark.triton
def test_the_tenants_benchmark_measures_every_point_of_every_system(tiny_fleet: Path, tmp_path: Path) -> None:
    load = throughput_by_tenants.Load(0.3, 0.3, 1, in_flight=8, response_s=1.0, response_share=0.2, generators=2)
    picture = tmp_path / "tenants.svg"
    report = throughput_by_tenants.throughput_by_tenants(
        *(tiny_fleet, "minilm", ["hbert", "dedicated"], [1, 12], ["uniform"], load, Limits(1, 1, 2), picture, "unseen"),
        5,
    )
    rates = [row for row in report.rows if row["measure"] == "throughput"]
    assert [(row["system"], row["tenants"]) for row in rates] == [
        (system, count) for system in ("hbert", "dedicated") for count in (1, 12)
    ]
    assert all(row["requests_per_s"] > 0 and row["errors"] == {} for row in rates)
    assert [row["system"] for row in report.rows if row["measure"] == "response"] == ["hbert", "dedicated"]
    assert report.settings["dedicated_files"] > 1
    assert report.settings["hbert_look_up_threads"] == 1
    assert (report.settings["hbert_num_slots"], report.settings["generators"]) == (5, 2)
    assert report.settings["texts"] == "unseen"
    assert picture.is_file()


def test_more_generators_than_requests_under_way_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="9 generators cannot have 8 requests under way"):
        throughput_by_tenants.Load(in_flight=8, generators=9)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU, for tests that prepare servers and do not start them."""
    monkeypatch.setattr(systems, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(systems, "choose_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_peers_on_several_gpus_are_refused(tiny_fleet: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    servers = Systems(open_fleet(tiny_fleet, "minilm", 12), Limits(1, 8, 2))
    # hBERT alone may use all GPUs.
    servers.prepare("hbert", QUIET)
    with pytest.raises(errors.ConfigError, match="CUDA_VISIBLE_DEVICES=0"):
        servers.prepare("dedicated", QUIET)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hbert", {"hbert_plot": 3, "hbert_upper": 3}),
        ("adapter", {"hbert_plot": 3, "hbert_upper": 3}),
        ("dedicated", {"hbert": 1}),
    ],
)
def test_on_a_gpu_threads_are_processes_of_both_stages_and_of_peers_except_those_of_whole_models(
    tiny_fleet: Path, gpu: None, name: SystemName, wanted: dict[str, int]
) -> None:
    Systems(open_fleet(tiny_fleet, "minilm", 12), Limits(3, 9, 2)).prepare(name, QUIET)
    models = tiny_fleet / "peers" / f"models-{name}"
    assert {role: instances_in((models / role / "config.pbtxt").read_text()) for role in wanted} == wanted


@pytest.mark.parametrize("name", ["hbert", "dedicated", "adapter"])
def test_threads_are_processes_except_for_whole_models(tiny_fleet: Path, name: SystemName) -> None:
    Systems(open_fleet(tiny_fleet, "minilm", 12), Limits(2, 8, 2)).prepare(name, QUIET)
    model = "hbert_upper" if name in ("hbert", "adapter") else "hbert"
    folder = tiny_fleet / "peers" / f"models-{name}" / model
    settings = json.loads((folder / "1" / "settings.json").read_text())
    wanted = (1, 2, 8) if name == "dedicated" else (2, 1, 4)
    found = instances_in((folder / "config.pbtxt").read_text())
    assert (found, settings["num_threads"], settings["host_cache_mb"]) == wanted


@pytest.mark.triton
@pytest.mark.parametrize(
    "name", sorted({*get_args(SystemName)} - {"hbert", "dedicated"})
)  # the test above measures those two
def test_every_system_starts_over_a_fleet_and_answers(tiny_fleet: Path, name: SystemName) -> None:
    servers = Systems(open_fleet(tiny_fleet, "minilm", 12), Limits(1, 1, 2))
    servers.prepare(name, QUIET)
    with servers.start(name) as server:
        server.wait_ready()
        with Client(server.ports.grpc_url) as client:
            assert client.predict("tenant-00003", "the red cat").label.startswith("label-")


def test_the_adapters_of_a_fleet_stand_in_the_same_layers_of_a_whole_base(tiny_fleet: Path, tmp_path: Path) -> None:
    fleet = open_fleet(tiny_fleet, "minilm", 12)
    store = write_whole_fleet(tmp_path / "whole", read_repository(fleet.models), fleet.names, QUIET)
    base = bases.load(store.base(whole_fleet.BASE))
    assert (base.config.upper_layers, base.config.adapted_layers) == (4, 2)
    ours, theirs = (
        BankFile(one.bank(BANK), of.fingerprint).load("tenant-00003")
        for one, of in ((Store(tiny_fleet / "store"), fleet.base), (store, base))
    )
    assert np.array_equal(ours.packed.weights, theirs.packed.weights)
    written = store.bank(whole_fleet.BANK).stat().st_ino
    write_whole_fleet(store.root, read_repository(fleet.models), fleet.names, QUIET)
    assert store.bank(whole_fleet.BANK).stat().st_ino == written


@pytest.mark.triton
def test_the_memory_benchmark_keeps_every_tenant_and_no_device_bytes_grow(tiny_fleet: Path, tmp_path: Path) -> None:
    report = memory.memory_by_tenants(tiny_fleet, "minilm", [2, 12], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert [row["answered"] for row in report.rows[:2]] == [2, 12]
    assert report.rows[0]["slot_mb"] == report.rows[1]["slot_mb"] > 0
    assert {"hbert_plot_rss_mb", "hbert_upper_rss_mb", "tritonserver_rss_mb"} <= report.rows[0].keys()
    assert all(goal.met for goal in report.goals)


def test_a_missing_fleet_is_refused_with_the_command_that_builds_it(tiny_fleet: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tiny_fleet):
        with pytest.raises(errors.MissingArtifactError, match="hplm build fleet --shape minilm --tenants 13"):
            open_fleet(folder, "minilm", 13)
