"""The real server where it hurts: overload, far more tenants than slots, broken plug-ins, gone clients, an early end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from hplm_client import Client
from hplm_client.answers import tensors_of
from hplm_loadtest.arrivals import PoissonArrivals
from hplm_loadtest.deadlines import DeadlineClasses
from hplm_loadtest.infer_message import METHOD, infer_messages
from hplm_loadtest.open_loop import closed_loop, open_loop
from hplm_loadtest.plan import Mix, Requests
from hplm_loadtest.run import Run
from hplm_loadtest.tenants import UniformTenants
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from hplm import errors, wire
from hplm.errors import StartError
from hplm.nn import base as bases
from hplm.nn import reference
from hplm.store.layout import Store
from hplm.triton import stubs
from hplm.triton.server import TritonServer, free_ports
from tests import tiny

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(300)]
FLEET = 1000
SLOTS = 8
TEXTS = tiny.sentences(3, seed=5, words=(3, 12))
# Of served fp32 logits against the reference on the same hidden states; two tenants differ a hundred times as much.
TOLERANCE = 3e-3


def pages_of(pid: int) -> dict[str, int]:
    """VmRSS of a process, and what its server's segments in /dev/shm take, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    segments = set(re.findall(r"/dev/shm/hplm-triton\S+", Path(f"/proc/{pid}/maps").read_text()))
    shared = sum(os.stat(path).st_blocks * 512 for path in segments)
    return {"rss": 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0]), "shm": shared}


def session_of(server: TritonServer) -> dict[int, str]:
    """Processes of the server's session that still run, and what they are."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == server.process.pid and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def stubs_of(server: TritonServer) -> dict[str, int]:
    """Process of each of our two stages."""
    return {model: pid for pid, model in stubs.stubs_of(server.process.pid).items()}


def metric(server: TritonServer, name: str) -> float:
    """A value on the metrics page; 0 where it is not there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=10) as answer:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), flags=re.MULTILINE)
    return float(found[0]) if found else 0.0


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def message(tenant: str, text: str) -> bytes:
    """An infer request that asks for LABEL and LOGITS alone."""
    made = service_pb2.ModelInferRequest(model_name=wire.MODEL)
    for name, value in ((wire.TEXT, text), (wire.TENANT, tenant)):
        made.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        made.raw_input_contents.append(len(value.encode()).to_bytes(4, "little") + value.encode())
    for name in (wire.LABEL, wire.LOGITS):
        made.outputs.add(name=name)
    return bytes(made.SerializeToString())


def read(answer: bytes) -> tuple[str, npt.NDArray[np.float32]]:
    """Label and logits of the bytes of an answer."""
    parsed = service_pb2.ModelInferResponse.FromString(answer)
    raw = dict(zip((output.name for output in parsed.outputs), parsed.raw_output_contents, strict=True))
    return raw[wire.LABEL][4:].decode(), np.frombuffer(raw[wire.LOGITS], np.float32)


def ask_all(server: TritonServer, messages: Sequence[bytes], in_flight: int, channels: int = 4) -> list[bytes]:
    """Answers in order, `in_flight` requests under way over several connections; raises where one fails."""
    answers = [b""] * len(messages)
    left = iter(enumerate(messages))

    async def work(channel: Any) -> None:
        call = channel.unary_unary(METHOD)
        for index, one in left:
            answers[index] = await call(one, timeout=60)

    async def run() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{server.ports.grpc}"
        made = [grpc.aio.insecure_channel(address, options=options) for _ in range(channels)]
        await asyncio.gather(*(work(made[i % channels]) for i in range(in_flight)))
        for channel in made:
            await channel.close()

    asyncio.run(run())
    return answers


