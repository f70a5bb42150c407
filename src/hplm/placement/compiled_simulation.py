"""The loop of `simulate`, compiled by numba. Its slow twin is `reference_simulation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Return a compiled function. Its code is kept for later processes if a folder for that can be written."""
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:
        # Neither the folder of this package nor a home folder can be written, as in many containers.
        return cast(Function, njit(nogil=True)(function))


@_compiled
def run(
    times_s: Floats,
    models: Integers,
    deadlines_s: Floats,
    stage_s: Floats,
    stages_of: Integers,
    first_holder: Integers,
    holders: Integers,
) -> tuple[Floats, Integers, Floats]:
    """Return each request's end (NaN if refused) and group (-1 if refused), `[k]`, and the busy seconds of stages.

    times_s, models, deadlines_s: `[k]`. stage_s: seconds, `[groups, models, stages]`. stages_of: `[groups]`. The groups that
    hold model m are `holders[first_holder[m]:first_holder[m + 1]]`. Busy seconds: `[groups, stages]`.
    """
    count, groups = len(times_s), len(stages_of)
    ended_s = np.full(count, np.nan)
    taken_by = np.full(count, -1, np.int32)
    # When each stage has computed all requests that were accepted so far.
    free_s = np.zeros((groups, stage_s.shape[2]))
    busy_s = np.zeros((groups, stage_s.shape[2]))
    # The queue of each group: a list of requests in the order of arrival, which is the order of their begins.
    begins_s = np.empty(count)
    next_in_queue = np.full(count, -1, np.int64)
    oldest = np.full(groups, -1, np.int64)
    newest = np.full(groups, -1, np.int64)
    queue_length = np.zeros(groups, np.int64)
    ends_s = np.empty(stage_s.shape[2])
    for request in range(count):
        now_s, model = times_s[request], models[request]
        chosen = -1
        for holder in range(first_holder[model], first_holder[model + 1]):
            group = holders[holder]
            while oldest[group] >= 0 and begins_s[oldest[group]] <= now_s:
                oldest[group] = next_in_queue[oldest[group]]
                queue_length[group] -= 1
            if (
                chosen < 0
                or queue_length[group] < queue_length[chosen]
                or (queue_length[group] == queue_length[chosen] and free_s[group, 0] < free_s[chosen, 0])
            ):
                chosen = group
        if chosen < 0:
            continue
        begin_s = max(now_s, free_s[chosen, 0])
        end_s = now_s
        for stage in range(stages_of[chosen]):
            end_s = max(end_s, free_s[chosen, stage]) + stage_s[chosen, model, stage]
            ends_s[stage] = end_s
        if end_s > now_s + deadlines_s[request]:
            continue
        for stage in range(stages_of[chosen]):
            free_s[chosen, stage] = ends_s[stage]
            busy_s[chosen, stage] += stage_s[chosen, model, stage]
        ended_s[request] = end_s
        taken_by[request] = chosen
        if begin_s > now_s:
            begins_s[request] = begin_s
            if oldest[chosen] < 0:
                oldest[chosen] = request
            else:
                next_in_queue[newest[chosen]] = request
            newest[chosen] = request
            queue_length[chosen] += 1
    return ended_s, taken_by, busy_s
