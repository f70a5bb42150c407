"""The model `cascade` on a real Triton, over three bases: its answers, its routes, and what happens if a level fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from hplm_client import AsyncClient, Client
from hplm_client.infer_tensors import input_tensors
from hplm_client.prediction import Prediction
from hplm_loadtest.benchmarks.serving.cascade import CascadeLoad, measure
from hplm_loadtest.benchmarks.serving.mixed import BaseLoad
from hplm_loadtest.benchmarks.serving.mixed import measure as measure_mixed
from hplm_loadtest.scenarios.server_metrics import metric_value
from hplm_loadtest.workloads.labelled_requests import LabelledRequest
from hplm_loadtest.workloads.load_plan import RequestMix
from rich.progress import Progress

from hplm import errors
from hplm.access.quotas import file_of
from hplm.adapters.tenant import Tenant
from hplm.cascade.plan import CascadePlan
from hplm.core import wire
from hplm.core.text import TextOrPair
from hplm.errors import HplmError
from hplm.quotas.limits import Limits
from hplm.quotas.quota_file import QuotaFile
from hplm.registry.registry import Registry
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import StubKeeper
from hplm.workloads.tenants import UniformTenants
from tests import tiny
from tests.messages import TOLERANCE, ask_all, message, read
from tests.triton.cascade.making import MODELS, Making, OfflineCascade, levels_over, make_bases
from tests.triton.repetitions import repetitions
from tests.waiting import until
from tests.watching import stubs_of

pytestmark = pytest.mark.triton

TEXTS = [*tiny.sentences(10, seed=5, words=(1, 14)), "Zoë   sings,\nfast 😀 over the café"]
PAIRS = list(zip(tiny.sentences(8, seed=6, words=(1, 12)), tiny.sentences(8, seed=7, words=(1, 9)), strict=True))
UNDER_WAY = 2000
Cascades = dict[str, tuple[CascadePlan, list[Tenant]]]


class Served:
    """A running server, the cascades of its tenants, and the slow twin."""

    def __init__(self, models: Path, making: Making, cascades: Cascades, server: TritonServer) -> None:
        self.models, self.making, self.cascades, self.server = models, making, cascades, server
        self.offline = OfflineCascade(making)


def make_cascades(making: Making) -> Cascades:
    """Tenants with one, two and three levels, pruned and not, of three tasks."""
    three = ("small", "middle", "tiny")
    return {
        "alpha": making.cascade("alpha", "alpha", 1, levels_over(*three, alpha=0.9)),
        "beta": making.cascade("beta", "beta", 2, levels_over(*three, cut_off=0.5), deterministic=True),
        "gamma": making.cascade("gamma", "gamma", 33, levels_over("small", "tiny", cut_off=0.9, alpha=1.1)),
        "follows": making.cascade("follows", "follows", 4, levels_over("small", "middle", cut_off=0.9, alpha=1.0)),
        "tagger": making.cascade("tagger", "tagger", 5, levels_over("small", "tiny", cut_off=0.1)),
        "single": making.cascade("single", "alpha", 6, levels_over("middle")),
        # Every text of these goes to the last level, if that level can answer.
        "sure": making.cascade("sure", "alpha", 7, levels_over("small", "tiny", cut_off=0.999)),
        "strict": making.cascade("strict", "alpha", 8, levels_over("small", "tiny", cut_off=0.999), on_late="refuse"),
        # The second level of this tenant is no other tenant's, so nothing but the plan says how long the level takes.
        "slow": making.cascade("slow", "alpha", 9, levels_over("middle", "small", cut_off=0.999), latency_ms=60_000.0),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = make_bases(tmp_path_factory.mktemp("cascade"))
    making = Making.over(models.parent)
    cascades = make_cascades(making)
    tiny.make_tenant(making.store, making.bases["tiny"], "plain", 10, "alpha", domain="general-tiny")
    with TritonServer(models, free_ports(), log=models.parent / "triton.log") as running:
        running.wait_ready()
        yield Served(models, making, cascades, running)


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.server.ports.grpc_url, concurrency=64) as made:
        yield made


def requests_of(cascades: Cascades) -> list[tuple[str, TextOrPair]]:
    """Texts or pairs of each tenant but `slow`, tenants in turns."""
    single = [(tenant, text) for text in TEXTS for tenant in cascades if tenant not in ("follows", "slow")]
    return [*single, *(("follows", pair) for pair in PAIRS)]


def arguments(tenant: str, text: TextOrPair) -> tuple[str, ...]:
    return (tenant, text) if isinstance(text, str) else (tenant, *text)


def test_a_text_is_charged_the_tokens_of_each_level_that_it_goes_to(served: Served, client: Client) -> None:
    # The estimate for all these letters is far more than there are tokens.
    text, count = f"the red cat {' ' * 60} sings", 5
    store = served.making.store
    with closing(Registry.open(store)) as registry:
        registry.set_limits("sure", Limits(tokens_per_s=1e6))
        time.sleep(0.6)  # two polls of each stage
        try:
            answers = [client.predict("sure", text) for _ in range(count)]
        finally:
            registry.set_limits("sure", Limits())
    assert {answer.level for answer in answers} == {"tiny"}
    tokens = sum(len(served.making.bases[base].load_text_encoder().encode([text])[0].ids) for base in ("small", "tiny"))
    pattern = file_of(store, "*")
    (path,) = pattern.parent.glob(pattern.name)
    with closing(QuotaFile(path)) as file:
        assert file.marked()["sure"].tokens == count * tokens


def reroutes(served: Served, requests: list[tuple[str, ...]]) -> list[int]:
    """Return ROUTE of each text of one request."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.server.ports.grpc}") as triton:
        rows = [(row[0], row[1], row[2] if len(row) > 2 else None) for row in requests]
        result = triton.infer("cascade", input_tensors(tritonclient.grpc, rows))
        return [int(count) for (count,) in result.as_numpy(wire.ROUTE)]


