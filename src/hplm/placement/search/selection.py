"""A selection of models for groups while it grows: what is in the groups, and the memory that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests


@dataclass(frozen=True)
class Problem:
    """Models to place, the cluster, and the requests.

    models: only these are placed. `requests` holds requests to these models alone.
    required_nodes: the number of nodes that each model must be on: 0 (a model may be left out), 1, or 2 (any node may fail).
    """

    models: tuple[ServedModel, ...]
    cluster: Cluster
    stage_times: StageTimes
    requests: ModelRequests
    required_nodes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(model.name for model in self.models)

    def of(self, models: Sequence[ServedModel]) -> Problem:
        """Return the problem of some of the models and of their requests."""
        names = [model.name for model in models]
        return replace(self, models=tuple(models), requests=self.requests.of_models(names))


@dataclass(frozen=True)
class Selection:
    """A placement that grows. `free_bytes[group][stage]`: the bytes left on the stage's fullest device."""

    placement: Placement
    free_bytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Fit:
    """A model in a group of one configuration: bytes of each stage on a device, and whether any deadline can be met."""

    stage_bytes: tuple[int, ...]
    in_time: bool
    seconds: float


class Groups:
    """The groups of a placement, and what each model needs in them."""

    def __init__(self, problem: Problem, groups: Sequence[Group]) -> None:
        self.problem = problem
        self.groups = tuple(groups)
        cluster = problem.cluster
        self.nodes = tuple(frozenset(cluster.node_of[device] for device in group.devices) for group in groups)
        self._capacity = tuple(
            tuple(
                min(cluster.device_bytes(device) for device in group.stage_devices(stage))
                for stage in range(group.config.stages)
            )
            for group in groups
        )
        longest = longest_deadlines(problem.requests)
        configs = {group.config for group in groups}
        self._fits: dict[str, tuple[_Fit | None, ...]] = {}
        for model in problem.models:
            longest_s = longest.get(model.name, float("inf"))
            by_config = {config: _fit(problem.stage_times, model, config, longest_s) for config in configs}
            self._fits[model.name] = tuple(by_config[group.config] for group in groups)

    def empty(self) -> Selection:
        """Return the selection without models."""
        return Selection(Placement.empty(self.groups), self._capacity)

    def fit(self, name: str, group: int) -> _Fit | None:
        """Return what a model needs in a group; None if it cannot be divided as the group demands."""
        return self._fits[name][group]

    def in_time(self, name: str, group: int) -> bool:
        """Return whether a request to the model can meet any deadline in an idle group."""
        fit = self.fit(name, group)
        return fit is not None and fit.in_time

    def can_assign(self, selection: Selection, name: str, group: int) -> bool:
        """Return whether a group can take a model: memory is left, it is not there yet, and it can be of use."""
        fit = self.fit(name, group)
        if fit is None or name in selection.placement.models[group]:
            return False
        if not fit.in_time and not self.problem.required_nodes:
            return False
        return _is_room(fit, selection.free_bytes[group])

    def assign(self, selection: Selection, name: str, group: int) -> Selection:
        """Return the selection with a model added to a group that can take it."""
        fit = self.fit(name, group)
        assert fit is not None
        free = list(selection.free_bytes)
        free[group] = tuple(left - need for left, need in zip(free[group], fit.stage_bytes, strict=True))
        return Selection(selection.placement.with_model(name, group), tuple(free))

    def release(self, selection: Selection, name: str, group: int) -> Selection:
        """Return the selection without a model that the group holds."""
        fit = self.fit(name, group)
        assert fit is not None
        free = list(selection.free_bytes)
        free[group] = tuple(left + freed for left, freed in zip(free[group], fit.stage_bytes, strict=True))
        models = list(selection.placement.models)
        models[group] = tuple(held for held in models[group] if held != name)
        return Selection(Placement(self.groups, tuple(models)), tuple(free))

    def selection_of(self, placement: Placement) -> Selection:
        """Return the selection of a placement in these groups."""
        selection = self.empty()
        for group, names in enumerate(placement.models):
            for name in names:
                selection = self.assign(selection, name, group)
        return selection

    def copies(self, selection: Selection, name: str) -> int:
        """Return the required copies of a model that exist: its groups that share no node, at most as many as required."""
        required = self.problem.required_nodes
        if not required:
            return 0
        used: set[int] = set()
        count = 0
        for group in selection.placement.groups_of(name):
            if not self.nodes[group] & used:
                used |= self.nodes[group]
                count += 1
        return min(count, required)

    def all_copies(self, selection: Selection) -> int:
        """Return the sum of `copies` over all models."""
        return sum(self.copies(selection, name) for name in self.problem.names)

    def lacking(self, selection: Selection) -> list[str]:
        """Return the models that lack a required copy."""
        required = self.problem.required_nodes
        return [name for name in self.problem.names if self.copies(selection, name) < required]

    def pairs(self, selection: Selection) -> list[tuple[str, int]]:
        """Return each (model, group) that can be added. While required copies are lacking, only pairs that add one."""
        lacking = self.lacking(selection)
        wanted = [(name, group) for name in lacking for group in self.groups_for_copy(selection, name)]
        if wanted:
            return wanted
        numbers = range(len(self.groups))
        return [
            (name, group) for name in self.problem.names for group in numbers if self.can_assign(selection, name, group)
        ]

    def groups_for_copy(self, selection: Selection, name: str) -> list[int]:
        """Return the groups that can take a model and share no node with its present groups."""
        used = {node for group in selection.placement.groups_of(name) for node in self.nodes[group]}
        numbers = range(len(self.groups))
        return [group for group in numbers if not self.nodes[group] & used and self.can_assign(selection, name, group)]

    def packed(self) -> Selection:
        """Return a selection of the required copies alone, packed: the largest model first, into the fullest group."""
        selection = self.empty()
        by_size = sorted(self.problem.models, key=lambda model: (-model.weight_bytes, model.name))
        for model in by_size:
            for _ in range(self.problem.required_nodes):
                groups = self.groups_for_copy(selection, model.name)
                if groups:
                    fullest = min(groups, key=lambda group: (min(selection.free_bytes[group]), group))
                    selection = self.assign(selection, model.name, fullest)
        return selection

    def most_served(self) -> float:
        """Return a bound: no placement in these groups can answer a greater share of the requests in time.

        A request needs a group that can meet its deadline. The stages of a group together work at most for the whole time.
        """
        requests = self.problem.requests
        if not len(requests):
            return 1.0
        work_s = float(requests.duration_s + requests.deadlines_s.max()) * sum(g.config.stages for g in self.groups)
        seconds = np.full(len(requests.names), np.inf)
        for model in self.problem.models:
            fits = zip(self._fits[model.name], self._capacity, strict=True)
            fastest = [fit.seconds for fit, capacity in fits if fit and _is_room(fit, capacity)]
            if fastest and model.name in requests.names:
                seconds[requests.names.index(model.name)] = min(fastest)
        needed = np.sort(seconds[requests.models][seconds[requests.models] <= requests.deadlines_s + 1e-6])
        served = int(np.searchsorted(np.cumsum(needed), work_s, side="right"))
        return served / len(requests)


def longest_deadlines(requests: ModelRequests) -> dict[str, float]:
    """Return the longest deadline of each model that has requests, in seconds."""
    longest = np.full(len(requests.names), -np.inf)
    np.maximum.at(longest, requests.models, requests.deadlines_s)
    return {name: float(value) for name, value in zip(requests.names, longest, strict=True) if np.isfinite(value)}


def _is_room(fit: _Fit, free_bytes: tuple[int, ...]) -> bool:
    return all(need <= free for need, free in zip(fit.stage_bytes, free_bytes, strict=True))


def _fit(stage_times: StageTimes, model: ServedModel, config: ParallelConfig, longest_s: float) -> _Fit | None:
    times, stage_bytes = stage_times.of(model, config), stage_times.bytes_of(model, config)
    if times is None or stage_bytes is None:
        return None
    return _Fit(stage_bytes, sum(times) <= longest_s + 1e-6, sum(times))
