"""The benchmark `hplm bench recovery`: the seconds until the next good answer after a process was killed."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from hplm_client import Client

from hplm.core.roles import served_base
from hplm.errors import HplmError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.runtime.process import ENDED, state_of
from hplm.runtime.restart_pauses import SETTLED_S
from hplm_loadtest.benchmarks.serve_process import LOOK_EVERY_S, START_S, ServeProcess, await_condition, serving
from hplm_loadtest.benchmarks.served_repository import single_text_tenants

# The longest time until the next good answer, in seconds, by what was killed.
GOALS_S = {"stub": 10.0, "Triton": 20.0}
# Clients that send requests one after another all the time, and the deadline of each request, in seconds.
CLIENTS, DEADLINE_S = 4, 2.0
TEXT = "A short text, to see an answer."
# Seconds until a client must get its first answer after a kill.
ANSWER_S = 300.0


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


def recovery(models: Path, trials: int) -> Report:
    """Kill a stub and then Triton, `trials` times each, while clients send requests; see `GOALS_S`.

    Triton runs for SETTLED_S before each kill, so that `hplm serve` starts Triton again after the first, shortest pause.
    """
    base = served_base(models)
    stages = [role.name for role in base.roles if role.backend is not None]
    tenants = single_text_tenants(models, base.name)[:8]
    answers, done = Answers(), threading.Event()
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="hplm-recovery-") as folder,
        serving(models, Path(folder), ["--drain-timeout=0"]) as served,
        progress_bars() as progress,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
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
                    await_condition(lambda: served.is_ready, START_S, "the server to be ready")
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


def _kill(served: ServeProcess, name: str, answers: Answers) -> dict[str, Any]:
    """Kill the process of a model, or Triton, and return what came of it."""
    triton, pid = served.process_of("Triton"), served.process_of(name)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: answers.first_after(killed_s) is not None, ANSWER_S, "a good answer")
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
