"""`hplm place` without servers: plans as they are shown, predictions of other workloads, and verdicts on measured load."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hplm_builder.placement.observed_load import Observed
from hplm_builder.placement.plan_build import placement_of, stage_times_of
from hplm_builder.placement.plan_file import read_tenant_rates, write_plan
from hplm_builder.placement.planned_workload import planned_requests

from hplm.errors import DataError
from hplm.placement.plan import CheckResult, Plan
from hplm.placement.simulation import simulate
from hplm_cli.place.checking import on_this_machine, random_texts
from hplm_cli.place.pictures import busy_over_time
from hplm_cli.place.shown_plan import plan_lines
from hplm_cli.place.watching import judge, verdict_lines
from tests.triton.placement import making

Hplm = Callable[..., "subprocess.CompletedProcess[str]"]
# Two bases, each on one device of its own; the other devices are idle.
APART = making.make_plan([("east", [0], {"hbert": [2]}), ("west", [0], {"mpnet": [4]})])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write_plan(APART, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_is_shown_with_its_groups_and_its_prediction() -> None:
    shown = "\n".join(plan_lines(APART))
    assert "2 bases on 2 of 4 devices of 2 nodes" in shown
    assert "hbert (2)" in shown
    assert "unchecked" in shown
    checked = replace(APART, check=CheckResult("2026-01-01T00:00:00Z", 0.99, 0.96, 100, "here"))
    assert "predicted 99.00%, measured 96.00%, error 0.030" in "\n".join(plan_lines(checked))


def test_a_plan_answers_less_in_time_at_a_higher_rate(hplm: Hplm, plan_file: Path) -> None:
    shares = []
    for scale in ("1", "20"):
        done = hplm("place", "simulate", str(plan_file), "--rate-scale", scale, "--json")
        assert done.returncode == 0, done.stderr
        shares.append(json.loads(done.stdout)["attainment"])
    assert shares[0] > 0.99
    assert shares[1] < 0.8


def test_the_simulated_answers_are_shown_for_each_base(hplm: Hplm, plan_file: Path) -> None:
    done = hplm("place", "simulate", str(plan_file), "--deadline-ms", "mpnet=30")
    assert "hbert" in done.stdout
    # A request to mpnet takes 40 ms.
    assert "mpnet" in done.stdout
    assert "0.00%" in done.stdout


def test_a_plan_that_is_not_there_is_refused(hplm: Hplm, tmp_path: Path) -> None:
    done = hplm("place", "simulate", str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "cannot be read as a plan" in done.stderr


def test_a_load_as_planned_keeps_the_plan() -> None:
    verdict = judge(APART, Observed(3600.0, {"hbert": 10.0, "mpnet": 10.0}, 1.0, 1.0), 2)
    assert not verdict.wins
    assert "keep the plan" in "\n".join(verdict_lines(APART, verdict))


def test_a_load_that_has_moved_to_one_base_makes_a_new_plan_win() -> None:
    verdict = judge(APART, Observed(3600.0, {"hbert": 90.0, "mpnet": 1.0}, 2.0, 0.6), 2)
    assert verdict.wins
    assert verdict.best > verdict.kept + 0.1
    said = "\n".join(verdict_lines(APART, verdict))
    assert "a new plan wins by" in said
    assert "--rate hbert=90" in said


def test_an_idle_hour_keeps_the_plan() -> None:
    assert not judge(APART, Observed(3600.0, {"hbert": 0.0, "mpnet": 0.0}, None, 1.0), 2).wins


class _Page(BaseHTTPRequestHandler):
    counts: Iterator[int]

    def do_GET(self) -> None:
        labels = 'model_instance="hbert_upper_0_0",stage="upper",tenant="films",outcome="ok"'
        body = f"hplm_tenant_texts_total{{{labels}}} {next(self.counts)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A node that answers 100 texts between two looks."""
    _Page.counts = iter(range(0, 10**9, 100))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_watch_says_what_nodes_count_and_ends_after_a_verdict(hplm: Hplm, plan_file: Path, metrics_url: str) -> None:
    gone = "http://127.0.0.1:9/metrics"
    options = ["--metrics", metrics_url, "--metrics", gone, "--window-s", "1", "--every-s", "0.1", "--once"]
    done = hplm("place", "watch", str(plan_file), *options)
    assert done.returncode == 0, done.stderr
    assert "hbert: " in done.stdout
    assert "the plan assumes 10" in done.stdout
    assert f"{gone} does not answer" in done.stderr


def test_nodes_on_one_machine_use_different_cores() -> None:
    local, wanted = on_this_machine(APART, [4, 5, 6])
    assert [node.cores[0] for node in local.nodes] == [(4,), (5,)]
    assert wanted == 2
    crowded, wanted = on_this_machine(APART, [4])
    assert {node.cores[0] for node in crowded.nodes} == {(4,)}
    assert wanted == 2


def test_texts_of_a_replay_have_the_length_of_the_plan() -> None:
    texts = random_texts(16, 5)
    assert [len(text.split()) for text in texts] == [14] * 5
    assert len(set(texts)) == 5
    assert random_texts(16, 5) == texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TENANT\nfilms\n", "line 1 has no column RATE; there are 'TENANT'"),
        ("TENANT,RATE\nfilms,much\n", "line 2: requests a second"),
        ("TENANT,RATE\nfilms,1\nfilms,2\n", "line 3: one line for each tenant"),
    ],
)
def test_malformed_rates_of_tenants_are_refused_with_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"{path}, {said}"):
        read_tenant_rates(path)


@pytest.mark.parametrize(
    "text", ["TENANT,RATE\nfilms,1.5\nbooks,0\n", "sep=;\r\nTenant;Rate\r\nfilms;1,5\r\nbooks;0\r\n"]
)
def test_rates_of_tenants_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)
    assert read_tenant_rates(path) == {"films": 1.5, "books": 0.0}


def test_a_plan_is_explained_in_words_and_pictures(hplm: Hplm, plan_file: Path, tmp_path: Path) -> None:
    done = hplm("place", "explain", str(plan_file), "--pictures", str(tmp_path / "pictures"), "--max-stages", "1")
    assert done.returncode == 0, done.stderr
    assert "hbert asks for" in done.stdout
    assert "One more device on node west" in done.stdout
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    factors = [f"attainment-by-{name}.svg" for name in ("cv", "deadline", "devices", "rate")]
    assert pictures == [*factors, "utilisation.svg"]


def test_the_busy_share_over_time_adds_up_to_what_the_devices_computed() -> None:
    placement, stage_times = placement_of(APART), stage_times_of(APART)
    outcomes = simulate(placement, stage_times, planned_requests(APART.assumptions))
    times, shares = busy_over_time(placement, stage_times, outcomes)
    width_s = times[1] - times[0]
    for number, group in enumerate(placement.groups):
        # A request counts when it ends, and a few requests end after the last arrival.
        assert width_s * sum(shares[number]) == pytest.approx(outcomes.busy_s[list(group.devices)].sum(), abs=0.5)


def test_a_plan_is_written_whole(plan_file: Path) -> None:
    assert Plan.load(plan_file) == APART
