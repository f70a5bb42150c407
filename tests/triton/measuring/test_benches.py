"""Small benchmarks against real servers measure what their results name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.access.flood import FloodLoad, access_flood
from hplm_loadtest.benchmarks.access.throughput import access_throughput
from hplm_loadtest.benchmarks.engine.limit import limit
from hplm_loadtest.benchmarks.papers.batching import batching
from hplm_loadtest.benchmarks.papers.schedulers import Setting, schedulers
from hplm_loadtest.benchmarks.placement.encode_stages import FORMS, encode_stages
from hplm_loadtest.benchmarks.serving.burst import burst
from hplm_loadtest.benchmarks.serving.overload import overload
from hplm_loadtest.benchmarks.serving.pipeline import pipeline
from hplm_loadtest.benchmarks.serving.response import response
from hplm_loadtest.benchmarks.serving.route import route
from hplm_loadtest.benchmarks.serving.trace import trace
from hplm_loadtest.benchmarks.serving.waves import waves
from hplm_loadtest.workloads.texts import POOL_FILE

from hplm.registry.registry import Registry
from hplm.reporting.benchmark_result import Report
from hplm.store.layout import Store
from tests import tiny
from tests.waiting import until

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny repository with the layout of `hplm build fleet`: a bank, and texts beside the models."""
    folder = tmp_path_factory.mktemp("fleet")
    models = tiny.make_repository(folder, num_slots=3)
    store, base = tiny.opened(folder)
    members = [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)]
    tiny.make_bank(store, base, members)
    (folder / POOL_FILE).write_text("\n".join(tiny.sentences(60)) + "\n")
    return models


def columns(report: Report, key: str) -> set[object]:
    return {row[key] for row in report.rows if key in row}


def test_batching_measures_each_mode_and_its_goals(fleet: Path, tmp_path: Path) -> None:
    report = batching(fleet, ["packed", "naive-100"], 1, 0.5, [1.0], tmp_path / "batching.svg")
    assert columns(report, "mode") == {"packed", "naive-100", "slotted, in-process"}
    by_rate = [row for row in report.rows if "offered_over_capacity" in row]
    assert {(row["mode"], row["length_variance"]) for row in by_rate} == {
        (mode, variance) for mode in ("packed", "naive-100") for variance in (20.0, 100.0)
    }
    assert all(row["in_time_per_s"] > row["utility_per_s"] > 0 and not row["lost"] for row in by_rate)
    assert {(row["rows"], row["slots"]) for row in report.rows if "slots" in row} >= {(10, 1), (32, 10)}
    saturated = [row for row in report.rows if "requests_per_s" in row]
    assert all(row["requests_per_s"] > 0 and not row["unanswered"] for row in saturated)
    for row in saturated:
        # Texts have 20 tokens on average; a packed batch is padded to a multiple of eight.
        least, most = {"packed": (1.0, 1.5), "naive-100": (2.0, 7.0)}[row["mode"]]
        assert least <= row["computed_over_real_tokens"] < most
    assert {goal.id for goal in report.goals} >= {
        "packed-naive-100-20",
        "fixed-row-100",
        "batching-kept-up",
        "batching-lost",
    }
    report.publish(tmp_path / "batching.json")
    assert (tmp_path / "batching.svg").stat().st_size


def test_schedulers_measures_utility_and_the_cost_of_choosing(fleet: Path, tmp_path: Path) -> None:
    report = schedulers(fleet, ["das", "sjf"], 1, 0.5, tmp_path / "schedulers.svg", [Setting()])
    measured = [row for row in report.rows if "utility_per_s" in row]
    assert {row["policy"] for row in measured} == {"das", "sjf"}
    assert all(row["utility_per_s"] > 0 and not row["lost"] for row in measured)
    assert columns(report, "waiting") == {400, 2_000, 10_000}
    assert {goal.id for goal in report.goals} == {
        "das-16x100-100",
        "das-cost",
        "das-growth",
        "schedulers-kept-up",
        "schedulers-lost",
    }