def served_hidden(server: TritonServer, tenant: str, text: str) -> torch.Tensor:
    """What the second stage is handed for a text."""
    with closing(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")) as triton:
        result = triton.infer("hbert_plot", tensors_of(tritonclient.grpc, tenant, text))
        return torch.from_numpy(result.as_numpy(wire.HIDDEN)[0].astype(np.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Far more tenants than slots


@dataclass(frozen=True)
class Fleet:
    """A server over FLEET tenants, and what each must answer: `wanted` `[tenants, texts, labels]`."""

    server: TritonServer
    wanted: npt.NDArray[np.float32]

    def send(self, order: Sequence[tuple[int, int]], in_flight: int) -> int:
        """Send (tenant, text) pairs; returns how many answers are not their own tenant's."""
        made = {pair: message(f"t{pair[0]}", TEXTS[pair[1]]) for pair in set(order)}
        crossed = 0
        answers = ask_all(self.server, [made[pair] for pair in order], in_flight)
        for (tenant, text), answer in zip(order, answers, strict=True):
            label, logits = read(answer)
            is_own = np.abs(logits - self.wanted[tenant, text]).max() < TOLERANCE
            crossed += not (is_own and label == f"t{tenant}-{self.wanted[tenant, text].argmax()}")
        return crossed


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    models = tiny.make_repository(folder, num_slots=SLOTS)
    store = Store(folder / "store")
    base = bases.load(store.base("tiny"))
    members = tiny.make_fleet(store, base, FLEET)
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        states = [served_hidden(server, "t0", text) for text in TEXTS]
        upper = base.load_upper()
        wanted = np.array([[reference.logits(upper, s, m)[0].numpy() for s in states] for m in members])
        yield Fleet(server, wanted)


def test_no_two_tenants_answers_are_near_each_other(fleet: Fleet) -> None:
    for text in range(len(TEXTS)):
        wanted = fleet.wanted[:, text]
        apart = np.abs(wanted[:, None] - wanted[None]).max(-1)
        assert apart[~np.eye(FLEET, dtype=bool)].min() > 20 * TOLERANCE


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
        pages.append({role: pages_of(pid) for role, pid in stubs_of(fleet.server).items()})
    return Traffic(crossed, pages)


def test_no_answer_is_crossed_in_50000_mixed_requests(traffic: Traffic) -> None:
    assert traffic.crossed == 0


def test_memory_of_the_stages_and_shared_memory_stay_flat_over_30000_requests(traffic: Traffic) -> None:
    warm, last = traffic.pages[3], traffic.pages[-1]
    print({role: [(p[role]["rss"] >> 20, p[role]["shm"] >> 20) for p in traffic.pages] for role in last})
    for role in ("hbert_plot", "hbert_upper"):
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


# ---------------------------------------------------------------------------------------------------------------------
# Slower than its clients


@pytest.fixture(scope="module")
def slow_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of which one core answers some ten requests of 60 tokens a second."""
    shape = tiny.config(hidden_size=512, upper_layers=24, max_tokens=64)
    return tiny.make_repository(
        tmp_path_factory.mktemp("slow"),
        shape=shape,
        num_slots=8,
        plot_settings={"overlay_windows": 65_536},
        # Batches of two requests or three: a batch must be short beside a deadline.
        upper_settings={"batch_rows": 2, "row_tokens": 96, "queue_capacity": 300},
    )


@pytest.fixture(scope="module")
def slow(slow_models: Path) -> Iterator[TritonServer]:
    with TritonServer(slow_models, free_ports(), log=slow_models.parent / "triton.log") as running:
        running.wait_ready()
        closed_loop(running.ports.grpc_url, long_texts().draw(20, rng()), 8, own_process=False)
        yield running


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def long_texts(deadline_s: float | None = None) -> Mix:
    deadlines = None if deadline_s is None else DeadlineClasses({"all": (deadline_s, 1.0)})
    return Mix(UniformTenants(list(tiny.TASKS)), tiny.sentences(10, words=(50, 58)), deadlines)


def capacity_per_s(server: TritonServer) -> float:
    run = closed_loop(server.ports.grpc_url, long_texts().draw(60, rng()), 8, own_process=False)
    assert run.kinds == {"answered": 60}
    return len(run) / run.span_s


def in_time_per_s(run: Run, deadline_s: float, window_s: float) -> tuple[npt.NDArray[np.float64], float]:
    """Answers within their deadline from when they were sent, a second, in each window but the first; share of late ones."""
    answered = np.array([code == "OK" for code in run.codes])
    in_time = answered & (run.done_s - run.sent_s <= deadline_s)
    windows = np.arange(window_s, run.duration_s + 1e-6, window_s)
    late_share = 1 - np.count_nonzero(in_time) / max(1, np.count_nonzero(answered))
    return np.histogram(run.done_s[in_time], windows)[0] / window_s, late_share


@dataclass(frozen=True)
class Overload:
    """Ten times what the server can do, and what it could do before and after."""

    run: Run
    goodput_per_s: float
    late_share: float
    capacity_per_s: float
    waiting: list[float]
    pages: list[dict[str, int]]


@pytest.fixture(scope="module")
def overload(slow: TritonServer) -> Overload:
    deadline_s, window_s = 2.0, 5.0
    before = capacity_per_s(slow)
    pids = list(stubs_of(slow).values())
    plan = long_texts(deadline_s).plan(PoissonArrivals(10 * before), 5 * window_s, rng())
    waiting: list[float] = []
    pages: list[dict[str, int]] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(open_loop, slow.ports.grpc_url, plan)
        while not running.done():
            waiting.append(metric(slow, "hplm_upper_waiting"))
            found = [pages_of(pid) for pid in pids]
            pages.append({kind: sum(one[kind] for one in found) for kind in ("rss", "shm")})
            time.sleep(1.0)
    run = running.result()
    windows, late_share = in_time_per_s(run, deadline_s, window_s)
    goodput = float(np.median(windows))
    capacity = min(before, capacity_per_s(slow))
    print(f"goodput {goodput:.1f}/s of {capacity:.1f}/s: {goodput / capacity:.2f}, late {late_share:.2f}")
    print(f"waiting at most {max(waiting):.0f}; bytes first {pages[0]}, last {pages[-1]}")
    return Overload(run, goodput, late_share, capacity, waiting, pages)


def test_under_ten_times_overload_every_request_is_answered_or_clearly_refused(overload: Overload) -> None:
    codes = Counter(overload.run.codes)
    assert set(codes) <= {"OK", errors.DeadlineError.code, errors.QueueFullError.code}
    assert codes["OK"] > 0
    assert sum(codes.values()) - codes["OK"] > 5 * codes["OK"]


def test_under_ten_times_overload_what_is_computed_is_in_time_and_goodput_stays_near_capacity(
    overload: Overload,
) -> None:
    assert overload.late_share < 0.1
    # On a machine of its own this is 0.9 and more. Here others may take processor time while the overload lasts that
    # they did not take while capacity was measured, and no more than a collapse can be told from that.
    assert overload.goodput_per_s > 0.5 * overload.capacity_per_s


def test_under_ten_times_overload_queue_and_memory_stay_bounded(overload: Overload) -> None:
    assert max(overload.waiting) <= 300
    first, last = overload.pages[len(overload.pages) // 3], overload.pages[-1]
    assert last["rss"] < 1.05 * first["rss"] + 8e6
    assert last["shm"] <= 1.5 * first["shm"]


def upper_messages(server: TritonServer, count: int) -> list[bytes]:
    """Requests that call the second stage itself."""
    hidden = served_hidden(server, "alpha", long_texts().texts[0]).to(torch.float16).numpy()
    tokens = np.zeros((len(hidden), 3), np.int32)
    made = service_pb2.ModelInferRequest(model_name="hbert_upper")
    for name, kind, value in ((wire.HIDDEN, "FP16", hidden), (wire.TOKENS, "INT32", tokens)):
        made.inputs.add(name=name, datatype=kind, shape=[1, *value.shape])
        made.raw_input_contents.append(value.tobytes())
    made.inputs.add(name=wire.TENANT, datatype="BYTES", shape=[1, 1])
    made.raw_input_contents.append(len(b"alpha").to_bytes(4, "little") + b"alpha")
    return [made.SerializeToString()] * count


@pytest.mark.parametrize("model", ["hbert", "hbert_upper"])
def test_clients_that_cancel_or_hang_up_harm_nobody_and_leave_nothing_behind(slow: TritonServer, model: str) -> None:
    requests = long_texts().draw(40, rng())
    messages = upper_messages(slow, 40) if model == "hbert_upper" else infer_messages(requests)
    with grpc.insecure_channel(f"127.0.0.1:{slow.ports.grpc}") as channel:
        call = channel.unary_unary(METHOD)
        started = [call.future(one, timeout=60) for one in messages]
        time.sleep(0.5)
        for one in started[::2]:
            one.cancel()
        hang_up(slow.ports.http, requests, count=20)
        # The others, and a newcomer, are answered.
        for one in started[1::2]:
            one.result(timeout=60)
        with Client(slow.ports.http_url) as client:
            assert client.predict("alpha", "the red cat").label in ("yes", "no")
    until(lambda: metric(slow, "hplm_upper_waiting") == 0)
    if model == "hbert_upper":
        # Triton 24.10 does not tell the steps of an ensemble that its client has gone: those are computed in vain.
        until(lambda: metric(slow, 'hplm_upper_events_total{event="cancelled"}') > 0)
    assert set(stubs_of(slow)) == {"hbert_plot", "hbert_upper"}


def hang_up(port: int, requests: Requests, count: int) -> None:
    """Send HTTP requests, half of them cut short, and close the connection without reading an answer."""
    for index in range(count):
        pairs = (("TEXT", requests.texts[index]), ("TENANT", requests.tenants[index]))
        inputs = [{"name": n, "shape": [1, 1], "datatype": "BYTES", "data": [value]} for n, value in pairs]
        body = json.dumps({"inputs": inputs}).encode()
        head = f"POST /v2/models/hbert/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head + (body if index % 2 else body[: len(body) // 2]))


@pytest.fixture
def fast_models(tmp_path: Path) -> Path:
    return tiny.make_repository(tmp_path)


@pytest.mark.parametrize("models", ["fast_models", "slow_models"])
def test_stopping_with_hundreds_of_requests_under_way_ends_each_of_them_and_leaves_no_process(
    request: pytest.FixtureRequest, models: str
) -> None:
    folder: Path = request.getfixturevalue(models)
    server = TritonServer(folder, free_ports(), log=folder.parent / "stopped.log")
    try:
        server.wait_ready()
        assert len(session_of(server)) >= 3
        with grpc.insecure_channel(f"127.0.0.1:{server.ports.grpc}") as channel:
            call = channel.unary_unary(METHOD)
            started = [call.future(one, timeout=60) for one in infer_messages(long_texts().draw(300, rng()))]
            started[0].result(timeout=30)
            start = time.monotonic()
            status = server.stop()
            assert time.monotonic() - start < 15
            ends = [one.exception(timeout=5) for one in started]
        # Not found: the first stage was done with it when the second was gone already; Triton says so.
        found = {"answered" if end is None else end.code().name for end in ends}
        assert found <= {"answered", "UNAVAILABLE", "NOT_FOUND"}
        assert all("unknown model" in str(e.details()) for e in ends if e and e.code().name == "NOT_FOUND")
        if models == "fast_models":
            # Not so where the work takes longer than Triton's `--exit-timeout-secs`.
            assert status == 0
        until(lambda: not session_of(server), 5)
    finally:
        server.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Third parties' policies

PLUGIN = """
from hplm.scheduling.policy import Batch, Waiting

class Broken:
    turn = 0

    def select(self, waiting, now_s, budget):
        self.turn += 1
        first = waiting[0]
        return [
            lambda: {}["no such thing"],
            lambda: None,
            lambda: Batch(()),
            lambda: Batch(((first, first),)),
            lambda: Batch(((Waiting(10**9, "alpha", 1, 0.0, 1e9),),)),
            lambda: Batch(((first,),), slot_tokens="many"),
        ][self.turn % 6]()
"""


@pytest.fixture
def with_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that has all that this one has, and a package with a policy; the server's stubs run in it."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    (site_packages / "third_party.py").write_text(PLUGIN)
    about = site_packages / "third_party-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hplm.policies]\nbroken = third_party:Broken\n")
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python3"))


def test_with_a_policy_that_raises_or_returns_nonsense_everything_is_answered_and_the_failures_counted(
    with_plugin: None, tmp_path: Path
) -> None:
    models = tiny.make_repository(tmp_path, upper_settings={"policy": "broken"})
    with TritonServer(models, free_ports(), log=tmp_path / "log") as server:
        server.wait_ready()
        with Client(server.ports.grpc_url) as client:
            pairs = [(tenant, text) for text in tiny.sentences(20) for tenant in tiny.TASKS]
            assert len(list(client.predict_many(pairs))) == 80
        until(lambda: metric(server, 'hplm_upper_events_total{event="policy_failures"}') > 0)
        assert server.process.poll() is None
    assert "policy: Broken: KeyError('no such thing')" in (tmp_path / "log").read_text()


def test_an_unknown_policy_stops_the_start_with_one_clear_error(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path, upper_settings={"policy": "best"})
    with (
        TritonServer(models, free_ports(), log=tmp_path / "log") as server,
        pytest.raises(StartError, match="there is no policy 'best'; there are fcfs, sjf, edf, das, slotted_das"),
    ):
        server.wait_ready(60)
