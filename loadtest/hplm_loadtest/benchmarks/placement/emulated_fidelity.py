"""Fidelity on emulated devices (AlpaServe Table 2): predicted against measured attainment, with real servers and requests.

Triton, the ensembles, the live queues, their admission and their batch loops are real. A device waits for the time that the
profile says. So up to eight devices run on two cores. On a machine that computes other things too, run this under `chrt -r 10`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.placement.cluster import uniform_cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.reporting.benchmark_result import Goal, Report
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.effort import Effort, tell
from hplm_loadtest.benchmarks.placement.fidelity_rows import SIMULATED, fidelity_row, largest_error
from hplm_loadtest.emulation.repository import EmulatedGroup, serve_groups, write_groups
from hplm_loadtest.placement.replay import Replay, Target, recorded_replay

DEVICES = 8
SCALES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
QUICK_SCALES = (1.5, 4.0)
# Seconds of each replay.
SECONDS, QUICK_SECONDS = 20.0, 10.0
GOAL = 0.02
# Latencies of the models in seconds: about those of Table 1. One device answers about four requests a second, so that two
# cores can carry the requests of eight devices.
LATENCIES_S = (0.16, 0.24, 0.24, 0.4)
LAYERS = 12
FEW, MANY = 4, 16
# The offered load as a share of what the devices can compute.
LOAD = 0.75
# Hidden states of 128 tokens of 768 float16.
BOUNDARY_BYTES = 128 * 768 * 2
# A model that is only asked to measure what a request costs besides its waits.
PROBE, PROBE_S = "probe", 0.02
PROBES = 40
TEXTS = ("a text",)


@dataclass(frozen=True)
class Overhead:
    """The time of a request besides the waits of its stages: `fixed_s` once, `hop_s` between two stages.

    `turn_s` is what a stage needs for a request besides the wait, while the next request is there already.
    """

    fixed_s: float
    hop_s: float
    turn_s: float

    def of(self, stages: int) -> float:
        return self.fixed_s + (stages - 1) * self.hop_s


def served_models(count: int) -> tuple[ServedModel, ...]:
    """Return models whose layers take equal times, and whose latencies repeat `LATENCIES_S`."""
    return tuple(
        ServedModel(f"model-{number}", (LATENCIES_S[number % 4] / LAYERS,) * LAYERS, (1,) * LAYERS)
        for number in range(count)
    )


def placement_of(models: Sequence[ServedModel], stages: int) -> Placement:
    """Return groups of `stages` devices. Few models are in every group; each of many models is in half of the groups."""
    count = DEVICES // stages
    config = ParallelConfig(stages)
    groups = tuple(Group(tuple(range(i * stages, (i + 1) * stages)), config) for i in range(count))
    copies = count if len(models) <= FEW else max(1, count // 2)
    held: list[list[str]] = [[] for _ in groups]
    for number, model in enumerate(models):
        for copy in range(copies):
            held[(number + copy) % count].append(model.name)
    return Placement(groups, tuple(tuple(sorted(names)) for names in held))


def measure_overhead(folder: Path) -> Overhead:
    """Measure what a request takes besides its waits, with a server of a short and of a long pipeline."""
    groups = [EmulatedGroup("short", {PROBE: (PROBE_S,)}), EmulatedGroup("long", {PROBE: (PROBE_S,) * 4})]
    # Far apart, then all at once.
    apart, together = np.arange(PROBES) * 5 * PROBE_S, np.zeros(PROBES)
    medians = {}
    with _serving(folder, groups, 0.0, 0.0) as url:
        for group in groups:
            latencies = _probe(url, group.name, apart).outcomes.latencies_s
            medians[group.name] = float(np.median(latencies)) - group.stages * PROBE_S
        burst = np.sort(_probe(url, "short", together).outcomes.ended_s)
    turn_s = float(np.median(np.diff(burst))) - PROBE_S
    return Overhead(medians["short"], (medians["long"] - medians["short"]) / 3, max(0.0, turn_s))


def _probe(url: str, group: str, times_s: npt.NDArray[np.float64]) -> Replay:
    requests = ModelRequests(
        (PROBE,), times_s, np.zeros(PROBES, np.int32), np.full(PROBES, 30.0), float(times_s[-1]) + 1
    )
    return recorded_replay({PROBE: [Target(url, group, group)]}, {PROBE: [PROBE]}, requests, TEXTS)


@contextmanager
def _serving(folder: Path, groups: Sequence[EmulatedGroup], hop_s: float, way_back_s: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hplm-emulated-", dir=folder) as models:
        repository = Path(models) / "models"
        names = write_groups(repository, groups, hop_s=hop_s, way_back_s=way_back_s, boundary_bytes=BOUNDARY_BYTES)
        with serve_groups(repository, names, log=folder / "triton.log") as server:
            yield server.ports.grpc_url


def emulated_groups(placement: Placement, times: StageTimes) -> list[EmulatedGroup]:
    """Return the groups of a placement that hold models, with the seconds of their stages."""
    groups = []
    for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True), 1):
        seconds = {name: times.of(name, group.config) for name in names}
        groups.append(
            EmulatedGroup(f"group_{number}", {name: each for name, each in seconds.items() if each is not None})
        )
    return [group for group in groups if group.stage_s]


def emulated_targets(placement: Placement, times: StageTimes, url: str) -> Mapping[str, list[Target]]:
    """Return the Triton models of each model's groups."""
    targets: dict[str, list[Target]] = {name: [] for name in times.models}
    for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True), 1):
        for name in names:
            seconds = times.of(name, group.config)
            assert seconds is not None, "the group's stages were written"
            targets[name].append(Target(url, f"group_{number}", f"group_{number}", seconds[0]))
    return targets


