"""Improves a selection of models by small moves: a model is added to a group, or takes the place of another model there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.search.greedy import Selected, utilisation
from hplm.placement.search.scores import Simulator, score_of
from hplm.placement.search.selection import Groups, Selection

# The models with the most unserved requests that a step tries to move. More rarely help.
_TRIED_MODELS = 4


def refined(groups: Groups, simulator: Simulator, selected: Selected, most_simulations: int) -> Selected:
    """Return a selection at least as good as `selected`. Each step takes the first move that gives a better score.

    The end is reached when no move helps, when every request is in time, or after `most_simulations` simulations.
    """
    left = most_simulations
    best = selected
    selection = groups.selection_of(selected.placement)
    outcomes = simulator.run(selection.placement)
    improved = True
    while improved and left > 0 and best.score.attainment < 1.0:
        improved = False
        for moved in _moves(groups, selection, outcomes):
            left -= 1
            of_move = simulator.run(moved.placement)
            score = score_of(of_move, groups.all_copies(moved))
            if score > best.score:
                best, selection, outcomes, improved = Selected(moved.placement, score), moved, of_move, True
                break
            if left <= 0:
                break
    return best


def _moves(groups: Groups, selection: Selection, outcomes: Outcomes) -> Iterator[Selection]:
    """Yield selections that differ by a move: for the models with the most unserved requests, in the idlest groups first."""
    requests = outcomes.requests
    missed = np.bincount(requests.models[~outcomes.in_time], minlength=len(requests.names))
    counts = np.bincount(requests.models, minlength=len(requests.names)).tolist()
    count_of = dict(zip(requests.names, counts, strict=True))
    number_of = {name: number for number, name in enumerate(requests.names)}
    known = [name for name in groups.problem.names if name in number_of]
    worst = sorted(known, key=lambda name: (-int(missed[number_of[name]]), name))[:_TRIED_MODELS]
    busy = utilisation(groups, outcomes)
    idlest = np.argsort(busy, kind="stable").tolist()
    for name in worst:
        if not missed[number_of[name]]:
            continue
        for group in idlest:
            if groups.can_assign(selection, name, group):
                yield groups.assign(selection, name, group)
    for name in worst:
        for group in idlest:
            if name in selection.placement.models[group]:
                yield groups.release(selection, name, group)
                continue
            held = selection.placement.models[group]
            for other in sorted(held, key=lambda one: (count_of.get(one, 0), one)):
                without = groups.release(selection, other, group)
                if groups.can_assign(without, name, group):
                    yield groups.assign(without, name, group)
