"""Selects the models of given groups (AlpaServe algorithm 1): the full beam search, and the fast heuristic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Placement
from hplm.placement.search.scores import Score, Simulator, score_of
from hplm.placement.search.selection import Groups, Selection


@dataclass(frozen=True)
class Selected:
    """The best selection that a search came to, and its score."""

    placement: Placement
    score: Score


def beam_selection(groups: Groups, simulator: Simulator, beam: int = 1) -> Selected:
    """Return the best selection that a beam search finds. Every model in every group is simulated at each step.

    The search ends when nothing can be added, or when every request is answered in time and no required copy lacks.
    """
    start = groups.empty()
    selections = [start]
    best = Selected(start.placement, score_of(simulator.run(start.placement), 0))
    while not _is_complete(groups, selections[0], best.score):
        seen: set[Placement] = set()
        scored: list[tuple[Score, Selection]] = []
        for selection in selections:
            for name, group in groups.pairs(selection):
                larger = groups.assign(selection, name, group)
                if larger.placement not in seen:
                    seen.add(larger.placement)
                    score = score_of(simulator.run(larger.placement), groups.all_copies(larger))
                    scored.append((score, larger))
        if not scored:
            break
        scored.sort(key=lambda pair: pair[0], reverse=True)
        selections = [selection for _, selection in scored[:beam]]
        if scored[0][0] > best.score:
            best = Selected(selections[0].placement, scored[0][0])
    return best


def fast_selection(groups: Groups, simulator: Simulator, patience: int | None = None) -> Selected:
    """Return the best selection of the fast heuristic: one simulation for each model that is added.

    The model with the most unserved requests goes to the least utilised group that can take it. The heuristic ends when nothing
    can be added, when every request is answered in time and no required copy lacks, or when `patience` steps brought nothing
    (default: twice the number of groups, at least 8).
    """
    patience = max(8, 2 * len(groups.groups)) if patience is None else patience
    best = _fast_from(groups, simulator, groups.empty(), patience)
    required = groups.problem.required_nodes * len(groups.problem.models)
    if best.score.copies < required:
        packed = _fast_from(groups, simulator, groups.packed(), patience)
        best = max(best, packed, key=lambda selected: selected.score)
    return best


def _fast_from(groups: Groups, simulator: Simulator, start: Selection, patience: int) -> Selected:
    selection = start
    outcomes = simulator.run(start.placement)
    best = Selected(start.placement, score_of(outcomes, groups.all_copies(start)))
    steps = 0
    while steps < patience and not _is_complete(groups, selection, best.score):
        pair = _next_pair(groups, selection, outcomes)
        if pair is None:
            break
        selection = groups.assign(selection, *pair)
        outcomes = simulator.run(selection.placement)
        score = score_of(outcomes, groups.all_copies(selection))
        steps += 1
        if score > best.score:
            best, steps = Selected(selection.placement, score), 0
    return best


def _is_complete(groups: Groups, selection: Selection, score: Score) -> bool:
    return score.attainment >= 1.0 and not groups.lacking(selection)


def _next_pair(groups: Groups, selection: Selection, outcomes: Outcomes) -> tuple[str, int] | None:
    """Return the model with the most unserved requests that some group can take, and the least utilised such group."""
    requests = outcomes.requests
    number_of = {name: number for number, name in enumerate(requests.names)}
    counts = np.bincount(requests.models, minlength=len(number_of))
    unserved = np.bincount(requests.models[~outcomes.in_time], minlength=len(number_of))
    busy = utilisation(groups, outcomes)

    def urgency(name: str) -> tuple[int, int, str]:
        number = number_of.get(name)
        return (0, 0, name) if number is None else (-int(unserved[number]), -int(counts[number]), name)

    def load(name: str, group: int) -> tuple[bool, float, int]:
        return not groups.in_time(name, group), float(busy[group]), group

    for name in sorted(groups.lacking(selection), key=urgency):
        available = groups.groups_for_copy(selection, name)
        if available:
            return name, min(available, key=lambda group: load(name, group))
    for name in sorted(groups.problem.names, key=urgency):
        numbers = range(len(groups.groups))
        available = [group for group in numbers if groups.can_assign(selection, name, group)]
        if available:
            return name, min(available, key=lambda group: load(name, group))
    return None


def utilisation(groups: Groups, outcomes: Outcomes) -> npt.NDArray[np.float64]:
    """Return the mean busy seconds of each group's devices, `[groups]`."""
    return np.array([outcomes.busy_s[list(group.devices)].mean() for group in groups.groups])
