"""The requests that a plan is made for, drawn again from the plan's assumptions, also at other rates, cv and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hplm.errors import ConfigError, DataError
from hplm.placement.plan import Assumptions
from hplm.reporting.benchmark_result import plain
from hplm.workloads.arrivals import TraceArrivals, require_positive
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests, resampled, split_requests
from hplm.workloads.traces import load_trace
from hplm.workloads.windows import fit_windows

# Seconds of a window in which a trace's arrivals are fitted before they are drawn with another cv.
WINDOW_S = 60.0
# The requests of a simulation at most: a plan is for a steady workload, and more requests change no digit that is shown.
MOST_REQUESTS = 5_000_000
# The deadline of a request that is late when it reaches the first stage, in seconds: no stage is so quick.
_PASSED_S = 1e-9


@dataclass(frozen=True)
class Scales:
    """Factors on the assumptions of a plan."""

    rate: float = 1.0
    cv: float = 1.0
    deadline: float = 1.0

    def __post_init__(self) -> None:
        require_positive(rate=self.rate, cv=self.cv, deadline=self.deadline)


def trace_assumptions(
    trace: Path, bases: tuple[str, ...], rates: Mapping[str, float]
) -> tuple[dict[str, float], float, float]:
    """Return the rate of each base, the cv of the gaps and the length in seconds of a trace at these rates.

    Without `rates` the trace keeps its own rate, and all bases have equal shares. Raises DataError if a gap is nearly the
    whole trace then, because that rate says nothing.
    """
    recorded = load_trace(trace)
    if not rates and recorded.is_stretched:
        raise DataError(
            f"{trace}: a trace with a rate of its own was expected, and one gap of {plain(recorded.largest_gap_s)} s is nearly "
            f"all of it (the usual gap is {plain(recorded.usual_gap_s)} s): remove the stray time stamp, or give --rate"
        )
    all_rates = dict(rates) or dict.fromkeys(bases, recorded.rate_per_s / len(bases))
    recorded_s = float(recorded.times_s[-1])
    (window,) = fit_windows(recorded.times_s, recorded_s, recorded_s)
    return all_rates, window.cv, (len(recorded.times_s) - 1) / sum(all_rates.values())


def planned_requests(assumed: Assumptions, scales: Scales | None = None) -> ModelRequests:
    """Draw the requests of a plan's workload as the placed stages see them: each deadline is less the time outside of them.

    The same assumptions and scales give the same requests as `sent_requests`. Raises as `sent_requests` does.
    """
    requests = sent_requests(assumed, scales)
    outside_s = np.array([assumed.outside_ms.get(base, 0.0) / 1000 for base in requests.names])
    # A deadline that is over before the first stage cannot be met.
    deadlines_s = np.maximum(requests.deadlines_s - outside_s[requests.models], _PASSED_S)
    return replace(requests, deadlines_s=deadlines_s)


def sent_requests(assumed: Assumptions, scales: Scales | None = None) -> ModelRequests:
    """Draw the requests of a plan's workload as clients send them. The same assumptions and scales give the same requests.

    Raises ConfigError if there are far too many requests or none, DataError if the trace cannot be read.
    """
    scales = scales or Scales()
    rates = {base: rate * scales.rate for base, rate in assumed.rates.items()}
    deadlines = {base: ms / 1000 * scales.deadline for base, ms in assumed.deadline_ms.items()}
    if not sum(rates.values()) > 0:
        raise ConfigError(
            "requests to at least one base were expected: give --rate BASE=REQUESTS_PER_SECOND or --trace"
        )
    if (count := sum(rates.values()) * assumed.duration_s) > MOST_REQUESTS:
        raise ConfigError(
            f"{count:,.0f} requests are too many to simulate, {MOST_REQUESTS:,} were expected at most: give a shorter --seconds"
        )
    rng = np.random.default_rng(assumed.seed)
    if assumed.trace:
        arrivals = TraceArrivals(Path(assumed.trace), sum(rates.values()))
        requests = split_requests(arrivals, rates, deadlines, assumed.duration_s, rng)
        if scales.cv != 1:
            requests = resampled(requests, WINDOW_S, deadlines, rng, cv_scale=scales.cv)
    else:
        requests = gamma_requests(rates, assumed.cv * scales.cv, deadlines, assumed.duration_s, rng)
    if not len(requests):
        raise ConfigError(
            f"the workload has no request in {plain(assumed.duration_s)} s at {plain(sum(rates.values()))} requests/s: give a "
            "longer --seconds"
        )
    return requests
