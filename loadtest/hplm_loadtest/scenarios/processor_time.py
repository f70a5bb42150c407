"""Measures the processor time of a request by process, which does not depend on how processes wait for each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median

from hplm.runtime.process import stat_of
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm_loadtest.scenarios.outcomes import Run

Milliseconds = Mapping[str, float]


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