def test_answers_equal_the_offline_computation_with_tenants_and_levels_mixed(served: Served, client: Client) -> None:
    requests = requests_of(served.cascades)
    wanted = [served.offline.answer(*served.cascades[tenant], text) for tenant, text in requests]
    assert {one.reroutes for one in wanted} == {0, 1, 2}
    found: list[Prediction] = []
    routes: list[int] = []
    for texts in (1, 2):
        rows = [arguments(*request) for request in requests if len(arguments(*request)) == texts + 1]
        for start in range(0, len(rows), 60):
            found += client.predict_batch(rows[start : start + 60], logits=True)
            routes += reroutes(served, rows[start : start + 60])
    for request, answer, expected, route in zip(requests, found, wanted, routes, strict=True):
        assert (answer.level, route, answer.late) == (expected.level, expected.reroutes, False), request
        assert [span.label for span in answer.spans] == expected.labels, request
        assert answer.confidence == pytest.approx(expected.confidence, abs=TOLERANCE), request
        assert answer.logits is not None
        np.testing.assert_allclose(answer.logits, expected.logits, atol=10 * TOLERANCE, err_msg=str(request))
        if expected.reroutes and answer.tenant != "tagger":
            assert answer.score == pytest.approx(answer.confidence)
        text = answer.text if answer.pair is None else f"{answer.text} {answer.pair}"
        assert answer.tenant == "tagger" or answer.spans[0].end == len(text)


def test_a_tenant_without_a_cascade_is_answered_as_by_the_model_that_routes(served: Served, client: Client) -> None:
    with Client(served.server.ports.grpc_url, model="hplm") as router:
        for text in TEXTS:
            found, wanted = client.predict("plain", text, logits=True), router.predict("plain", text, logits=True)
            assert (found.spans, found.level, found.confidence, found.late) == (wanted.spans, "tiny", None, False)
            assert wanted.level is None
            np.testing.assert_allclose(found.logits, wanted.logits, atol=TOLERANCE)


BAD = {"empty": ("alpha", ""), "unknown": ("nobody", "hello"), "name": ("../a", "x"), "large": ("alpha", "x" * 100_000)}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_request_has_the_error_of_the_model_that_routes(served: Served, client: Client, bad: str) -> None:
    with Client(served.server.ports.grpc_url, model="hplm") as router:
        with pytest.raises(HplmError) as wanted:
            router.predict(*BAD[bad])
        with pytest.raises(HplmError) as found:
            client.predict(*BAD[bad])
    assert found.value.wire() == wanted.value.wire()


