"""Searches for a placement (AlpaServe algorithm 2): enumerates buckets, groups and configurations, and keeps the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.search.buckets import device_splits, model_buckets
from hplm.placement.search.greedy import Selected, beam_selection, fast_selection
from hplm.placement.search.partitions import blocks_of, equal_groups, group_sizes, parallel_configs
from hplm.placement.search.refinement import refined
from hplm.placement.search.robust import covers_every_model, survives_any_node
from hplm.placement.search.scores import Score, Simulator, in_windows
from hplm.placement.search.selection import Groups, Problem
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests

# Is called with the number of finished steps, the number of all steps, and a sentence about the last step.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search: its method and its limits.

    method: `fast` (one simulation for each model that is added) or `full` (a simulation for each model in each group).
    full_up_to: the fast method also improves what the full method selects, if there are at most so many pairs of a model and a
        group: then that takes seconds. 0: never, as in the paper.
    beam: the selections that the full method keeps at each step.
    most_group_devices, most_stages, most_intra: limits of a group.
    sizes: the group sizes to try; None tries all that the limits allow.
    span_nodes: whether a group may have devices of several nodes.
    bucket_ratio: models of a bucket differ in latency by at most this factor.
    most_buckets: the most buckets of models.
    most_discrepancy, most_splits: limits of the divisions of devices among buckets, see `device_splits`.
    cover_every_model: refuse placements that leave a model out.
    survive_any_node: refuse placements that lose a model when any one node fails.
    refined: the best configurations of each bucket that are improved by small moves; see `refinement`.
    refining_simulations: the most simulations for each of them.
    most_requests: the search simulates about this number of requests at most. The result's attainment is that of all requests.
    """

    method: Literal["fast", "full"] = "fast"
    full_up_to: int = 64
    beam: int = 1
    most_group_devices: int = 32
    most_stages: int = 16
    most_intra: int = 8
    sizes: tuple[int, ...] | None = None
    span_nodes: bool = False
    bucket_ratio: float = 2.0
    most_buckets: int = 3
    most_discrepancy: float = 2.5
    most_splits: int = 5
    cover_every_model: bool = False
    survive_any_node: bool = False
    refined: int = 3
    refining_simulations: int = 300
    most_requests: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("fast", "full"):
            raise ConfigError(f"method: 'fast' or 'full' was expected, got {self.method!r}")
        for name in (
            "beam",
            "refining_simulations",
            "most_group_devices",
            "most_stages",
            "most_intra",
            "most_buckets",
            "most_splits",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: a number of 1 or more was expected, got {getattr(self, name)}")
        if self.bucket_ratio < 1 or self.most_discrepancy < 1:
            raise ConfigError("bucket_ratio and most_discrepancy: factors of 1 or more were expected")

    @property
    def required_nodes(self) -> int:
        """The nodes that each model must be on."""
        return 2 if self.survive_any_node else int(self.cover_every_model)


@dataclass(frozen=True)
class Trial:
    """A configuration of a bucket that the search tried. `skipped`: it could not be better than the best."""

    models: int
    devices: int
    config: ParallelConfig
    groups: int
    attainment: float
    simulations: int
    skipped: bool = False

    def __str__(self) -> str:
        what = f"{self.models} models on {self.devices} devices as {self.groups} groups of {self.config}"
        if self.skipped:
            return f"{what}: skipped, at most {self.attainment:.4f} in time"
        return f"{what}: {self.attainment:.4f} in time, {self.simulations} simulations"


@dataclass(frozen=True)
class SearchResult:
    """The best placement that a search found.

    attainment: the share of all requests that are in time, simulated.
    log: what was tried, in order.
    """

    placement: Placement
    attainment: float
    seconds: float
    simulations: int
    log: tuple[Trial, ...]
    covers_every_model: bool
    survives_any_node: bool


def search(
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions | None = None,
    *,
    stage_times: StageTimes | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the placement with the greatest share of requests in time.

    Of placements with an equal share, the one that leaves more of the deadlines wins. Raises ConfigError if every model must be
    covered, or must survive any node, and no placement does that.
    """
    options = options or SearchOptions()
    started_s = time.monotonic()
    if options.survive_any_node and len(cluster.nodes) < 2:
        raise ConfigError("a placement that survives any node needs two nodes or more, got one: leave the option out")
    stage_times = stage_times or StageTimes(cluster, models)
    sample = requests if options.most_requests is None else in_windows(requests, options.most_requests)
    problem = Problem(tuple(models), cluster, stage_times, sample, options.required_nodes)
    searcher = _Searcher(problem, options)
    best = searcher.best(progress)
    _check(best, problem, options)
    outcomes = Simulator(stage_times, requests).run(best.placement)
    names = problem.names
    return SearchResult(
        best.placement,
        outcomes.attainment,
        time.monotonic() - started_s,
        searcher.simulations + 1,
        tuple(searcher.log),
        covers_every_model(best.placement, names),
        survives_any_node(best.placement, cluster, names),
    )


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


class _Searcher:
    """Remembers the best selection of each bucket on each set of devices."""

    def __init__(self, problem: Problem, options: SearchOptions) -> None:
        self.problem = problem
        self.options = options
        self.simulations = 0
        self.log: list[Trial] = []
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], Selected] = {}

    def best(self, progress: Progress | None) -> Selected:
        """Return the best placement of all divisions into buckets."""
        problem, options = self.problem, self.options
        divisions = [
            (buckets, split)
            for buckets in model_buckets(problem.models, options.bucket_ratio, options.most_buckets)
            if len(buckets) <= problem.cluster.devices
            for split in device_splits(
                buckets,
                problem.cluster,
                problem.requests,
                spread=options.survive_any_node,
                most_discrepancy=options.most_discrepancy,
                most_splits=options.most_splits,
            )
        ]
        best: Selected | None = None
        for number, (buckets, split) in enumerate(divisions, 1):
            selected = [self._bucket(*pair) for pair in zip(buckets, split.devices, strict=True)]
            together = self._together(buckets, selected)
            if best is None or together.score > best.score:
                best = together
            if progress:
                progress(number, len(divisions), f"{best.score.attainment:.4f} of the requests in time")
        assert best is not None
        return best

    def _bucket(self, models: Sequence[ServedModel], devices: tuple[int, ...]) -> Selected:
        """Return the best selection of a bucket of models on its devices."""
        key = (tuple(model.name for model in models), devices)
        if key not in self._known:
            self._known[key] = self._search_bucket(self.problem.of(models), devices)
        return self._known[key]

    def _search_bucket(self, problem: Problem, devices: tuple[int, ...]) -> Selected:
        options = self.options
        simulator = Simulator(problem.stage_times, problem.requests)
        blocks = blocks_of(devices, problem.cluster, options.span_nodes)
        best: Selected | None = None
        found: list[tuple[Groups, Selected]] = []
        for config, groups in self._partitions(blocks):
            fitted = Groups(problem, groups)
            trial = Trial(len(problem.models), len(devices), config, len(groups), fitted.most_served(), 0, True)
            complete = problem.required_nodes * len(problem.models)
            if best and best.score.copies == complete and trial.attainment < best.score.attainment:
                self.log.append(trial)
                continue
            before = simulator.simulations
            if options.method == "full":
                selected = beam_selection(fitted, simulator, options.beam)
            else:
                selected = fast_selection(fitted, simulator)
            used = simulator.simulations - before
            self.log.append(replace(trial, attainment=selected.score.attainment, simulations=used, skipped=False))
            found.append((fitted, selected))
            if best is None or selected.score > best.score:
                best = selected
        if best is None:
            raise ConfigError(f"no group can be formed of {len(devices)} devices within the limits {options}")
        for fitted, selected in self._to_refine(found):
            starts = [selected]
            if options.method == "fast" and len(problem.models) * len(fitted.groups) <= options.full_up_to:
                starts.append(beam_selection(fitted, simulator))
            for start in starts:
                improved = refined(fitted, simulator, start, options.refining_simulations)
                best = max(best, improved, key=lambda one: one.score)
        self.simulations += simulator.simulations
        return best

    def _to_refine(self, found: Sequence[tuple[Groups, Selected]]) -> list[tuple[Groups, Selected]]:
        """Return the best selections, and that without parallelism: so no search is worse than selective replication."""
        if not self.options.refined:
            return []
        ranked = sorted(found, key=lambda pair: pair[1].score, reverse=True)
        single = [pair for pair in ranked[self.options.refined :] if pair[0].groups[0].config == ParallelConfig()]
        return ranked[: self.options.refined] + single

    def _partitions(self, blocks: Sequence[Sequence[int]]) -> list[tuple[ParallelConfig, tuple[Group, ...]]]:
        options = self.options
        sizes = group_sizes(blocks, options.most_group_devices)
        if options.sizes is not None:
            sizes = [size for size in options.sizes if size <= max(len(block) for block in blocks)]
        return [
            (config, equal_groups(blocks, config))
            for size in sizes
            for config in parallel_configs(size, options.most_stages, options.most_intra)
        ]

    def _together(self, buckets: Sequence[Sequence[ServedModel]], selected: Sequence[Selected]) -> Selected:
        """Return the placements of all buckets as one. Buckets share no model and no device, so their scores add up."""
        requests = self.problem.requests
        rates = requests.rates()
        total = sum(rates.values())
        shares = [sum(rates.get(model.name, 0.0) for model in bucket) / total if total else 0.0 for bucket in buckets]
        score = Score(
            sum(part.score.copies for part in selected),
            sum(share * part.score.attainment for share, part in zip(shares, selected, strict=True)) if total else 1.0,
            sum(share * part.score.slack for share, part in zip(shares, selected, strict=True)) if total else 1.0,
        )
        groups = tuple(group for part in selected for group in part.placement.groups)
        models = tuple(names for part in selected for names in part.placement.models)
        return Selected(Placement(groups, models), score)


def _check(best: Selected, problem: Problem, options: SearchOptions) -> None:
    """Refuse a placement that does not hold what the options require."""
    names = problem.names
    placed = {name for models in best.placement.models for name in models}
    left_out = [name for name in names if name not in placed]
    if options.required_nodes and left_out:
        raise ConfigError(
            f"no placement was found that holds every model: {len(left_out)} did not fit, such as {left_out[0]}; give more "
            "devices, or devices with more memory"
        )
    if options.survive_any_node and not survives_any_node(best.placement, problem.cluster, names):
        lost = [name for name in names if not survives_any_node(best.placement, problem.cluster, [name])]
        raise ConfigError(
            f"no placement was found that survives the loss of any node: {len(lost)} models fit on one node only, such as "
            f"{lost[0]}; give more devices or nodes, or leave the option out"
        )
