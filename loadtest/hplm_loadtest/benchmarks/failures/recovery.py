"""The benchmark `hplm bench recovery`: the seconds until the next good answer after a process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from hplm_client import Client

from hplm.core.roles import served_base
from hplm.errors import HplmError, StartError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.runtime.process import ENDED, stat_of, state_of
from hplm.runtime.restart_pauses import SETTLED_S
from hplm.triton.launcher.ports import Ports, free_ports
from hplm.triton.workarounds.dead_stubs import stubs_over
from hplm_loadtest.benchmarks.served_repository import single_text_tenants

# The longest time until the next good answer, in seconds, by what was killed.
GOALS_S = {"stub": 10.0, "Triton": 20.0}
# Clients that send requests one after another all the time, and the deadline of each request, in seconds.
CLIENTS, DEADLINE_S = 4, 2.0
TEXT = "A short text, to see an answer."
# Seconds that a server may take to be ready or to end, and a client to get its first answer after a kill.
START_S, END_S, ANSWER_S = 300.0, 60.0, 300.0
LOOK_EVERY_S = 0.05


@dataclass
class Answers:
    """When requests of the clients were sent and answered, and when others were sent that were not answered."""

    answered: list[tuple[float, float]] = field(default_factory=list)
    failed_s: list[float] = field(default_factory=list)

    def send(self, url: str, model: str, tenants: Sequence[str], done: threading.Event) -> None:
        """Send requests until `done`, the next as soon as the one before has ended."""
        names = cycle(tenants)
        with Client(url, model=model, timeout_s=DEADLINE_S + 1.0) as client:
            while not done.is_set():
                sent_s = time.monotonic()
                try:
                    client.predict(next(names), TEXT, deadline_s=DEADLINE_S)
                except HplmError:
                    self.failed_s.append(sent_s)
                    time.sleep(LOOK_EVERY_S)
                else:
                    self.answered.append((sent_s, time.monotonic()))

    def first_after(self, killed_s: float) -> float | None:
        """Return the seconds from a kill until the first answer to a request that was sent after it, None if there is none."""
        done_s = [done for sent, done in list(self.answered) if sent > killed_s]
        return min(done_s) - killed_s if done_s else None


@dataclass(frozen=True)
class Served:
    """`hplm serve` over a repository, with its logs in `folder`."""

    models: Path
    ports: Ports
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def is_ready(self) -> bool:
        """Whether every model answers, by the endpoint of `hplm serve`. Raises StartError if the process has ended."""
        if self.process.poll() is not None:
            raise StartError(f"`hplm serve` has ended with status {self.process.returncode}")
        try:
            with LOCAL_HTTP.open(f"{self.ports.health_url}/ready", timeout=10.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def process_of(self, model: str) -> int:
        """Return the process of a model, or that of Triton, its parent, if `model` is "Triton"."""
        stubs = stubs_over(self.models)
        if model != "Triton":
            return stubs[model][0]
        return int(stat_of(next(iter(stubs.values()))[0])[1])


def recovery(models: Path, trials: int) -> Report:
    """Kill a stub and then Triton, `trials` times each, while clients send requests; see `GOALS_S`.

    Triton runs for SETTLED_S before each kill, so that `hplm serve` starts Triton again after the first, shortest pause.
    """
    base = served_base(models)
    stages = [role.name for role in base.roles if role.backend is not None]
    tenants = single_text_tenants(models, base.name)[:8]
    answers, done = Answers(), threading.Event()
    rows: list[dict[str, Any]] = []
    with serving(models) as served, progress_bars() as progress, ThreadPoolExecutor(CLIENTS) as pool:
        bar = progress.add_task("kills", total=2 * trials)
        sending = [
            pool.submit(answers.send, url, base.name, tenants, done)
            for url in (served.ports.http_url, served.ports.grpc_url) * (CLIENTS // 2)
        ]
        try:
            for trial in range(trials):
                began_s = time.monotonic()
                for name in (stages[trial % len(stages)], "Triton"):
                    if name == "Triton":
                        time.sleep(max(0.0, began_s + SETTLED_S + 1.0 - time.monotonic()))
                    rows.append({"trial": trial + 1, **_kill(served, name, answers)})
                    _await(lambda: served.is_ready, START_S, "the server to be ready")
                    progress.update(bar, advance=1)
        finally:
            done.set()
        for one in sending:
            one.result()
    summary = [_summary(kind, rows) for kind in GOALS_S]
    goals = [
        Goal(
            f"recovery-{row['killed']}",
            f"next good answer after kill -9 of a {row['killed']}, worst",
            goal_s,
            row["worst_s"],
            "s",
            "lower",
        )
        for row, goal_s in zip(summary, GOALS_S.values(), strict=True)
    ]
    settings = {"trials": trials, "clients": CLIENTS, "deadline_s": DEADLINE_S, "tenants": len(tenants)}
    return Report("recovery", settings, [*summary, *rows], goals)


def _kill(served: Served, name: str, answers: Answers) -> dict[str, Any]:
    """Kill the process of a model, or Triton, and return what came of it."""
    triton, pid = served.process_of("Triton"), served.process_of(name)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _await(lambda: answers.first_after(killed_s) is not None, ANSWER_S, "a good answer")
    seconds = answers.first_after(killed_s)
    return {
        "process": name,
        "seconds": seconds,
        "failed": sum(sent_s > killed_s for sent_s in list(answers.failed_s)),
        # A stub that is killed while it holds a lock that it shares with Triton takes Triton along.
        "with_triton": state_of(triton) in ENDED,
    }


def _summary(kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    of_kind = [row for row in rows if (row["process"] == "Triton") == (kind == "Triton")]
    seconds = [row["seconds"] for row in of_kind]
    return {
        "killed": kind,
        "trials": len(of_kind),
        "p50_s": median(seconds),
        "worst_s": max(seconds),
        "with_triton": sum(row["with_triton"] for row in of_kind),
    }


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[Served]:
    """Run `hplm serve` without a worker and with `flags`, and end it afterwards. Yields when it is ready. Raises StartError."""
    ports = free_ports()
    with tempfile.TemporaryDirectory(prefix="hplm-recovery-") as folder:
        command = [sys.executable, "-m", "hplm_cli", "serve", "--models", str(models.absolute()), "--no-worker"]
        command += [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics", "health")]
        command += [f"--log={folder}/triton.log", "--drain-timeout=0", *flags]
        output = Path(folder) / "serve.log"
        with output.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            served = Served(models, ports, process, Path(folder))
            try:
                _await(lambda: served.is_ready, START_S, "`hplm serve` to be ready")
            except StartError as error:
                raise StartError(f"{error}; it says:\n{output.read_text(errors='replace')}") from None
            yield served
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(condition: Callable[[], bool], within_s: float, what: str) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise StartError(f"waited {within_s:.0f} s for {what}")
        time.sleep(LOOK_EVERY_S)
