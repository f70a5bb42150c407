"""Sends load plans to servers one after another, over rounds: the common part of all benchmarks under an open load."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.progress import Progress

from hplm.errors import InternalError
from hplm.runtime.process import stat_of
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import RoundRobinTenants, UniformTenants
from hplm_loadtest.benchmarks.benchmark_server import AS_CONFIGURED, StageSettings, benchmark_server
from hplm_loadtest.benchmarks.served_repository import single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix
from hplm_loadtest.workloads.texts import text_settings, texts_of_kind

WARM_UP_IN_FLIGHT = 64
Point = TypeVar("Point", bound=Hashable)
Milliseconds = Mapping[str, float]


class MeteredRun(NamedTuple):
    """A load run and the processor milliseconds of one of its requests, by process."""

    run: Run
    cpu_ms: Milliseconds


class ServerMeter:
    """Counts the processor time of a server's processes from now on: Triton's own process, and one for each of its models."""

    def __init__(self, server: TritonServer) -> None:
        self._triton = server.process.pid
        self._before = self._seconds()

    def per_request(self, run: Run) -> Milliseconds:
        """Return processor milliseconds per answered request of `run`, by process, the generator included."""
        spent = {name: after - self._before.get(name, 0.0) for name, after in self._seconds().items()}
        answered = max(1, run.kinds["answered"])
        return {name: 1000 * seconds / answered for name, seconds in {**spent, "generator": run.generator_s}.items()}

    def _seconds(self) -> dict[str, float]:
        """Return the processor seconds of each process since its start."""
        seconds = {"triton": _processor_s(self._triton)}
        for pid, model in stubs_of(self._triton).items():
            seconds[model] = seconds.get(model, 0.0) + _processor_s(pid)
        return seconds


def medians(rounds: Sequence[Milliseconds]) -> Milliseconds:
    """Return the medians over rounds, by process and for all processes together."""
    by_process = {name: median(by_name.get(name, 0.0) for by_name in rounds) for name in rounds[0]}
    return {**by_process, "all": median(sum(by_name.values()) for by_name in rounds)}


def _processor_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, in user and system mode."""
    user, system = stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Traffic:
    """The source of a benchmark's requests: the single-text tenants of a repository, texts of one kind, random numbers."""

    models: Path
    text_kind: str
    names: Sequence[str]
    texts: Sequence[str]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @classmethod
    def read(cls, models: Path, text_kind: str) -> Traffic:
        """Read the tenants and the texts of a repository. Raises ConfigError or DataError."""
        return cls(models, text_kind, single_text_tenants(models), texts_of_kind(text_kind, models))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that a benchmark result lists for the texts."""
        return text_settings(self.text_kind, self.texts, self.models)

    def mix(self, deadlines: DeadlineClasses | None = None) -> RequestMix:
        """Return requests of random tenants, all equally likely."""
        return RequestMix(UniformTenants(self.names), self.texts, deadlines)

    @contextmanager
    def warm_server(
        self,
        settings: StageSettings = AS_CONFIGURED,
        *,
        tenants: int | None = None,
        texts: Sequence[str] | None = None,
        log: str = "triton-bench.log",
        with_router: bool = False,
    ) -> Iterator[TritonServer]:
        """Start a server and send one request to each tenant, or to the first `tenants`. `with_router`: see `benchmark_server`.

        A tenant's first request reads and checks files, which the benchmark does not measure. Raises InternalError if a request
        is not answered.
        """
        names = self.names[:tenants]
        with benchmark_server(self.models, settings, log=log, with_router=with_router) as server:
            first = RequestMix(RoundRobinTenants(names), texts or self.texts).draw(len(names), self.rng)
            if errors := closed_loop(server.ports.grpc_url, first, WARM_UP_IN_FLIGHT).row()["errors"]:
                raise InternalError(f"not every tenant answered its first request, before the benchmark: {errors}")
            yield server


def run_plans_in_turns(
    servers: Mapping[str, TritonServer],
    plans: Mapping[Point, Callable[[], LoadPlan]],
    rounds: int,
    progress: Progress,
) -> dict[tuple[str, Point], list[MeteredRun]]:
    """Send the load plan of each point to each server, one after another, once per round.

    All servers get the same plan. Every second round goes through the servers backwards, so that no server always comes first.
    Returns the runs by server and point.
    """
    bar = progress.add_task("runs", total=rounds * len(plans) * len(servers))
    runs: dict[tuple[str, Point], list[MeteredRun]] = {(name, point): [] for name in servers for point in plans}
    for turn in range(rounds):
        for point, make_plan in plans.items():
            plan = make_plan()
            for name in list(servers)[:: -1 if turn % 2 else 1]:
                meter = ServerMeter(servers[name])
                run = open_loop(servers[name].ports.grpc_url, plan)
                runs[name, point].append(MeteredRun(run, meter.per_request(run)))
                progress.update(bar, advance=1)
    return runs