def test_every_client_asks_for_the_level_and_the_confidence(served: Served) -> None:
    async def ask() -> Prediction:
        async with AsyncClient(served.server.ports.http_url) as client:
            return await client.predict("sure", "the red cat")

    with Client(served.server.ports.http_url) as http:
        (streamed,) = http.predict_many([("sure", "the red cat")])
    assert {(one.level, one.late) for one in (asyncio.run(ask()), streamed)} == {("tiny", False)}
    command = [
        str(Path(sys.executable).parent / "hplm"),
        "predict",
        "-t",
        "sure",
        "--url",
        served.server.ports.grpc_url,
    ]
    told = json.loads(subprocess.check_output([*command, "--json", "the red cat"], text=True))
    assert (told["level"], told["late"]) == ("tiny", False)
    assert told["confidence"] == pytest.approx(streamed.confidence)
    shown = subprocess.check_output([*command, "the red cat"], text=True)
    assert "(answered by tiny, confidence 0." in shown


def test_a_text_that_cannot_reach_the_next_level_in_time_is_answered_by_the_small_level_or_refused(
    served: Served, client: Client
) -> None:
    late = client.predict("slow", "the red cat", deadline_s=20.0)
    assert (late.level, late.late) == ("middle", True)
    assert client.predict("slow", "the red cat").level == "small"
    with pytest.raises(errors.DeadlineError):
        client.predict("alpha", "the red cat", deadline_s=1e-6)


