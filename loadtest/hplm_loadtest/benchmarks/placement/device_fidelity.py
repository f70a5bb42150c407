"""Fidelity on devices that compute (AlpaServe Table 2): a device is a core to which a process of an encode stage is pinned.

The prediction uses the profile that `hplm profile` measures in the same run, on the same core. Batches have one request, as in
the paper, and stages serve first come, first served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core.roles import served_base
from hplm.errors import ConfigError, StartError
from hplm.models import base as bases
from hplm.placement.cluster import uniform_cluster
from hplm.placement.live_simulation import TOKENS_PER_S, LiveQueues
from hplm.placement.measured import served_model
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.profiles.profile import Profile
from hplm.reporting.benchmark_result import Goal, Report
from hplm.scheduling.known_cost import KnownCost
from hplm.serving.encode_stage import WAY_BACK
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.effort import Effort, tell
from hplm_loadtest.benchmarks.placement.encode_stages import Variant, variant_server
from hplm_loadtest.benchmarks.placement.fidelity_rows import fidelity_row, largest_error
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.placement.replay import Target, recorded_replay

SCALES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
QUICK_SCALES = (2.0, 5.0)
LOAD = 0.6
SECONDS, QUICK_SECONDS = 20.0, 14.0
GOAL = 0.05
# Words of a text. Each is one token, so the text is long enough for the encode stage to take most of a request's time.
WORDS = 126
ONE_BY_ONE: Mapping[str, Any] = {"policy": "fcfs", "batch_requests": 1, "num_threads": 1}
# Requests that are sent one at a time, and requests that are sent at once: fewer would not show how times vary.
IDLE_REQUESTS, BURST_REQUESTS = 20, 60
# The share of batches that end within the bound of the live cost model.
WITHIN_BOUND = 0.95


@dataclass(frozen=True)
class Layout:
    """How devices serve the base. Each of `variants` is a server of its own, and a group of the placement."""

    name: str
    variants: tuple[Variant, ...]
    placement: Placement


def layouts(model: ServedModel, cores: Sequence[int]) -> list[Layout]:
    """Return one device, two replicas, and a pipeline of two stages."""
    first, second = cores[0], cores[1]
    pair = ParallelConfig(2)
    cut = StageTimes(uniform_cluster(2, 10**12), [model]).cut_of(model, pair)
    if cut is None:
        raise ConfigError(f"base {model.name} has a single layer: a base of two layers or more was expected")
    one = partial(Variant, (), settings=ONE_BY_ONE)
    names = (model.name,)
    return [
        Layout("1 device", (one(((second,),)),), Placement((Group((0,), ParallelConfig()),), (names,))),
        Layout(
            "2 devices, a replica each",
            (one(((first,),)), one(((second,),))),
            Placement((Group((0,), ParallelConfig()), Group((1,), ParallelConfig())), (names, names)),
        ),
        Layout(
            "2 devices, 2 stages",
            (Variant(cut, ((first,), (second,)), settings=ONE_BY_ONE),),
            Placement((Group((0, 1), pair),), (names,)),
        ),
    ]


def measured_profile(models: Path, core: int) -> Profile:
    """Measure the base with `hplm profile`, on one core as the stages are. Raises StartError with the command's words."""
    command = [sys.executable, "-m", "hplm_cli", "profile", "--models", str(models.absolute()), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=partial(os.sched_setaffinity, 0, {core})
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise StartError(f"`hplm profile` failed with status {done.returncode}: {done.stderr[-500:]}")
    return Profile.from_json(json.loads(lines[-1]), "hplm profile --json")


def device_fidelity(models: Path, effort: Effort) -> Report:
    """Measure a profile, serve the base in each layout, and replay each workload at each deadline scale."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(f"two cores were expected for two devices, this process may use {len(cores)}")
    served = read_repository(models)
    text = " ".join(["the"] * WORDS)
    tokens = len(bases.load(served.store.base(served.plot.base)).load_text_encoder().encode([text])[0].ids)
    profile = measured_profile(models, cores[1])
    model = served_model(profile, tokens)
    tell(f"a text of {tokens} tokens takes {1000 * model.latency_s:.1f} ms in the encode stage")
    rows = []
    for layout in layouts(model, cores):
        rows += _rows(models, layout, model, effort, text)
    error = largest_error(rows)
    text = f"largest error of the predicted share in time, devices that compute, {len(rows)} replays"
    goal = Goal("placement-device-error", text, GOAL, error, "", "lower")
    return Report("fidelity", {"models": str(models), "quick": effort.quick}, rows, [goal])


def _rows(models: Path, layout: Layout, model: ServedModel, effort: Effort, text: str) -> list[dict[str, Any]]:
    tenants = {model.name: single_text_tenants(models)[:16]}
    rows = []
    with ExitStack() as stack:
        urls = [stack.enter_context(variant_server(models, each)).ports.grpc_url for each in layout.variants]
        targets = {model.name: [Target(url, read_name(models), url) for url in urls]}
        # One at a time, and then all at once.
        idle = _same_requests(model.name, np.arange(IDLE_REQUESTS) * 4 * model.latency_s)
        at_once = _same_requests(model.name, np.zeros(BURST_REQUESTS))
        idle_s = float(np.median(recorded_replay(targets, tenants, idle, [text]).outcomes.latencies_s))
        overhead_s = max(0.0, idle_s - model.latency_s)
        burst = recorded_replay(targets, tenants, at_once, [text])
        gaps_s = _gaps_s(burst.outcomes.ended_s, burst.outcomes.groups)
        stages = layout.placement.groups[0].config.stages
        # While the next request is there already, a stage takes longer than the profile says: Triton, look-up and replies
        # share its cores, and both cores share a memory.
        slowdown = max(1.0, float(np.median(gaps_s)) * stages / model.latency_s)
        margin = float(np.quantile(gaps_s, WITHIN_BOUND) / np.median(gaps_s))
        queues = LiveQueues(cost=partial(_MarginCost, margin))
        tell(
            f"{layout.name}: a request alone takes {1000 * idle_s:.1f} ms; under load a stage takes {slowdown:.2f} times the "
            f"profile's time, and 19 of 20 requests at most {margin:.2f} times the median"
        )
        model = replace(model, layer_s=tuple(each * slowdown for each in model.layer_s))
        devices = sum(len(group.devices) for group in layout.placement.groups)
        times = StageTimes(uniform_cluster(devices, 10**12), [model])
        for cv in (4.0,) if effort.quick else (1.0, 4.0):
            for number, scale in enumerate(QUICK_SCALES if effort.quick else SCALES):
                requests = gamma_requests(
                    {model.name: LOAD * devices / model.latency_s},
                    cv,
                    {model.name: scale * idle_s},
                    QUICK_SECONDS if effort.quick else SECONDS,
                    effort.rng(number + round(100 * cv)),
                )
                replayed = recorded_replay(targets, tenants, requests, [text])
                setting = f"{layout.name}, {'Poisson' if cv == 1 else f'Gamma cv {cv:g}'}"
                rows.append(
                    fidelity_row(
                        setting,
                        scale,
                        replayed,
                        layout.placement,
                        times,
                        overhead_s,
                        kept_back=WAY_BACK,
                        queues=queues,
                    )
                )
                tell(str(rows[-1]))
    return rows


def _same_requests(name: str, times_s: npt.NDArray[np.float64]) -> ModelRequests:
    """Return requests to one model that have time enough."""
    count = len(times_s)
    return ModelRequests((name,), times_s, np.zeros(count, np.int32), np.full(count, 100.0), float(times_s[-1]) + 1)


class _MarginCost(KnownCost):
    """Known times of which 19 of 20 requests take at most `margin` times as long, as the live cost model learns it."""

    def __init__(self, margin: float) -> None:
        super().__init__(1 / TOKENS_PER_S)
        self._margin = margin

    def bound(self, tokens: int, squares: int) -> float:
        return self._margin * self.predict(tokens, squares)


def _gaps_s(ended_s: npt.NDArray[np.float64], groups: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return the seconds between the answers of each group to requests that came at once."""
    return np.concatenate([np.diff(np.sort(ended_s[groups == group])) for group in np.unique(groups)])


def read_name(models: Path) -> str:
    """Return the name of the first base's model."""
    return served_base(models).name
