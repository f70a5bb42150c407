"""A real server with far more tenants than slots: no answer is crossed, memory stays flat, deadlines are kept.

`make test` sends 10,000 mixed requests, `make test-long` 50,000.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from hplm_client import AsyncClient
from hplm_client.infer_tensors import input_tensors
from hplm_client.prediction import Prediction
from hplm_client.transport.error_translation import from_triton
from hplm_loadtest.scenarios.server_metrics import metric_value
from tritonclient.utils import InferenceServerException

from hplm import errors
from hplm.adapters.tenant import Tenant
from hplm.core import wire
from hplm.engine import reference
from hplm.engine.encode import EngineRequest
from hplm.models.device import choose_dtype
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.messages import TOLERANCE, ask_all, message, read, served_hidden
from tests.triton.repetitions import repetitions
from tests.watching import pages_of, segment_growth, stubs_of

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.repeated, pytest.mark.timeout(900)]
# The number of parts in which mixed requests are sent, and of requests in a part. Memory is read after each part.
PARTS, PART = 10, repetitions(1_000, 5_000)
FLEET = 1000
SLOTS = 8
# Of so many tenants one is a tagging, and of so many requests one goes over HTTP.
TAGGING_EVERY = 10
HTTP_EVERY = 10
MAX_TOKENS = 40
# Smaller products than any real base has are computed one way or another by their size.
SHAPE = tiny.config(hidden_size=128, max_tokens=MAX_TOKENS)
# From one word to as many as the base reads, beside the two tokens around them.
WORDS = (1, 2, 3, 5, 7, 9, 12, 16, 20, 26, 32, MAX_TOKENS - 2)
TEXTS = [" ".join(np.random.default_rng(count).choice(tiny.WORDS, count)) for count in WORDS]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Fleet:
    """A server over FLEET tenants, and what each must answer: logits `[1 or tokens, labels]` of `wanted[tenant][text]`.

    To the bit in bfloat16, and in float32 with AVX-512; on other machines products in float32 are rounded by their size.
    """

    server: TritonServer
    wanted: list[list[npt.NDArray[np.float32]]]
    tolerance: float

    def send(self, order: Sequence[Pair], in_flight: int) -> int:
        """Send (tenant, text) pairs; returns how many answers are not their own tenant's."""
        over_http, over_grpc = order[::HTTP_EVERY], [pair for i, pair in enumerate(order) if i % HTTP_EVERY]
        messages = {pair: message(f"t{pair[0]}", TEXTS[pair[1]]) for pair in set(over_grpc)}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(asyncio.run, self._ask_over_http(over_http, max(1, in_flight // HTTP_EVERY)))
            answers = ask_all(self.server, [messages[pair] for pair in over_grpc], in_flight)
            predictions = asked.result()
        assert len(predictions) + len(answers) == len(order)
        crossed = sum(not self._is_own(*pair, *read(one)) for pair, one in zip(over_grpc, answers, strict=True))
        for pair, one in zip(over_http, predictions, strict=True):
            assert one.logits is not None
            crossed += not self._is_own(*pair, one.label or "", one.logits)
        return crossed

    async def _ask_over_http(self, pairs: Sequence[Pair], in_flight: int) -> list[Prediction]:
        room = asyncio.Semaphore(in_flight)
        async with AsyncClient(self.server.ports.http_url, timeout_s=60) as client:

            async def one(tenant: int, text: int) -> Prediction:
                async with room:
                    return await client.predict(f"t{tenant}", TEXTS[text], logits=True)

            return await asyncio.gather(*(one(*pair) for pair in pairs))

    def _is_own(self, tenant: int, text: int, label: str, logits: npt.NDArray[np.float32]) -> bool:
        """`label`: the first one; none where a tagging found nothing."""
        wanted = self.wanted[tenant][text]
        if logits.size != wanted.size or np.abs(logits.reshape(wanted.shape) - wanted).max() > self.tolerance:
            return False
        name, _, number = label.partition("-")
        if is_tagging(tenant):
            return not label or name == f"t{tenant}"
        # Of two labels that are as good as equal, rounding chooses.
        return name == f"t{tenant}" and bool(wanted[0, int(number)] >= wanted.max() - self.tolerance)


def is_tagging(tenant: int) -> bool:
    return tenant % TAGGING_EVERY == TAGGING_EVERY - 1


def as_tagging(member: Tenant) -> Tenant:
    """The same weights, its eight labels made such as tell where entities begin and end."""
    kinds = [f"{member.card.name}-{kind}" for kind in "abcd"]
    labels = ("O", *(f"{place}-{kind}" for kind in kinds for place in "BI"))[:8]
    return replace(member, card=replace(member.card, task="tagging", labels=labels))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    dtype = choose_dtype("auto", torch.device("cpu"))
    name = str(dtype).removeprefix("torch.")
    # With all that fills slots at once, whatever a processor has by default.
    # Beside other tests it takes no turns of theirs.
    upper_settings = {
        "host_cache_mb": 10,
        "device": "cpu",
        "num_threads": 1,
        "coarse_prefetch": True,
        "compute_nice": 0,
    }
    models = tiny.make_repository(
        folder,
        num_slots=SLOTS,
        dtype=name,
        shape=SHAPE,
        # Room for all windows of all texts: what is computed again may be rounded in another way.
        plot_settings={"overlay_windows": 4096},
        upper_settings=upper_settings,
    )
    store, base = tiny.opened(folder)
    members = [as_tagging(m) if is_tagging(i) else m for i, m in enumerate(tiny.fleet_of(base, FLEET))]
    tiny.make_bank(store, base, members)
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        states = [served_hidden(server, "t0", text) for text in TEXTS]
        engine = tiny.engine_of(base, 2, reduced_size=members[0].packed.reduced_size, dtype=dtype)
        # One tenant after another, nobody beside it, by as many threads as the server has.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        hidden = [state.numpy().astype(np.float16) for state in states]
        wanted = [engine.run([EngineRequest(m, h) for h in hidden]) for m in members]
        engine.close()
        torch.set_num_threads(threads)
        slow = base.load_upper()
        # A random encoder's hidden states are larger than means of three windows, and round more.
        rounding = 0.02 if dtype == torch.float32 else 0.06
        for member, served in zip(members[:50], wanted, strict=False):
            found = [reference.logits(slow, state, member).numpy() for state in states]
            apart = np.concatenate([np.abs(s - f).ravel() for s, f in zip(served, found, strict=True)])
            assert apart.mean() < rounding * np.concatenate([one.ravel() for one in found]).std()
        is_exact = dtype == torch.bfloat16 or torch.backends.cpu.get_cpu_capability() == "AVX512"
        yield Fleet(server, wanted, 0.0 if is_exact else TOLERANCE)


def test_no_two_tenants_answers_are_near_each_other(fleet: Fleet) -> None:
    for text in range(len(TEXTS)):
        for tagging in (False, True):
            wanted = np.array([own[text].ravel() for i, own in enumerate(fleet.wanted) if is_tagging(i) == tagging])
            apart = np.abs(wanted[:, None] - wanted[None]).max(-1)
            assert apart[~np.eye(len(wanted), dtype=bool)].min() > 500 * TOLERANCE


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
    """The crossed answers of mixed requests, the adapters that were loaded for them, and the memory after each part."""

    crossed: int
    loads: float
    pages: list[dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def traffic(fleet: Fleet) -> Traffic:
    """Some tenants ask all the time, most now and then."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, FLEET + 1) ** 0.8
    crossed, pages, loads_before = 0, [], host_loads(fleet)
    for _ in range(PARTS):
        tenants = rng.choice(FLEET, PART, p=weights / weights.sum())
        crossed += fleet.send(list(zip(tenants, rng.integers(len(TEXTS), size=PART), strict=True)), 96)
        processes = {**stubs_of(fleet.server), "tritonserver": fleet.server.process.pid}
        pages.append({role: pages_of(pid) for role, pid in processes.items()})
    return Traffic(crossed, host_loads(fleet) - loads_before, pages)


def host_loads(fleet: Fleet) -> float:
    """Return how many adapters were loaded into host memory so far."""
    return metric_value(fleet.server, 'hplm_upper_events_total{event="host_loads"}')


def test_no_answer_is_crossed_in_thousands_of_mixed_requests(traffic: Traffic) -> None:
    """50,000 requests in `make test-long`."""
    assert traffic.crossed == 0


def test_tenants_were_pushed_out_of_host_memory_and_loaded_again_all_the_while(traffic: Traffic) -> None:
    print(f"{traffic.loads:.0f} loads")
    assert traffic.loads > 0.05 * PARTS * PART


def test_memory_of_server_and_stages_and_shared_memory_stay_flat_over_the_second_half(traffic: Traffic) -> None:
    """25,000 requests in `make test-long`."""
    # By then oneDNN has met most sizes of products; it keeps what it made ready for the last thousand.
    warm, last = traffic.pages[PARTS // 2 - 1], traffic.pages[-1]
    print({role: [(p[role]["rss"] >> 20, p[role]["shm"] >> 20) for p in traffic.pages] for role in last})
    for role in ("hbert_plot", "hbert_upper", "tritonserver"):
        assert last[role]["rss"] < 1.03 * warm[role]["rss"] + 16e6
        # Triton has both stages' segments.
        segments = 2 if role == "tritonserver" else 1
        assert last[role]["shm"] <= warm[role]["shm"] + segments * segment_growth(SHAPE)


@pytest.mark.parametrize(
    ("timeout_us", "codes"),
    [
        (1, {errors.DeadlineError.code}),
        (1000, {errors.DeadlineError.code, "OK"}),
        (200_000_000, {"OK"}),
        (365 * 86_400 * 1_000_000, {"OK"}),
        (2**62, {"OK"}),
        (0, {"OK"}),
    ],
    ids=["1-us", "1-ms", "200-s", "a-year", "for-ever", "none"],
)
@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_a_deadline_is_kept_or_refused(fleet: Fleet, module: Any, timeout_us: int, codes: set[str]) -> None:
    port = fleet.server.ports.http if module is tritonclient.http else fleet.server.ports.grpc
    with closing(module.InferenceServerClient(f"127.0.0.1:{port}")) as triton:
        for _ in range(5):
            code = "OK"
            try:
                triton.infer(wire.MODEL, input_tensors(module, [("t1", "the red cat", None)]), timeout=timeout_us)
            except InferenceServerException as error:
                # What expires before it comes to a stage Triton refuses in its own words.
                code = from_triton(error, "the server").code
            assert code in codes
