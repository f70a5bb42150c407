"""The benchmark `hplm bench malformed`: malformed requests through the example proxy to a server that needs keys."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hplm.core import wire
from hplm.errors import InternalError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.runtime.process import give_way_for_memory
from hplm_loadtest.benchmarks.attacks.attack import HEADER, Attack, AttackPlan
from hplm_loadtest.benchmarks.attacks.connections import HANGING_S, Answer, Connections, GrpcConnection
from hplm_loadtest.benchmarks.attacks.encodings import grpc_message
from hplm_loadtest.benchmarks.attacks.example_proxy import EXAMPLE, Proxy, example_proxy
from hplm_loadtest.benchmarks.attacks.keyed_copy import keyed_copy
from hplm_loadtest.benchmarks.attacks.known_crashes import Outcome, send_known_crashes
from hplm_loadtest.benchmarks.attacks.target import Footprint, Target, shared_memory_bytes
from hplm_loadtest.benchmarks.attacks.verdicts import Judge, Verdict

# Most that each process may grow after the warm-up: memory as a share and in bytes, and open files.
GROWTH_SHARE, GROWTH_BYTES, GROWTH_FILES = 0.05, 32 << 20, 32
# Most that shared memory may grow: a step of Triton for each stub that is widened late.
GROWTH_SHARED_BYTES = 8 << 20
# Share of the requests before the first look at memory.
WARM_UP = 0.1
# Seconds until connections that are no longer used are closed everywhere.
SETTLE_S = 3.0
MOST_FAULTS_SHOWN = 20
# The largest memory that requests may make Triton take for a moment, and the memory at which Triton is killed.
PEAK_BYTES, MOST_BYTES = 512 << 20, 3 << 30
# Seconds between looks at Triton's memory.
LOOK_S = 0.1


@dataclass
class AttackRun:
    """The verdicts of a run, what the processes held after the warm-up and at the end, and faults beside the answers."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by encoding and by who answered
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by who answered and code
    changes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    course: list[dict[str, Footprint]] = field(default_factory=list)  # after each WARM_UP of the requests
    end: dict[str, Footprint] = field(default_factory=dict)
    shared_bytes: list[int] = field(default_factory=list)
    changed_processes: int = 0
    good_refused: int = 0
    good_asked: int = 0
    log_faults: list[str] = field(default_factory=list)
    known: list[Outcome] = field(default_factory=list)
    peak_bytes: int = 0  # of Triton
    seconds: float = 0.0
    slowest_s: float = 0.0

    def add(self, attack: Attack, verdict: Verdict, seconds: float) -> None:
        self.verdicts[attack.encoding, verdict.by] += 1
        self.codes[verdict.by, verdict.code] += 1
        self.changes.update(set(attack.changes) or {"none"})
        self.slowest_s = max(self.slowest_s, seconds)
        if verdict.fault:
            self.faults.append(
                f"request {attack.number} ({attack.encoding}, {attack.model}, {attack.changes}): {verdict.fault}"
            )

    @property
    def warm(self) -> dict[str, Footprint]:
        """The footprints after the warm-up."""
        return self.course[0]

    @property
    def growth_bytes(self) -> int:
        """The largest growth of a process beyond what is allowed as a share."""
        return max(
            self.end[name].rss_bytes - round(self.warm[name].rss_bytes * (1 + GROWTH_SHARE)) for name in self.warm
        )

    @property
    def growth_files(self) -> int:
        return max(self.end[name].files - self.warm[name].files for name in self.warm)