def test_pipeline_measures_every_variant(fleet: Path, tmp_path: Path) -> None:
    report = pipeline(fleet, 1, 0.3, tmp_path / "pipeline.svg")
    assert len(report.rows) == 8
    assert {goal.id for goal in report.goals} == {"pipeline-known", "pipeline-new", "pipeline-lost"}


def test_limit_measures_the_engine_alone_and_through_the_server(fleet: Path) -> None:
    report = limit(fleet, 1, 0.1, "cpu", fleet.parent / "limit.svg")
    assert (fleet.parent / "limit.svg").read_text().startswith("<?xml")
    engine, served = report.rows
    # On a busy machine either can be faster in such a short time.
    assert served["requests_per_s"] > 0
    assert engine["requests_per_s"] > 0


def test_response_and_burst_lose_no_request_measure_processor_time_and_draw(
    fleet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (row,) = response(fleet, [200], 1, 2.0, "pool", tmp_path / "response.svg").rows
    assert f"{fleet} has {len(tiny.TASKS)} tenants, not 200" in caplog.text
    assert row["requests"] > 10
    assert not row["lost"] + row["failed"] + row["refused"]
    processes = {name: spent for name, spent in row["cpu_ms"].items() if name != "all"}
    assert set(processes) == {"triton", "hbert_plot", "hbert_upper", "generator"}
    assert processes["generator"] > 0
    assert all(spent >= 0 for spent in processes.values())
    assert row["cpu_ms"]["all"] == pytest.approx(sum(processes.values()))
    (row,) = burst(fleet, 0.02, 3, 1, "pool", tmp_path / "burst.png").rows
    assert row["requests"] == 15
    assert not row["lost"] + row["failed"] + row["refused"]
    drawn = {picture.name: picture.read_bytes() for picture in tmp_path.iterdir()}
    assert set(drawn) == {"response.svg", "burst.png"}
    assert drawn["response.svg"].startswith(b"<?xml")
    assert drawn["burst.png"].startswith(b"\x89PNG")
    assert min(map(len, drawn.values())) > 5_000


def test_waves_measures_the_first_and_the_last_answer_of_a_wave(fleet: Path, tmp_path: Path) -> None:
    report = waves(fleet, [4, 1, 4], 3, "pool", tmp_path / "waves.svg")
    one, four = report.rows
    assert [(row["at_once"], row["requests"]) for row in report.rows] == [(1, 3), (4, 12)]
    assert not any(row["lost"] + row["failed"] + row["refused"] for row in report.rows)
    assert one["first_p50_ms"] == one["last_p50_ms"]
    assert 0 < four["first_p50_ms"] < four["last_p50_ms"] <= four["last_worst_ms"]
    assert (tmp_path / "waves.svg").stat().st_size


def test_access_flood_measures_the_others_beside_a_flood_with_and_without_quotas(fleet: Path) -> None:
    report = access_flood(fleet, FloodLoad(rounds=1, duration_s=1.0, tenants=3, load=0.1, times=2.0, quota=1.0), "pool")
    runs = {(row["limited_by"], row["flood"]): row for row in report.rows if "flood" in row}
    assert set(runs) == {(by, flood) for by in ("fair shares alone", "quotas") for flood in ("without", "with")}
    assert all(row["requests"] and not row["failed"] and not row["lost"] for row in runs.values())
    for by in ("fair shares alone", "quotas"):
        assert runs[by, "without"]["flood_offered_per_s"] == 0 < runs[by, "with"]["flood_offered_per_s"]
    # The flood gets no more than its quota.
    limited = runs["quotas", "with"]
    assert limited["flood_answered_per_s"] < limited["flood_offered_per_s"]
    assert {goal.id for goal in report.goals} >= {"58-flood-fair", "58-flood-quotas", "58-flood-refused"}


ONE_OF_ALL = """
import sys
from hplm_loadtest.cli.bench import run_hplm
from hplm_loadtest.scenarios.stop_signals import stop_on_signals

stop_on_signals("bench")
run_hplm(*sys.argv[1:])
"""


@pytest.mark.parametrize("program", [["-m", "hplm_cli"], ["-c", ONE_OF_ALL]], ids=["by-itself", "as-one-of-all"])
def test_a_stopped_benchmark_removes_its_folder_and_prints_a_line(
    fleet: Path, tmp_path: Path, program: list[str]
) -> None:
    command = [sys.executable, *program, "bench", "waves", "--models", str(fleet), "--texts", "pool"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        # The benchmark still has waves to send, one per second.
        until(lambda: any(tmp_path.glob("hplm-variant-*/models/hbert_upper")))
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "hplm bench: stopped by SIGTERM\n" in errors
    assert "Traceback" not in errors
    assert not [*tmp_path.glob("hplm-variant-*")]


def test_overload_measures_goodput_and_how_soon_requests_are_refused(fleet: Path, tmp_path: Path) -> None:
    report = overload(fleet, [5.0, 0.2, 5.0], 1, 1.5, 0.5, "pool", tmp_path / "overload.svg")
    few, many = report.rows
    assert (few["times"], many["times"]) == (0.2, 5.0)
    assert few["goodput_per_s"] > 0
    assert many["offered_per_s"] > 5 * few["offered_per_s"]
    assert not any(row["lost"] + row["failed"] for row in report.rows)
    assert many["refused"] > 0
    assert report.goals[0].value == many["share"] == many["goodput_per_s"] / many["capacity_per_s"]
    assert (tmp_path / "overload.svg").stat().st_size


def test_trace_writes_events_for_perfetto_and_a_picture(fleet: Path, tmp_path: Path) -> None:
    report = trace(fleet, 64, 3, tmp_path / "trace.json", tmp_path / "trace.png")
    assert {("plot", "batch"), ("upper", "batch"), ("upper", "layer"), ("upper", "fill"), ("upper", "answer")} <= {
        (row["stage"], row["span"]) for row in report.rows
    }
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert (tmp_path / "trace.png").stat().st_size


def test_route_measures_both_models_of_one_server(fleet: Path) -> None:
    report = route(fleet, "pool", rounds=2, pairs=10, in_flight=16, seconds=0.5)
    assert [row["model"] for row in report.rows] == ["hbert", "hplm"]
    assert all(row["requests_per_s"] > 0 and row["p50_ms"] > 0 and not row["unanswered"] for row in report.rows)
    assert "hplm" in report.rows[1]["cpu_ms"]
    assert {goal.id for goal in report.goals} == {"route-cost", "route-share", "route-unanswered"}


def test_stages_measures_two_encode_stages_beside_one(fleet: Path) -> None:
    report = encode_stages(fleet, "pool", rounds=1, singles=10, in_flight=8, seconds=0.5, forms=FORMS[::2])
    assert [row["server"] for row in report.rows] == ["1 stage, 2 threads", "2 stages"]
    assert all(row["requests_per_s"] > 0 and row["p50_ms"] > 0 and not row["unanswered"] for row in report.rows)
    assert {"hbert_upper_1", "hbert_upper_2"} < set(report.rows[1]["cpu_ms"])
    assert report.rows[0]["rate_x"] == report.rows[0]["p50_x"] == 1.0


def test_access_throughput_measures_a_server_with_keys_beside_a_server_without(fleet: Path) -> None:
    report = access_throughput(fleet, "pool", rounds=2, in_flight=16, seconds=0.5)
    assert [row["server"] for row in report.rows] == ["without keys", "with keys and quotas"]
    assert all(row["requests_per_s"] > 0 and not row["unanswered"] for row in report.rows)
    assert {goal.id for goal in report.goals} == {"58-throughput", "58-unanswered"}
    # The keys are in a copy of the registry.
    with closing(Registry.open(Store(fleet.parent / "store"))) as registry:
        assert registry.access_keys() == []