@dataclass(frozen=True)
class Setting:
    """A placement and a workload of which each deadline scale is a replay."""

    stages: int
    models: int
    cv: float

    def __str__(self) -> str:
        arrivals = "Poisson" if self.cv == 1 else f"Gamma cv {self.cv:g}"
        return f"{DEVICES // self.stages} groups of {self.stages} stages, {self.models} models, {arrivals}"

    def requests(self, models: Sequence[ServedModel], scale: float, seconds: float, effort: Effort) -> ModelRequests:
        """Draw the requests of a replay."""
        rate = LOAD * DEVICES / (len(models) * float(np.mean([model.latency_s for model in models])))
        deadlines = {model.name: scale * model.latency_s for model in models}
        rng = effort.rng(round(100 * scale) + 10_000 * self.stages + 100_000 * self.models + round(10 * self.cv))
        return gamma_requests({model.name: rate for model in models}, self.cv, deadlines, seconds, rng)


def emulated_fidelity(effort: Effort) -> Report:
    """Replay each setting at each deadline scale, and compare with what both simulators predict."""
    settings = [Setting(stages, models, cv) for stages in (2, 4) for models in (FEW, MANY) for cv in (1.0, 4.0)]
    scales, seconds = (QUICK_SCALES, QUICK_SECONDS) if effort.quick else (SCALES, SECONDS)
    if effort.quick:
        settings = [Setting(2, FEW, 4.0), Setting(4, MANY, 1.0)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="hplm-fidelity-") as name:
        folder = Path(name)
        overhead = measure_overhead(folder)
        tell(
            f"a request takes {1000 * overhead.fixed_s:.1f} ms besides its waits, {1000 * overhead.hop_s:.1f} ms for each "
            f"further stage; a stage needs {1000 * overhead.turn_s:.1f} ms for a request besides the wait"
        )
        for stages, count in sorted({(setting.stages, setting.models) for setting in settings}):
            models = served_models(count)
            placement = placement_of(models, stages)
            groups = emulated_groups(placement, StageTimes(uniform_cluster(DEVICES, 10**12), models))
            times = StageTimes(uniform_cluster(DEVICES, 10**12), [_turned(model, stages, overhead) for model in models])
            with _serving(folder, groups, overhead.hop_s, overhead.fixed_s) as url:
                targets = emulated_targets(placement, times, url)
                tenants = {model.name: [model.name] for model in models}
                for setting in settings:
                    if (setting.stages, setting.models) != (stages, count):
                        continue
                    for scale in scales:
                        requests = setting.requests(models, scale, seconds, effort)
                        replayed = recorded_replay(targets, tenants, requests, TEXTS)
                        rows.append(fidelity_row(str(setting), scale, replayed, placement, times, overhead.of(stages)))
                        tell(str(rows[-1]))
    error = largest_error(rows)
    text = f"largest error of the predicted share in time, emulated devices, {len(rows)} replays"
    goal = Goal("placement-emulated-error", text, GOAL, error, "", "lower")
    more = {"quick": effort.quick, "largest_error_without_live_queues": largest_error(rows, SIMULATED)}
    return Report("emulated-fidelity", more, rows, [goal])


def _turned(model: ServedModel, stages: int, overhead: Overhead) -> ServedModel:
    """Return a model whose stages take the turn of a real stage longer."""
    more_s = overhead.turn_s * stages / LAYERS
    return replace(model, layer_s=tuple(each + more_s for each in model.layer_s))