@contextmanager
def paused(process: int) -> Iterator[None]:
    """Stop a process. If it takes a second or more, Triton 24.10 ends itself (`lock_exception` or `bad_alloc`)."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_level_that_hangs_delays_only_texts_that_need_it_and_those_to_their_deadline(
    served: Served, client: Client
) -> None:
    client.predict("sure", "the red cat")
    hbert = stubs_of(served.server)["hbert_upper"]
    with paused(hbert):
        late = client.predict("sure", "the red cat", deadline_s=0.4)
        assert (late.level, late.late) == ("small", True)
        assert client.predict("single", "the red cat").level == "middle"
    assert client.predict("sure", "the red cat").level == "tiny"
    with paused(hbert), pytest.raises(errors.DeadlineError):
        client.predict("strict", "the red cat", deadline_s=0.4)
    assert client.predict("sure", "the red cat").level == "tiny"
    until(lambda: metric_value(served.server, 'hplm_cascade_late_total{why="gave_up"}') >= 2)


def test_a_level_that_died_is_left_out_until_it_is_loaded_again(served: Served, client: Client) -> None:
    keeper = StubKeeper(served.server, lambda: served.server.has_ended)
    os.kill(stubs_of(served.server)["hbert_upper"], signal.SIGKILL)
    until(lambda: client.predict("sure", "the red cat").late)
    assert client.predict("sure", "the red cat").level == "small"
    with pytest.raises(errors.StageDownError):
        client.predict("strict", "the red cat")
    assert client.predict("single", "the red cat").level == "middle"
    until(lambda: any("hbert" in said for said in keeper.look()))
    until(lambda: client.predict("sure", "the red cat").level == "tiny")


def test_the_model_loads_no_torch(served: Served) -> None:
    maps = Path(f"/proc/{stubs_of(served.server)['cascade']}/maps").read_text()
    assert "numpy" in maps
    assert "libtorch" not in maps


def test_a_restarted_model_sends_every_text_the_same_way(served: Served) -> None:
    requests = [arguments(*request) for request in requests_of(served.cascades) if request[0] in ("alpha", "gamma")]
    before = reroutes(served, requests)
    assert len(set(before)) > 1
    keeper = StubKeeper(served.server, lambda: served.server.has_ended)
    os.kill(stubs_of(served.server)["cascade"], signal.SIGKILL)
    until(lambda: any("cascade" in said for said in keeper.look()))
    assert reroutes(served, requests) == before


def test_a_request_counts_once_whatever_the_number_of_its_levels(served: Served, client: Client) -> None:
    counters = (
        'hplm_cascade_events_total{event="ok"}',
        'hplm_cascade_answers_total{level="tiny"}',
        'hplm_cascade_rerouted_total{level="small"}',
        'hplm_cascade_confidence_bucket{le="+Inf"}',
    )

    def values() -> list[float]:
        return [metric_value(served.server, name) for name in counters]

    client.predict("sure", "the red cat")
    before: list[float] = []
    while before != (now := values()) or not now[0]:
        before = now
        time.sleep(1.1)  # counters are published once a second
    list(client.predict_many([("sure", text) for text in TEXTS]))
    until(lambda: values() == [count + len(TEXTS) for count in before])
    assert metric_value(served.server, "hplm_cascade_logic_us_total") > 0


def test_the_benchmark_asks_every_base_a_vote_of_all_and_the_cascade(served: Served) -> None:
    labels = {"alpha": "yes", "beta": "red"}
    requests = [LabelledRequest(name, name, text, label) for name, label in labels.items() for text in TEXTS]
    load = CascadeLoad(rounds=1, singles=10, in_flight=8, seconds=0.3)
    report = measure(served.server, [*MODELS.values()], requests, load, Progress(disable=True))
    variants = [*MODELS.values(), "Cocktail", "cascade"]
    asked = [row for row in report.rows if "variant" in row]
    assert [(row["task"], row["variant"]) for row in asked] == [(task, name) for task in labels for name in variants]
    assert all(row["requests"] == 10 and row["mean_ms"] > 0 for row in asked)
    shares = asked[variants.index("cascade")]["levels"]
    assert shares.keys() <= MODELS.keys()
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    saturated = {row["saturated"]: row["requests_per_s"] for row in report.rows if "saturated" in row}
    assert saturated.keys() == set(variants)
    assert 0 < saturated["Cocktail"] < min(saturated[base] for base in MODELS.values())
    values = {goal.id: goal.value for goal in report.goals}
    assert values["cascade-unanswered"] == 0
    assert 0 < values["cascade-logic"] < 100


def test_the_mixed_benchmark_asks_each_base_alone_and_all_together(served: Served) -> None:
    loads = {base: BaseLoad(40.0, RequestMix(UniformTenants(["alpha", "beta"]), TEXTS)) for base in MODELS.values()}
    report = measure_mixed(served.server.ports.grpc_url, loads, 1, 0.5, Progress(disable=True))
    asked = [(row["base"], row["load"]) for row in report.rows]
    assert asked == [(base, load) for base in MODELS.values() for load in ("alone", "together")]
    assert all(row["requests"] > 0 and row["lost"] == row["failed"] == 0 for row in report.rows)
    assert {goal.id for goal in report.goals} > {f"mixed-p99-{base}" for base in MODELS.values()}


def make_fleet(served: Served, count: int) -> list[str]:
    """Publish tenants with one, two or three levels, and return their names once the server knows all."""
    bases = [("small", "tiny"), ("small", "middle", "tiny"), ("middle", "tiny"), ("small",)]
    names = [f"of-{number}" for number in range(count)]
    for number, name in enumerate(names):
        if name not in served.cascades:
            levels = levels_over(*bases[number % 4], cut_off=0.6, alpha=(0.0, 0.9)[number % 2])
            like = ("alpha", "beta", "gamma")[number % 3]
            served.cascades[name] = served.making.cascade(name, like, 100 + number, levels)

    def are_served() -> bool:
        found = client.predict_many([(name, "red") for name in names], on_error="yield")
        return all(isinstance(one, Prediction) and one.confidence is not None and not one.late for one in found)

    with Client(served.server.ports.grpc_url, concurrency=count) as client:
        until(are_served)
    return names


@pytest.mark.stress
@pytest.mark.repeated
def test_mixed_requests_of_200_tenants_have_no_crossed_answers(served: Served) -> None:
    """4,000 requests, and 20,000 in `make test-long`."""
    kinds = [(name, text) for name in make_fleet(served, 200) for text in TEXTS[:4]]
    wanted = [read(answer) for answer in ask_all(served.server, [message(*kind, "cascade") for kind in kinds], 16)]
    order = np.random.default_rng(0).integers(0, len(kinds), repetitions(4_000, 20_000))
    answers = ask_all(served.server, [message(*kinds[i], "cascade") for i in order], UNDER_WAY, channels=16)
    for i, answer in zip(order, answers, strict=True):
        label, logits = read(answer)
        assert label == wanted[i][0], kinds[i]
        np.testing.assert_allclose(logits, wanted[i][1], atol=10 * TOLERANCE)
