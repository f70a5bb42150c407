"""Loads with Locust, in processes of their own because importing Locust patches the standard library."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hplm.reporting.benchmark_result import plain
from hplm.triton.launcher.ports import free_ports
from tests.unit.clients.answering import answering
from tests.waiting import until

FOLLOW = """
import sys
from hplm_loadtest.scenarios.locust_load import LoadTask, run_load
from hplm.reporting.progress import progress_bars

def make_plan():
    print("planned", flush=True)
    raise ValueError("a bug")

with progress_bars() as progress:
    run_load(sys.argv[1], "steady", LoadTask(make_plan, str, 5.0, progress), int(sys.argv[2]) if sys.argv[2:] else None)
"""


def test_a_bug_ends_the_load_and_the_load_is_not_tried_again() -> None:
    with answering() as server:
        command = [sys.executable, "-c", FOLLOW, server.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["planned"]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: a bug"


@contextmanager
def loading(folder: Path, url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a load test that writes `report.json` into the folder."""
    (folder / "names.txt").write_text("alpha\n")
    (folder / "texts.txt").write_text("the red cat\n")
    files = ["--tenants", str(folder / "names.txt"), "--text", str(folder / "texts.txt")]
    program = [str(Path(sys.executable).parent / "hplm"), "loadtest", *options, "--url", url]
    command = [*program, *files, "--json", str(folder / "report.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def read_report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_a_ramp_has_a_row_for_each_tenth_of_its_time(tmp_path: Path) -> None:
    options = ["ramp", "--from", "10", "--to", "100", "--duration", "3"]
    with answering() as server, loading(tmp_path, server.url, *options) as running:
        running.communicate(timeout=60)
    whole, *slices = read_report(tmp_path)["rows"]
    assert [row["seconds"] for row in slices] == [f"{plain(0.3 * i)}-{plain(0.3 * (i + 1))}" for i in range(10)]
    offered = [row["offered_per_s"] for row in slices]
    assert sum(offered) * 0.3 == pytest.approx(whole["requests"])
    assert offered[0] < 40 < offered[-1]
    assert {"p50_ms", "p95_ms", "p99_ms", "in_time", "refused", "lost", "kept_up"} <= slices[0].keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_load_is_marked_in_its_result_and_by_its_status(tmp_path: Path, number: signal.Signals) -> None:
    options = ["steady", "--rate", "20", "--duration", "300"]
    with answering() as server, loading(tmp_path, server.url, *options) as running:
        until(lambda: len(server.texts) >= 10)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "hplm loadtest: stopped after" in errors
    assert "Traceback" not in errors
    report = read_report(tmp_path)
    assert report["settings"]["interrupted"] is True
    assert 0 < report["settings"]["duration_s"] < 200
    assert report["settings"]["planned_s"] == 300
    assert [goal["met"] for goal in report["goals"] if goal["id"] == "loadtest-whole"] == [False]
    assert report["rows"][0]["requests"] >= 10


def test_more_interrupts_end_the_waiting_for_late_answers_and_the_result_is_still_written(tmp_path: Path) -> None:
    released = threading.Event()
    with answering(lambda _: released.wait()) as server:
        try:
            with loading(tmp_path, server.url, "steady", "--rate", "20", "--timeout", "300") as running:
                until(lambda: len(server.texts) >= 5)
                running.send_signal(signal.SIGINT)
                while running.poll() is None:
                    # Often enough to arrive in every part of the end, the interpreter's own end included.
                    time.sleep(0.01)
                    running.send_signal(signal.SIGINT)
                _, errors = running.communicate(timeout=60)
        finally:
            released.set()
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert read_report(tmp_path)["rows"][0]["lost"] >= 5


def test_every_request_of_a_run_that_was_not_stopped_ends_with_its_own_timeout(tmp_path: Path) -> None:
    """The wait for the requests that were sent last is long enough too."""
    released = threading.Event()
    options = ["burst", "--clients", "20", "--count", "1", "--stagger", "0", "--timeout", "1"]
    with answering(lambda _: released.wait()) as server:
        try:
            with loading(tmp_path, server.url, *options) as running:
                running.communicate(timeout=60)
        finally:
            released.set()
    assert read_report(tmp_path)["rows"][0]["errors"] == {"UNREACHABLE": 20}


class Page:
    """Locust's page of a load test."""

    def __init__(self) -> None:
        self.port = free_ports().http

    def ask(self, path: str, body: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=60) as answer:
            return str(answer.read().decode())

    def is_up(self) -> bool:
        try:
            return "Locust" in self.ask("/")
        except OSError:
            return False

    def start(self, host: str) -> None:
        self.ask("/swarm", urllib.parse.urlencode({"user_count": 1, "spawn_rate": 1, "host": host}).encode())

    def is_stopped(self) -> bool:
        return bool(json.loads(self.ask("/stats/requests"))["state"] == "stopped")

    def errors(self) -> str:
        return "\n".join(one["msg"] for one in json.loads(self.ask("/exceptions"))["exceptions"])


def test_a_result_names_the_server_that_was_chosen_on_the_page(tmp_path: Path) -> None:
    page = Page()
    options = ["burst", "--clients", "5", "--count", "1", "--web-port", str(page.port)]
    with answering() as first, answering() as second, loading(tmp_path, first.url, *options) as running:
        until(page.is_up)
        page.start(second.url)
        until(lambda: page.is_stopped() and len(second.texts) == 5)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert "Traceback" not in errors
    settings = read_report(tmp_path)["settings"]
    assert settings["url"] == second.url
    assert settings["interrupted"] is False
    assert not first.texts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_page_without_runs_is_stopped_with_the_status_of_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    page = Page()
    with answering() as server, loading(tmp_path, server.url, "steady", "--web-port", str(page.port)) as running:
        until(page.is_up)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    # No empty line follows in the place of progress bars.
    assert errors.endswith(f"(Ctrl-C ends)\nhplm loadtest: stopped by {number.name}\n")


def test_an_error_with_a_bad_host_is_shown_on_the_page_and_the_last_result_is_kept(
    tmp_path: Path,
) -> None:
    page = Page()
    options = ["burst", "--clients", "5", "--count", "1", "--web-port", str(page.port)]
    nobody = f"http://127.0.0.1:{free_ports().http}"
    with answering() as server, loading(tmp_path, server.url, *options) as running:
        until(page.is_up)
        page.start(server.url)
        until(lambda: page.is_stopped() and len(server.texts) == 5)
        for host in (nobody, "", "garbage", "ftp://x:1"):
            words = nobody if host == nobody else f"{host!r} is not an address"
            page.start(host)
            until(lambda words=words: page.is_stopped() and words in page.errors())  # type: ignore[misc]
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "Traceback" not in errors
    report = read_report(tmp_path)
    assert report["settings"]["url"] == server.url
    assert report["rows"][0]["requests"] == 5


def test_a_bug_is_shown_on_the_page_and_the_page_stays() -> None:
    page = Page()
    with answering() as server:
        command = [sys.executable, "-c", FOLLOW, server.url, str(page.port)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            try:
                until(page.is_up)
                page.start(server.url)
                until(lambda: page.is_stopped() and "ValueError: a bug" in page.errors())
                running.send_signal(signal.SIGINT)
                _, errors = running.communicate(timeout=60)
            finally:
                running.kill()
    assert running.returncode == 130
    assert "ValueError: a bug" in errors
