"""Fidelity on emulated devices (AlpaServe Table 2): predicted against measured attainment, with real servers and requests.

Triton, the ensembles, the live queues, their admission and their batch loops are real. A device waits for the time that the
profile says. So up to eight devices run on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hplm.placement.cluster import uniform_cluster
from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.figure import Effort
from hplm_loadtest.emulation.repository import EmulatedGroup, serve_groups, write_groups
from hplm_loadtest.placement.replay import Replay, Target, recorded_replay

DEVICES = 8
SCALES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 10.0)
QUICK_SCALES = (1.5, 4.0)
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
    """What a request takes besides the waits of its stages: `fixed_s` once, `hop_s` between two stages.

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


def measure_overhead(folder: Path, log: Path) -> Overhead:
    """Measure what a request takes besides its waits, with a server of a short and of a long pipeline."""
    groups = [EmulatedGroup("short", {PROBE: (PROBE_S,)}), EmulatedGroup("long", {PROBE: (PROBE_S,) * 4})]
    # Far apart, then all at once.
    apart, together = np.arange(PROBES) * 5 * PROBE_S, np.zeros(PROBES)
    medians = {}
    with _serving(folder, groups, 0.0, 0.0, log) as url:
        for group in groups:
            latencies = _probe(url, group.name, apart).outcomes.latencies_s
            medians[group.name] = float(np.median(latencies)) - group.stages * PROBE_S
        burst = np.sort(_probe(url, "short", together).outcomes.ended_s)
    turn_s = float(np.median(np.diff(burst))) - PROBE_S
    return Overhead(medians["short"], (medians["long"] - medians["short"]) / 3, max(0.0, turn_s))


def _probe(url: str, group: str, times_s: Any) -> Replay:
    requests = ModelRequests(
        (PROBE,), times_s, np.zeros(PROBES, np.int32), np.full(PROBES, 30.0), float(times_s[-1]) + 1
    )
    return recorded_replay({PROBE: [Target(url, group, group)]}, {PROBE: [PROBE]}, requests, TEXTS)


@contextmanager
def _serving(
    folder: Path, groups: Sequence[EmulatedGroup], hop_s: float, way_back_s: float, log: Path
) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hplm-emulated-", dir=folder) as models:
        repository = Path(models) / "models"
        names = write_groups(repository, groups, hop_s=hop_s, way_back_s=way_back_s, boundary_bytes=BOUNDARY_BYTES)
        with serve_groups(repository, names, log=log) as server:
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


def emulated_targets(placement: Placement, names: Sequence[str], url: str) -> Mapping[str, list[Target]]:
    """Return the Triton models of each model's groups."""
    return {
        name: [Target(url, f"group_{number + 1}", f"group_{number + 1}") for number in placement.groups_of(name)]
        for name in names
    }


@dataclass(frozen=True)
class Setting:
    """A placement and a workload of which each deadline scale is a replay."""

    stages: int
    models: int
    cv: float

    def __str__(self) -> str:
        arrivals = "Poisson" if self.cv == 1 else f"Gamma cv {self.cv:g}"
        return f"{DEVICES // self.stages} groups of {self.stages} stages, {self.models} models, {arrivals}"


def emulated_fidelity(effort: Effort, log: Path, seconds: float = 20.0) -> list[dict[str, Any]]:
    """Replay each setting at each deadline scale. Return a row for each, with what both simulators predict."""
    settings = [Setting(stages, models, cv) for stages in (2, 4) for models in (FEW, MANY) for cv in (1.0, 4.0)]
    if effort.quick:
        settings = [Setting(2, FEW, 4.0), Setting(4, MANY, 1.0)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="hplm-fidelity-") as folder:
        overhead = measure_overhead(Path(folder), log)
        effort.tell(
            f"a request takes {1000 * overhead.fixed_s:.1f} ms besides its waits, {1000 * overhead.hop_s:.1f} ms for each "
            f"further stage; a stage needs {1000 * overhead.turn_s:.1f} ms for a request besides the wait"
        )
        for stages in sorted({setting.stages for setting in settings}):
            for count in sorted({setting.models for setting in settings if setting.stages == stages}):
                models = served_models(count)
                placement = placement_of(models, stages)
                cluster = uniform_cluster(DEVICES, 10**12)
                groups = emulated_groups(placement, StageTimes(cluster, models))
                own = [each for each in settings if (each.stages, each.models) == (stages, count)]
                with _serving(Path(folder), groups, overhead.hop_s, overhead.fixed_s, log) as url:
                    for setting in own:
                        for scale in QUICK_SCALES if effort.quick else SCALES:
                            row = _compare(setting, scale, models, placement, overhead, url, effort, seconds)
                            effort.tell(f"{row}")
                            rows.append(row)
    return rows


def _compare(
    setting: Setting,
    scale: float,
    models: Sequence[ServedModel],
    placement: Placement,
    overhead: Overhead,
    url: str,
    effort: Effort,
    seconds: float,
) -> dict[str, Any]:
    rate = LOAD * DEVICES / (len(models) * float(np.mean([model.latency_s for model in models])))
    deadlines = {model.name: scale * model.latency_s for model in models}
    rng = effort.rng(round(100 * scale) + 10_000 * setting.stages + 100_000 * setting.models + round(10 * setting.cv))
    requests = gamma_requests({model.name: rate for model in models}, setting.cv, deadlines, seconds, rng)
    targets = emulated_targets(placement, requests.names, url)
    replayed = recorded_replay(targets, {name: [name] for name in requests.names}, requests, TEXTS)
    predicted = predicted_outcomes(setting.stages, models, placement, overhead, requests)
    measured = replayed.outcomes
    return {
        "setting": str(setting),
        "scale": scale,
        "requests": len(requests),
        "measured": measured.attainment,
        **{name: outcomes.attainment for name, outcomes in predicted.items()},
        **{f"error {name}": abs(outcomes.attainment - measured.attainment) for name, outcomes in predicted.items()},
        "lag_p99_ms": 1000 * float(np.percentile(replayed.run.lag_s, 99)),
        "errors": dict(replayed.run.row()["errors"]),
    }


def predicted_outcomes(
    stages: int,
    models: Sequence[ServedModel],
    placement: Placement,
    overhead: Overhead,
    requests: ModelRequests,
) -> dict[str, Outcomes]:
    """Return what the simulators predict, with the measured overhead taken off each deadline."""
    turned = [
        ServedModel(
            model.name, tuple(each + overhead.turn_s * stages / LAYERS for each in model.layer_s), model.layer_bytes
        )
        for model in models
    ]
    times = StageTimes(uniform_cluster(DEVICES, 10**12), turned)
    less = ModelRequests(
        requests.names,
        requests.times_s,
        requests.models,
        np.maximum(0.0, requests.deadlines_s - overhead.of(stages)),
        requests.duration_s,
    )
    return {"simulated": simulate(placement, times, less)}
