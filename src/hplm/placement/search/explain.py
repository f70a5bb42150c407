"""Explains a placement in words: why each model is where it is, which models limit it, and what a change would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hplm.placement.cluster import Cluster
from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Placement
from hplm.placement.search.enumeration import SearchOptions, search, selective_replication
from hplm.placement.search.selection import longest_deadlines
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests

# Factors of the deadlines and of the rates that an explanation tries.
DEADLINE_FACTORS = (1.25, 2.0)
RATE_FACTORS = (1.25, 2.0)


@dataclass(frozen=True)
class ModelWords:
    """A model's groups, its requests, how many of them were not in time, and a sentence that says why."""

    name: str
    groups: tuple[int, ...]
    requests: int
    missed: int
    words: str


@dataclass(frozen=True)
class Change:
    """The share of requests in time after a change, and before."""

    what: str
    attainment: float
    before: float

    def __str__(self) -> str:
        points = 100 * (self.attainment - self.before)
        return f"{self.what}: {self.attainment:.2%} of the requests in time ({points:+.2f} points)"


@dataclass(frozen=True)
class Explanation:
    """The explanation of a placement. `limiting`: the models with the most misses, which have nine of ten misses together."""

    attainment: float
    models: tuple[ModelWords, ...]
    limiting: tuple[str, ...]
    changes: tuple[Change, ...]

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        limits = (
            f"Most misses are of {', '.join(self.limiting)}." if self.limiting else "No request misses its deadline."
        )
        return [
            f"{self.attainment:.2%} of the requests are in time.",
            *(model.words for model in self.models),
            limits,
            *(f"{change}." for change in self.changes),
        ]


def explain(
    placement: Placement,
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions | None = None,
    *,
    stage_times: StageTimes | None = None,
) -> Explanation:
    """Explain a placement. One more device and no parallelism are searched anew, with `options`; the rest is simulated."""
    stage_times = stage_times or StageTimes(cluster, models)
    outcomes = simulate(placement, stage_times, requests)
    words = tuple(_words_of(model.name, placement, stage_times, outcomes) for model in models)
    return Explanation(
        outcomes.attainment,
        words,
        _limiting(words),
        _changes(placement, models, cluster, requests, options or SearchOptions(), stage_times, outcomes.attainment),
    )


def _words_of(name: str, placement: Placement, stage_times: StageTimes, outcomes: Outcomes) -> ModelWords:
    requests = outcomes.requests
    mine = requests.models == (requests.names.index(name) if name in requests.names else -1)
    count, missed = int(mine.sum()), int((mine & ~outcomes.in_time).sum())
    groups = placement.groups_of(name)
    if not groups:
        return ModelWords(name, groups, count, missed, f"{name} is in no group: all its {count} requests are refused.")
    latencies = [sum(stage_times.of(name, placement.groups[group].config) or ()) for group in groups]
    work = float(count) * stage_times.model(name).latency_s / requests.duration_s
    busy = [_busy_share(placement, group, outcomes) for group in groups]
    copies = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
    shape = ", ".join(f"{group} {placement.groups[group].config}" for group in groups)
    words = (
        f"{name} asks for {work:.2f} devices' time and is in {copies} (stages, devices of a stage): {shape}. A request takes "
        f"{min(latencies) * 1000:.0f} ms there when they are idle; they are busy {float(np.mean(busy)):.0%} of the time"
    )
    longest = longest_deadlines(requests).get(name)
    if not missed:
        reason = "and no request misses its deadline."
    elif longest is not None and min(latencies) > longest:
        reason = f"and all requests miss: the longest deadline is {longest * 1000:.0f} ms."
    else:
        reason = f"and {missed} of {count} requests miss, because they meet a long queue."
    return ModelWords(name, groups, count, missed, f"{words}, {reason}")


def _busy_share(placement: Placement, group: int, outcomes: Outcomes) -> float:
    busy_s = outcomes.busy_s[list(placement.groups[group].devices)]
    return float(busy_s.mean()) / outcomes.requests.duration_s


def _limiting(models: Sequence[ModelWords]) -> tuple[str, ...]:
    total = sum(model.missed for model in models)
    names: list[str] = []
    explained = 0
    for model in sorted(models, key=lambda model: (-model.missed, model.name)):
        if explained >= 0.9 * total or not model.missed:
            break
        names.append(model.name)
        explained += model.missed
    return tuple(names)


def _changes(
    placement: Placement,
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions,
    stage_times: StageTimes,
    before: float,
) -> tuple[Change, ...]:
    last = cluster.nodes[-1]
    larger = replace(cluster, nodes=(*cluster.nodes[:-1], replace(last, devices=last.devices + 1)))
    more = search(models, larger, requests, options).attainment
    free = replace(options, cover_every_model=False, survive_any_node=False)
    single = selective_replication(models, cluster, requests, free, stage_times=stage_times).attainment
    changes = [
        Change(f"One more device on node {last.name} and a new search", more, before),
        Change("Every model on whole devices, without pipelines", single, before),
    ]
    for factor in DEADLINE_FACTORS:
        looser = replace(requests, deadlines_s=requests.deadlines_s * factor)
        attainment = simulate(placement, stage_times, looser).attainment
        changes.append(Change(f"Deadlines {factor:g} times as long, the same placement", attainment, before))
    for factor in RATE_FACTORS:
        faster = replace(requests, times_s=requests.times_s / factor, duration_s=requests.duration_s / factor)
        attainment = simulate(placement, stage_times, faster).attainment
        changes.append(Change(f"{factor:g} times as many requests a second, the same placement", attainment, before))
    return tuple(changes)