class MemoryGuard:
    """Notes the largest memory of Triton while a block lasts.

    Kills Triton at MOST_BYTES, because other programs need the machine's memory.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-guard")

    def __enter__(self) -> MemoryGuard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            # A Triton that has ended is found by its number at the end.
            with suppress(OSError):
                self.peak_bytes = max(self.peak_bytes, Footprint.of(self._pid).rss_bytes)
                if self.peak_bytes > MOST_BYTES:
                    os.kill(self._pid, signal.SIGKILL)
                    return


def _send(attack: Attack, over: Connections) -> Answer:
    if attack.encoding == "gRPC":
        return over.grpc.send(attack.body, attack.headers)
    return over.http.send(
        attack.method,
        attack.path,
        attack.headers,
        attack.body,
        said_length=attack.said_length,
        hangs_up=attack.hangs_up,
    )


def malformed(models: Path, count: int, connections: int, every: int, seed: int = 1, example: Path = EXAMPLE) -> Report:
    """Send `count` malformed requests over `connections` connections to a copy of `models`; see `attack_target`."""
    # If the machine has too little memory, the system ends this benchmark and its servers before other programs.
    give_way_for_memory()
    with keyed_copy(models) as target, example_proxy(target.ports, target.models.parent / "proxy", example) as proxy:
        run = attack_target(target, proxy, count, connections, every, seed)
    settings = {"requests": count, "connections": connections, "good_requests_every": every, "seed": seed}
    return report_of(run, settings)


def attack_target(target: Target, proxy: Proxy, count: int, connections: int, every: int, seed: int) -> AttackRun:
    """Send `count` malformed requests, and good requests to every model after each `every`, then the documented crashes."""
    run, plan, judge = AttackRun(), AttackPlan(target, seed), Judge(target)
    before = target.processes()
    mine = Connections(proxy.host, proxy.http, proxy.grpc, proxy.certificate)
    _ask_every_model(target, run)

    def one(number: int) -> tuple[Attack, Verdict, float]:
        attack = plan.attack(number)
        began_s = time.monotonic()
        answer = _send(attack, mine)
        return attack, judge.verdict(attack, answer), time.monotonic() - began_s

    guard = MemoryGuard(before["Triton"])
    with guard, closing(mine), ThreadPoolExecutor(connections) as pool, progress_bars() as progress:
        bar = progress.add_task("requests", total=count)
        began_s = time.monotonic()
        for first in range(0, count, every):
            for attack, verdict, seconds in pool.map(one, range(first, min(first + every, count))):
                run.add(attack, verdict, seconds)
            progress.update(bar, completed=first + every)
            _ask_every_model(target, run)
            if first + every >= WARM_UP * count * (len(run.course) + 1):
                run.course.append(_footprints(target, run))
        run.seconds = time.monotonic() - began_s
    run.peak_bytes = guard.peak_bytes
    time.sleep(SETTLE_S)
    run.end = _footprints(target, run)
    run.known = list(send_known_crashes(target, proxy))
    _ask_every_model(target, run)
    after = target.processes()
    run.changed_processes = len({*before.items()} ^ {*after.items()})
    run.log_faults = list(_log_faults(target))
    return run


def _footprints(target: Target, run: AttackRun) -> dict[str, Footprint]:
    processes = target.processes()
    run.shared_bytes.append(shared_memory_bytes(list(processes.values())))
    return {name: Footprint.of(pid) for name, pid in processes.items()}


def _ask_every_model(target: Target, run: AttackRun) -> None:
    """Ask each model that answers a client, directly."""
    rng = random.Random(1)
    channel = GrpcConnection(target.ports.host, target.ports.grpc)
    for model, inputs in target.inputs.items():
        if model.endswith("_upper"):
            # Clients cannot call an encode stage, and watch a job over streams alone; the base's model asks the stage.
            continue
        caller = target.callers_of(model)[0]
        key = target.keys.operators["admin"] if model == wire.MANAGER else caller.key
        request = inputs.well_formed(target.values(model, caller, "A moving film."), rng)
        request.pop("outputs", None)
        answer = channel.send(grpc_message(request, rng, is_changed=False), [(HEADER, f"Bearer {key}")])
        run.good_asked += 1
        if not answer.is_ok:
            run.good_refused += 1
            run.faults.append(f"{model} does not answer a good request: {answer.status} {answer.content[:300]!r}")
    channel.close()


def _log_faults(target: Target) -> Iterator[str]:
    """Yield what the logs must not hold: tracebacks and secrets."""
    for log in target.logs:
        content = log.read_bytes() if log.is_file() else b""
        # Each line of Triton's log names a module and a line, so only the head of a traceback counts.
        if (head := content.find(b"Traceback (most recent")) >= 0:
            around = content[max(0, head - 300) : head + 1500].decode(errors="replace")
            yield f"{log.name} has a traceback: {around}"
        if any(secret in content for secret in target.secrets):
            yield f"{log.name} has the secret of a key"


def report_of(run: AttackRun, settings: dict[str, Any]) -> Report:
    """Return the benchmark result of a run."""
    count = sum(run.verdicts.values())
    rows: list[dict[str, Any]] = []
    for encoding in dict.fromkeys(encoding for encoding, _ in sorted(run.verdicts)):
        by = {who: number for (over, who), number in run.verdicts.items() if over == encoding}
        rows.append(
            {
                "over": encoding,
                "requests": sum(by.values()),
                "answered": by.get("answered", 0),
                "by hplm": by.get("hplm", 0),
                "by Triton": by.get("Triton", 0),
                "by proxy": by.get("proxy", 0),
                "hung up": by.get("hung up", 0),
                # Good requests that Triton refused together with a malformed request of the same batch.
                "batch mates": by.get("batch mate", 0),
                "faults": by.get("fault", 0),
            }
        )
    rows += [
        {
            "process": name,
            "rss_mb": run.warm[name].rss_bytes / 1e6,
            "rss_mb_end": run.end[name].rss_bytes / 1e6,
            "files": run.warm[name].files,
            "files_end": run.end[name].files,
            "rss_mb_course": [round(held[name].rss_bytes / 1e6) for held in run.course],
        }
        for name in run.warm
    ]
    rows += [
        {"documented": one.request, "sent over": one.over, "refused by": one.by, "code": one.code} for one in run.known
    ]
    rows += [{"refused": who, "code": code, "times": number} for (who, code), number in run.codes.most_common() if code]
    rows += [{"changed": change, "times": number} for change, number in run.changes.most_common()]
    rows += [{"fault": fault} for fault in (*run.log_faults, *run.faults)[:MOST_FAULTS_SHOWN]]
    shared = run.shared_bytes[-1] - run.shared_bytes[0]
    goals = [
        Goal(
            "58-attacks-answers",
            "malformed requests with a wrong answer",
            0,
            sum(map(bool, run.faults)),
            "requests",
            "lower",
        ),
        Goal("58-attacks-alive", "processes that ended or began", 0, run.changed_processes, "processes", "lower"),
        Goal("58-attacks-good", "good requests not answered", 0, run.good_refused, "requests", "lower"),
        Goal("58-attacks-logs", "logs with a traceback or a key", 0, len(run.log_faults), "logs", "lower"),
        Goal("58-attacks-documented", "documented crashes not kept out", 0, _passed(run.known), "requests", "lower"),
        Goal(
            "58-attacks-memory",
            "growth of a process beyond 5 %",
            GROWTH_BYTES / 1e6,
            run.growth_bytes / 1e6,
            "MB",
            "lower",
        ),
        Goal("58-attacks-shared", "growth of shared memory", GROWTH_SHARED_BYTES / 1e6, shared / 1e6, "MB", "lower"),
        Goal("58-attacks-files", "growth of a process's open files", GROWTH_FILES, run.growth_files, "files", "lower"),
        Goal("58-attacks-peak", "the largest memory of Triton", PEAK_BYTES / 1e6, run.peak_bytes / 1e6, "MB", "lower"),
        Goal("58-attacks-hang", "the slowest answer", HANGING_S, run.slowest_s, "s", "lower"),
    ]
    settings = {
        **settings,
        "seconds": run.seconds,
        "requests_per_s": count / run.seconds,
        "good_requests": run.good_asked,
        "shared_memory_mb": [size / 1e6 for size in run.shared_bytes],
    }
    return Report("malformed", settings, rows, goals)


def _passed(known: Sequence[Outcome]) -> int:
    if not known:
        raise InternalError("the documented requests were not sent")
    return sum(not outcome.is_kept_out for outcome in known)
