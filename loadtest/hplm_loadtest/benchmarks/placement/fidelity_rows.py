"""Compares what a replay measured with what both simulators predict for the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hplm.errors import DeadlineError
from hplm.placement.live_simulation import LiveQueues, simulate_live
from hplm.placement.placement import Placement
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm_loadtest.placement.replay import Replay
from hplm_loadtest.scenarios.outcomes import kind_of

# The columns of errors: that of the paper's simulator, and that of the simulator with live queues.
SIMULATED, LIVE = "simulated", "live queues"


def fidelity_row(
    setting: str,
    scale: float,
    replayed: Replay,
    placement: Placement,
    times: StageTimes,
    overhead_s: float,
    *,
    kept_back: float = 0.0,
    queues: LiveQueues | None = None,
) -> dict[str, Any]:
    """Return the measured and the predicted share of requests in time.

    `overhead_s` is taken off each deadline, or the share `kept_back` of the deadline if that is more. `queues` are the settings
    of the live queues.
    """
    measured, requests = replayed.outcomes, replayed.outcomes.requests
    off_s = np.maximum(overhead_s, kept_back * requests.deadlines_s)
    less = replace(requests, deadlines_s=np.maximum(0.0, requests.deadlines_s - off_s))
    predicted = {
        SIMULATED: simulate(placement, times, less).attainment,
        LIVE: simulate_live(placement, times, less, queues).attainment,
    }
    return {
        "setting": setting,
        "deadline / latency": scale,
        "requests": len(requests),
        "measured": measured.attainment,
        **predicted,
        **{f"error, {name}": abs(attained - measured.attainment) for name, attained in predicted.items()},
        "unanswered": sum(kind in ("lost", "failed") for kind in map(_kind, replayed.run.codes)),
        "lag_p99_ms": 1000 * float(np.percentile(replayed.run.lag_s, 99)),
    }


def largest_error(rows: Sequence[Mapping[str, Any]], name: str = LIVE) -> float:
    """Return the largest difference between predicted and measured attainment."""
    return max((float(row[f"error, {name}"]) for row in rows), default=0.0)


def _kind(code: str) -> str:
    # A missed deadline is an expected answer here, though it is an error for a client.
    return "refused" if code == DeadlineError.code else kind_of(code)
