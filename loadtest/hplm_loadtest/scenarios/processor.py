"""Processor time by process: what a request costs the machine, whoever waits for whom."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median

from hplm.runtime.process import stat_of
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm_loadtest.scenarios.run import Run

Milliseconds = Mapping[str, float]


class ServerMeter:
    """Counts from now on what a server's processes take: Triton's own, and one for each of its models."""

    def __init__(self, server: TritonServer) -> None:
        self._triton = server.process.pid
        self._before = self._seconds()

    def per_request(self, run: Run) -> Milliseconds:
        """Processor milliseconds by process, the generator's too, for each request of `run` that was answered."""
        spent = {name: after - self._before.get(name, 0.0) for name, after in self._seconds().items()}
        answered = max(1, run.kinds["answered"])
        return {name: 1000 * seconds / answered for name, seconds in {**spent, "generator": run.generator_s}.items()}

    def _seconds(self) -> dict[str, float]:
        """Since each process began."""
        taken = {"triton": _taken_s(self._triton)}
        for pid, model in stubs_of(self._triton).items():
            taken[model] = taken.get(model, 0.0) + _taken_s(pid)
        return taken


def medians(rounds: Sequence[Milliseconds]) -> Milliseconds:
    """By process, and of all together."""
    by_process = {name: median(one.get(name, 0.0) for one in rounds) for name in rounds[0]}
    return {**by_process, "all": median(sum(one.values()) for one in rounds)}


def _taken_s(pid: int) -> float:
    """By all threads of a process, in user and system mode."""
    user, system = stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
