"""Sends load plans to servers one after another, over rounds: the common part of all benchmarks under an open load."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.progress import Progress

from hplm.errors import InternalError
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.benchmark_server import AS_CONFIGURED, StageSettings, benchmark_server
from hplm_loadtest.benchmarks.served_repository import single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.processor_time import Milliseconds, ServerMeter
from hplm_loadtest.workloads.deadlines import DeadlineClasses
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix
from hplm_loadtest.workloads.tenants import RoundRobinTenants, UniformTenants
from hplm_loadtest.workloads.texts import text_settings, texts_of_kind

WARM_UP_IN_FLIGHT = 64
Point = TypeVar("Point", bound=Hashable)


class MeteredRun(NamedTuple):
    """A load run and the processor milliseconds of one of its requests, by process."""

    run: Run
    cpu_ms: Milliseconds


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
    ) -> Iterator[TritonServer]:
        """Start a server and send one request to each tenant, or to the first `tenants`.

        A tenant's first request reads and checks files, which the benchmark does not measure. Raises InternalError if a request
        is not answered.
        """
        names = self.names[:tenants]
        with benchmark_server(self.models, settings, log=log) as server:
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
