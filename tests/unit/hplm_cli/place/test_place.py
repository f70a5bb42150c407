"""`hplm place` without servers: plans as they are shown, predictions of other workloads, and verdicts on measured load."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from hplm_builder.placement.observed_load import Observed
from hplm_builder.placement.plan_build import placement_of, stage_times_of
from hplm_builder.placement.plan_file import read_tenant_rates, write_plan
from hplm_builder.placement.planned_workload import planned_requests

import hplm_cli
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
    without = replace(APART, prediction=replace(APART.prediction, of_base={"hbert": 1.0}))
    assert "mpnet: no request in the simulated workload" in "\n".join(plan_lines(without))


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


def test_a_simulation_of_a_stretched_trace_ends(hplm: Hplm, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n0\n" + "\n".join(str(1_700_000_000.5 + number / 9) for number in range(8000)))
    rates = {"hbert": 2.4e-6, "mpnet": 2.4e-6}
    assumed = replace(APART.assumptions, rates=rates, trace=str(trace), duration_s=1.7e9)
    write_plan(replace(APART, assumptions=assumed), tmp_path / "plan.json")
    done = hplm("place", "simulate", str(tmp_path / "plan.json"), "--cv-scale", "2")
    assert done.returncode == 1
    assert "warning: the gap after arrival 1 is" in done.stderr
    assert "BAD_CONFIG: 1,700,000,000 s have 28,333,333 windows of 60 s, 1,000,000 were expected at most" in done.stderr
    # Rate and duration bound the requests of a part of the trace.
    options = ["--rate", "hbert=2", "--rate", "mpnet=2", "--seconds", "5", "--json"]
    done = hplm("place", "simulate", str(tmp_path / "plan.json"), *options)
    assert json.loads(done.stdout)["requests"] == 20


def test_a_plan_is_simulated_where_neither_the_package_nor_a_home_folder_can_be_written(
    plan_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    shutil.copytree(Path(hplm_cli.__file__).parents[1], source, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (source, *source.rglob("*/")):
        folder.chmod(0o555)
    # The superuser may write everywhere, unless this capability is dropped.
    without_rights = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.getuid() == 0 else []
    command = [*without_rights, sys.executable, "-m", "hplm_cli", "place", "simulate", str(plan_file)]
    environment = {**os.environ, "HOME": "/proc/none", "PYTHONPATH": str(source)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd="/")
    for folder in (source, *source.rglob("*/")):
        folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "are answered by their deadline" in done.stdout


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\x00", '{"version": 1}'])
def test_a_plan_that_is_no_json_of_a_plan_is_one_line(hplm: Hplm, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    done = hplm("place", "simulate", str(tmp_path / "plan.json"))
    assert done.returncode == 1
    assert done.stderr.startswith("hplm: BAD_CONFIG: ")
    assert done.stderr.count("\n") == 1


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


def test_an_idle_hour_gives_no_verdict() -> None:
    with pytest.raises(DataError, match="no data: requests were expected"):
        judge(APART, Observed(3600.0, {"hbert": 0.0, "mpnet": 0.0}, None, None), 2)


def metrics(hbert: float = 0, mpnet: float = 0) -> bytes:
    """The metrics page of a node with both bases."""
    counts = {"hbert": hbert, "mpnet": mpnet}
    line = 'hplm_tenant_texts_total{{model_instance="{0}_upper_0_0",stage="upper",tenant="films",outcome="ok"}} {1}\n'
    return "".join(line.format(base, count) for base, count in counts.items()).encode()


def reply(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def node(replies: Iterable[bytes]) -> Iterator[str]:
    """The address of a port that answers each connection with the next of `replies`, byte by byte as it is, and closes it."""
    left = iter(replies)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(next(left))

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()


def watch(hplm: Hplm, plan_file: Path, *urls: str) -> subprocess.CompletedProcess[str]:
    options = [option for url in urls for option in ("--metrics", url)]
    return hplm("place", "watch", str(plan_file), *options, "--window-s", "1", "--every-s", "0.1", "--once")


def test_watch_says_what_nodes_count_and_ends_after_a_verdict(hplm: Hplm, plan_file: Path) -> None:
    with node(reply(metrics(count, count)) for count in itertools.count(0, 100)) as url:
        done = watch(hplm, plan_file, url)
    assert done.returncode == 0, done.stderr
    assert "hbert: " in done.stdout
    assert "the plan assumes 10" in done.stdout
    assert "answered: 100.00%" in done.stdout


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (reply(b"<!doctype html><html>Grafana</html>"), "BAD_DATA: {url}: the metrics of `hplm serve` were expected, got HTML"),
        (reply(b"node_cpu_seconds_total 1\n"), "got a page without a line `hplm_...`"),
        (reply(b""), "got a page without a line `hplm_...`"),
        (reply(b"hplm_plot_waiting 0\n"), "the page of a node with a base of hbert, mpnet was expected, and it has none"),
        (reply(metrics()[:150]), "this page was cut off"),
        (reply(metrics(), length=5000), "UNREACHABLE: {url}: the page was cut off after"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhplm", "UNREACHABLE: {url}: the page was cut off after"),
        (reply(b"not here", status="404 Not Found"), "UNREACHABLE: {url} answers with status 404: check the port and the path"),
        (b"", "UNREACHABLE: {url} does not answer: Remote end closed connection"),
        (b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00@\x00", "UNREACHABLE: {url} does not speak HTTP/1"),
        (reply(metrics(hbert=float("nan"))), "a count of texts was expected on the metrics page, got 'nan'"),
        (reply(metrics()), "BAD_DATA: no data: requests were expected"),
        (reply(metrics().splitlines(keepends=True)[0]), "the page of a node with base mpnet was expected too"),
    ],
    ids=[
        "html", "other-metrics", "empty", "other-bases", "half-a-line", "cut", "cut-chunk", "404", "closed", "http2", "nan",
        "no-requests", "half-of-the-bases",
    ],
)  # fmt: skip
def test_watch_without_measurements_says_why_and_ends_with_status_1(
    hplm: Hplm, plan_file: Path, page: bytes, said: str
) -> None:
    with node(itertools.repeat(page)) as url:
        done = watch(hplm, plan_file, url)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said.format(url=url) in done.stderr
    assert done.stderr.count("\n") == 1


def test_watch_at_a_port_for_grpc_says_so(hplm: Hplm, plan_file: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    done = watch(hplm, plan_file, f"http://127.0.0.1:{port}/metrics")
    server.stop(None)
    assert done.returncode == 1
    assert re.search("UNREACHABLE: .* does not (speak HTTP/1|answer)", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/metrics", "UNREACHABLE: http://127.0.0.1:9/metrics does not answer: [Errno 111]"),
        ("http://127.0.0.1:port/", "UNREACHABLE: http://127.0.0.1:port/ does not answer: nonnumeric port"),
        ("http://[::1/metrics", "UNREACHABLE: "),
        ("127.0.0.1:8002", "BAD_CONFIG: the address of a page, such as http://HOST:8002/metrics, was expected"),
        ("file:///etc/hostname", "BAD_CONFIG: the address of a page"),
    ],
    ids=["closed", "no-port", "no-address", "no-scheme", "file"],
)
def test_watch_at_an_address_without_a_server_says_so(hplm: Hplm, plan_file: Path, url: str, said: str) -> None:
    done = watch(hplm, plan_file, url)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("pages", [1, 3])
def test_watch_gives_no_verdict_if_a_node_is_silent_at_its_end(hplm: Hplm, plan_file: Path, pages: int) -> None:
    busy = (reply(metrics(count, count)) for count in itertools.count(0, 100))
    gone = itertools.chain(itertools.repeat(reply(metrics()), pages), itertools.repeat(b""))
    with node(busy) as east, node(gone) as west:
        done = watch(hplm, plan_file, east, west)
    assert done.returncode == 1
    assert done.stdout == ""
    warning, error = done.stderr.splitlines()
    assert warning.startswith(f"{west} does not answer")
    assert f"no data: two metrics pages of each node were expected, one after the other, and {west} gave none" in error


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
