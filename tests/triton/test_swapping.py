"""A real server with far more tenants than slots: no answer is crossed, memory stays flat, deadlines are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from hplm_client.answers import tensors_of
from hplm_loadtest.metrics import metric
from tritonclient.utils import InferenceServerException

from hplm import errors, wire
from hplm.nn import base as bases
from hplm.nn import reference
from hplm.nn.dtype import choose_dtype
from hplm.nn.upper import UpperEngine, UpperRequest
from hplm.store.layout import Store
from hplm.triton.server import TritonServer, free_ports
from tests import tiny
from tests.messages import TEXTS, TOLERANCE, ask_all, message, read, served_hidden
from tests.watching import pages_of, stubs_of

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(600)]
FLEET = 1000
SLOTS = 8


@dataclass(frozen=True)
class Fleet:
    """A server over FLEET tenants, and what each must answer: `wanted` `[tenants, texts, labels]`.

    To the bit in bfloat16, and in float32 with AVX-512; on other machines products in float32 are rounded by their size.
    """

    server: TritonServer
    wanted: npt.NDArray[np.float32]
    tolerance: float

    def send(self, order: Sequence[tuple[int, int]], in_flight: int) -> int:
        """Send (tenant, text) pairs; returns how many answers are not their own tenant's."""
        made = {pair: message(f"t{pair[0]}", TEXTS[pair[1]]) for pair in set(order)}
        crossed = 0
        answers = ask_all(self.server, [made[pair] for pair in order], in_flight)
        for (tenant, text), answer in zip(order, answers, strict=True):
            label, logits = read(answer)
            wanted = self.wanted[tenant, text]
            is_own = np.abs(logits - wanted).max() <= self.tolerance
            name, _, number = label.partition("-")
            # Of two labels that are as good as equal, rounding chooses.
            is_best = wanted[int(number)] >= wanted.max() - self.tolerance
            crossed += not (is_own and name == f"t{tenant}" and is_best)
        return crossed


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    dtype = choose_dtype("auto", torch.device("cpu"))
    name = str(dtype).removeprefix("torch.")
    upper_settings = {"host_cache_mb": 10, "device": "cpu", "num_threads": 1}
    # Smaller products than any real base has are computed one way or another by their size.
    shape = tiny.config(hidden_size=128)
    models = tiny.make_repository(folder, num_slots=SLOTS, dtype=name, shape=shape, upper_settings=upper_settings)
    store = Store(folder / "store")
    base = bases.load(store.base("tiny"))
    members = tiny.make_fleet(store, base, FLEET)
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        states = [served_hidden(server, "t0", text) for text in TEXTS]
        engine = UpperEngine(
            base.config,
            base.load_upper(),
            num_slots=2,
            reduced_size=members[0].packed.reduced_size,
            device=torch.device("cpu"),
            dtype=dtype,
        )
        # One tenant after another, nobody beside it, by as many threads as the server has.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        hidden = [state.numpy().astype(np.float16) for state in states]
        wanted = np.array([np.concatenate(engine.run([UpperRequest(m, h) for h in hidden])) for m in members])
        engine.close()
        torch.set_num_threads(threads)
        slow = base.load_upper()
        found = np.array([[reference.logits(slow, s, m)[0].numpy() for s in states] for m in members[:50]])
        assert np.abs(wanted[:50] - found).mean() < 0.02 * found.std()
        is_exact = dtype == torch.bfloat16 or torch.backends.cpu.get_cpu_capability() == "AVX512"
        yield Fleet(server, wanted, 0.0 if is_exact else TOLERANCE)


def test_no_two_tenants_answers_are_near_each_other(fleet: Fleet) -> None:
    for text in range(len(TEXTS)):
        wanted = fleet.wanted[:, text]
        apart = np.abs(wanted[:, None] - wanted[None]).max(-1)
        assert apart[~np.eye(FLEET, dtype=bool)].min() > 500 * TOLERANCE


@pytest.mark.parametrize("order", ["all-new", "round-robin", "reversed", "one-then-another"])
def test_every_tenant_gets_its_own_answer_however_slots_are_swapped(fleet: Fleet, order: str) -> None:
    orders = {
        "all-new": range(FLEET),
        "round-robin": [(start + 125 * i) % FLEET for start in range(125) for i in range(8)],
        "reversed": reversed(range(FLEET)),
        "one-then-another": [i // 2 if i % 2 else FLEET - 1 for i in range(FLEET)],
    }
    pairs = [(tenant, i % len(TEXTS)) for i, tenant in enumerate(orders[order])]
    assert fleet.send(pairs, 3 * SLOTS) == 0


@dataclass(frozen=True)
class Traffic:
    """What came of 50,000 mixed requests, and the memory of both stages after each part of them."""

    crossed: int
    pages: list[dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def traffic(fleet: Fleet) -> Traffic:
    """Some tenants ask all the time, most now and then."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, FLEET + 1) ** 0.8
    crossed, pages = 0, []
    for _ in range(10):
        tenants = rng.choice(FLEET, 5000, p=weights / weights.sum())
        crossed += fleet.send(list(zip(tenants, rng.integers(len(TEXTS), size=5000), strict=True)), 96)
        processes = {**stubs_of(fleet.server), "tritonserver": fleet.server.process.pid}
        pages.append({role: pages_of(pid) for role, pid in processes.items()})
    return Traffic(crossed, pages)


def test_no_answer_is_crossed_in_50000_mixed_requests(traffic: Traffic) -> None:
    assert traffic.crossed == 0


def test_tenants_were_pushed_out_of_host_memory_and_loaded_again_all_the_while(fleet: Fleet, traffic: Traffic) -> None:
    assert metric(fleet.server, 'hplm_upper_events_total{event="host_loads"}') > 5 * FLEET


def test_memory_of_server_and_stages_and_shared_memory_stay_flat_over_30000_requests(traffic: Traffic) -> None:
    warm, last = traffic.pages[3], traffic.pages[-1]
    print({role: [(p[role]["rss"] >> 20, p[role]["shm"] >> 20) for p in traffic.pages] for role in last})
    for role in ("hbert_plot", "hbert_upper", "tritonserver"):
        assert last[role]["rss"] < 1.03 * warm[role]["rss"] + 4e6
        assert last[role]["shm"] == warm[role]["shm"]


@pytest.mark.parametrize(
    ("timeout_us", "codes"),
    [
        (1, {errors.DeadlineError.code}),
        (1000, {errors.DeadlineError.code, "OK"}),
        (20_000_000, {"OK"}),
        (365 * 86_400 * 1_000_000, {"OK"}),
        (2**62, {"OK"}),
        (0, {"OK"}),
    ],
    ids=["1-us", "1-ms", "20-s", "a-year", "for-ever", "none"],
)
@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_a_deadline_is_kept_or_refused(fleet: Fleet, module: Any, timeout_us: int, codes: set[str]) -> None:
    port = fleet.server.ports.http if module is tritonclient.http else fleet.server.ports.grpc
    with closing(module.InferenceServerClient(f"127.0.0.1:{port}")) as triton:
        for _ in range(5):
            code = "OK"
            try:
                triton.infer(wire.MODEL, tensors_of(module, "t1", "the red cat"), timeout=timeout_us)
            except InferenceServerException as error:
                found = errors.from_wire(str(error.message()))
                assert found is not None
                code = found.code
            assert code in codes
