"""The placements that AlpaServe is compared with: selective replication, Clockwork++, round robin, and greedy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hplm.placement.cluster import Cluster
from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import ParallelConfig, Placement
from hplm.placement.search.enumeration import Progress, SearchOptions, SearchResult, search
from hplm.placement.search.partitions import blocks_of, equal_groups
from hplm.placement.search.selection import Groups, Problem
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests


def selective_replication(
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions | None = None,
    *,
    stage_times: StageTimes | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for a placement without model parallelism: every group is one device."""
    options = replace(options or SearchOptions(), sizes=(1,), most_stages=1, most_intra=1)
    return search(models, cluster, requests, options, stage_times=stage_times, progress=progress)


def greedy_alone(
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions | None = None,
    *,
    stages: int = 4,
    stage_times: StageTimes | None = None,
) -> SearchResult:
    """Select models for pipelines of a fixed number of stages. Nothing else is searched (AlpaServe Fig. 17)."""
    options = replace(
        options or SearchOptions(), sizes=(min(stages, _largest_block(cluster, options)),), most_intra=1, most_buckets=1
    )
    return search(models, cluster, requests, options, stage_times=stage_times)


def round_robin(
    models: Sequence[ServedModel],
    cluster: Cluster,
    *,
    stages: int = 4,
    span_nodes: bool = False,
    stage_times: StageTimes | None = None,
) -> Placement:
    """Place the models in their order into the next pipeline that has memory left, again and again until nothing fits."""
    stage_times = stage_times or StageTimes(cluster, models)
    names = tuple(model.name for model in models)
    empty = np.zeros(0)
    no_requests = ModelRequests(names, empty, empty.astype(np.int32), empty, 1.0)
    blocks = blocks_of(range(cluster.devices), cluster, span_nodes)
    stages = min(stages, max(len(block) for block in blocks))
    groups = Groups(
        Problem(tuple(models), cluster, stage_times, no_requests), equal_groups(blocks, ParallelConfig(stages))
    )
    selection = groups.empty()
    count = len(groups.groups)
    following = 0
    added = True
    while added:
        added = False
        for name in names:
            for step in range(count):
                group = (following + step) % count
                if groups.can_assign(selection, name, group):
                    selection = groups.assign(selection, name, group)
                    following, added = (group + 1) % count, True
                    break
    return selection.placement


def clockwork(
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    window_s: float,
    options: SearchOptions | None = None,
    *,
    knows_window: bool = True,
    stage_times: StageTimes | None = None,
) -> Outcomes:
    """Simulate Clockwork++: selective replication places the models anew at the start of each window, at no cost.

    `knows_window`: the placement of a window is made for the window's own requests, an upper bound of what Clockwork can do.
    Otherwise it is made for the requests of the window before. A window starts with empty queues, in Clockwork's favour.
    """
    stage_times = stage_times or StageTimes(cluster, models)
    options = replace(options or SearchOptions(), cover_every_model=False, survive_any_node=False)
    ended_s = np.full(len(requests), np.nan)
    groups = np.full(len(requests), -1, dtype=np.int32)
    busy_s = np.zeros(cluster.devices)
    known: ModelRequests | None = None
    for start_s in np.arange(0.0, requests.duration_s, window_s):
        end_s = min(start_s + window_s, requests.duration_s)
        last = end_s >= requests.duration_s
        inside = (requests.times_s >= start_s) & ((requests.times_s < end_s) | last)
        window = _shifted(requests.where(inside), start_s, end_s - start_s)
        seen = window if knows_window or known is None else known
        known = window
        if not inside.any():
            continue
        placement = selective_replication(models, cluster, seen, options, stage_times=stage_times).placement
        outcomes = simulate(placement, stage_times, window)
        ended_s[inside] = outcomes.ended_s + start_s
        groups[inside] = outcomes.groups
        busy_s += outcomes.busy_s
    return Outcomes(requests, ended_s, groups, busy_s)


def _shifted(requests: ModelRequests, start_s: float, duration_s: float) -> ModelRequests:
    return replace(requests, times_s=requests.times_s - start_s, duration_s=duration_s)


def _largest_block(cluster: Cluster, options: SearchOptions | None) -> int:
    blocks = blocks_of(range(cluster.devices), cluster, bool(options and options.span_nodes))
    return max(len(block) for block in blocks)
